"""What a person sees of a run on the terminal: the banner at the start, the report at the end, the log between.

Words only, on standard error; nothing is decided here. With the log as JSON, all of it is JSON, one object a line.
"""

from __future__ import annotations

import logging
import sys
import traceback
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Literal

import msgspec

from kconsume import __version__
from kconsume.backends.abc import OutboxStore
from kconsume.errors import DecodeError, HandlerFailed, KconsumeError
from kconsume.logs import place_of
from kconsume.settings import masked_address

if TYPE_CHECKING:
    from kconsume.app import App
    from kconsume.registration import Registration
    from kconsume.runtime.supervisor import Report

LogFormat = Literal["text", "json"]

LOG_FORMAT = "%(asctime)s %(levelname)-7s %(name)s %(message)s"

_RUNNER = "<kconsume runner"

_log = logging.getLogger("kconsume")


def set_up_logging(form: LogFormat | None = None, level: str | None = None) -> None:
    """Show the log. What the program has set up itself stays, unless a form or a level is asked for."""
    root = logging.getLogger()
    if form is not None or not (root.handlers or _log.handlers):
        handler = logging.StreamHandler()
        handler.setFormatter(JsonLines() if form == "json" else TextLines(LOG_FORMAT))
        logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    if level is not None:
        root.setLevel(level.upper())


class TextLines(logging.Formatter):
    """The log for people; a line that was made in a handler ends with the record it is about."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802  (logging's name)
        line = super().formatMessage(record)
        place = place_of(record)
        if place is None:
            return line
        attempt = f" attempt={place.attempt}" if place.attempt > 1 else ""
        return f"{line}  record={place}{attempt}"


class JsonLines(logging.Formatter):
    """One JSON object a line: time, level, logger, message, the exception's text, and what came as `extra=`."""

    _ORDINARY = frozenset((*vars(logging.makeLogRecord({})), "message", "asctime", "taskName"))

    def format(self, record: logging.LogRecord) -> str:
        event: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            event["exception"] = self.formatException(record.exc_info)
        extra = {name: value for name, value in vars(record).items() if name not in self._ORDINARY}
        return msgspec.json.encode({**extra, **event}, enc_hook=repr).decode()


def banner(app: App) -> None:
    """Handler → topic → store → what is guaranteed, in one sentence each."""
    _tell([f"kconsume {__version__}  group {app.group}  brokers {app.brokers}"])
    for registration in app.registrations:
        topics = registration.topics_text
        group = "" if registration.group == app.group else f"  (group {registration.group})"
        address = masked_address(registration.store_address)
        lines = [f"  {registration.name} ← {topics} → {address}{group}", f"      {guarantee(registration)}"]
        if registration.binding.sends:
            where = f"to {registration.binding.to}" if registration.binding.to else "through its Sender"
            lines.append(f"      what it sends {where}: {sending(registration)}")
        _tell(lines)


def guarantee(registration: Registration) -> str:
    """What a handler is promised with its store, in one sentence."""
    store, own = registration.store, registration.own_guarantee
    if own is not None:
        return own
    if hasattr(store, "transaction") and registration.binding.transaction is None:
        return (
            "at least once: the handler does not take the store's transaction, so a crash repeats what was in "
            "flight; add a parameter for it to make its writes exactly once"
        )
    return store.guarantee


def sending(registration: Registration) -> str:
    """What is promised of what a handler sends."""
    if isinstance(registration.store, OutboxStore):
        return "by the outbox, if and only if its offset passes; again after a kill, with the same origin"
    return "at least once, confirmed before the offset passes"


def farewell(report: Report) -> None:
    """What was drained, committed, left; and for a failure what it was and how to see it again."""
    committed = " ".join(f"{p}@{offset}" for p, offset in sorted(report.committed.items())) or "nothing"
    _tell(
        [
            f"kconsume stopped in {report.seconds:.1f} s  handled {report.handled}  skipped {report.skipped}",
            f"  committed {committed}",
        ]
    )
    for partition in report.abandoned:
        _tell([f"  abandoned {partition}: its handler had not ended at the deadline; the record is handled again"])
    for partition, error in sorted(report.held.items()):
        again = [f"  see it again: {error.try_command}"] if isinstance(error, HandlerFailed) else []
        _tell([f"  held {partition}: {error}", *again])
    if report.unsent:
        _tell([f"  left {report.unsent} records in the outbox: whoever has their partitions next sends them"])
    for group in report.hung:
        _tell([f"  left group {group} without closing: the client did not come back in time"])
    if report.failure is not None:
        tell_failure(report.failure)


def tell_failure(error: BaseException) -> None:
    """What went wrong, and for a record how to see it again; with a traceback only where that tells something."""
    shown = _worth_a_trace(error)
    lines = [f"error: {error}"]
    if isinstance(error, HandlerFailed):
        lines.append("  its offset was not passed: the record is handled again at the next start")
        lines.append(f"  see it again: {error.try_command}")
    if _in_json():
        _log.error("%s", _on_one_line(lines), exc_info=None if shown is None else _beyond_the_runner(shown))
        return
    if shown is not None:
        lines.insert(0, handlers_trace(shown))
    _say(lines)


def handlers_trace(error: BaseException) -> str:
    """The traceback as the person who wrote the handler wants it: from the handler's first frame on."""
    return "".join(traceback.format_exception(_beyond_the_runner(error))).rstrip()


def flush() -> None:
    """Before a hard exit, which flushes nothing."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()


def _worth_a_trace(error: BaseException) -> BaseException | None:
    """The error whose frames tell a person something; none for an error that says it all in its words."""
    shown = error.__cause__ if isinstance(error, HandlerFailed) else error
    said_it_all = DecodeError if isinstance(error, HandlerFailed) else KconsumeError
    return None if isinstance(shown, said_it_all) else shown


def _beyond_the_runner(error: BaseException) -> BaseException:
    """The same error, and what led to it, without the frames that are kconsume's."""
    fault: BaseException | None = error
    seen: set[int] = set()
    while fault is not None and id(fault) not in seen:
        seen.add(id(fault))
        trace = fault.__traceback__
        while trace is not None and not trace.tb_frame.f_code.co_filename.startswith(_RUNNER):
            trace = trace.tb_next
        if trace is not None:
            fault.__traceback__ = trace.tb_next
        elif isinstance(fault, KconsumeError):
            fault.__traceback__ = None
        fault = fault.__cause__ or (None if fault.__suppress_context__ else fault.__context__)
    return error


def _tell(lines: Sequence[str]) -> None:
    if _in_json():
        _log.info("%s", _on_one_line(lines))
    else:
        _say(lines)


def _in_json() -> bool:
    return any(isinstance(handler.formatter, JsonLines) for handler in logging.getLogger().handlers)


def _on_one_line(lines: Sequence[str]) -> str:
    return "; ".join(" ".join(line.split()) for line in lines)


def _say(lines: Sequence[str]) -> None:
    sys.stderr.write("".join(f"{line}\n" for line in lines))
    sys.stderr.flush()

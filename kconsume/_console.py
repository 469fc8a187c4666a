"""What a run shows on standard error: the log, the banner at the start, the report at the end, and a failure.

With a text log, the banner and the report are separate lines. With a JSON log, they are log events with fields:
`consumer starting`, `handler registered`, `consumer stopped`, `consumer failed`. This file must not decide anything
about the run.
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
from kconsume._config.client_settings import masked_address
from kconsume._event_log import EventLog
from kconsume._log_context import place_of
from kconsume.backends.capabilities import capabilities_of
from kconsume.errors import DecodeError, HandlerFailed, KconsumeError

if TYPE_CHECKING:
    from kconsume._handlers.registration import Registration
    from kconsume._runtime.supervisor import Report
    from kconsume.app import App

LogFormat = Literal["text", "json"]

LOG_FORMAT = "%(asctime)s %(levelname)-7s %(name)s %(message)s"

_RUNNER = "<kconsume runner"

_log = EventLog()


def set_up_logging(form: LogFormat | None = None, level: str | None = None) -> None:
    """Write the log to standard error. Without `form`, a program that has configured logging itself is left alone.

    Args:
        form: `text` or `json`. If given, it replaces the program's own logging configuration.
        level: the lowest level that is written.
    """
    root = logging.getLogger()
    if form is not None or not (root.handlers or _log.logger.handlers):
        handler = logging.StreamHandler()
        handler.setFormatter(JsonLines() if form == "json" else TextLines(LOG_FORMAT))
        logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    if level is not None:
        root.setLevel(level.upper())


class TextLines(logging.Formatter):
    """The log as text. A line that was logged inside a handler ends with the record, as `record=orders/3@1042`."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802  (logging's name)
        line = super().formatMessage(record)
        place = place_of(record)
        if place is None:
            return line
        attempt = f" attempt={place.attempt}" if place.attempt > 1 else ""
        return f"{line}  record={place}{attempt}"


class JsonLines(logging.Formatter):
    """The log as JSON, one object a line: time, level, logger, message, exception, and the values of `extra=`.

    For an event of kconsume, `message` is the name of the event, and its fields are members of the object.
    """

    _ORDINARY = frozenset((*vars(logging.makeLogRecord({})), "message", "asctime", "taskName", "event", "fields"))

    def format(self, record: logging.LogRecord) -> str:
        event: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": getattr(record, "event", None) or record.getMessage(),
        }
        if record.exc_info:
            event["exception"] = self.formatException(record.exc_info)
        extra = {name: value for name, value in vars(record).items() if name not in self._ORDINARY}
        fields: dict[str, object] = getattr(record, "fields", {})
        if event.keys().isdisjoint(fields):
            extra |= fields
        else:
            extra["fields"] = fields
        return msgspec.json.encode({**extra, **event}, enc_hook=repr).decode()


def banner(app: App) -> None:
    """Show the app and each handler: its topics, its store, and what is guaranteed."""
    if not _in_json():
        _write(_banner_lines(app))
        return
    _log.info("consumer starting", version=__version__, group=app.group, brokers=app.brokers)
    for registration in app.registrations:
        sends = {"to": registration.binding.to, "sending": sending(registration)} if registration.binding.sends else {}
        _log.info(
            "handler registered",
            handler=registration.name,
            topics=list(registration.topics),
            **({} if registration.pattern is None else {"pattern": registration.pattern}),
            group=registration.group,
            store=masked_address(registration.store_address),
            guarantee=guarantee(registration),
            **sends,
        )


def _banner_lines(app: App) -> list[str]:
    lines = [f"kconsume {__version__}  group {app.group}  brokers {app.brokers}"]
    for registration in app.registrations:
        topics = registration.topics_text
        group = "" if registration.group == app.group else f"  (group {registration.group})"
        address = masked_address(registration.store_address)
        lines += [f"  {registration.name} ← {topics} → {address}{group}", f"      {guarantee(registration)}"]
        if registration.binding.sends:
            where = f"to {registration.binding.to}" if registration.binding.to else "through its Sender"
            lines.append(f"      records sent {where}: {sending(registration)}")
    return lines


def guarantee(registration: Registration) -> str:
    """Return what is guaranteed for a handler with its store, in one sentence."""
    store, own = registration.store, registration.own_guarantee
    if own is not None:
        return own
    if capabilities_of(store).transactional is not None and registration.binding.transaction is None:
        return (
            "at least once: the handler does not take the store's transaction, so records in flight are handled again "
            "after a crash; add a parameter for the transaction to make the writes exactly once"
        )
    return store.guarantee


def sending(registration: Registration) -> str:
    """Return what is guaranteed for the records that a handler sends."""
    if capabilities_of(registration.store).outbox is not None:
        return (
            "by the outbox, only if the offset of the handled record passes; again after a kill, with the same origin"
        )
    return "at least once, confirmed before the offset passes"


def farewell(report: Report) -> None:
    """Show the report: what was handled, committed and abandoned, and the failure if there was one."""
    if _in_json():
        _log.info(
            "consumer stopped",
            seconds=round(report.seconds, 3),
            handled=report.handled,
            skipped=report.skipped,
            committed=dict(sorted(report.committed.items())),
            abandoned=list(report.abandoned),
            held={partition: str(error) for partition, error in sorted(report.held.items())},
            try_commands=[e.try_command for e in report.held.values() if isinstance(e, HandlerFailed)],
            outbox_records=report.unsent,
            unclosed_groups=list(report.hung),
        )
    else:
        _write(_report_lines(report))
    if report.failure is not None:
        tell_failure(report.failure)


def _report_lines(report: Report) -> list[str]:
    committed = " ".join(f"{p}@{offset}" for p, offset in sorted(report.committed.items())) or "nothing"
    lines = [
        f"kconsume stopped in {report.seconds:.1f} s  handled {report.handled}  skipped {report.skipped}",
        f"  committed {committed}",
    ]
    lines += [
        f"  abandoned {partition}: its handler had not ended at the deadline; the record is handled again"
        for partition in report.abandoned
    ]
    for partition, error in sorted(report.held.items()):
        lines.append(f"  held {partition}: {error}")
        if isinstance(error, HandlerFailed):
            lines.append(f"  see it again: {error.try_command}")
    if report.unsent:
        lines.append(f"  left {report.unsent} records in the outbox: the next owners of their partitions send them")
    return [*lines, *(f"  left group {g} without closing: the client did not close in time" for g in report.hung)]


def tell_failure(error: BaseException) -> None:
    """Show an error, with the command that repeats the record, and a traceback only if it helps the user."""
    shown = _worth_a_trace(error)
    if _in_json():
        again = {"record": error.place, "hint": error.try_command} if isinstance(error, HandlerFailed) else {}
        trace = None if shown is None else _beyond_the_runner(shown)
        _log.error("consumer failed", error=error, **again, exc_info=trace)
        return
    lines = [] if shown is None else [handlers_trace(shown)]
    lines.append(f"error: {error}")
    if isinstance(error, HandlerFailed):
        lines.append("  its offset was not passed: the record is handled again at the next start")
        lines.append(f"  see it again: {error.try_command}")
    _write(lines)


def handlers_trace(error: BaseException) -> str:
    """Return the traceback from the handler's first frame on, without the frames of kconsume."""
    return "".join(traceback.format_exception(_beyond_the_runner(error))).rstrip()


def flush() -> None:
    """Flush the log and both streams. Needed before `os._exit`, which flushes nothing."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()


def _worth_a_trace(error: BaseException) -> BaseException | None:
    """Return the error whose traceback helps the user, or None if the message is enough."""
    shown = error.__cause__ if isinstance(error, HandlerFailed) else error
    sufficient = DecodeError if isinstance(error, HandlerFailed) else KconsumeError
    return None if isinstance(shown, sufficient) else shown


def _beyond_the_runner(error: BaseException) -> BaseException:
    """Remove the frames of kconsume from the error and its causes, and return it."""
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


def _in_json() -> bool:
    return any(isinstance(handler.formatter, JsonLines) for handler in logging.getLogger().handlers)


def _write(lines: Sequence[str]) -> None:
    sys.stderr.write("".join(f"{line}\n" for line in lines))
    sys.stderr.flush()

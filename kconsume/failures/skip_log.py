"""Logs records that were skipped after a failure. Records with the same outcome and class of error share one line.

A broken deployment fails on every record, and a log line costs more than handling a record. So a line has the first
record and its error, the number of further records, and the last record.
"""

from __future__ import annotations

import math
import threading
import time
from typing import Any, NamedTuple

from kconsume._event_log import EventLog
from kconsume.failures.policy import Verdict
from kconsume.records import Message

_log = EventLog("failures")
_clock = time.monotonic


class Skipped(NamedTuple):
    """What happened to a record that was skipped."""

    verdict: Verdict
    """`SKIP`, `DEAD_LETTER` or `RETRY_LATER`."""
    to: str | None = None
    """The topic or the table to which it was written."""


class SkippedRecords:
    """Records that were not logged yet, by their outcome and the class of their error."""

    __slots__ = ("_groups",)

    def __init__(self) -> None:
        self._groups: dict[tuple[Skipped, type[BaseException]], _Group] = {}

    def __bool__(self) -> bool:
        return bool(self._groups)

    def add(self, skipped: Skipped, message: Message, error: BaseException) -> None:
        group = self._groups.get((skipped, type(error)))
        if group is None:
            self._groups[skipped, type(error)] = _Group(place_text(message), cause_text(error))
        else:
            group.more += 1
            group.last = message

    def take(self, others: SkippedRecords) -> None:
        """Take over the records of `others`, which were skipped later."""
        for key, those in others._groups.items():
            group = self._groups.get(key)
            if group is None:
                self._groups[key] = those
            else:
                group.more += 1 + those.more
                group.last = those.last or those.first
        others._groups = {}

    def log(self) -> None:
        for (skipped, _), group in self._groups.items():
            fields: dict[str, Any] = {"record": group.first}
            if group.last is not None:
                fields |= {"more": group.more, "last": place_text(group.last)}
            fields["cause"] = group.cause
            if skipped.verdict is Verdict.SKIP:
                _log.warning("record skipped", **fields)
            elif skipped.verdict is Verdict.DEAD_LETTER:
                _log.warning("dead letter", to=skipped.to, **fields)
            else:
                _log.warning("retry later", to=skipped.to, **fields)
        self._groups.clear()


class SkipLog:
    """Logs the skipped records of one lane, at most once a second.

    The worker that runs the lane calls `add`. Records that follow within a second wait until the owner thread calls
    `flush`, or `close` at the end of the lane. `_waiting` and `_logged_at` are written under `_lock`; `flush` first
    looks at `_waiting` without the lock. `_closed` is written by the thread that stops the lane.
    """

    EVERY = 1.0
    """The shortest time between two lines, in seconds."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting = SkippedRecords()
        self._logged_at = -math.inf
        self._closed = False

    def add(self, skipped: SkippedRecords) -> None:
        with self._lock:
            self._waiting.take(skipped)
        self.flush()

    def flush(self) -> None:
        """Log the waiting records, if a second has passed since the last line."""
        if not self._waiting:
            return
        with self._lock:
            now = _clock()
            if not self._waiting or (now - self._logged_at < self.EVERY and not self._closed):
                return
            self._logged_at = now
            due, self._waiting = self._waiting, SkippedRecords()
        due.log()

    def close(self) -> None:
        """Log the waiting records, and from now on log each record at once, because `flush` may not be called again."""
        self._closed = True
        self.flush()


class _Group:
    """Records with the same outcome and the same class of error."""

    __slots__ = ("cause", "first", "last", "more")

    def __init__(self, first: str, cause: str) -> None:
        self.first = first
        self.cause = cause
        self.more = 0
        """The number of records after the first one."""
        self.last: Message | str | None = None
        """The last record, kept as a message, because its text is made only when the line is logged."""


def place_text(message: Message | str) -> str:
    """Return the place of a record, as `orders/3@1042`. A text is returned unchanged."""
    return message if isinstance(message, str) else f"{message.topic()}/{message.partition()}@{message.offset()}"


def cause_text(error: BaseException) -> str:
    """Return the class and the message of an error, on one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"

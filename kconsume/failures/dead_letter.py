"""`DeadLetter`: where a record is written after its last failed attempt. `DeadLetterLimit`: how many are allowed.

This file only holds values and counts. `failures/letter_headers.py` defines what a letter contains. The runtime or a
store writes the letter.
"""

from __future__ import annotations

import re
import threading
from collections import deque
from collections.abc import Callable

from kconsume._kafka.outgoing import is_topic_name
from kconsume.errors import ConfigurationError

_TABLE = re.compile(r"(?:[A-Za-z_][A-Za-z0-9_$]*\.)?[A-Za-z_][A-Za-z0-9_$]*")
_FEW = 20
"""A limit that is a share applies only from this number of records on."""


class DeadLetter:
    """Write a failed record to a topic or a table, then let its offset pass: `DeadLetter("orders.dlq")`.

    Args:
        topic: the topic that gets the dead letters.
        table: instead of a topic, a table in the database that stores the offsets. The letter is written in the same
            transaction as the offset.
        limit: the consumer stops when more records than this fail within `window` seconds. A limit between 0 and 1 is
            a share of the handled records. A limit keeps a broken deployment from dead-lettering a whole topic.
        window: the time in which failures count for `limit`, in seconds.
    """

    __slots__ = ("limit", "table", "topic", "window")

    def __init__(
        self,
        topic: str | None = None,
        *,
        table: str | None = None,
        limit: float | None = None,
        window: float = 60.0,
    ) -> None:
        if (topic is None) == (table is None):
            raise ConfigurationError(
                "DeadLetter takes a topic or a table: DeadLetter('orders.dlq'), or DeadLetter(table='failed_orders')"
            )
        if topic is not None and not _is_topic(topic):
            raise ConfigurationError(
                f"DeadLetter({topic!r}) names no topic: use 1 to 249 of a-z A-Z 0-9 . _ -, as in 'orders.dlq'"
            )
        if table is not None and not _is_table(table):
            raise ConfigurationError(
                f"DeadLetter(table={table!r}) names no table: use letters, digits and _, as in 'failed_orders' or "
                f"'shop.failed_orders'"
            )
        if limit is not None and not _is_limit(limit):
            raise ConfigurationError(
                f"DeadLetter(limit={limit!r}) is no limit: give a number of dead letters, 1 or more, or a share of the "
                f"records between 0 and 1"
            )
        if not _is_time(window):
            raise ConfigurationError(f"DeadLetter(window={window!r}) must be a number of seconds: write window=60")
        self.topic = topic
        self.table = table
        self.limit = limit
        self.window = float(window)

    def __repr__(self) -> str:
        return f"DeadLetter({self.topic!r})" if self.topic is not None else f"DeadLetter(table={self.table!r})"

    def __str__(self) -> str:
        where = f"topic {self.topic}" if self.topic is not None else f"table {self.table} in the offset's transaction"
        if self.limit is None:
            return f"is written to {where}, and its offset passes"
        many = f"{self.limit:g}" if self.limit >= 1 else f"{self.limit:.0%} of the records"
        return f"is written to {where}, and its offset passes; more than {many} in {self.window:g} s stop the consumer"


def _is_topic(topic: object) -> bool:
    return isinstance(topic, str) and is_topic_name(topic)


def _is_table(table: object) -> bool:
    return isinstance(table, str) and _TABLE.fullmatch(table) is not None


def _is_time(window: object) -> bool:
    return isinstance(window, int | float) and 0 < window < float("inf")


def _is_limit(limit: object) -> bool:
    if isinstance(limit, bool) or not isinstance(limit, int | float):
        return False
    return 0 < limit < 1 or (limit >= 1 and limit == int(limit))


class DeadLetterLimit:
    """Counts the dead letters of one handler within the window, and compares the count with the limit.

    Called by the workers of the handler. All fields are written and read under `_lock`.
    """

    def __init__(self, limit: float, window: float, clock: Callable[[], float]) -> None:
        """
        Args:
            limit, window: as in `DeadLetter`.
            clock: returns the seconds of a monotonic clock.
        """
        self._limit = limit
        self._window = window
        self._clock = clock
        self._lock = threading.Lock()
        self._past: deque[tuple[float, int, int]] = deque()
        """A time, the number of records that were finished then, and the number of those that failed."""
        self._handled = self._failed = 0

    def exceeds(self, records: int) -> bool:
        """Return True if `records` more dead letters would exceed the limit."""
        with self._lock:
            self._forget(self._clock())
            handled, failed = self._handled + records, self._failed + records
            if self._limit >= 1:
                return failed > self._limit
            return handled >= _FEW and failed > self._limit * handled

    def note(self, handled: int, failed: int) -> None:
        """Count finished records.

        Args:
            handled: how many.
            failed: how many of these records became dead letters.
        """
        with self._lock:
            now = self._clock()
            self._forget(now)
            self._past.append((now, handled, failed))
            self._handled += handled
            self._failed += failed

    def _forget(self, now: float) -> None:
        while self._past and self._past[0][0] <= now - self._window:
            _, handled, failed = self._past.popleft()
            self._handled -= handled
            self._failed -= failed

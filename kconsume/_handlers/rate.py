"""How many records of a handler may start now: `Rate` is the user's setting, `Limiter` enforces it.

The limiter only counts: it must not wait, knows no records, and reads only the clock that it was given. The callers
wait, so that a request to stop can end the wait.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from kconsume.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class Rate:
    """At most `records` records in any `per` seconds: `Rate(50)`, `Rate(50, per=60.0)`.

    Args:
        records: how many records may start in that time. A whole number, 1 or more.
        per: the time in seconds.
    """

    records: int
    per: float = 1.0

    def __post_init__(self) -> None:
        if not _is_number(self.records, int) or self.records < 1:
            raise ConfigurationError(
                f"Rate(records={self.records!r}) cannot be enforced: give a whole number above zero, and for less "
                f"than one record a second a longer time: Rate(1, per=10.0)"
            )
        if not _is_number(self.per, (int, float)) or not 0 < self.per < math.inf:
            raise ConfigurationError(
                f"Rate(per={self.per!r}) is not a time: give seconds above zero, for example Rate(50, per=1.0)"
            )


class _Grant(NamedTuple):
    opened: float
    expires: float
    records: int


class _Waiting(NamedTuple):
    """The place in the queue of a caller that has to wait."""

    least: int
    valid_until: float


class Limiter:
    """Enforces one handler's rate in one process. The worker threads of the handler share one limiter.

    In every period of `per` seconds no more than `records` records are granted. A batch larger than the rate is granted
    when no earlier grant counts any more. A batch that is n times as large as the rate counts for n times `per`, so
    that the rate holds over time. Callers that pass `caller=` are served in turn; otherwise a large batch would wait
    for ever behind small ones. Callers without `caller=` are served if there is room when they ask.

    Args:
        rate: the user's setting.
        clock: returns seconds and never goes backwards.
    """

    _GRAINS = 128
    """The number of grains in a period. Records that are granted within one grain count as granted at its last moment.
    So the rate is never exceeded, and memory does not grow with the rate."""

    _KEEP_PLACE = 0.5
    """Seconds for which a caller that does not ask again keeps its place in the queue."""

    _SHORTEST_WAIT = 0.005

    def __init__(self, rate: Rate, clock: Callable[[], float] = time.monotonic) -> None:
        self._records = rate.records
        self._per = rate.per
        self._grain = rate.per / self._GRAINS if rate.records > self._GRAINS else 0.0
        self._clock = clock
        self._lock = threading.Lock()
        self._grants: deque[_Grant] = deque()
        self._granted = 0
        self._queue: dict[object, _Waiting] = {}

    def take(self, least: int, most: int, caller: object = None) -> tuple[int, float]:
        """Return `(n, 0.0)` if n records may start now, or `(0, seconds)` if the caller must ask again later.

        The caller may ask again sooner than after these seconds. This method does not wait.

        Args:
            least: how many records the caller needs. 1 or more.
            most: how many records it can use. `least` or more.
            caller: identifies the caller, so that callers are served in turn.
        """
        with self._lock:
            now = self._clock()  # read under the lock, so that the times in the deque are in order
            self._drop_expired(now)
            if caller is not None and (first := self._first_in_queue(caller, now)) is not None:
                self._queue[caller] = _Waiting(least, now + self._KEEP_PLACE)
                return 0, max(self._SHORTEST_WAIT, _seconds(now, self._free_at(first.least)) if self._grants else 0.0)
            room = self._room(least)
            if room < least:
                if caller is not None:
                    self._queue[caller] = _Waiting(least, now + self._KEEP_PLACE)
                return 0, _seconds(now, self._free_at(least))
            self._queue.pop(caller, None)
            granted = min(most, room)
            self._remember(now, granted)
            return granted, 0.0

    def _first_in_queue(self, caller: object, now: float) -> _Waiting | None:
        """Return the first place in the queue, or None if it is the caller's own."""
        while self._queue:
            first, waiting = next(iter(self._queue.items()))
            if first is caller:
                return None
            if waiting.valid_until > now:
                return waiting
            del self._queue[first]  # this caller has stopped and does not ask any more
        return None

    def _drop_expired(self, now: float) -> None:
        while self._grants and self._grants[0].expires <= now:
            self._granted -= self._grants.popleft().records

    def _room(self, least: int) -> int:
        room = self._records - self._granted
        return least if least > self._records and not self._grants else room

    def _free_at(self, least: int) -> float:
        """Return when enough grants have expired. For more records than the rate, that is when all have expired."""
        room = self._records - self._granted
        for grant in self._grants:
            room += grant.records
            if room >= least:
                return grant.expires
        return self._grants[-1].expires

    def _remember(self, now: float, granted: int) -> None:
        opened, records = now, granted
        if self._grants and now - self._grants[-1].opened < self._grain:
            last = self._grants.pop()
            opened, records = last.opened, last.records + granted
        lasts = self._per * max(1.0, granted / self._records)
        self._grants.append(_Grant(opened, now + lasts, records))
        self._granted += granted


def _seconds(now: float, moment: float) -> float:
    """Return the seconds until `moment`, rounded up: `now + seconds` is never below `moment`."""
    seconds = moment - now
    return seconds if now + seconds >= moment else seconds + math.ulp(moment)


def _is_number(value: object, kinds: type | tuple[type, ...]) -> bool:
    return isinstance(value, kinds) and not isinstance(value, bool)

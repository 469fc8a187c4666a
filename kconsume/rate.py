"""How many records of a handler may start now: `Rate`, what a person asks for, and `Limiter`, which keeps it.

The limiter counts and answers; it never waits, knows no records, and reads no clock but the one it is given.
Whoever asks does the waiting, where a request to stop can end it.
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
    """At most `records` records in any `per` seconds: `Rate(50)`, `Rate(50, per=60.0)`."""

    records: int
    per: float = 1.0

    def __post_init__(self) -> None:
        if not _is_number(self.records, int) or self.records < 1:
            raise ConfigurationError(
                f"Rate(records={self.records!r}) cannot be kept: give a whole number above zero, and for less than one "
                f"record a second a longer time: Rate(1, per=10.0)"
            )
        if not _is_number(self.per, (int, float)) or not 0 < self.per < math.inf:
            raise ConfigurationError(
                f"Rate(per={self.per!r}) is not a time: give seconds above zero, for example Rate(50, per=1.0)"
            )


class _Grant(NamedTuple):
    opened: float
    expires: float
    records: int


class Limiter:
    """Keeps one handler's rate in one process. Its worker threads share it.

    In every stretch of `per` seconds no more than `records` are granted. A caller that needs more than that at
    once, a batch larger than the rate, gets it when nothing counts any more, and the batch then counts for as many
    times `per` as it is larger, so that the rate holds over time. There is no queue: who asks first when there is
    room is granted.
    """

    _GRAINS = 128
    """How finely a window is remembered. What is granted within one grain counts as granted at its last moment:
    never too many are let through, and the memory is the same for a million records a second."""

    def __init__(self, rate: Rate, clock: Callable[[], float] = time.monotonic) -> None:
        self._records = rate.records
        self._per = rate.per
        self._grain = rate.per / self._GRAINS if rate.records > self._GRAINS else 0.0
        self._clock = clock
        self._lock = threading.Lock()
        self._grants: deque[_Grant] = deque()
        self._granted = 0

    def take(self, least: int, most: int) -> tuple[int, float]:
        """`(n, 0.0)`: n records may start now, least <= n <= most. `(0, seconds)`: ask again after so long.

        Needs 1 <= least <= most. Does not wait.
        """
        with self._lock:
            now = self._clock()  # inside, so that the moments in the deque are in order
            self._forget(now)
            room = self._room(least)
            if room < least:
                return 0, _seconds(now, self._free_at(least))
            granted = min(most, room)
            self._remember(now, granted)
            return granted, 0.0

    def _forget(self, now: float) -> None:
        while self._grants and self._grants[0].expires <= now:
            self._granted -= self._grants.popleft().records

    def _room(self, least: int) -> int:
        room = self._records - self._granted
        return least if least > self._records and not self._grants else room

    def _free_at(self, least: int) -> float:
        """When enough of what was granted no longer counts; for more than the rate, when all of it does not."""
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
    """From now until a moment, never a rounding error too short: `now + seconds` reaches it."""
    seconds = moment - now
    return seconds if now + seconds >= moment else seconds + math.ulp(moment)


def _is_number(value: object, kinds: type | tuple[type, ...]) -> bool:
    return isinstance(value, kinds) and not isinstance(value, bool)

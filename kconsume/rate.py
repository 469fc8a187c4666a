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


class _Turn(NamedTuple):
    """The place of one who was told to wait."""

    least: int
    kept_until: float


class Limiter:
    """Keeps one handler's rate in one process. Its worker threads share it.

    In every stretch of `per` seconds no more than `records` are granted. A caller that needs more than that at
    once, a batch larger than the rate, gets it when nothing counts any more, and the batch then counts for as many
    times `per` as it is larger, so that the rate holds over time. Those who give their name are granted in turn, for
    a batch that needs much room would otherwise be kept out for ever by those that need little; of the others, who
    asks first when there is room is granted.
    """

    _GRAINS = 128
    """How finely a window is remembered. What is granted within one grain counts as granted at its last moment:
    never too many are let through, and the memory is the same for a million records a second."""

    _KEPT = 0.5
    """Seconds for which the turn of one who does not ask again is kept."""

    _MOMENT = 0.005

    def __init__(self, rate: Rate, clock: Callable[[], float] = time.monotonic) -> None:
        self._records = rate.records
        self._per = rate.per
        self._grain = rate.per / self._GRAINS if rate.records > self._GRAINS else 0.0
        self._clock = clock
        self._lock = threading.Lock()
        self._grants: deque[_Grant] = deque()
        self._granted = 0
        self._turns: dict[object, _Turn] = {}

    def take(self, least: int, most: int, who: object = None) -> tuple[int, float]:
        """`(n, 0.0)`: n records may start now, least <= n <= most. `(0, seconds)`: ask again after so long, or sooner.

        Needs 1 <= least <= most. `who` asks, to be granted in turn. Does not wait.
        """
        with self._lock:
            now = self._clock()  # inside, so that the moments in the deque are in order
            self._forget(now)
            if who is not None and (ahead := self._ahead_of(who, now)) is not None:
                self._turns[who] = _Turn(least, now + self._KEPT)
                return 0, max(self._MOMENT, _seconds(now, self._free_at(ahead.least)) if self._grants else 0.0)
            room = self._room(least)
            if room < least:
                if who is not None:
                    self._turns[who] = _Turn(least, now + self._KEPT)
                return 0, _seconds(now, self._free_at(least))
            self._turns.pop(who, None)
            granted = min(most, room)
            self._remember(now, granted)
            return granted, 0.0

    def _ahead_of(self, who: object, now: float) -> _Turn | None:
        """The turn that comes first, if it is another's."""
        while self._turns:
            first, turn = next(iter(self._turns.items()))
            if first is who:
                return None
            if turn.kept_until > now:
                return turn
            del self._turns[first]  # it has stopped, and does not ask any more
        return None

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

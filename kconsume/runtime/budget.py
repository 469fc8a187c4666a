"""How long things may take: deadlines, and how much work to start at once.

Pure but for the clock that `Deadline` is given.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from kconsume.protocols import GroupProtocol

Clock = Callable[[], float]


class Deadline:
    """A moment that several steps share: each takes what is left."""

    __slots__ = ("_clock", "_end", "seconds")

    def __init__(self, seconds: float, clock: Clock = time.monotonic) -> None:
        self.seconds = seconds
        self._clock = clock
        self._end = clock() + seconds

    @property
    def left(self) -> float:
        """Seconds left, never negative."""
        return max(0.0, self._end - self._clock())

    @property
    def passed(self) -> bool:
        return self._clock() >= self._end

    def part(self, share: float) -> Deadline:
        """A nearer deadline for one step, so that the steps after it have time too."""
        return Deadline(self.left * share, self._clock)


def revoke_budget(protocol: GroupProtocol, *, fenced: bool, poll_interval: float, shutdown: float) -> float:
    """Seconds in which partitions are given up: what runs ends, offsets are sent, listeners are told.

    While it lasts nothing is fetched. Under *eager* all members wait for the slowest anyway. Under *consumer* the
    partitions are handed over at the end of it, so where no fence guards the store it is better to wait. It must fit
    into the poll interval, after which the broker goes on without us, and into the shutdown, of which it is a part.
    """
    most = min(10.0, poll_interval / 4, max(1.0, shutdown - 5.0))
    short = protocol is GroupProtocol.COOPERATIVE or (protocol is GroupProtocol.CONSUMER and fenced)
    return min(1.0, most) if short else most


class Pace:
    """How fast a lane's handler is, and so how many records to run before looking up.

    A slice should take about `target` seconds: long enough that starting it costs nothing, short enough that
    a revoke, a shutdown or a commit does not wait for it. One record at first, then at most twice as many
    each time, so that a slow handler is never handed a long slice on a guess.
    """

    TARGET = 0.05
    SWIFT = 20e-6

    __slots__ = ("limit", "seconds_each", "size", "target", "waits")

    def __init__(self, limit: int, *, waits: bool = False, target: float = TARGET) -> None:
        """`waits`: the handler waits for something, however fast it seems, so it is never taken for a swift one."""
        self.limit = limit
        self.size = 1
        self.seconds_each: float | None = None
        self.waits = waits
        self.target = target

    @property
    def swift(self) -> bool:
        """Whether the handler is so fast that it cannot be waiting for anything: other threads would not help it."""
        return self.seconds_each is not None and self.seconds_each < self.SWIFT and not self.waits

    def took(self, records: int, seconds: float) -> None:
        """A slice of `records` took `seconds`."""
        each = seconds / records
        known, told = self.seconds_each, self._told(records, each)
        self.seconds_each = each if known is None else known + (each - known) * told
        fits = self.waits and records < self.size and seconds <= self.target
        fitting = int(self.target / max(0.0 if fits else each, self.seconds_each, 1e-9))
        self.size = max(1, min(self.limit, fitting, self.size * 2))

    def _told(self, records: int, each: float) -> float:
        """How much a slice says of the next. One that waits pays for its transaction once, so that the fewer records it
        has the slower they seem: the rest of a chunk says little, and one that was faster than the last says it all."""
        if not self.waits:
            return 0.25
        share = min(1.0, records / self.size)
        return share if each < (self.seconds_each or each) else 0.25 * share

"""How long things may take: deadlines, and how much work to start at once.

Pure but for the clock that `Deadline` is given.
"""

from __future__ import annotations

import time
from collections.abc import Callable

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


class Pace:
    """How fast a lane's handler is, and so how many records to run before looking up.

    A slice should take about `TARGET` seconds: long enough that starting it costs nothing, short enough that
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
        return self.seconds_each is not None and self.seconds_each < self.SWIFT

    def took(self, records: int, seconds: float) -> None:
        """A slice of `records` took `seconds`."""
        each = max(seconds / records, self.SWIFT) if self.waits else seconds / records
        known = self.seconds_each
        self.seconds_each = each if known is None else known + (each - known) * 0.25
        fitting = int(self.target / max(each, self.seconds_each, 1e-9))
        self.size = max(1, min(self.limit, fitting, self.size * 2))

"""Chooses how many records of a lane run in one slice, from the time of earlier slices. Pure: no clock, no I/O."""

from __future__ import annotations


class Pace:
    """The measured speed of a lane's handler, and the size of the next slice.

    A slice should take about `target` seconds. This is long enough that the start of a slice costs little, and short
    enough that a revoke, a shutdown or a commit waits only briefly. The first slice has one record. Each slice is at
    most twice as large as the previous one, so that a slow handler never gets a long slice because of a wrong estimate.
    """

    TARGET = 0.05
    """Seconds of one slice."""

    __slots__ = ("limit", "seconds_each", "size", "target", "waits")

    def __init__(self, limit: int, *, waits: bool = False, target: float = TARGET) -> None:
        """
        Args:
            limit: records of a slice, at most.
            waits: True if the handler is known to wait for something, so that a slice takes time besides its records.
            target: seconds that a slice should take.
        """
        self.limit = limit
        self.size = 1
        self.seconds_each: float | None = None
        self.waits = waits
        self.target = target

    def measured(self, records: int, seconds: float) -> None:
        """Learn that a slice of `records` took `seconds`."""
        each = seconds / records
        known, weight = self.seconds_each, self._weight(records, each)
        self.seconds_each = each if known is None else known + (each - known) * weight
        fits = self.waits and records < self.size and seconds <= self.target
        fitting = int(self.target / max(0.0 if fits else each, self.seconds_each, 1e-9))
        self.size = max(1, min(self.limit, fitting, self.size * 2))

    def _weight(self, records: int, each: float) -> float:
        """The weight of a slice in the average, between 0 and 1.

        A slice of a handler that waits includes the time of one transaction, so a slice with few records seems slow per
        record. Therefore the rest of a chunk has a low weight, and a slice that was faster than the average has the
        full weight.
        """
        if not self.waits:
            return 0.25
        share = min(1.0, records / self.size)
        return share if each < (self.seconds_each or each) else 0.25 * share

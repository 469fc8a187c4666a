"""Which offsets are finished, and how far the group may commit.

Pure: no clock, no I/O, no threads. The runtime says what it handed out (`delivered`) and what came back
(`finished`); the answer to "how far?" is `watermark`. Offsets have gaps (compaction, transaction markers), so
the watermark comes from what was delivered and is unfinished, never from "previous + 1".

What is handed out is a *unit*: records of one partition that one lane handles in order. Units may finish in
any order; within a unit, progress only goes forward.
"""

from __future__ import annotations

from collections import deque


class Tracker:
    """One partition's progress since it was assigned at `start`."""

    __slots__ = ("_end", "_order", "_progress")

    def __init__(self, start: int) -> None:
        self._end = start
        self._order: deque[tuple[int, int]] = deque()  # (first, end) of each unit, ascending
        self._progress: dict[int, int] = {}  # first -> how far the unit is finished

    def delivered(self, first: int, last: int) -> None:
        """A unit with records from offset `first` to offset `last` was handed out."""
        if first < self._end or last < first:
            raise ValueError(f"records {first} to {last} delivered after offset {self._end - 1}: out of order")
        self._order.append((first, last + 1))
        self._progress[first] = first
        self._end = last + 1

    def finished(self, first: int, upto: int) -> None:
        """Of the unit that began at `first`, every record below offset `upto` is finished."""
        done = self._progress.get(first)
        if done is None or upto < done:
            raise ValueError(f"unit {first} finished up to {upto}, but it stands at {done}")
        self._progress[first] = upto
        order, progress = self._order, self._progress
        while order and progress[order[0][0]] >= order[0][1]:
            del progress[order.popleft()[0]]

    def ended(self, end: int) -> None:
        """The log ends at `end`: where everything delivered is finished, nothing below it is left to deliver. Offsets
        behind the last record (a transaction marker, compacted records) are passed by this."""
        if not self._order and end > self._end:
            self._end = end

    @property
    def watermark(self) -> int:
        """The offset to commit: everything delivered below it is finished."""
        return self._progress[self._order[0][0]] if self._order else self._end

    @property
    def idle(self) -> bool:
        """Whether everything that was delivered is finished."""
        return not self._order

"""Which offsets are finished, and how far the group may commit.

Pure: no clock, no I/O, no threads. The runtime calls `delivered` for records that it gave to a lane and `finished` for
records that the lane has handled; `watermark` is the offset to commit. Offsets have gaps (compaction, transaction
markers), so the watermark is the lowest *delivered and unfinished* offset, never "previous + 1".

A *unit* is records of one partition that one lane handles in order. Units may finish in any order; within a unit,
progress only goes forward.
"""

from __future__ import annotations

from collections import deque


class Watermark:
    """The progress of one partition since it was opened at offset `start`."""

    __slots__ = ("_end", "_order", "_progress")

    def __init__(self, start: int) -> None:
        self._end = start
        self._order: deque[tuple[int, int]] = deque()  # (first, end) of each unit, ascending
        self._progress: dict[int, int] = {}  # first -> the offset below which the unit is finished

    def delivered(self, first: int, last: int) -> None:
        """A unit with records from offset `first` to offset `last` was given to a lane."""
        if first < self._end or last < first:
            raise ValueError(f"records {first} to {last} delivered after offset {self._end - 1}: out of order")
        self._order.append((first, last + 1))
        self._progress[first] = first
        self._end = last + 1

    def finished(self, first: int, upto: int) -> None:
        """In the unit that begins at `first`, every record below offset `upto` is finished."""
        done = self._progress.get(first)
        if done is None or upto < done:
            raise ValueError(f"unit {first} finished up to {upto}, but it is finished up to {done} already")
        self._progress[first] = upto
        order, progress = self._order, self._progress
        while order and progress[order[0][0]] >= order[0][1]:
            del progress[order.popleft()[0]]

    def ended(self, end: int) -> None:
        """The log ends at `end`. If all delivered records are finished, the watermark moves to `end`. The offsets up to
        there belong to transaction markers and compacted records, which are never delivered."""
        if not self._order and end > self._end:
            self._end = end

    @property
    def watermark(self) -> int:
        """The offset to commit: every delivered record below it is finished."""
        return self._progress[self._order[0][0]] if self._order else self._end

    @property
    def idle(self) -> bool:
        """Whether all delivered records are finished."""
        return not self._order

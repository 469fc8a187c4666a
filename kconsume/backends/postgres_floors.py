"""From where on the rows of an outbox are read: not through those again that were deleted a moment ago.

PostgreSQL keeps deleted rows, and their places in the index, until they are vacuumed: a read from the beginning goes
through all of them, each time, and the faster rows come and go the longer it takes. The owner of a partition knows up
to where it has deleted everything, for rows of one epoch are committed in the order of their numbers. Should one turn
up behind that all the same, it is found a second later: so often the beginning is looked at.

Numbers only; what is sent and deleted is the relay's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from kconsume.records import Partition

FROM_THE_BEGINNING_EVERY = 1.0
"""Seconds."""


@dataclass(slots=True)
class _Reading:
    epoch: int
    began_at: float
    """When it was last read from the beginning."""
    floor: int = 0
    """All rows up to this number that there were are deleted."""
    there: Sequence[int] = field(default=())
    """Those that were read last, ascending."""


class Floors:
    """Of the partitions of one store."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._readings: dict[tuple[str, Partition], _Reading] = {}

    def above(self, group: str, partition: Partition, epoch: int) -> int:
        """Only rows above this number need be read. A new epoch begins at the beginning: an earlier owner may have
        left something."""
        now, reading = self._clock(), self._readings.get((group, partition))
        if reading is None or reading.epoch != epoch or now - reading.began_at >= FROM_THE_BEGINNING_EVERY:
            self._readings[group, partition] = reading = _Reading(epoch, now)
        return reading.floor

    def read(self, group: str, partition: Partition, numbers: Sequence[int]) -> None:
        """These are there; none, or the first of them, ascending."""
        if (reading := self._readings.get((group, partition))) is not None:
            reading.there = numbers

    def deleted(self, group: str, partition: Partition, numbers: Collection[int]) -> None:
        if (reading := self._readings.get((group, partition))) is None or not reading.there:
            return
        gone = frozenset(numbers)
        left = [number for number in reading.there if number not in gone]
        reading.floor = max(reading.floor, left[0] - 1 if left else reading.there[-1])
        reading.there = left

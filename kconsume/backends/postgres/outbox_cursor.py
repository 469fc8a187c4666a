"""The row at which the next read of a partition's outbox begins, so that deleted rows are not scanned again and again.

PostgreSQL keeps deleted rows, and their index entries, until they are vacuumed. A read from the beginning scans all of
them, and takes longer the more rows are inserted and deleted per second. The owner of a partition knows up to which
number it has deleted every row, because rows of one epoch commit in the order of their numbers. If a row appears below
that number all the same, it is found within a second: the outbox is read from the beginning once a second.

This module handles numbers only: no connection, no I/O. The outbox relay sends and deletes the rows.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from kconsume.records import Partition

FROM_THE_BEGINNING_EVERY = 1.0
"""Seconds between two reads from the beginning."""


@dataclass(slots=True)
class _Reading:
    epoch: int
    began_at: float
    """When the partition was last read from the beginning."""
    deleted_up_to: int = 0
    """All rows that the owner has read and whose number is not above this one are deleted."""
    present: Sequence[int] = field(default=())
    """The numbers of the rows of the last read that are not yet deleted, ascending."""


class OutboxCursor:
    """The cursors of the partitions of one store. Needs no lock: for each partition, the relay reads and deletes rows
    one after the other."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """
        Args:
            clock: returns monotonic seconds.
        """
        self._clock = clock
        self._readings: dict[tuple[str, Partition], _Reading] = {}

    def read_above(self, group: str, partition: Partition, epoch: int) -> int:
        """Return the number above which rows must be read.

        It is 0 for a new epoch, because an earlier owner may have left rows, and every `FROM_THE_BEGINNING_EVERY`
        seconds.
        """
        now, reading = self._clock(), self._readings.get((group, partition))
        if reading is None or reading.epoch != epoch or now - reading.began_at >= FROM_THE_BEGINNING_EVERY:
            self._readings[group, partition] = reading = _Reading(epoch, now)
        return reading.deleted_up_to

    def read(self, group: str, partition: Partition, numbers: Sequence[int]) -> None:
        """Record the numbers of the rows that a read returned.

        Args:
            numbers: all rows above `read_above`, or the first of them, ascending.
        """
        if (reading := self._readings.get((group, partition))) is not None:
            reading.present = numbers

    def deleted(self, group: str, partition: Partition, numbers: Collection[int]) -> None:
        """Record that these rows were sent and deleted."""
        if (reading := self._readings.get((group, partition))) is None or not reading.present:
            return
        gone = frozenset(numbers)
        left = [number for number in reading.present if number not in gone]
        reading.deleted_up_to = max(reading.deleted_up_to, left[0] - 1 if left else reading.present[-1])
        reading.present = left

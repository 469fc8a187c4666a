"""Gives fetched records to their lanes, one fetch at a time or in batches, and never more than a lane may hold.

All methods are called by the owner thread.
"""

from __future__ import annotations

import time

from kconsume._kafka.fetched import Runs
from kconsume._runtime.assignment.owned_partitions import OwnedPartitions
from kconsume._runtime.assignment.partition import OwnedPartition
from kconsume._runtime.lanes.backpressure import Advice, Backpressure
from kconsume._runtime.lanes.lane import Chunk, Lane


class Dispatcher:
    """Gives fetched records to the lanes of the partitions of one consumer."""

    def __init__(self, partitions: OwnedPartitions, memory: int, most_records: int) -> None:
        """memory: bytes that all lanes together may hold.

        Args:
            most_records: records of one fetch.
        """
        self.fetch_size: int | None = None
        """How many records to fetch next, to fill batches of the partition that the last records came from."""
        self._partitions = partitions
        self._memory = memory
        self._most_records = most_records
        self._full: dict[OwnedPartition, float] = {}
        """Partitions with a full lane, each with the time since when it is full."""
        self._batching: set[OwnedPartition] = set()
        """Partitions with records that wait for their batch."""

    @property
    def has_full_lanes(self) -> bool:
        return bool(self._full)

    @property
    def has_batches(self) -> bool:
        """Whether records wait for their batch."""
        return bool(self._batching)

    def waits_for_batch(self, owned: OwnedPartition) -> bool:
        """Whether records of the partition wait for their batch."""
        return owned in self._batching

    def seconds_until_batch(self) -> float:
        """How long the next batch may still wait for records. 0 if no batch waits for a time."""
        buffers = [owned.lane.batch_buffer for owned in self._batching if owned.lane is not None]
        due = min((buffer.due_at for buffer in buffers if buffer is not None), default=0.0)
        return max(0.0, due - time.monotonic())

    def dispatch(self, runs: Runs, now: float) -> None:
        """Give records to their lanes.

        Args:
            runs: the records of each partition, in their order.
            now: when they were fetched.
        """
        partitions = self._partitions
        window = Backpressure(self._memory, len(partitions))
        for partition, run in runs:
            owned = partitions.get(partition)
            if owned is None or owned.lane is None:
                continue  # not our partition: its records are not delivered, so the offset never passes them
            buffer = owned.lane.batch_buffer
            if buffer is None:
                self._deliver(owned, owned.lane, Chunk(run, run[0].offset(), run[-1].offset()), window)
            elif not owned.lane.stop_reasons:
                self._batching.add(owned)
                buffer.add(run, now)
                self._deliver_ready(owned, window, now)
                self.fetch_size = buffer.fetch_size(self._most_records)

    def deliver_batches(self, now: float) -> None:
        """Give the batches that are full or due to their lanes."""
        window = Backpressure(self._memory, len(self._partitions))
        for owned in list(self._batching):
            self._deliver_ready(owned, window, now)

    def apply_backpressure(self, now: float) -> bool:
        """Pause and resume partitions with full lanes, as `Backpressure` advises. Returns whether the next fetch should
        wait for room."""
        wait = False
        window = Backpressure(self._memory, len(self._partitions))
        for owned, since in list(self._full.items()):
            lane = owned.lane
            if lane is None or self._partitions.get(owned.partition) is not owned:
                del self._full[owned]
                continue
            pace = lane.pace
            advice = window.advise(
                lane.queued_records,
                lane.queued_bytes,
                full_for=now - since,
                seconds_each=pace.seconds_each,
                waits=pace.waits,
                batch=lane.batch_size,
            )
            if advice is Advice.FLOW:
                del self._full[owned]
                self._partitions.remove_pause(owned, "pressure")
            elif advice is Advice.PAUSE:
                self._partitions.add_pause(owned, "pressure")
            wait = wait or (advice is Advice.WAIT and not owned.pause_reasons)
        return wait

    def _deliver_ready(self, owned: OwnedPartition, window: Backpressure, now: float) -> None:
        lane = owned.lane
        if lane is None or lane.batch_buffer is None or lane.stop_reasons:
            self._batching.discard(owned)
            return
        while (chunk := lane.batch_buffer.take_ready(now, window.bytes // 2)) is not None:
            self._deliver(owned, lane, chunk, window)
        if not len(lane.batch_buffer):
            self._batching.discard(owned)

    def _deliver(self, owned: OwnedPartition, lane: Lane, chunk: Chunk, window: Backpressure) -> None:
        owned.progress.delivered(chunk.first, chunk.last)
        lane.lanes.submit(lane, chunk)
        pace, batch = lane.pace, lane.batch_size
        records, size = lane.queued_records, lane.queued_bytes
        if window.fullness(records, size, pace.seconds_each, waits=pace.waits, batch=batch) >= 1.0:
            self._full.setdefault(owned, time.monotonic())

"""Collects the records of a lane into batches, across fetches, by size or by time.

The owner thread calls every method, and this module starts no thread or timer. Records that wait here are neither
started nor delivered. They are dropped with their lane, and the next owner of the partition fetches them again.
"""

from __future__ import annotations

from kconsume._handlers.batches import Batching
from kconsume._runtime.lanes.backpressure import RECORD_OVERHEAD
from kconsume._runtime.lanes.lane import Chunk
from kconsume.records import Message


class BatchBuffer:
    """The records of one lane that wait for their batch. Used by the owner thread alone."""

    __slots__ = ("_batching", "_bytes", "_due_at", "_messages", "_weighed")

    def __init__(self, batching: Batching) -> None:
        self._batching = batching
        self._messages: list[Message] = []
        self._weighed = 0
        """How many of the messages are counted in `_bytes`. Messages that need not wait are never counted."""
        self._bytes = 0
        self._due_at = 0.0

    def __len__(self) -> int:
        return len(self._messages)

    @property
    def batch_size(self) -> int:
        """How many records a full batch has."""
        return self._batching.records

    @property
    def due_at(self) -> float:
        """The time at which the waiting records are handed over although the batch is not full."""
        return self._due_at

    def fetch_size(self, about: int) -> int:
        """How many records to fetch: close to `about`, and such that they fill batches. A remainder would only wait."""
        records = self._batching.records
        missing = records - len(self._messages)
        return min(missing, about) + max(0, about - missing) // records * records

    def add(self, messages: list[Message], now: float) -> None:
        if not self._messages:
            self._due_at = now + self._batching.wait
            self._messages = messages
        else:
            self._messages.extend(messages)

    def drop(self) -> int:
        """Release the waiting records of a stopped lane, because the lane may be kept for some time. Returns how many
        there were."""
        dropped = len(self._messages)
        self._messages, self._bytes, self._weighed = [], 0, 0
        return dropped

    def take_ready(self, now: float, most_bytes: int) -> Chunk | None:
        """The next batch if it is full or due, else None. The remainder starts a new wait.

        Args:
            now: the time on the clock of `add`.
            most_bytes: limit of the waiting records, including the Python objects of each. A batch that would need more
                is cut short.
        """
        messages, most = self._messages, self._batching.records
        if not messages or (len(messages) < most and now < self._due_at and self._waiting_bytes() < most_bytes):
            return None
        batch, rest = (messages, []) if len(messages) <= most else (messages[:most], messages[most:])
        self._messages, self._due_at = rest, now + self._batching.wait
        self._bytes = self._weighed = 0
        return Chunk(batch, batch[0].offset(), batch[-1].offset())

    def _waiting_bytes(self) -> int:
        new = self._messages[self._weighed :]
        self._bytes += sum(map(len, new)) + len(new) * RECORD_OVERHEAD
        self._weighed += len(new)
        return self._bytes

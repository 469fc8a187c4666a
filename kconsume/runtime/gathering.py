"""Batches by size or by time, across fetches: a lane's records wait here until their batch is full or due.

Values only; the owner thread asks. What waits is not started and not delivered: it is dropped with its lane, and
fetched again by whoever owns the partition then.
"""

from __future__ import annotations

from kconsume.batches import Batching
from kconsume.records import Message
from kconsume.runtime.lanes import Chunk
from kconsume.runtime.pressure import RECORD_OVERHEAD


class Gathering:
    """The records of one lane on their way into batches."""

    __slots__ = ("_batching", "_bytes", "_due", "_messages", "_weighed")

    def __init__(self, batching: Batching) -> None:
        self._batching = batching
        self._messages: list[Message] = []
        self._weighed = 0
        """So many of them are counted in `bytes`; only what has to wait is."""
        self._bytes = 0
        self._due = 0.0

    def __len__(self) -> int:
        return len(self._messages)

    @property
    def most(self) -> int:
        """How many records a full batch has."""
        return self._batching.records

    @property
    def due(self) -> float:
        """When what waits is handed over though it is not full."""
        return self._due

    def appetite(self, about: int) -> int:
        """How many records to fetch, about so many, to fill batches with them: what is left over would only wait."""
        records = self._batching.records
        missing = records - len(self._messages)
        return min(missing, about) + max(0, about - missing) // records * records

    def add(self, messages: list[Message], now: float) -> None:
        if not self._messages:
            self._due = now + self._batching.wait
            self._messages = messages
        else:
            self._messages.extend(messages)

    def drop(self) -> int:
        """Let go of what waits; answers how many records that were. A lane is remembered after it was stopped."""
        dropped = len(self._messages)
        self._messages, self._bytes, self._weighed = [], 0, 0
        return dropped

    def ready(self, now: float, most_bytes: int) -> Chunk | None:
        """The next batch, if it is full or due. What is left waits anew. `most_bytes` bounds what waits, with what
        Python needs for each record: a batch that would need more is cut short."""
        messages, most = self._messages, self._batching.records
        if not messages or (len(messages) < most and now < self._due and self._weigh() < most_bytes):
            return None
        batch, rest = (messages, []) if len(messages) <= most else (messages[:most], messages[most:])
        self._messages, self._due = rest, now + self._batching.wait
        self._bytes = self._weighed = 0
        return Chunk(batch, batch[0].offset(), batch[-1].offset())

    def _weigh(self) -> int:
        new = self._messages[self._weighed :]
        self._bytes += sum(map(len, new)) + len(new) * RECORD_OVERHEAD
        self._weighed += len(new)
        return self._bytes

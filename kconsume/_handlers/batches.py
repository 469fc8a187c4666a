"""`Batching` says when a batch is passed to its handler. `Batch` has the records of one batch.

Values only. This module must not wait, collect records or decode them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import overload

from kconsume.errors import ConfigurationError
from kconsume.records import Headers, Message, Record, record_of


@dataclass(frozen=True, slots=True)
class Batching:
    """When a batch is passed to its handler: when it is full or has waited long enough, whichever comes first.

    Args:
        records: the number of records in a full batch. A whole number, 1 or more.
        wait: seconds from the batch's first record until the batch is passed on although it is not full. With 0, a
            batch has the records that have already arrived.
    """

    records: int = 500
    wait: float = 0.2

    def __post_init__(self) -> None:
        if not _is_a(int, self.records) or self.records < 1:
            raise ConfigurationError(
                f"Batching(records={self.records!r}) holds no record: give a whole number, 1 or more, for example 500"
            )
        if not _is_a((int, float), self.wait) or not 0 <= self.wait < math.inf:
            raise ConfigurationError(f"Batching(wait={self.wait!r}) must be seconds, 0 or more: write wait=0.2")


class Batch(Sequence[Record]):
    """The records of one batch, in order, all of one partition. Each `Record` is made when it is accessed.

    `id` is `group:topic_id:partition:first-last`, the same for the same records: the idempotency key for calls outside
    the transaction. Offsets have gaps (compaction, transactions): `last - first + 1` is not the length.

    Args:
        messages: the client's messages.
        scope: `group:topic_id`, as in `record_of`.
        attempt: the number of this attempt on these records, counted from 1.
    """

    __slots__ = ("_messages", "_scope", "attempt")

    attempt: int

    def __init__(self, messages: Sequence[Message], scope: str, attempt: int = 1) -> None:
        self._messages = messages
        self._scope = scope
        self.attempt = attempt

    @property
    def topic(self) -> str:
        return self._messages[0].topic()

    @property
    def partition(self) -> int:
        return self._messages[0].partition()

    @property
    def first(self) -> int:
        """The offset of the first record."""
        return self._messages[0].offset()

    @property
    def last(self) -> int:
        """The offset of the last record of the batch."""
        return self._messages[-1].offset()

    @property
    def id(self) -> str:
        return f"{self._scope}:{self.partition}:{self.first}-{self.last}"

    @property
    def keys(self) -> list[bytes | None]:
        return [message.key() for message in self._messages]

    @property
    def values(self) -> list[bytes | None]:
        return [message.value() for message in self._messages]

    @property
    def offsets(self) -> list[int]:
        return [message.offset() for message in self._messages]

    @property
    def timestamps(self) -> list[datetime | None]:
        return [record.timestamp for record in self]

    @property
    def headers(self) -> list[Headers]:
        return [record.headers for record in self]

    def __len__(self) -> int:
        return len(self._messages)

    def __iter__(self) -> Iterator[Record]:
        return (record_of(message, self._scope, self.attempt) for message in self._messages)

    @overload
    def __getitem__(self, index: int) -> Record: ...
    @overload
    def __getitem__(self, index: slice) -> Batch: ...
    def __getitem__(self, index: int | slice) -> Record | Batch:
        if not isinstance(index, slice):
            return record_of(self._messages[index], self._scope, self.attempt)
        if index.step not in (None, 1):
            # The id of such a batch would equal the id of the whole range, and of every other selection from the range.
            raise ValueError(
                f"a part of a batch is a range of offsets, and [::{index.step}] leaves records out: select from "
                f"list(batch)"
            )
        return Batch(self._messages[index], self._scope, self.attempt)

    def __repr__(self) -> str:
        if not self._messages:
            return "Batch(empty)"
        place = f"{self.topic}/{self.partition}@{self.first}-{self.last}"
        return f"Batch({place}, {len(self)} record{'s' if len(self) > 1 else ''})"


def _is_a(kinds: type | tuple[type, ...], given: object) -> bool:
    return isinstance(given, kinds) and not isinstance(given, bool)  # True is an int, but no user means a number by it

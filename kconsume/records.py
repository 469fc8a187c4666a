"""The values `Partition` and `Record`. This file must not read, write or decode anything."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from operator import methodcaller
from typing import NamedTuple, Protocol

from kconsume.errors import ConfigurationError

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MILLISECOND = timedelta(milliseconds=1)
_TIMESTAMP_NOT_AVAILABLE = 0

Headers = tuple[tuple[str, bytes], ...]


class Partition(NamedTuple):
    """One partition of a topic, written `orders/3`.

    Attributes:
        topic: the name of the topic.
        number: the number of the partition.
    """

    topic: str
    number: int

    def __str__(self) -> str:
        return f"{self.topic}/{self.number}"

    @classmethod
    def parse(cls, text: str) -> Partition:
        """Read a text such as `orders/3`.

        Args:
            text: topic and number. The name of a topic cannot contain a slash.
        """
        topic, slash, number = text.rpartition("/")
        if not slash or not topic or not number.isdecimal():
            raise ConfigurationError(f"{text!r} is not a partition: write TOPIC/NUMBER, for example orders/3")
        return cls(topic, int(number))


class Message(Protocol):
    """The methods of the client's message object that kconsume uses."""

    def topic(self) -> str: ...
    def partition(self) -> int: ...
    def offset(self) -> int: ...
    def key(self) -> bytes | None: ...
    def value(self) -> bytes | None: ...
    def headers(self) -> list[tuple[str, bytes | None]] | None: ...
    def timestamp(self) -> tuple[int, int]: ...
    def leader_epoch(self) -> int | None: ...
    def __len__(self) -> int: ...


class Record:
    """A Kafka record with its metadata.

    Args:
        topic: the topic.
        partition: the number of the partition.
        offset: the offset.
        key: the key, or None.
        value: the value, or None for a tombstone.
        headers: pairs of a name and a value.
        timestamp: the record's timestamp in UTC, or None if it has none.
        attempt: 1 at the first attempt, then 2, and so on.
        id: `group:topic_id:partition:offset`, the same at every attempt and on every consumer: the idempotency key for
            calls outside the transaction.
    """

    __slots__ = ("attempt", "headers", "id", "key", "offset", "partition", "timestamp", "topic", "value")

    topic: str
    partition: int
    offset: int
    key: bytes | None
    value: bytes | None
    headers: Headers
    timestamp: datetime | None
    attempt: int
    id: str

    def __init__(
        self,
        topic: str = "",
        partition: int = 0,
        offset: int = 0,
        key: bytes | None = None,
        value: bytes | None = None,
        headers: Headers = (),
        timestamp: datetime | None = None,
        attempt: int = 1,
        id: str = "",
    ) -> None:
        self.topic = topic
        self.partition = partition
        self.offset = offset
        self.key = key
        self.value = value
        self.headers = headers
        self.timestamp = timestamp
        self.attempt = attempt
        self.id = id

    def __repr__(self) -> str:
        return f"Record({self.topic}/{self.partition}@{self.offset})"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Record):
            return NotImplemented
        return all(getattr(self, name) == getattr(other, name) for name in Record.__slots__)

    def __hash__(self) -> int:
        return hash((self.topic, self.partition, self.offset))


_offset_of = methodcaller("offset")


def index_of(messages: Sequence[Message], message: Message) -> int:
    """Return the index of a message in a sequence that ascends by offset.

    `list.index` would take half a microsecond for each earlier message (measured): the client's messages compare all
    their fields.
    """
    return bisect_left(messages, message.offset(), key=_offset_of)


def record_of(message: Message, scope: str, attempt: int = 1) -> Record:
    """Return the record of a message.

    Args:
        message: the client's message.
        scope: `group:topic_id`, the first part of `Record.id`.
        attempt: the number of this attempt.
    """
    partition, offset = message.partition(), message.offset()
    return Record(
        message.topic(),
        partition,
        offset,
        message.key(),
        message.value(),
        headers_of(message),
        moment_of(message),
        attempt,
        f"{scope}:{partition}:{offset}",
    )


def headers_of(message: Message) -> Headers:
    """Return the headers of a message. A header without a value has the value `b""`."""
    given = message.headers()
    return tuple((name, value if value is not None else b"") for name, value in given) if given else ()


def moment_of(message: Message) -> datetime | None:
    """Return the timestamp of a message, or None if it has none."""
    kind, millis = message.timestamp()
    try:
        return None if kind == _TIMESTAMP_NOT_AVAILABLE else _EPOCH + millis * _MILLISECOND
    except OverflowError:  # a producer may write any 64-bit number, for example microseconds
        return None

"""Reading a topic of dead letters: all of it by cause, or one letter by its place.

Reads up to where the topic ended when it was asked, with a consumer that joins no group and commits nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import UTC, datetime, timedelta
from typing import NamedTuple, cast

from confluent_kafka import Consumer, KafkaError, TopicPartition

from kconsume.backends import MemoryStore
from kconsume.backends.letter_reading import Heap
from kconsume.cli.failed import _bootstrap
from kconsume.cli.rehearse import Place, _fetch, _must_be_reachable, _reading
from kconsume.cluster import Cluster
from kconsume.errors import BrokerUnavailable, ConfigurationError
from kconsume.failures.letters import PREFIX, Letter, read_marks, reset_epoch_in
from kconsume.records import Message, Partition, Record, record_of
from kconsume.runtime.budget import Deadline
from kconsume.runtime.plans import ConsumerPlan
from kconsume.settings import ClientValue, client_settings

_PATIENCE = 10.0
"""Seconds without a single record, however long all of them take."""
_AT_ONCE = 500
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class Read(NamedTuple):
    """What a topic holds."""

    records: int
    heaps: list[Heap]
    strangers: int
    """Records that are no dead letters."""


class LetterTopics:
    """The topics of a cluster. Connects at the first question."""

    def __init__(self, brokers: str, kafka: Mapping[str, ClientValue]) -> None:
        self._brokers = brokers
        self._kafka = kafka

    def heaps(self, topic: str, since: datetime | None = None, group: str | None = None) -> Read:
        """The topic by where its letters came from and why. The time of a letter is the record's own, or, where the
        topic has `LogAppendTime`, when it was written."""
        heaps: dict[tuple[str, str], Heap] = {}
        records = strangers = 0
        for record in self.records(topic):
            records += 1
            letter = letter_in(record)
            if letter is None:
                strangers += 1
            elif _is_wanted(record, letter, since, group):
                key = letter.partition.topic, letter.exception
                heaps[key] = _with(heaps.get(key), letter, record)
        return Read(records, [heaps[key] for key in sorted(heaps)], strangers)

    def records(self, topic: str) -> Iterator[Record]:
        """All that the topic holds now, in the order of each partition; nothing of transactions that were undone."""
        return _records(self._plan(), topic)

    def letter(self, place: Place) -> Letter:
        letter = letter_in(record_of(_fetch(self._plan(), place), ""))
        if letter is None:
            raise ConfigurationError(
                f"{place} is no dead letter, because it has no header kconsume-origin: choose one that "
                f"`kconsume dlq list` shows"
            )
        return letter

    def _plan(self) -> ConsumerPlan:
        """Of a consumer that has nothing to handle and keeps no offsets."""
        _must_be_reachable(self._brokers)
        address = _bootstrap(self._brokers)
        kafka = {**self._kafka, "isolation.level": "read_committed"}
        settings = client_settings(address, "kconsume-dlq", kafka, embedded=address != self._brokers)
        return ConsumerPlan("kconsume-dlq", MemoryStore(), (), None, settings, Cluster(address, self._kafka), 0.0, 0)


# The records


def _records(plan: ConsumerPlan, topic: str) -> Iterator[Record]:
    partitions = [Partition(topic, number) for number in range(plan.cluster.topics([topic])[topic])]
    firsts, ends = plan.cluster.edges(partitions, "earliest"), plan.cluster.edges(partitions, "latest")
    filled = [Place(p, firsts[p]) for p in partitions if firsts[p] < ends[p]]
    if not filled:
        return
    with _reading(plan, filled[0], Deadline(_PATIENCE)) as consumer:
        consumer.assign([TopicPartition(*place.partition, place.offset) for place in filled])
        for message in _up_to(consumer, {place.partition: ends[place.partition] for place in filled}):
            yield record_of(message, "")


def _up_to(consumer: Consumer, ends: Mapping[Partition, int]) -> Iterator[Message]:
    left, trouble, deadline = set(ends), "no answer", Deadline(_PATIENCE)
    while left:
        if deadline.passed:
            raise BrokerUnavailable(
                f"{', '.join(map(str, sorted(left)))} could not be read to the end: no record for {_PATIENCE:g} s "
                f"({trouble}); is the broker well?"
            )
        for message in consumer.consume(_AT_ONCE, 0.2):
            error = message.error()
            partition = Partition(cast(str, message.topic()), cast(int, message.partition()))
            if error is not None and error.code() != KafkaError._PARTITION_EOF:
                trouble = error.str()
                continue
            deadline, offset = Deadline(_PATIENCE), cast(int, message.offset())
            if error is None and offset < ends[partition]:
                yield cast(Message, message)  # the client's stubs allow for messages that are errors
                deadline = Deadline(_PATIENCE)  # whoever reads them may take time
            if error is not None or offset + 1 >= ends[partition]:  # behind the last record there may be a gap
                left.discard(partition)


# The letters


def letter_in(record: Record) -> Letter | None:
    """The letter that a record is; None if it is none."""
    marks = read_marks(record.headers)
    if "origin" not in marks:
        return None
    return Letter(
        Partition(marks.get("topic", "?"), _number(marks.get("partition"))),
        _number(marks.get("offset")),
        marks.get("group", "?"),
        marks["origin"],
        _number(marks.get("attempts")),
        marks.get("exception", "?"),
        marks.get("message", ""),
        marks.get("trace", ""),
        record.key,
        record.value,
        _moment(marks.get("timestamp", "")),
        tuple(pair for pair in record.headers if not pair[0].startswith(PREFIX)),
        redriven=max(0, _number(marks.get("redriven"))),
        reset_epoch=reset_epoch_in(marks),
    )


def _number(text: str | None) -> int:
    """-1 for what is none: somebody else may have written such headers."""
    return int(text) if text is not None and text.isdecimal() and text.isascii() else -1


def _moment(text: str) -> datetime | None:
    try:
        return _EPOCH + timedelta(milliseconds=int(text))
    except (ValueError, OverflowError):
        pass
    try:
        return datetime.fromisoformat(text).astimezone(UTC)  # as `kconsume failed dead-letter` writes it
    except (ValueError, OverflowError):
        return None


def _is_wanted(record: Record, letter: Letter, since: datetime | None, group: str | None) -> bool:
    if group is not None and letter.group != group:
        return False
    return since is None or (record.timestamp is not None and record.timestamp >= since)


def _with(heap: Heap | None, letter: Letter, record: Record) -> Heap:
    at, place = record.timestamp, str(Place(Partition(record.topic, record.partition), record.offset))
    if heap is None:
        return Heap(letter.partition.topic, letter.exception, 1, at, at, place)
    times = [time for time in (heap.first, heap.last, at) if time is not None]
    return Heap(
        heap.topic, heap.cause, heap.count + 1, min(times, default=None), max(times, default=None), place
    )  # fmt: skip

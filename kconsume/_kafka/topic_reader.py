"""Reads records of a topic without a consumer group: one record, a range of offsets, or all that a topic holds now.

For tools, never for a running consumer. `TopicReader` assigns partitions by hand, so that no member joins a group and
no offset is committed. The end of a read is known before it starts. Offsets have gaps (compaction, aborted records,
transaction markers), so the end of a range may be a gap that no record ever follows.
Every wait is bounded: `BrokerUnavailable` is raised if no record came for `patience` seconds.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple, cast

from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition

from kconsume._config.client_settings import ClientValue
from kconsume._kafka.cluster import Cluster
from kconsume._runtime.deadlines import Deadline
from kconsume.errors import BrokerUnavailable, ConfigurationError
from kconsume.records import Message, Partition

_PATIENCE = 10.0
_POLL = 0.2
_BATCH = 500


class RecordPlace(NamedTuple):
    """The place of one record, written `orders/3@1042`."""

    partition: Partition
    offset: int

    def __str__(self) -> str:
        return f"{self.partition}@{self.offset}"

    @classmethod
    def parse(cls, text: str) -> RecordPlace:
        """Return the place that `text` names.

        Args:
            text: as in `orders/3@1042`; anything else raises `ConfigurationError`.
        """
        where, at, offset = text.rpartition("@")
        if not at or not offset.isdecimal():
            raise ConfigurationError(f"{text!r} is not a record: write TOPIC/PARTITION@OFFSET, as in orders/3@1042")
        return cls(Partition.parse(where), int(offset))


class TopicReader:
    """Reads records of named partitions. Connects at the first read; each read has a client of its own."""

    def __init__(self, cluster: Cluster, settings: Mapping[str, ClientValue], *, patience: float = _PATIENCE) -> None:
        """
        Args:
            cluster: where the topics are looked up.
            settings: all properties of a consumer of that cluster (`client_settings`); `isolation.level` is
                `read_committed` unless the settings say otherwise.
            patience: how many seconds may pass without a record.
        """
        self._cluster = cluster
        self._settings = settings
        self._patience = patience

    def record(self, place: RecordPlace) -> Message:
        """Return the record at this place. If there is none, the `ConfigurationError` says why."""
        self._check_partition(place.partition)
        with self._consumer(str(place)) as consumer:
            self._check_offset(consumer, place)
            _, found = next(self._read(consumer, {place.partition: place.offset}, {place.partition}, batch=1))
        if found is not None and found.offset() == place.offset:
            return found
        then = "no record follows it" if found is None else f"the next record is {place.partition}@{found.offset()}"
        raise ConfigurationError(
            f"there is no record {place}: the offset is a gap (compacted, aborted, or a transaction marker); {then}"
        )

    def between(self, partition: Partition, first: int, end: int) -> Iterator[Message]:
        """Yield the records of a range, in order. The range may begin and end in a gap; `first` must be in the log.

        Args:
            first: the first offset that is read.
            end: the offset after the last one that is read.
        """
        self._check_partition(partition)
        start = RecordPlace(partition, first)
        with self._consumer(str(start)) as consumer:
            self._check_offset(consumer, start)
            yield from self._read_to({partition: first}, {partition: end}, consumer)

    def topic(self, name: str) -> Iterator[Message]:
        """Yield all records that the topic holds when the read begins, in the order of each partition."""
        partitions = [Partition(name, number) for number in range(self._cluster.topics([name])[name])]
        firsts, ends = self._cluster.edges(partitions, "earliest"), self._cluster.edges(partitions, "latest")
        starts = {partition: first for partition, first in firsts.items() if first < ends[partition]}
        if starts:
            with self._consumer(f"topic {name!r}") as consumer:
                yield from self._read_to(starts, ends, consumer)

    @contextmanager
    def _consumer(self, what: str) -> Iterator[Consumer]:
        """Yield a consumer for one read. `what` names the read in errors."""
        try:
            consumer = Consumer(
                {
                    **self._settings,
                    "group.id": f"kconsume-reader-{uuid.uuid4().hex}",  # the client requires a group; nothing joins it
                    "enable.partition.eof": True,
                    "log_level": 0,
                }
            )
        except KafkaException as error:
            raise ConfigurationError(
                f"the Kafka client refused its configuration: {error.args[0].str()}; check kafka={{...}}"
            ) from None
        try:
            yield consumer
        except KafkaException as error:
            raise BrokerUnavailable(f"{what} cannot be read: {error.args[0].str()}; check the brokers") from error
        finally:
            consumer.close()

    def _check_partition(self, partition: Partition) -> None:
        count = self._cluster.topics([partition.topic])[partition.topic]
        if partition.number >= count:
            raise ConfigurationError(
                f"topic {partition.topic!r} has {count} partitions, numbered from 0: no {partition}"
            )

    def _check_offset(self, consumer: Consumer, place: RecordPlace) -> None:
        first, end = consumer.get_watermark_offsets(TopicPartition(*place.partition), timeout=self._patience)
        if first <= place.offset < end:
            return
        holds = f"holds {first} to {end - 1}" if first < end else "is empty"
        gone = "deleted by retention" if place.offset < first else "not written yet"
        raise ConfigurationError(f"there is no record {place}: {place.partition} {holds}; that offset is {gone}")

    def _read_to(
        self, starts: Mapping[Partition, int], ends: Mapping[Partition, int], consumer: Consumer
    ) -> Iterator[Message]:
        left = set(starts)
        for partition, message in self._read(consumer, starts, left):
            if message is not None and message.offset() < ends[partition]:
                yield message
            if message is None or message.offset() + 1 >= ends[partition]:  # the rest of a range may be a gap
                left.discard(partition)

    def _read(
        self, consumer: Consumer, starts: Mapping[Partition, int], left: set[Partition], *, batch: int = _BATCH
    ) -> Iterator[tuple[Partition, Message | None]]:
        """Yield the records of the partitions in `left`, and None at the end of a log.

        The caller removes from `left` the partitions that it has read.
        """
        consumer.assign([TopicPartition(*partition, first) for partition, first in starts.items()])
        deadline, trouble = Deadline(self._patience), "no answer"
        while left:
            if deadline.passed:
                raise BrokerUnavailable(
                    f"{', '.join(map(str, sorted(left)))} could not be read to the end: no record for "
                    f"{self._patience:g} s ({trouble}). Check the brokers; a record of an open transaction can be "
                    f"read when the transaction has ended"
                )
            for message in consumer.consume(batch, _POLL):
                error = message.error()
                if error is not None and error.code() != KafkaError._PARTITION_EOF:
                    trouble = error.str()
                    continue
                partition = Partition(cast(str, message.topic()), cast(int, message.partition()))
                if partition not in left:
                    continue
                # The client's stubs allow for messages that are errors.
                yield partition, None if error is not None else cast(Message, message)
                deadline = Deadline(self._patience)  # after the yield: the caller may have needed much time

"""Batches and tables of the client's own messages, as a real broker hands them over."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition

from kconsume._handlers.arrow import schema, table_of
from kconsume._handlers.batches import Batch
from kconsume.records import Message
from kconsume.testing.services import KafkaService
from tests.fix_kafka import MakeTopic, produce, unique
from tests.waiting import eventually

MICROSECONDS = 1_700_000_000_123_456
"""What a producer writes that took the wrong unit: no date can hold it as milliseconds."""
ANY_TIME = {"message.timestamp.after.max.ms": str(2**63 - 1)}


@pytest.fixture
def producer(kafka: KafkaService) -> Iterator[Producer]:
    with _producing(kafka) as made:
        yield made


def test_a_table_has_what_the_records_have(kafka: KafkaService, producer: Producer, topic: MakeTopic) -> None:
    name = topic(partitions=4, config=ANY_TIME)
    producer.produce(
        name, b"a", b"k", partition=3, timestamp=1_700_000_000_123, headers=[("trace", b"1"), ("no", None)]
    )
    producer.produce(name, None, b"k", partition=3, timestamp=1_700_000_000_124)
    producer.produce(name, b"", None, partition=3, timestamp=MICROSECONDS)
    producer.produce(name, b"\x00\xff", b"", partition=3, timestamp=0, headers=[("trace", b""), ("trace", b"2")])
    assert producer.flush(20) == 0

    messages = read(kafka, name, partition=3, count=4)
    table, batch = table_of(messages), Batch(messages, "g:t")

    table.validate(full=True)
    assert table.schema.equals(schema())
    assert column(messages, "key") == batch.keys == [b"k", b"k", None, b""]
    assert column(messages, "value") == batch.values == [b"a", None, b"", b"\x00\xff"]
    assert column(messages, "topic") == [batch.topic] * 4 == [name] * 4
    assert column(messages, "partition") == [batch.partition] * 4 == [3] * 4
    assert column(messages, "offset") == batch.offsets == [0, 1, 2, 3]
    assert column(messages, "timestamp") == batch.timestamps == [record.timestamp for record in batch]
    assert [moment is None for moment in batch.timestamps] == [False, False, True, False]
    assert column(messages, "headers") == [
        [{"key": "trace", "value": b"1"}, {"key": "no", "value": None}],
        None,
        None,
        [{"key": "trace", "value": b""}, {"key": "trace", "value": b"2"}],
    ]


def test_the_offsets_of_a_table_have_the_gaps_that_transactions_leave(kafka: KafkaService, topic: MakeTopic) -> None:
    name = topic(partitions=1)
    with _producing(kafka, **{"transactional.id": unique("gaps")}) as producer:
        producer.init_transactions(20)
        for word, keep in ((b"a", True), (b"undone", False), (b"b", True), (b"c", True)):
            producer.begin_transaction()
            producer.produce(name, word, partition=0)
            producer.flush(20)  # an abort drops what was not sent yet
            producer.commit_transaction(20) if keep else producer.abort_transaction(20)

    messages = read(kafka, name, partition=0, count=3)
    batch = Batch(messages, "g:t")

    assert column(messages, "value") == [b"a", b"b", b"c"]
    assert column(messages, "offset") == batch.offsets == [0, 4, 6]
    assert batch.id == "g:t:0:0-6"
    assert repr(batch) == f"Batch({name}/0@0-6, 3 records)"


def test_a_table_has_the_broker_s_time_where_the_topic_is_stamped_on_arrival(
    kafka: KafkaService, topic: MakeTopic
) -> None:
    name = topic(partitions=1, config={"message.timestamp.type": "LogAppendTime"})
    produce(kafka.bootstrap, name, [b"a", b"b"], partition=0)
    messages = read(kafka, name, partition=0, count=2)
    assert column(messages, "timestamp") == Batch(messages, "g:t").timestamps
    assert None not in column(messages, "timestamp")


def column(messages: list[Message], name: str) -> list[object]:
    return table_of(messages).column(name).to_pylist()


def read(kafka: KafkaService, topic: str, partition: int, count: int) -> list[Message]:
    settings = {"bootstrap.servers": kafka.bootstrap, "group.id": unique("reads"), "log_level": 0}
    consumer = Consumer({**settings, "enable.auto.commit": False})
    consumer.assign([TopicPartition(topic, partition, 0)])
    messages: list[Message] = []

    def all_there() -> bool:
        messages.extend(cast(Message, message) for message in consumer.consume(count, 0.1) if not message.error())
        return len(messages) >= count

    try:
        eventually(all_there, what=f"{count} records of {topic}/{partition}")
    finally:
        consumer.close()
    assert len(messages) == count
    return messages


@contextmanager
def _producing(kafka: KafkaService, **settings: str) -> Iterator[Producer]:
    producer = Producer({"bootstrap.servers": kafka.bootstrap, "log_level": 0, **settings})
    yield producer
    producer.flush(20)

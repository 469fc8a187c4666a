"""A compacted topic, through every store: offsets are missing between the records that are left.

What the next record's offset is cannot be told from the last one's, so nothing may count on it: no consumer may fence
itself at a gap, and at the end of the log nothing may look unread.
"""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import wraps
from pathlib import Path

import psycopg
import pytest
from confluent_kafka import Consumer, KafkaError, TopicPartition
from confluent_kafka.admin import AdminClient
from redis.client import Pipeline

from kconsume import App, Partition
from kconsume.backends import open_store
from kconsume.testing.services import KafkaService
from tests.fix_kafka import create_topic, delete_topics, produce, unique
from tests.waiting import eventually

COMPACTED = {
    "cleanup.policy": "compact",
    "segment.ms": "100",
    "min.cleanable.dirty.ratio": "0.01",
    "delete.retention.ms": "0",
}
WRITTEN = 40
LEFT = [n for n in range(WRITTEN) if n % 3 == 0 or n == WRITTEN - 2]
"""Each third record has a key of its own; of the others the last is left."""


def read(bootstrap: str, topic: str) -> list[int]:
    """The values that are there now."""
    settings = {"bootstrap.servers": bootstrap, "group.id": unique("looks"), "enable.partition.eof": True}
    consumer, values = Consumer({**settings, "enable.auto.commit": False, "log_level": 0}), list[int]()
    with closing(consumer):
        consumer.assign([TopicPartition(topic, 0, 0)])
        while True:
            for message in consumer.consume(500, timeout=1.0):
                error = message.error()
                if error is None:
                    values.append(int(message.value() or b""))
                elif error.code() == KafkaError._PARTITION_EOF:
                    return values


@pytest.fixture(scope="module")
def compacted(kafka: KafkaService, kafka_admin: AdminClient) -> Iterator[str]:
    """All tests read it, each with a group of its own, and write one more record."""
    name = unique("compacted")
    create_topic(kafka_admin, name, 1, COMPACTED)
    keys = [f"key {n}" if n % 3 == 0 else "the same" for n in range(WRITTEN)]
    produce(kafka.bootstrap, name, [str(n) for n in range(WRITTEN)], keys, partition=0)

    def is_compacted() -> bool:
        # What is written last begins a new segment once the one before is old enough, and only that one is compacted.
        produce(kafka.bootstrap, name, [str(WRITTEN)], ["the end"], partition=0)
        return [value for value in read(kafka.bootstrap, name) if value != WRITTEN] == LEFT

    eventually(is_compacted, what="the broker has compacted the topic")
    yield name
    delete_topics(kafka_admin, [name])


Handler = Callable[..., None]


def with_postgres(value: str, tx: psycopg.Connection) -> None:
    tx.execute("insert into effects values (%s)", (value,))


def with_sqlite(value: str, tx: sqlite3.Connection) -> None:
    tx.execute("insert into effects values (?)", (value,))


def with_redis(value: str, tx: Pipeline) -> None:
    tx.rpush("effects", value)


@pytest.fixture(params=["postgres", "sqlite", "redis", "kafka", "memory"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, Handler]:
    """An address for the offsets, and a handler that writes with them if it can."""

    def without(value: str) -> None:
        """Nothing but the offset."""

    match request.param:
        case "postgres":
            request.getfixturevalue("database").execute("create table effects (value text)")
            return request.getfixturevalue("postgres_url"), with_postgres
        case "sqlite":
            with closing(sqlite3.connect(tmp_path / "shop.db")) as connection:
                connection.execute("create table effects (value text)")
            return f"sqlite:///{tmp_path / 'shop.db'}", with_sqlite
        case "redis":
            return request.getfixturevalue("redis_url"), with_redis
        case other:
            return f"{other}://", without


def test_each_record_that_is_left_is_handled_once_and_nothing_is_lag(
    kafka: KafkaService,
    compacted: str,
    group: str,
    place: tuple[str, Handler],
    caplog: pytest.LogCaptureFixture,
) -> None:
    offsets, write = place
    app, calls = App(kafka.bootstrap, group=group, offsets=offsets), list[int]()

    @app.consume(compacted, chunk=4)
    @wraps(write)
    def effect(value: str, *tx: object) -> None:
        calls.append(int(value))
        write(value, *tx)

    partition = Partition(compacted, 0)

    def has_read_all() -> bool:
        # The copy that every store keeps in the Kafka group, for tools that show lag.
        with closing(open_store("kafka://", brokers=kafka.bootstrap)) as committed:
            row = committed.load(group, [partition]).get(partition)
        with closing(Consumer({"bootstrap.servers": kafka.bootstrap, "group.id": group, "log_level": 0})) as consumer:
            _, end = consumer.get_watermark_offsets(TopicPartition(compacted, 0), timeout=20)
        return row is not None and row.next_offset == end

    with caplog.at_level(logging.WARNING, logger="kconsume"), app.running():
        eventually(has_read_all, what="the offset is at the end of the log")
        produce(kafka.bootstrap, compacted, [str(WRITTEN)], ["the end"], partition=0)
        eventually(has_read_all, what="the offset goes on")
    assert [value for value in calls if value != WRITTEN] == LEFT
    assert [r.getMessage() for r in caplog.records if r.getMessage().startswith("partition fenced ")] == []

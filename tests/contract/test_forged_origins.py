"""Headers that look like ours on a topic that is not ours: copied from a dead letter, or made up. No record is dropped
for the sake of another that says the same of where it came from."""

from __future__ import annotations

from collections.abc import Sequence

import psycopg
import pytest
from confluent_kafka import Producer

from kconsume import App, DeadLetter, Record, RetryTopics
from kconsume.failures.retry_topics import retry_topic
from tests.fix_arena import Arena
from tests.waiting import eventually

pytestmark = pytest.mark.parametrize("arena", ["real"], indirect=True)

VALUES = ["a", "b", "c"]
FORGED: list[tuple[str, str | bytes | None]] = [
    ("kconsume-topic", b"orders"), ("kconsume-partition", b"0"), ("kconsume-offset", b"7"),
    ("kconsume-origin", b"shop:T:0:7"), ("kconsume-attempts", b"3"),
]  # fmt: skip


def write_forged(arena: Arena, topic: str, values: Sequence[str] = VALUES) -> None:
    producer = Producer({"bootstrap.servers": arena.bootstrap, "log_level": 0})
    for value in values:
        producer.produce(topic, value, headers=FORGED)
    assert not producer.flush(30)


def app_on(arena: Arena, group: str, postgres_url: str) -> App:
    return App(arena.bootstrap, group=group, offsets=postgres_url, kafka=arena.quick({}))


def test_each_record_has_its_own_row_among_the_dead_letters(
    arena: Arena, group: str, postgres_url: str, database: psycopg.Connection
) -> None:
    topic = arena.topic(1)
    write_forged(arena, topic)
    app = app_on(arena, group, postgres_url)

    @app.consume(topic, on_error=DeadLetter(table="dead"))
    def handle(value: str, tx: psycopg.Connection) -> None:
        raise LookupError(value)

    app.catch_up(idle=0.2)
    rows = database.execute("select value, topic, record_offset from dead order by 3").fetchall()
    assert rows == [(value.encode(), topic, offset) for offset, value in enumerate(VALUES)]


def test_each_record_is_tried_again(arena: Arena, group: str, postgres_url: str, database: psycopg.Connection) -> None:
    topic = arena.topic(1)
    arena._made |= {f"{topic}.dlq", retry_topic(topic, group, 1)}
    write_forged(arena, topic)
    database.execute("create table seen (value text)")
    app = app_on(arena, group, postgres_url)

    @app.consume(topic, retry=RetryTopics(delays=(0.2,)), on_error=DeadLetter(arena.topic(1, f"{topic}.dlq")))
    def handle(record: Record, tx: psycopg.Connection) -> None:
        if record.topic == topic:
            raise LookupError("not yet")
        tx.execute("insert into seen values (%s)", ((record.value or b"").decode(),))

    def seen() -> list[str]:
        return [value for (value,) in database.execute("select value from seen order by 1")]

    with app.running():
        eventually(lambda: seen() == VALUES, what="all three have their effect")

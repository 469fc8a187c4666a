"""The wall clock is put forward by an hour, back, and further back, while records fail and are tried later: each has
one effect, and partitions go on. No record waits for its time at the moment of a step."""

from __future__ import annotations

import time
from collections import Counter

import psycopg
import pytest

from kconsume import App, DeadLetter, Record, RetryTopics
from kconsume.testing.services import KafkaService
from tests.fix_arena import QUICK
from tests.fix_kafka import MakeTopic, produce
from tests.liveness import assert_app_lives
from tests.waiting import eventually

HOUR = 3600.0
EACH = 20


def test_a_clock_that_steps_loses_nothing_and_repeats_nothing(
    kafka: KafkaService,
    topic: MakeTopic,
    group: str,
    postgres_url: str,
    database: psycopg.Connection,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source, now, ahead = topic(2), time.time, [0.0]
    monkeypatch.setattr(time, "time", lambda: now() + ahead[0])
    database.execute("create table effects (value text)")
    app = App(kafka.bootstrap, group=group, offsets=postgres_url, kafka=QUICK)

    @app.consume(source, retry=RetryTopics((0.3,)), on_error=DeadLetter(table="dead"))
    def handle(value: str, record: Record, tx: psycopg.Connection) -> None:
        tx.execute("insert into effects values (%s)", (value,))
        if record.topic == source and value.endswith("7"):
            raise LookupError("not yet")

    def effects() -> Counter[str]:
        return Counter(value for (value,) in database.execute("select value from effects"))

    expected = Counter[str]()
    with app.running():
        for step in (0.0, HOUR, 0.0, -HOUR):
            ahead[0] = step
            values = [f"{len(expected)}:{number}" for number in range(EACH)]
            expected.update(2 * values)
            for partition in range(2):
                produce(kafka.bootstrap, source, values, partition=partition)
            eventually(lambda: effects() >= expected, what=f"all are handled, with the clock at {step:+g} s")
            assert effects() == expected, "each once"
            assert_app_lives(
                app, bootstrap=kafka.bootstrap, topic=source, group=group, offsets=postgres_url, partitions=2,
                value=f"{step}",
            )  # fmt: skip
            expected.update(2 * [f"{step}"])
    assert effects() == expected

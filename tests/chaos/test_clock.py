"""The wall clock is put forward by an hour, back, and further back, while records fail and are tried later, or wait for
that: each has one effect, and partitions go on."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence

import psycopg
import pytest

from kconsume import App, DeadLetter, Record, RetryTopics
from kconsume.failures.retry_topics import Moment, RetryChain
from kconsume.records import Message
from kconsume.testing.services import KafkaService
from tests.fix_arena import STEADY
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
    app = App(kafka.bootstrap, group=group, offsets=postgres_url, kafka=STEADY)

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
                produce(kafka.bootstrap, source, values, partition=partition, gaps=True)
            eventually(lambda: effects() >= expected, what=f"all are handled, with the clock at {step:+g} s")
            assert effects() == expected, "each once"
            assert_app_lives(
                app, bootstrap=kafka.bootstrap, topic=source, group=group, offsets=postgres_url, partitions=2,
                value=f"{step}",
            )  # fmt: skip
            expected.update(2 * [f"{step}"])
    assert effects() == expected


DELAY = 3.0
"""Seconds: long enough that the clock steps meanwhile."""
STEPS = ((0.0, HOUR), (HOUR, 0.0), (0.0, -HOUR))
"""Forward, back, and further back: by how much the clock is ahead before and after."""


def test_a_record_that_waits_when_the_clock_steps_is_tried_once_and_holds_up_nobody(
    kafka: KafkaService,
    topic: MakeTopic,
    group: str,
    postgres_url: str,
    database: psycopg.Connection,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    step_while_one_waits(kafka, topic, group, postgres_url, database, monkeypatch, STEPS, within=45)


def step_while_one_waits(
    kafka: KafkaService,
    topic: MakeTopic,
    group: str,
    postgres_url: str,
    database: psycopg.Connection,
    monkeypatch: pytest.MonkeyPatch,
    steps: Sequence[tuple[float, float]],
    *,
    within: float,
) -> None:
    source, now, ahead = topic(2), time.time, [steps[0][0]]
    waited = set[tuple[str, float]]()
    """Values that were not due yet when they were looked at, and by how much the clock was ahead then."""
    seconds_left = RetryChain.seconds_left

    def look(self: RetryChain, message: Message, since: Moment) -> float:
        step = ahead[0]
        if left := seconds_left(self, message, since):
            waited.add(((message.value() or b"").decode(), step))
        return left

    monkeypatch.setattr(time, "time", lambda: now() + ahead[0])
    monkeypatch.setattr(RetryChain, "seconds_left", look)
    database.execute("create table effects (value text)")
    app = App(kafka.bootstrap, group=group, offsets=postgres_url, kafka=STEADY)

    @app.consume(source, retry=RetryTopics((DELAY,)), on_error=DeadLetter(table="dead"))
    def handle(value: str, record: Record, tx: psycopg.Connection) -> None:
        tx.execute("insert into effects values (%s)", (value,))
        if record.topic == source and value.startswith("later"):
            raise LookupError("not yet")

    def effects() -> Counter[str]:
        return Counter(value for (value,) in database.execute("select value from effects"))

    def wait_across(before: float, after: float) -> None:
        """One record in each partition waits when the clock steps, and one is written behind it then."""
        name = f"later {before:+g} {after:+g}"
        for partition in range(2):
            produce(kafka.bootstrap, source, [f"{name}/{partition}"], partition=partition, gaps=True)
        eventually(lambda: any(value.startswith(name) for value, _ in waited), what=f"one waits: {name}")
        ahead[0] = after
        for partition in range(2):
            produce(kafka.bootstrap, source, [f"{name}/{partition} behind"], partition=partition, gaps=True)
        expected.update(f"{name}/{partition}{place}" for partition in range(2) for place in ("", " behind"))
        eventually(lambda: effects() >= expected, within=within, what=f"all are handled: {name}")
        across = [value for value, step in waited if step == before and (value, after) in waited]
        assert any(value.startswith(name) for value in across), "none waited at the step, so nothing was proven"
        assert effects() == expected, "each once"

    expected = Counter[str]()
    with app.running():
        for before, after in steps:
            wait_across(before, after)
            assert_app_lives(
                app, bootstrap=kafka.bootstrap, topic=source, group=group, offsets=postgres_url, partitions=2,
                value=f"{after}",
            )  # fmt: skip
            expected.update(2 * [f"{after}"])
    assert effects() == expected
    assert database.execute("select to_regclass('dead')").fetchone() == (None,), "none is dead"


@pytest.mark.parametrize(
    ("step", "fails"), [((0.0, HOUR), "none waited at the step"), ((HOUR, 0.0), "not within 12 s: all are handled")]
)
def test_control_a_wait_by_the_wall_clock_is_over_too_soon_or_lasts_as_long_as_the_clock_was_put_back(
    kafka: KafkaService,
    topic: MakeTopic,
    group: str,
    postgres_url: str,
    database: psycopg.Connection,
    monkeypatch: pytest.MonkeyPatch,
    step: tuple[float, float],
    fails: str,
) -> None:
    seconds_left = RetryChain.seconds_left

    def look_at_the_clock_again(self: RetryChain, message: Message, since: Moment) -> float:
        return seconds_left(self, message, Moment.now())

    monkeypatch.setattr(RetryChain, "seconds_left", look_at_the_clock_again)
    with pytest.raises(AssertionError, match=fails):
        step_while_one_waits(kafka, topic, group, postgres_url, database, monkeypatch, [step], within=12)

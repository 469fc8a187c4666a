"""Offsets with gaps on a real Kafka: each record in a transaction of its own, so that a marker follows each of them.

The stored offset and the offset of the next record then always differ. Two faults came of that: a save from the polling
thread moved the row under the worker's transaction, so that a consumer fenced itself, and after a database failover it
moved the row over the records that the failover had lost.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial

import psycopg
import pytest
import redis
from confluent_kafka import KafkaError, Producer
from redis.client import Pipeline

from kconsume import App, Partition
from kconsume._embedded.controls import KafkaControls
from kconsume._kafka.consumer import StartAt
from kconsume._runtime.assignment.claiming import Claiming
from kconsume._runtime.assignment.owned_partitions import OwnedPartitions
from kconsume._runtime.assignment.partition import OwnedPartition
from kconsume._runtime.loop import Loop
from kconsume.backends import MemoryStore, Position, open_store
from kconsume.backends.base import Positions
from kconsume.errors import Fenced
from kconsume.testing.services import KafkaService
from tests.fix_arena import QUICK
from tests.fix_kafka import MakeTopic, produce, unique
from tests.liveness import assert_app_lives
from tests.waiting import eventually


def produce_with_gaps(bootstrap: str, topic: str, values: list[str]) -> None:
    """One record a transaction: record n has offset 2n, and the log ends behind the last marker."""
    producer = Producer({"bootstrap.servers": bootstrap, "transactional.id": unique("gaps"), "log_level": 0})
    producer.init_transactions(30)
    for value in values:
        producer.begin_transaction()
        producer.produce(topic, value, partition=0)
        producer.commit_transaction(30)


def stored(offsets: str, group: str, topic: str, brokers: str = "") -> int | None:
    store = open_store(offsets, brokers=brokers)
    try:
        row = store.load(group, [Partition(topic, 0)]).get(Partition(topic, 0))
        return None if row is None else row.next_offset
    finally:
        store.close()


def app_on(kafka: KafkaService, group: str, offsets: str) -> App:
    return App(kafka.bootstrap, group=group, offsets=offsets, kafka=QUICK)


def two_writers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rule is off: offsets of all lanes are saved by the polling thread, too."""
    monkeypatch.setattr(
        OwnedPartition, "unsaved", property(lambda h: h.lane is not None and h.progress.watermark != h.stored)
    )


def runs_once_a_record(
    kafka: KafkaService, topic: str, group: str, postgres_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The handler is slower than the clock by which offsets are saved."""
    app, calls = app_on(kafka, group, postgres_url), list[str]()

    @app.consume(topic)
    def note(value: str, tx: psycopg.Connection) -> None:
        calls.append(value)
        tx.execute("select pg_sleep(1.3)")

    with caplog.at_level(logging.WARNING, logger="kconsume"):
        with app.running():
            for value in ("0", "1", "2"):  # each is delivered by itself, while the handler of the one before runs
                produce_with_gaps(kafka.bootstrap, topic, [value])
                eventually(partial(calls.__contains__, value), what=f"the handler of {value} runs")
            eventually(lambda: stored(postgres_url, group, topic) == 6, what="the row is behind the last marker")
    assert calls == ["0", "1", "2"]
    assert [r for r in caplog.records if r.getMessage().startswith("partition fenced ")] == []


def test_a_consumer_does_not_fence_itself_at_offset_gaps(
    kafka: KafkaService, topic: MakeTopic, group: str, postgres_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    runs_once_a_record(kafka, topic(1), group, postgres_url, caplog)


def test_control_with_two_writers_it_does(
    kafka: KafkaService,
    topic: MakeTopic,
    group: str,
    postgres_url: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    two_writers(monkeypatch)
    with pytest.raises(AssertionError):
        runs_once_a_record(kafka, topic(1), group, postgres_url, caplog)


class TestAFailoverThatLostItsTail:
    """The database is set back to an earlier state, under the same epoch, while the handler of the next record runs:
    what a standby that was promoted, or a backup that was restored, looks like."""

    @staticmethod
    def run(write: Callable[[list[str]], None], seen: list[str], fail_over: Callable[[], None]) -> None:
        """The fourth record is delivered by itself, behind a marker; the failover comes while it is handled."""
        write(["0", "1", "2"])
        eventually(lambda: "2" in seen, what="the first three are handled")
        write(["3", "4"])
        eventually(lambda: "3" in seen, what="the handler of the fourth record runs")
        fail_over()

    def test_postgres_loses_nothing(
        self, kafka: KafkaService, topic: MakeTopic, group: str, postgres_url: str, database: psycopg.Connection
    ) -> None:
        name, seen, over = topic(1), list[str](), threading.Event()
        database.execute("create table effects (value text)")
        app = app_on(kafka, group, postgres_url)

        @app.consume(name, chunk=1)
        def note(value: str, tx: psycopg.Connection) -> None:
            seen.append(value)
            if value == "3" and not over.is_set():
                over.wait(60)
                time.sleep(2.2)  # two saves of the polling thread
            tx.execute("insert into effects values (%s)", (value,))

        def fail_over() -> None:
            database.execute("delete from effects where value in ('1', '2')")
            set_back(postgres_url, group)
            over.set()

        def effects() -> list[str]:
            return [value for (value,) in database.execute("select value from effects order by value")]

        with app.running():
            self.run(lambda values: produce_with_gaps(kafka.bootstrap, name, values), seen, fail_over)
            eventually(lambda: "4" in effects(), what="the last record has its effect", within=60)
            assert effects() == ["0", "1", "2", "3", "4"]
            assert_app_lives(
                app, bootstrap=kafka.bootstrap, topic=name, group=group, offsets=postgres_url, partitions=1
            )
        assert effects() == ["0", "1", "2", "3", "4", "x"]

    def test_redis_loses_nothing(self, kafka: KafkaService, topic: MakeTopic, group: str, redis_url: str) -> None:
        name, seen, over = topic(1), list[str](), threading.Event()
        app, client = app_on(kafka, group, redis_url), redis.Redis.from_url(redis_url, decode_responses=True)

        @app.consume(name, chunk=1)
        def note(value: str, tx: Pipeline) -> None:
            seen.append(value)
            if value == "3" and not over.is_set():
                over.wait(60)
                time.sleep(2.2)
            tx.rpush("effects", value)

        def fail_over() -> None:
            client.lrem("effects", 0, "1")
            client.lrem("effects", 0, "2")
            set_back(redis_url, group)
            over.set()

        def effects() -> list[str]:
            return [str(value) for value in client.lrange("effects", 0, -1)]

        with app.running():
            self.run(lambda values: produce_with_gaps(kafka.bootstrap, name, values), seen, fail_over)
            eventually(lambda: "4" in effects(), what="the last record has its effect", within=60)
            assert sorted(effects()) == ["0", "1", "2", "3", "4"]
            assert_app_lives(app, bootstrap=kafka.bootstrap, topic=name, group=group, offsets=redis_url, partitions=1)
        assert sorted(effects()) == ["0", "1", "2", "3", "4", "x"]
        client.close()

    @pytest.mark.parametrize("store", ["postgres", "redis"])
    def test_what_the_polling_thread_saves_does_not_pass_the_tail_either(
        self, kafka: KafkaService, topic: MakeTopic, group: str, request: pytest.FixtureRequest, store: str
    ) -> None:
        """Of a handler outside of the store's transaction, whose offsets are saved from there."""
        name, seen, offsets = topic(1), list[str](), request.getfixturevalue(f"{store}_url")
        app = app_on(kafka, group, offsets)

        @app.consume(name)
        def note(value: str) -> None:
            seen.append(value)

        with app.running():
            produce_with_gaps(kafka.bootstrap, name, ["0", "1", "2"])
            eventually(lambda: stored(offsets, group, name) == 6, what="all is saved")
            set_back(offsets, group)
            produce_with_gaps(kafka.bootstrap, name, ["3"])
            eventually(lambda: stored(offsets, group, name) == 8, what="all is saved")
        assert seen == ["0", "1", "2", "3", "1", "2", "3"]

    def test_control_with_two_writers_the_tail_is_lost(
        self, kafka: KafkaService, topic: MakeTopic, group: str, redis_url: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        two_writers(monkeypatch)
        monkeypatch.setattr("kconsume._runtime.assignment.committer.Position", without_previous)
        # Behind the third record the lane would pass the marker, and the row have no gap before the fourth.
        monkeypatch.setattr(Loop, "_pass_the_end", lambda *_: None)
        with pytest.raises(AssertionError):
            self.test_redis_loses_nothing(kafka, topic, group, redis_url)


def set_back(offsets: str, group: str) -> None:
    """Behind the first record, under the same epoch."""
    if offsets.startswith("redis"):
        with redis.Redis.from_url(offsets) as client:
            (row,) = client.keys(f"kconsume:offset:{group}:*")
            client.hset(row, "next", "1")
    else:
        with psycopg.connect(offsets, autocommit=True) as database:
            database.execute("update kconsume_offsets set next_offset = 1")


def without_previous(
    offset: int, epoch: int, topic_id: str | None, leader_epoch: int | None = None, previous: int | None = None
) -> Position:
    return Position(offset, epoch, topic_id, leader_epoch=leader_epoch)


@pytest.mark.parametrize("offsets", ["kafka://", "memory://"])
def test_a_marker_behind_the_last_record_is_no_lag(
    kafka: KafkaService, topic: MakeTopic, group: str, offsets: str
) -> None:
    name, seen = topic(1), list[str]()
    produce_with_gaps(kafka.bootstrap, name, ["0", "1"])
    app = app_on(kafka, group, offsets)

    @app.consume(name)
    def note(value: str) -> None:
        seen.append(value)

    with app.running():
        eventually(lambda: stored("kafka://", group, name, kafka.bootstrap) == 4, what="committed at the log's end")
    assert seen == ["0", "1"]


@pytest.mark.parametrize("form", ["redis", "postgres on the event loop"])
def test_nor_is_it_where_the_work_moves_the_row(
    kafka: KafkaService,
    topic: MakeTopic,
    group: str,
    request: pytest.FixtureRequest,
    caplog: pytest.LogCaptureFixture,
    form: str,
) -> None:
    name, seen = topic(1), list[str]()
    offsets = request.getfixturevalue(f"{form.partition(' ')[0]}_url")
    app = app_on(kafka, group, offsets)

    def on_redis(value: str, tx: Pipeline) -> None:
        seen.append(value)

    async def on_the_loop(value: str, tx: psycopg.AsyncConnection) -> None:
        seen.append(value)

    def at(end: int) -> bool:
        return {stored(offsets, group, name), stored("kafka://", group, name, kafka.bootstrap)} == {end}

    app.consume(name)(on_redis if form == "redis" else on_the_loop)
    with caplog.at_level(logging.WARNING, logger="kconsume"), app.running():
        produce_with_gaps(kafka.bootstrap, name, ["0", "1"])
        eventually(lambda: at(4), what="row and group are at the log's end")
        produce_with_gaps(kafka.bootstrap, name, ["2"])
        eventually(lambda: at(6), what="and again")
    assert seen == ["0", "1", "2"]
    assert caplog.messages == [], "nobody was fenced"


class LateRefusal(MemoryStore):
    """Saves under the first epoch are answered only when they are let, and then say that we were fenced."""

    def __init__(self) -> None:
        super().__init__()
        self.begun, self.answers = threading.Event(), threading.Event()

    def save(self, group: str, positions: Positions) -> None:
        if any(position.epoch == 1 for position in positions.values()):
            self.begun.set()
            self.answers.wait(60)
            raise Fenced("by an assignment that has ended")
        super().save(group, positions)

    def offset(self, group: str, topic: str) -> int | None:
        row = self.load(group, [Partition(topic, 0)]).get(Partition(topic, 0))
        return None if row is None else row.next_offset


def a_late_refusal_changes_nothing(
    bootstrap: str,
    name: str,
    group: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    go_and_return: Callable[[App], None],
) -> None:
    """The answer comes when the partition is assigned anew, ahead of its new claim: when the owner thread sees it, the
    partition is open."""
    seen, store, take_up = list[str](), LateRefusal(), Claiming.claim_new
    app = App(bootstrap, group=group, offsets=store, kafka=QUICK, shutdown=3.0)

    def assigned_anew(claiming: Claiming, new: Mapping[Partition, OwnedPartition]) -> Mapping[Partition, StartAt]:
        if store.begun.is_set() and Partition(name, 0) in new:
            store.answers.set()
        return take_up(claiming, new)

    @app.consume(name)
    def note(value: str) -> None:
        seen.append(value)

    monkeypatch.setattr(Claiming, "claim_new", assigned_anew)
    with caplog.at_level(logging.WARNING, logger="kconsume"), app.running():
        try:
            produce(bootstrap, name, ["a"], partition=0)
            assert store.begun.wait(60)
            go_and_return(app)
            assert store.answers.wait(60)
            eventually(lambda: seen.count("a") >= 2, what="it is assigned anew, and its record handled again")
            produce(bootstrap, name, ["b"], partition=0)
            eventually(lambda: "b" in seen, what="the partition flows")
            eventually(lambda: store.offset(group, name) == 2, what="the offset passes")
        finally:
            store.answers.set()
    assert [r.getMessage() for r in caplog.records if r.getMessage().startswith("partition fenced ")] == []


def test_a_refusal_of_an_assignment_that_has_ended_does_not_stop_the_next(
    kafka: KafkaService,
    topic: MakeTopic,
    group: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    name, other = topic(1), topic(1)

    def go_and_return(app: App) -> None:
        app.subscribe(other)
        eventually(lambda: owned(app) == {Partition(other, 0)}, what="the partition went")
        app.subscribe(name)

    a_late_refusal_changes_nothing(kafka.bootstrap, name, group, monkeypatch, caplog, go_and_return)


def test_nor_does_one_of_an_assignment_that_was_lost(
    embedded: KafkaControls, group: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    name = unique("topic")
    embedded.create_topic(name, 1)

    def go_and_return(_: App) -> None:
        embedded.fail_next("Heartbeat", KafkaError.UNKNOWN_MEMBER_ID)

    a_late_refusal_changes_nothing(embedded.bootstrap, name, group, monkeypatch, caplog, go_and_return)


def test_control_where_receipts_are_not_compared_with_what_is_in_charge_it_does(
    kafka: KafkaService,
    topic: MakeTopic,
    group: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(OwnedPartitions, "current", lambda self, partition, _: self.get(partition))
    # The answers of claims that have ended count too: whichever comes first.
    with pytest.raises((AssertionError, KeyError)):
        test_a_refusal_of_an_assignment_that_has_ended_does_not_stop_the_next(kafka, topic, group, monkeypatch, caplog)


def owned(app: App) -> set[Partition]:
    supervisor = app._supervisor
    assert supervisor is not None
    return {p for consumer in supervisor.consumers for p in consumer.loop.snapshot.assigned}

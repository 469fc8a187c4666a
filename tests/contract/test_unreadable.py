"""A batch that cannot be read holds its partition: nothing behind it is handled, and nothing is passed in silence.

On a broker of its own, whose log files the test changes.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from confluent_kafka import Consumer, KafkaError, Producer, TopicPartition

from kconsume import App, Batching, Partition
from kconsume._config.client_settings import RECEIVE_LIMIT, ClientValue
from kconsume._kafka.client_log import client_log
from kconsume._runtime.assignment import held_watch
from kconsume.backends import MemoryStore, OffsetStore, open_store
from kconsume.errors import UnreadableBatch
from kconsume.testing.services import LocalKafka
from tests.fix_arena import Arena
from tests.liveness import assert_app_lives
from tests.waiting import eventually

BATCHES, EACH = 5, 10
"""Of partition 1: batches of so many records; the third is damaged."""
BEFORE, BEHIND = 2 * EACH, 3 * EACH


@pytest.fixture(scope="module")
def broker() -> Iterator[LocalKafka]:
    with LocalKafka() as broker:
        yield broker


@pytest.fixture
def arena(broker: LocalKafka) -> Iterator[Arena]:
    arena = Arena("real", broker.bootstrap, None)
    yield arena
    arena.clean_up()


@pytest.fixture(autouse=True)
def attentive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(held_watch, "LOOK_EVERY", 0.1)
    monkeypatch.setattr(held_watch, "READ_AGAIN_EVERY", 0.5)


class Log:
    """The log file of a partition whose third batch is damaged by one byte."""

    def __init__(self, broker: LocalKafka, topic: str, compression: str) -> None:
        producer = Producer({"bootstrap.servers": broker.bootstrap, "compression.type": compression, "linger.ms": 1000})
        self.values = [f"{number}:{'x' * 40}" for number in range(BATCHES * EACH)]
        for at in range(0, len(self.values), EACH):
            for value in self.values[at : at + EACH]:
                producer.produce(topic, value, partition=1)
            producer.flush()  # one batch
        (self._file,) = Path(broker.folder).glob(f"data/{topic}-1/*.log")
        data = self._file.read_bytes()
        starts = [0]
        while starts[-1] < len(data):  # base offset in 8 bytes, then the length of what follows in 4
            starts.append(starts[-1] + 12 + int.from_bytes(data[starts[-1] + 8 : starts[-1] + 12], "big"))
        assert len(starts) == BATCHES + 1, "one batch each"
        self._at = starts[3] - 15  # among the values of the third

    def flip(self) -> None:
        """Damage it, or mend it."""
        with self._file.open("r+b") as file:
            file.seek(self._at)
            (byte,) = file.read(1)
            file.seek(self._at)
            file.write(bytes([byte ^ 0xFF]))


def assert_lives(app: App, store: OffsetStore, arena: Arena, group: str, topic: str) -> None:
    assert_app_lives(app, bootstrap=arena.bootstrap, topic=topic, group=group, offsets=store, partitions=2)


def member(
    arena: Arena,
    group: str,
    topic: str,
    seen: list[str],
    kafka: dict[str, ClientValue] | None = None,
    store: OffsetStore | None = None,
) -> App:
    app = App(arena.bootstrap, group=group, offsets=store or "memory://", kafka=arena.quick(kafka or {}))

    @app.consume(topic)
    def handle(value: bytes) -> None:
        seen.append(value.decode("latin-1"))

    return app


def held(app: App) -> dict[Partition, str]:
    supervisor = app._supervisor
    consumers = supervisor.consumers if supervisor is not None else ()
    return {p: trouble.code for consumer in consumers for p, trouble in consumer.loop.snapshot.held.items()}


@pytest.mark.dense
@pytest.mark.parametrize("compression", ["none", "lz4"])
def test_a_damaged_batch_holds_its_partition_until_it_is_mended_or_passed(
    broker: LocalKafka, arena: Arena, group: str, compression: str
) -> None:
    topic, seen = arena.topic(2), list[str]()
    log = Log(broker, topic, compression)
    log.flip()
    arena.produce(topic, ["good"], 0)
    store = MemoryStore()
    app = member(arena, group, topic, seen, store=store)
    with app.running():
        eventually(lambda: held(app) == {Partition(topic, 1): "unreadable_batch"}, what="it is held")
        eventually(lambda: len(seen) == BEFORE + 1, what="all before it, and the other partition, are handled")
        arena.produce(topic, ["later"], 0)
        eventually(lambda: "later" in seen, what="the other goes on")
        assert set(seen) == {*log.values[:BEFORE], "good", "later"}, "nothing of it and nothing behind it"
        log.flip()  # as by a replica that has the batch whole
        eventually(lambda: len(seen) == len(log.values) + 2, what="it goes on by itself")
        eventually(lambda: held(app) == {}, what="nothing is held")
        assert_lives(app, store, arena, group, topic)
    assert [value for value in seen if value in log.values] == log.values


def test_a_damaged_batch_is_passed_by_a_seek_alone(broker: LocalKafka, arena: Arena, group: str) -> None:
    topic, seen = arena.topic(2), list[str]()
    log = Log(broker, topic, "none")
    log.flip()
    app = member(arena, group, topic, seen)
    with pytest.raises(UnreadableBatch, match=rf"{topic}/1 has records that cannot be read .*Nothing was skipped"):
        app.catch_up(idle=0.2)
    assert seen == log.values[:BEFORE]
    with app.running():
        eventually(lambda: held(app) == {Partition(topic, 1): "unreadable_batch"}, what="it is held")
        app.seek(Partition(topic, 1), BEHIND)
        eventually(lambda: len(seen) == len(log.values) - EACH, what="it goes on behind it")
    assert seen == log.values[:BEFORE] + log.values[BEHIND:]


LIMITS: dict[str, ClientValue] = {"fetch.max.bytes": 1000, "message.max.bytes": 1000, RECEIVE_LIMIT: 1512}
LARGE = "a" * 5000


@pytest.mark.dense
def test_a_record_above_a_limit_that_was_set_holds_its_partition_and_no_other(arena: Arena, group: str) -> None:
    topic, seen = arena.topic(2), list[str]()
    arena.produce(topic, ["before", LARGE, "behind"], 1)
    store = MemoryStore()
    app = member(arena, group, topic, seen, LIMITS, store)
    with pytest.raises(UnreadableBatch, match=rf"{topic}/1@1 has 5,000 bytes, more than {RECEIVE_LIMIT}=1512 .* Raise"):
        app.catch_up(idle=0.2)
    assert seen == ["before"]
    with app.running():
        eventually(lambda: held(app) == {Partition(topic, 1): "unreadable_batch"}, what="it is held")
        arena.produce(topic, ["other"], 0)
        eventually(lambda: seen == ["before", "other"], what="the other partition goes on")
        app.seek(Partition(topic, 1), 2)
        eventually(lambda: seen == ["before", "other", "behind"], what="it goes on behind it")
        eventually(lambda: held(app) == {}, what="nothing is held")
        assert_lives(app, store, arena, group, topic)


@pytest.mark.dense
def test_the_end_of_the_log_that_comes_with_it_does_not_pass_it(
    arena: Arena, group: str, sqlite_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the owner thread is busy, the client fetches the record, those behind it and the end: all come at once."""
    monkeypatch.setattr(held_watch, "READ_AGAIN_EVERY", 60.0)
    topic, seen, busy, produced = arena.topic(2), list[str](), threading.Event(), threading.Event()
    app = arena.app(group, sqlite_url, {RECEIVE_LIMIT: 10_512, "fetch.max.bytes": 10_000, "message.max.bytes": 10_000})

    @app.consume(topic, executor="inline")
    def handle(value: str) -> None:
        if value == "busy":
            busy.set()
            produced.wait(60)
            time.sleep(1.0)  # the fetch that finds the end takes a moment
        seen.append(value)

    def offsets() -> list[int]:
        with closing(open_store(sqlite_url)) as store:
            rows = store.load(group, [Partition(topic, 0), Partition(topic, 1)])
            return [rows[p].next_offset for p in sorted(rows)]

    with app.running():
        arena.produce(topic, ["busy"], 0)
        assert busy.wait(60)
        arena.produce(topic, ["before", "a" * 11_000, "behind"], 1)
        produced.set()
        eventually(lambda: held(app) == {Partition(topic, 1): "unreadable_batch"}, what="it is held")
        arena.produce(topic, ["later"], 0)
        eventually(lambda: offsets()[0] == 2, what="the other partition goes on, and all offsets are saved")
    assert offsets() == [2, 1]
    assert seen == ["busy", "before", "later"]


def test_records_that_wait_for_their_batch_do_not_come_twice(arena: Arena, group: str) -> None:
    """The partition is read again meanwhile, from behind the last record that was handled."""
    topic, batches = arena.topic(1), list[list[str]]()
    arena.produce(topic, ["before", LARGE, "behind"], 0)
    app = arena.app(group, "memory://", LIMITS)

    @app.consume(topic, batch=Batching(records=50, wait=2.0))
    def handle(values: list[str]) -> None:
        batches.append(values)

    with app.running():
        eventually(lambda: held(app) == {Partition(topic, 0): "unreadable_batch"}, what="it is held")
        eventually(lambda: batches, what="those before it are handled")
    assert batches == [["before"]]


def test_without_a_limit_a_large_record_is_read(arena: Arena, group: str) -> None:
    topic, seen = arena.topic(2), list[str]()
    arena.produce(topic, [LARGE], 1)
    member(arena, group, topic, seen).catch_up(idle=0.2)
    assert seen == [LARGE]


def test_control_with_a_low_limit_of_its_own_the_client_stands_still_and_names_no_partition(arena: Arena) -> None:
    topic, errors, seen = arena.topic(2), list[KafkaError](), list[str]()
    arena.produce(topic, [LARGE], 1)
    arena.produce(topic, ["other"], 0)
    settings = {"bootstrap.servers": arena.bootstrap, "group.id": "bare", "error_cb": errors.append}
    bare = Consumer({**settings, **LIMITS}, logger=client_log())
    bare.assign([TopicPartition(topic, 1, 0)])

    def complains() -> bool:
        message = bare.poll(0.1)
        if message is not None and message.error() is None:
            seen.append(str(message.topic()))
        return sum(RECEIVE_LIMIT in error.str() for error in errors) > 1

    try:
        eventually(complains, what="it complains again and again")
        assert not any(topic in error.str() for error in errors)
        assert seen == []
    finally:
        bare.close()


def test_control_without_checksums_damaged_bytes_reach_the_handler(
    broker: LocalKafka, arena: Arena, group: str
) -> None:
    topic, seen = arena.topic(2), list[str]()
    log = Log(broker, topic, "none")
    log.flip()
    app = member(arena, group, topic, seen, {"check.crcs": False})
    app.catch_up(idle=0.2)
    assert len(seen) == len(log.values)
    assert seen != log.values, "as if nothing had happened"

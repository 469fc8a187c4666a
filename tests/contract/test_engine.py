"""What an app does with records, on the embedded and on the real broker: one suite for both."""

from __future__ import annotations

import sqlite3
import threading
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Literal

import msgspec
import pytest

from kconsume import App, DecodeError, Partition, Record
from kconsume._kafka.cluster import Cluster
from kconsume._runtime.assignment.claims import Claims
from kconsume._runtime.lanes.backpressure import RECORD_OVERHEAD
from kconsume._runtime.lanes.lane import Lane
from kconsume.backends import MemoryStore, PostgresStore, SqliteStore, open_store
from kconsume.errors import OffsetOutOfRange, StartRequired, TopicNotFound, TopicRecreated
from tests.fix_arena import Arena
from tests.waiting import eventually


def table(path: str) -> sqlite3.Connection:
    connection = sqlite3.connect(path.removeprefix("sqlite:///"), isolation_level=None)
    connection.execute("create table if not exists seen (value text)")
    return connection


@pytest.mark.dense
@pytest.mark.parametrize("executor", ["thread", "inline"])
@pytest.mark.parametrize("store", ["kafka", "memory", "sqlite"])
def test_every_record_is_handled_once_and_passed(
    arena: Arena, group: str, sqlite_url: str, store: str, executor: Literal["thread", "inline"]
) -> None:
    topic = arena.topic()
    expected = arena.fill(topic, 500)
    offsets = {"kafka": "kafka://", "memory": "memory://", "sqlite": sqlite_url}[store]
    app, seen = arena.app(group, offsets), []

    @app.consume(topic, executor=executor)
    def handle(value: str) -> None:
        seen.append(value)

    report = app.catch_up(idle=0.2)

    assert sorted(seen) == sorted(expected)
    assert report.handled == 2000
    assert report.committed == {Partition(topic, n): 500 for n in range(4)}
    assert report.exit_code == 0
    for number in range(4):
        of_partition = [v for v in seen if v.startswith(f"{number}:")]
        assert of_partition == [f"{number}:{n}" for n in range(500)], "order by partition (P7)"


@pytest.mark.parametrize("store", ["kafka", "sqlite"])
def test_a_restart_goes_on_where_the_group_stood(arena: Arena, group: str, sqlite_url: str, store: str) -> None:
    topic = arena.topic(1)
    offsets = {"kafka": "kafka://", "sqlite": sqlite_url}[store]
    seen: list[str] = []

    def run() -> None:
        app = arena.app(group, offsets)

        @app.consume(topic)
        def handle(value: str) -> None:
            seen.append(value)

        app.catch_up(idle=0.2)

    arena.produce(topic, ["a", "b"], 0)
    run()
    arena.produce(topic, ["c"], 0)
    run()
    assert seen == ["a", "b", "c"]


@pytest.mark.dense
def test_rows_and_offset_commit_together_in_sqlite(arena: Arena, group: str, sqlite_url: str) -> None:
    topic = arena.topic()
    expected = arena.fill(topic, 300)
    rows = table(sqlite_url)
    app = arena.app(group, sqlite_url)

    @app.consume(topic)
    def handle(value: str, tx: sqlite3.Connection) -> None:
        tx.execute("insert into seen values (?)", (value,))

    app.catch_up(idle=0.2)

    values = [row[0] for row in rows.execute("select value from seen")]
    assert sorted(values) == sorted(expected)
    stored = rows.execute("select partition, next_offset, epoch from kconsume_offsets order by 1").fetchall()
    assert stored == [(n, 300, 1) for n in range(4)]


def test_groups_read_the_same_topic_independently(arena: Arena, group: str) -> None:
    topic = arena.topic(2)
    expected = arena.fill(topic, 50, partitions=2)
    app = arena.app(f"{group}-one")
    one: list[str] = []
    two: list[str] = []

    @app.consume(topic)
    def first(value: str) -> None:
        one.append(value)

    @app.consume(topic, group=f"{group}-two")
    def second(value: str) -> None:
        two.append(value)

    app.catch_up(idle=0.2)
    assert sorted(one) == sorted(two) == sorted(expected)


def test_several_topics_and_handlers_share_one_consumer(arena: Arena, group: str) -> None:
    orders, payments, refunds = arena.topic(2), arena.topic(1), arena.topic(1)
    app = arena.app(group)
    seen: list[tuple[str, str]] = []

    @app.consume(orders, payments)
    def buy(record: Record) -> None:
        seen.append((record.topic, (record.value or b"").decode()))

    @app.consume(refunds, executor="inline")
    def refund(value: str) -> None:
        seen.append((refunds, value))

    arena.produce(orders, ["o0"], 0)
    arena.produce(orders, ["o1"], 1)
    arena.produce(payments, ["p"])
    arena.produce(refunds, ["r"])
    assert len(app.plans()) == 1
    app.catch_up(idle=0.2)
    assert sorted(seen) == sorted([(orders, "o0"), (orders, "o1"), (payments, "p"), (refunds, "r")])


# Failures (P1, P9)


@pytest.mark.dense
@pytest.mark.parametrize("store", ["kafka", "sqlite"])
def test_a_handler_that_fails_stops_the_app_with_its_exception_and_its_offset_is_not_passed(
    arena: Arena, group: str, sqlite_url: str, store: str
) -> None:
    topic = arena.topic(1)
    arena.produce(topic, [str(n) for n in range(20)], 0)
    offsets = {"kafka": "kafka://", "sqlite": sqlite_url}[store]
    app = arena.app(group, offsets)

    @app.consume(topic)
    def handle(value: str) -> None:
        if value == "7":
            raise LookupError("no such thing")

    with pytest.raises(LookupError, match="no such thing") as caught:
        app.catch_up(idle=0.2)
    assert caught.value.__notes__ == [f"kconsume: handle failed on {topic}/0@7: LookupError: no such thing"]
    stored = open_store(offsets, brokers=arena.bootstrap).load(group, [Partition(topic, 0)])
    assert stored[Partition(topic, 0)].next_offset == 7


def test_a_failing_record_in_a_transaction_is_isolated_and_its_neighbours_take_effect_once(
    arena: Arena, group: str, sqlite_url: str
) -> None:
    topic = arena.topic(1)
    arena.produce(topic, [str(n) for n in range(100)], 0)
    rows = table(sqlite_url)
    app = arena.app(group, sqlite_url)

    @app.consume(topic, on_error="skip")
    def handle(value: str, tx: sqlite3.Connection) -> None:
        tx.execute("insert into seen values (?)", (value,))
        if int(value) % 10 == 3:
            raise ValueError(value)

    report = app.catch_up(idle=0.2)
    assert (report.handled, report.skipped) == (90, 10)
    values = [int(row[0]) for row in rows.execute("select value from seen order by rowid")]
    assert values == [n for n in range(100) if n % 10 != 3]


class Order(msgspec.Struct):
    id: int


@pytest.mark.parametrize("payload", [None, b"\xff\xfe", b"not json", b'{"id": "x"}', b""])
def test_a_payload_that_cannot_be_decoded_stops_or_is_skipped_as_asked(
    arena: Arena, group: str, payload: bytes | None
) -> None:
    topic = arena.topic(1)
    arena.produce(topic, [b'{"id": 1}', payload, b'{"id": 2}'], 0)
    strict, lenient = arena.app(f"{group}-strict"), arena.app(f"{group}-lenient")
    seen: list[int] = []

    def handle(order: Order) -> None:
        seen.append(order.id)

    strict.consume(topic)(handle)
    with pytest.raises(DecodeError):
        strict.catch_up(idle=0.2)
    assert seen == [1]

    lenient.consume(topic, on_error="skip")(handle)
    assert lenient.catch_up(idle=0.2).skipped == 1
    assert seen == [1, 1, 2]


def test_tombstones_come_as_none_when_asked_for(arena: Arena, group: str) -> None:
    topic = arena.topic(1)
    arena.produce(topic, [b'{"id": 1}', None], 0)
    app, seen = arena.app(group), []

    @app.consume(topic)
    def handle(order: Order | None) -> None:
        seen.append(order)

    app.catch_up(idle=0.2)
    assert seen == [Order(1), None]


def test_a_failed_handler_ends_a_block_that_sleeps(arena: Arena, group: str) -> None:
    topic = arena.topic(1)
    app = arena.app(group)

    @app.consume(topic)
    def handle(value: str) -> None:
        raise RuntimeError("broken")

    def block() -> None:
        with app.running():
            arena.produce(topic, ["x"], 0)  # not before: it would fail before the block is entered
            eventually(lambda: False, within=60, what="the block is ended by the handler's failure")

    with pytest.raises(RuntimeError, match="broken"):
        block()


# Where to start


def test_a_partition_without_an_offset_starts_where_asked_and_that_is_pinned(arena: Arena, group: str) -> None:
    topic = arena.topic(1)
    arena.produce(topic, ["before"], 0)
    seen: list[str] = []

    def run() -> None:
        app = arena.app(group)

        @app.consume(topic, start="latest")
        def handle(value: str) -> None:
            seen.append(value)

        app.catch_up(idle=0.2)

    run()
    arena.produce(topic, ["after"], 0)
    run()
    assert seen == ["after"], "latest was pinned at the first start, so nothing was skipped at the second"


@pytest.mark.dense
@pytest.mark.parametrize("arena", ["real"], indirect=True)
def test_a_record_is_handled_only_once_its_start_at_the_end_is_kept(arena: Arena, group: str) -> None:
    """Else a crash in that moment would skip it: the next start begins where the log ends then."""
    topic = arena.topic(1)
    app, committed = arena.app(group), list[object]()
    cluster = Cluster(arena.bootstrap)

    @app.on_assigned
    def write(partitions: Sequence[Partition]) -> None:
        for partition in partitions:
            arena.produce(topic, ["first"], partition.number)

    @app.consume(topic, start="latest")
    def handle(value: str) -> None:
        committed.append(cluster.committed(group, [Partition(topic, 0)]))

    with app.running():
        eventually(lambda: committed, what="the record is handled")
    assert all(committed)


@pytest.mark.parametrize("arena", ["real"], indirect=True)
def test_start_at_the_end_is_pinned_for_partitions_that_nobody_has_claimed_yet(
    arena: Arena, group: str, postgres_url: str
) -> None:
    topic = arena.topic(4)
    with closing(PostgresStore(postgres_url)) as store:
        first = Claims(store, Cluster(arena.bootstrap), group, "one of two that started", lambda _: "latest")
        first.claim([Partition(topic, 1), Partition(topic, 2)], 1)
    # The other one has died before it claimed the rest.
    expected = arena.fill(topic, 2)
    app, seen = arena.app(group, postgres_url), Counter[str]()

    @app.consume(topic, start="latest")
    def handle(value: str) -> None:
        seen[value] += 1

    app.catch_up(idle=0.5)
    assert seen == Counter(expected)


def test_start_error_refuses_to_choose(arena: Arena, group: str) -> None:
    topic = arena.topic(1)
    app = arena.app(group)

    @app.consume(topic, start="error")
    def handle(value: str) -> None: ...

    with pytest.raises(StartRequired, match="start='earliest'"):
        app.catch_up(idle=0.2)


@pytest.mark.dense
@pytest.mark.parametrize("store", ["kafka", "sqlite"])
def test_an_offset_below_the_log_is_an_error_and_never_a_jump(
    arena: Arena, group: str, sqlite_url: str, store: str
) -> None:
    topic = arena.topic(1)
    offsets = {"kafka": "kafka://", "sqlite": sqlite_url}[store]
    arena.produce(topic, [str(n) for n in range(100)], 0)
    open_store(offsets, brokers=arena.bootstrap).reset(group, {Partition(topic, 0): 5})
    arena.delete_records(topic, 0, 50)
    app, seen = arena.app(group, offsets), []

    @app.consume(topic)
    def handle(value: str) -> None:
        seen.append(value)

    with pytest.raises(OffsetOutOfRange, match="Nothing was skipped"):
        app.catch_up(idle=0.2)
    assert seen == []


@pytest.mark.dense
def test_an_offset_above_the_log_is_an_error(arena: Arena, group: str) -> None:
    topic = arena.topic(1)
    arena.produce(topic, ["x"], 0)
    open_store("kafka://", brokers=arena.bootstrap).reset(group, {Partition(topic, 0): 1000})
    app = arena.app(group)

    @app.consume(topic)
    def handle(value: str) -> None: ...

    with pytest.raises(OffsetOutOfRange):
        app.catch_up(idle=0.2)


def test_a_topic_that_was_made_again_is_an_error(arena: Arena, group: str, sqlite_url: str) -> None:
    topic = arena.topic(1)  # with kafka:// the broker itself forgets the offsets of a topic that it deletes

    def run() -> int:
        app = arena.app(group, sqlite_url)

        @app.consume(topic)
        def handle(value: str) -> None: ...

        return app.catch_up(idle=0.2).handled

    arena.produce(topic, ["a", "b"], 0)
    assert run() == 2
    arena.delete_topic(topic)
    eventually(lambda: topic not in arena.admin.list_topics(timeout=10).topics, what="the topic is gone")
    arena.topic(1, name=topic)
    arena.produce(topic, ["c", "d", "e"], 0)
    with pytest.raises(TopicRecreated, match="deleted and made again"):
        run()


def test_explicit_partitions_are_taken_without_a_group(arena: Arena, group: str, sqlite_url: str) -> None:
    topic = arena.topic(4)
    arena.fill(topic, 20)
    for kind, offsets in (("kafka", "kafka://"), ("sqlite", sqlite_url)):
        app = arena.app(f"{group}-{kind}", offsets)  # the offsets of a group are in one store
        seen: list[str] = []

        @app.consume(topic, partitions=[1, 3])
        def handle(value: str, seen: list[str] = seen) -> None:
            seen.append(value)

        app.catch_up(idle=0.2)
        assert sorted(seen) == sorted(f"{p}:{n}" for p in (1, 3) for n in range(20))
        assert app.catch_up(idle=0.2).handled == 0


def test_an_empty_topic_is_caught_up_at_once(arena: Arena, group: str) -> None:
    app = arena.app(group)

    @app.consume(arena.topic())
    def handle(value: str) -> None: ...

    assert app.catch_up(idle=0.1).handled == 0


def test_an_unknown_topic_is_an_error(arena: Arena, group: str) -> None:
    arena.topic(name=f"{group}-orders")
    app = arena.app(group)

    @app.consume(f"{group}-ordres")
    def handle(value: str) -> None: ...

    with pytest.raises(TopicNotFound, match=r"orders|create it"):
        app.catch_up(idle=0.1)


# Steering


@pytest.mark.dense
def test_pause_resume_and_seek_steer_a_running_app(arena: Arena, group: str, sqlite_url: str) -> None:
    topic = arena.topic(1)
    place = Partition(topic, 0)
    app, seen = arena.app(group, sqlite_url), []

    @app.consume(topic)
    def handle(record: Record) -> None:
        seen.append(record.offset)

    with app.running():
        arena.produce(topic, ["a", "b", "c"], 0)
        eventually(lambda: seen == [0, 1, 2], what="the first three")
        app.pause(place)
        app.seek(place, 1)
        eventually(lambda: stored(sqlite_url, group, place) == (1, 3), what="the seek is stored under a new epoch")
        arena.produce(topic, ["d"], 0)
        app.resume(str(place))
        eventually(lambda: seen == [0, 1, 2, 1, 2, 3], what="from the place that was sought, in order")


def stored(url: str, group: str, partition: Partition) -> tuple[int, int] | None:
    """Offset and epoch in the store."""
    position = SqliteStore.from_url(url).load(group, [partition]).get(partition)
    return None if position is None else (position.next_offset, position.epoch)


@pytest.mark.dense
def test_stop_from_a_handler_drains_and_ends(arena: Arena, group: str) -> None:
    topic = arena.topic(1)
    arena.produce(topic, [str(n) for n in range(1000)], 0)
    app, seen = arena.app(group), []

    @app.consume(topic, chunk=1)
    def handle(value: str) -> None:
        seen.append(value)
        if len(seen) == 10:
            app.stop()

    app.run()
    position = open_store("kafka://", brokers=arena.bootstrap).load(group, [Partition(topic, 0)])
    assert position[Partition(topic, 0)].next_offset == len(seen), "exactly what was handled was passed"


# The store


def test_a_store_that_is_away_at_the_claim_means_waiting_not_guessing(arena: Arena, group: str, tmp_path: Path) -> None:
    topic = arena.topic(1)
    arena.produce(topic, ["a"], 0)
    folder = tmp_path / "not-yet"
    app, seen = arena.app(group, f"sqlite:///{folder / 'shop.db'}"), []

    @app.consume(topic)
    def handle(value: str) -> None:
        seen.append(value)

    app.startup = 0  # or the block would not be entered
    with app.running():
        supervisor = app._supervisor
        assert supervisor is not None
        assignment = supervisor.consumers[0].assignment
        eventually(
            lambda: [h for h in assignment.partitions.values() if h.claim_tries > 1], what="the claim has failed twice"
        )
        assert seen == []
        folder.mkdir()
        eventually(lambda: seen == ["a"], what="it goes on by itself when the store is there")


@pytest.mark.dense
def test_a_zombie_is_fenced_and_goes_on_only_when_the_broker_confirms_it(
    arena: Arena, group: str, sqlite_url: str
) -> None:
    topic = arena.topic(1)
    place = Partition(topic, 0)
    rows = table(sqlite_url)
    app = arena.app(group, sqlite_url)

    @app.consume(topic, chunk=1)
    def handle(value: str, tx: sqlite3.Connection) -> None:
        tx.execute("insert into seen values (?)", (value,))

    with app.running():
        arena.produce(topic, ["a"], 0)
        eventually(lambda: rows.execute("select count(*) from seen").fetchone() == (1,), what="a is handled")
        SqliteStore.from_url(sqlite_url).claim(group, [place], "a rival", lambda _: {})
        arena.produce(topic, ["b"], 0)
        eventually(lambda: stored(sqlite_url, group, place) == (2, 3), what="fenced, confirmed, claimed again, handled")
    assert rows.execute("select value from seen").fetchall() == [("a",), ("b",)]


# Slow handlers and bounded memory


def test_a_slow_handler_is_never_evicted(arena: Arena, group: str) -> None:
    topic = arena.topic(1)
    arena.produce(topic, ["slow", "next"], 0)
    app, seen = arena.app(group, kafka={"max.poll.interval.ms": 2000}), []

    @app.consume(topic)
    def handle(value: str) -> None:
        began = time.monotonic()
        eventually(lambda: value != "slow" or time.monotonic() - began > 3.5, what="longer than the poll interval")
        seen.append(value)

    app.catch_up(idle=0.2)
    assert seen == ["slow", "next"], "with an eviction, the slow record would come again (P5)"


def memory_bounds_what_is_in_flight(arena: Arena, group: str, memory: int) -> None:
    """In bytes: the window of each lane, and the fetch that filled it. While the lane waits to be paused, the client's
    callbacks are served, and that may bring a record each time."""
    topic, size, each = arena.topic(2), 1_000, 3_000
    for partition in range(2):
        arena.produce(topic, (b"x" * size for _ in range(each)), partition)
    app = App(arena.bootstrap, group=group, kafka=arena.quick({}), memory=memory)
    release, seen = threading.Event(), list[int]()

    @app.consume(topic, executor="thread")
    def handle(record: Record) -> None:
        release.wait(60)
        seen.append(record.partition)

    with app.running(), ExitStack() as stack:
        stack.callback(release.set)
        eventually(lambda: len(full := full_lanes(app)) == 2 and full, what="both partitions are paused, being full")
        weights = [lane.queued_bytes + lane.queued_records * RECORD_OVERHEAD for lane in full_lanes(app)]
        served = 100 * (size + RECORD_OVERHEAD)
        fetch = 1_000 * (size + RECORD_OVERHEAD)
        assert sum(weights) <= MEMORY + 2 * (fetch + served), "what is in flight is bounded"
        release.set()
        eventually(lambda: len(seen) == 2 * each, what="they go on, and all is handled")


def full_lanes(app: App) -> list[Lane]:
    supervisor = app._supervisor
    assert supervisor is not None
    owned_partitions = list(supervisor.consumers[0].assignment.partitions.values())
    return [h.lane for h in owned_partitions if h.lane is not None and "pressure" in h.pause_reasons]


MEMORY = 100_000


@pytest.mark.dense
def test_what_is_in_flight_is_bounded_by_memory_whatever_the_lag(arena: Arena, group: str) -> None:
    memory_bounds_what_is_in_flight(arena, group, MEMORY)


@pytest.mark.parametrize("arena", ["embedded"], indirect=True)
def test_control_with_the_default_memory_more_is_in_flight(arena: Arena, group: str) -> None:
    with pytest.raises(AssertionError, match="what is in flight is bounded"):
        memory_bounds_what_is_in_flight(arena, group, App("embedded://", group=group).memory)


@pytest.mark.dense
def test_memory_store_outlives_a_run_of_the_app(arena: Arena, group: str) -> None:
    topic = arena.topic(1)
    store = MemoryStore()
    app = App(arena.bootstrap, group=group, offsets=store, kafka={"session.timeout.ms": 2000})

    @app.consume(topic)
    def handle(value: str) -> None: ...

    arena.produce(topic, ["a", "b"], 0)
    assert app.catch_up(idle=0.2).handled == 2
    assert app.catch_up(idle=0.2).handled == 0
    assert store.load(group, [Partition(topic, 0)])[Partition(topic, 0)].next_offset == 2

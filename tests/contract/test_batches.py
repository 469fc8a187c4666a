"""Batches on a running app: exact sizes, records that wait for their batch, and what becomes of them; both brokers."""

from __future__ import annotations

import sqlite3
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, NamedTuple

import msgspec
import pyarrow
import pytest

from kconsume import App, Batch, Batching, Partition, Record
from kconsume._runtime.assignment.partition import OwnedPartition
from kconsume._runtime.lanes.batching import BatchBuffer
from kconsume.backends import SqliteStore
from kconsume.errors import UnreadableBatch
from tests.fix_arena import QUICK, Arena
from tests.unit.fakes import FakeMessage
from tests.waiting import eventually

LONG = 60.0
"""A wait that no test sees the end of."""


class Seen(NamedTuple):
    member: str
    partition: int
    offsets: list[int]


def owned_partitions(app: App) -> dict[Partition, OwnedPartition]:
    supervisor = app._supervisor
    return {} if supervisor is None else dict(supervisor.consumers[0].assignment.partitions)


def assigned(app: App) -> set[int]:
    return {p.number for p, h in owned_partitions(app).items() if h.lane is not None and h.state.value == "open"}


def gathered(app: App) -> dict[int, int]:
    """How many records of each partition wait for their batch."""
    lanes = [h.lane for h in owned_partitions(app).values() if h.lane is not None]
    return {lane.partition.number: len(lane.batch_buffer) for lane in lanes if lane.batch_buffer is not None}


def member(arena: Arena, name: str, topic: str, group: str, seen: list[Seen], batching: Batching) -> App:
    app = arena.app(group)

    @app.consume(topic, batch=batching)
    def handle(batch: Batch) -> None:
        seen.append(Seen(name, batch.partition, batch.offsets))

    return app


def of_partition(seen: list[Seen], partition: int) -> list[int]:
    return [offset for each in seen if each.partition == partition for offset in each.offsets]


def table(url: str) -> sqlite3.Connection:
    connection = sqlite3.connect(url.removeprefix("sqlite:///"), isolation_level=None, timeout=30)
    connection.execute("create table if not exists seen (partition integer, position integer)")
    return connection


def rows(connection: sqlite3.Connection) -> list[tuple[int, int]]:
    return connection.execute("select partition, position from seen order by rowid").fetchall()


def write(batch: Batch, tx: sqlite3.Connection) -> None:
    tx.executemany("insert into seen values (?, ?)", [(batch.partition, offset) for offset in batch.offsets])


# Sizes


@pytest.mark.dense
def test_batches_are_full_across_fetches_and_never_mix_partitions(arena: Arena, group: str) -> None:
    topic = arena.topic(4)
    arena.fill(topic, 1050)
    seen: list[Seen] = []
    app = arena.app(group)

    @app.consume(topic, batch=Batching(100, wait=LONG))
    def handle(records: list[Record], batch: Batch) -> None:
        assert {(record.topic, record.partition) for record in records} == {(topic, batch.partition)}
        seen.append(Seen("", batch.partition, [record.offset for record in records]))

    report = app.catch_up(idle=0.3)

    for partition in range(4):
        sizes = [len(each.offsets) for each in seen if each.partition == partition]
        assert sizes == [100] * 10 + [50]
        assert of_partition(seen, partition) == list(range(1050))
    assert report.committed == {Partition(topic, n): 1050 for n in range(4)}


@pytest.mark.timeout(40)
def test_catching_up_does_not_wait_for_records_that_do_not_come(arena: Arena, group: str) -> None:
    topic = arena.topic(2)
    arena.fill(topic, 7, partitions=2)
    seen: list[Seen] = []
    report = member(arena, "", topic, group, seen, Batching(500, wait=300.0)).catch_up(idle=0.2)
    assert sorted(len(each.offsets) for each in seen) == [7, 7]
    assert report.handled == 14


def test_a_batch_that_does_not_fill_is_handed_over_when_its_time_has_come(arena: Arena, group: str) -> None:
    topic, seen = arena.topic(1), list[Seen]()
    app = member(arena, "", topic, group, seen, Batching(500, wait=1.0))
    with app.running():
        eventually(lambda: assigned(app) == {0}, what="assigned")
        arena.produce(topic, ["a"] * 7, 0)
        eventually(lambda: [len(each.offsets) for each in seen] == [7], what="the seven, in one batch")


def test_the_wait_begins_with_the_first_record_and_not_with_the_poll_before(
    arena: Arena, group: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A poll may have waited a tenth of a second: counted from its beginning, a short wait would be over at once."""
    counted_from: list[float] = []
    add = BatchBuffer.add

    def noting(self: BatchBuffer, messages: list[Any], now: float) -> None:
        counted_from.append(now)
        add(self, messages, now)

    monkeypatch.setattr(BatchBuffer, "add", noting)
    topic, seen = arena.topic(1), list[Seen]()
    app = member(arena, "", topic, group, seen, Batching(10, wait=0.0))
    with app.running():
        eventually(lambda: assigned(app) == {0}, what="assigned")
        for number in range(1, 6):
            before = time.monotonic()
            arena.produce(topic, ["x"], 0)
            eventually(lambda: len(seen) == number, what="it came")  # noqa: B023  (used at once)
            assert counted_from[-1] >= before


@pytest.mark.parametrize("form", ["list", "record", "batch", "table", "async"])
def test_every_form_of_a_batch_has_all_of_its_records(arena: Arena, group: str, form: str) -> None:
    topic, got = arena.topic(1), list[bytes | None]()
    arena.produce(topic, [b"%d" % n for n in range(250)], 0)
    app = arena.app(group)

    def values(batch: list[bytes]) -> None:
        got.extend(batch)

    def records(batch: list[Record]) -> None:
        got.extend(record.value for record in batch)

    def lazily(batch: Batch) -> None:
        got.extend(batch.values)

    def columns(batch: pyarrow.Table) -> None:
        got.extend(batch["value"].to_pylist())

    async def later(batch: list[bytes]) -> None:
        got.extend(batch)

    forms: dict[str, Callable[..., Any]] = {
        "list": values,
        "record": records,
        "batch": lazily,
        "table": columns,
        "async": later,
    }
    app.consume(topic, batch=Batching(100, wait=0.2))(forms[form])
    assert app.catch_up(idle=0.3).handled == 250
    assert got == [b"%d" % n for n in range(250)]


# Records that wait, and the end


@pytest.mark.dense
def test_what_waits_when_the_app_stops_is_not_handled_and_not_lost(arena: Arena, group: str) -> None:
    topic, seen = arena.topic(2), list[Seen]()
    app = member(arena, "one", topic, group, seen, Batching(500, wait=LONG))
    with app.running():
        eventually(lambda: assigned(app) == {0, 1}, what="assigned")
        arena.fill(topic, 10, partitions=2)
        eventually(lambda: gathered(app) == {0: 10, 1: 10}, what="gathered")
    assert seen == []
    again: list[Seen] = []
    member(arena, "two", topic, group, again, Batching(500, wait=0.1)).catch_up(idle=0.3)
    assert [of_partition(again, partition) for partition in range(2)] == [list(range(10))] * 2


@pytest.mark.dense
def test_what_waits_when_a_partition_moves_is_handled_by_its_new_owner_alone(arena: Arena, group: str) -> None:
    topic, seen = arena.topic(4), list[Seen]()
    one = member(arena, "one", topic, group, seen, Batching(20, wait=LONG))
    two = member(arena, "two", topic, group, seen, Batching(20, wait=LONG))
    with one.running():
        eventually(lambda: len(assigned(one)) == 4, what="all assigned")
        arena.fill(topic, 10)
        eventually(lambda: gathered(one) == dict.fromkeys(range(4), 10), what="all gathered by the first")
        with two.running():
            eventually(lambda: len(assigned(one)) == len(assigned(two)) == 2, what="two each", within=40)
            eventually(lambda: gathered(two) == dict.fromkeys(assigned(two), 10), what="fetched again by the second")
            moved = assigned(two)
            arena.fill(topic, 10)
            eventually(lambda: len(seen) >= 4, what="four full batches")
    expected = [Seen("two" if p in moved else "one", p, list(range(20))) for p in range(4)]
    assert sorted(seen, key=lambda each: each.partition) == expected


@pytest.mark.dense
def test_what_waits_in_a_paused_partition_is_kept_and_comes_once(arena: Arena, group: str) -> None:
    topic, seen = arena.topic(1), list[Seen]()
    app = member(arena, "", topic, group, seen, Batching(20, wait=LONG))
    with app.running():
        eventually(lambda: assigned(app) == {0}, what="assigned")
        arena.produce(topic, ["x"] * 10, 0)
        eventually(lambda: gathered(app) == {0: 10}, what="gathered")
        app.pause(f"{topic}/0")
        eventually(lambda: "user" in owned_partitions(app)[Partition(topic, 0)].pause_reasons, what="paused")
        arena.produce(topic, ["x"] * 10, 0)
        app.resume(f"{topic}/0")
        eventually(lambda: seen, what="a full batch")
    assert seen == [Seen("", 0, list(range(20)))]


@pytest.mark.dense
def test_what_waits_is_handed_over_in_its_time_though_the_partition_is_paused(arena: Arena, group: str) -> None:
    topic, seen = arena.topic(1), list[Seen]()
    app = member(arena, "", topic, group, seen, Batching(20, wait=2.0))
    with app.running():
        eventually(lambda: assigned(app) == {0}, what="assigned")
        arena.produce(topic, ["x"] * 10, 0)
        eventually(lambda: gathered(app) == {0: 10}, what="gathered")
        app.pause(f"{topic}/0")
        eventually(lambda: seen, what="what was in flight is finished")
    assert seen == [Seen("", 0, list(range(10)))]


@pytest.mark.dense
def test_what_waits_is_dropped_by_a_seek(arena: Arena, group: str) -> None:
    topic, seen = arena.topic(1), list[Seen]()
    app = member(arena, "", topic, group, seen, Batching(20, wait=LONG))
    with app.running():
        eventually(lambda: assigned(app) == {0}, what="assigned")
        arena.produce(topic, ["x"] * 19, 0)
        eventually(lambda: gathered(app) == {0: 19}, what="gathered")
        app.seek(f"{topic}/0", 9)
        eventually(lambda: gathered(app) == {0: 10}, what="fetched from there")
        arena.produce(topic, ["x"] * 10, 0)
        eventually(lambda: seen, what="a full batch")
    assert seen == [Seen("", 0, list(range(9, 29)))]


@pytest.mark.dense
def test_a_fence_met_by_a_gathered_batch_undoes_it_and_it_is_handled_once_under_the_new_claim(
    arena: Arena, group: str, sqlite_url: str
) -> None:
    topic, seen = arena.topic(1), table(sqlite_url)
    app = arena.app(group, sqlite_url)
    app.consume(topic, batch=Batching(20, wait=LONG))(write)
    with app.running():
        eventually(lambda: assigned(app) == {0}, what="assigned")
        arena.produce(topic, ["x"] * 10, 0)
        eventually(lambda: gathered(app) == {0: 10}, what="gathered")
        rival = SqliteStore(sqlite_url.removeprefix("sqlite:///"))
        rival.claim(group, [Partition(topic, 0)], "rival", lambda _: {})
        rival.close()
        arena.produce(topic, ["x"] * 10, 0)
        eventually(lambda: rows(seen) == [(0, n) for n in range(20)], what="each once")


# Memory (P10)


def test_huge_records_are_not_gathered_without_end(arena: Arena, group: str) -> None:
    topic, count = arena.topic(2), list[int]()
    app = App(arena.bootstrap, group=group, kafka=dict(QUICK), memory=2_000_000)

    @app.consume(topic, batch=Batching(1_000_000, wait=LONG))
    def handle(batch: Batch) -> None:
        count.append(len(batch))

    with app.running():
        eventually(lambda: len(assigned(app)) == 2, what="assigned")
        for partition in range(2):
            arena.produce(topic, [b"x" * 100_000] * 40, partition)
        eventually(lambda: sum(count) + sum(gathered(app).values()) == 80, what="all fetched")
        assert all(waiting * 100_000 <= 500_000 for waiting in gathered(app).values()), "half a lane's share"


# Several batches of one fetch, and one of them takes long (P5, P7)


def fast_batches(arena: Arena, group: str) -> tuple[App, str, list[Seen], threading.Event, threading.Event]:
    topic, seen = arena.topic(2), list[Seen]()
    app = arena.app(group, kafka={"max.poll.interval.ms": 2000})
    entered, release = threading.Event(), threading.Event()

    @app.consume(topic, batch=Batching(50, wait=0.05))
    def handle(values: list[bytes], batch: Batch) -> None:
        if b"hold" in values:
            entered.set()
            release.wait(60)
        seen.append(Seen("", batch.partition, batch.offsets))

    return app, topic, seen, entered, release


@pytest.mark.dense
def test_a_long_batch_between_the_batches_of_one_fetch_holds_up_its_partition_and_loses_and_repeats_none(
    arena: Arena, group: str
) -> None:
    app, topic, seen, entered, release = fast_batches(arena, group)
    with app.running():
        try:
            eventually(lambda: len(assigned(app)) == 2, what="assigned")
            for partition in range(2):
                arena.produce(topic, [b"x"] * 1000, partition)
            eventually(lambda: sum(len(each.offsets) for each in seen) == 2000, what="the first records")
            # One fetch of several batches, of which the second takes long.
            arena.produce(topic, [b"x"] * 60 + [b"hold"] + [b"x"] * 439, 0)
            assert entered.wait(20)
            arena.produce(topic, [b"x"] * 500, 1)
            eventually(lambda: len(of_partition(seen, 1)) == 1500, what="the other partition flows")
            held_up = [each for each in seen if each.partition == 0 and each.offsets[0] >= 1060]
            assert held_up == [], "nothing of the lane overtakes the batch that holds it up"
        finally:
            release.set()
        eventually(lambda: len(of_partition(seen, 0)) == 1500, what="the held-up partition goes on")
    for partition in range(2):
        assert of_partition(seen, partition) == list(range(1500)), "each once, in order"
        assert all(len(each.offsets) <= 50 for each in seen)


# A storm (P1, P2)


@pytest.mark.dense
def test_members_that_come_and_go_handle_every_record_once_in_batches(
    arena: Arena, group: str, sqlite_url: str
) -> None:
    topic, seen = arena.topic(6), table(sqlite_url)
    calls: Counter[int] = Counter()

    def make(number: int) -> App:
        app = arena.app(group, sqlite_url)

        @app.consume(topic, batch=Batching(23, wait=0.1))
        def handle(batch: Batch, tx: sqlite3.Connection) -> None:
            write(batch, tx)
            calls[number] += 1

        return app

    produced = 0

    def write_some() -> None:
        nonlocal produced
        for partition in range(6):
            produced += arena.produce(topic, ["x"] * 30, partition)

    def newcomer_works(number: int) -> bool:
        write_some()
        return calls[number] > 0

    with ExitStack() as staying:
        staying.enter_context(make(0).running())
        for number in range(1, 9 if arena.kind == "real" else 4):
            with make(number).running():
                eventually(lambda: newcomer_works(number), within=40, what="the newcomer works")  # noqa: B023
                write_some()
        eventually(lambda: len(set(rows(seen))) == produced, within=60, what="every record has its effect")
    assert len(rows(seen)) == produced, "rows = distinct = produced"
    by_partition: dict[int, list[int]] = defaultdict(list)
    for partition, position in rows(seen):
        by_partition[partition].append(position)
    assert all(positions == list(range(produced // 6)) for positions in by_partition.values()), "in order (P7)"


# Records that cannot be had, or fail


class Order(msgspec.Struct):
    id: int


@pytest.mark.parametrize(
    ("annotation", "expected"),
    [
        (list[bytes], [[0, 1], [3, 4]]),
        (list[bytes | None], [[0, 1, None, 3, 4]]),
        (list[Order], [[0, 1], [3, 4]]),
        (list[Order | None], [[0, 1, None, 3, 4]]),
    ],
)
def test_tombstones_come_as_none_when_asked_for_and_cut_the_batch_when_not(
    arena: Arena, group: str, annotation: Any, expected: list[list[int | None]]
) -> None:
    topic, got = arena.topic(1), list[list[int | None]]()
    arena.produce(topic, [None if n == 2 else b'{"id": %d}' % n for n in range(5)], 0)
    app = arena.app(group)

    def handle(values: Any) -> None:
        orders = [msgspec.json.decode(v, type=Order) if isinstance(v, bytes) else v for v in values]
        got.append([None if order is None else order.id for order in orders])

    handle.__annotations__ = {"values": annotation, "return": None}
    app.consume(topic, batch=Batching(5, wait=LONG), on_error="skip")(handle)
    report = app.catch_up(idle=0.3)
    assert got == expected
    assert report.skipped == (1 if len(expected) > 1 else 0)


@pytest.mark.dense
def test_one_bad_record_of_five_hundred_is_skipped_and_the_others_are_written_once(
    arena: Arena, group: str, sqlite_url: str
) -> None:
    topic, seen, sizes = arena.topic(1), table(sqlite_url), list[int]()
    arena.produce(topic, [b"%d" % n for n in range(500)], 0)
    app = arena.app(group, sqlite_url)

    @app.consume(topic, batch=Batching(500, wait=2.0), on_error="skip")
    def handle(values: list[bytes], batch: Batch, tx: sqlite3.Connection) -> None:
        sizes.append(len(values))
        write(batch, tx)
        if b"317" in values:
            raise ValueError("somewhere in here")

    report = app.catch_up(idle=0.3)
    assert (report.handled, report.skipped) == (499, 1)
    assert rows(seen) == [(0, n) for n in range(500) if n != 317]
    assert sizes[0] == 500
    assert len(sizes) <= 27, "three times the logarithm"


@pytest.mark.dense
@pytest.mark.parametrize("arena", ["embedded"], indirect=True)
@pytest.mark.parametrize("way", ["seek", "revoked", "held"])
def test_records_that_waited_for_their_batch_go_with_their_lane(arena: Arena, group: str, way: str) -> None:
    """A lane that was stopped is remembered, as long as its partition may come back; its records need not be."""
    topic, seen = arena.topic(1), list[Seen]()
    place = Partition(topic, 0)
    app = member(arena, "one", topic, group, seen, Batching(records=1000, wait=LONG))
    with app.running():
        arena.produce(topic, map(str, range(50)), 0)
        eventually(lambda: gathered(app) == {0: 50}, what="all wait for their batch")
        assert app._supervisor is not None
        (consumer,) = app._supervisor.consumers
        lane = owned_partitions(app)[place].lane
        assert lane is not None
        if way == "seek":
            app.seek(place, 0)
            eventually(
                lambda: (now := owned_partitions(app)[place].lane) is not None and now is not lane, what="a new lane"
            )
        elif way == "revoked":
            app.subscribe(arena.topic(1))
            eventually(lambda: place not in owned_partitions(app), what="revoked")
        else:
            owned = owned_partitions(app)[place]
            error = UnreadableBatch("no batch")
            consumer.loop.request(lambda: consumer.assignment.holds.put_on_hold(owned, error, drains=False))
            on_its_way: Any = FakeMessage(offset=50, topic=topic)
            consumer.loop.request(lambda: consumer.loop.dispatcher.dispatch([(place, [on_its_way])], 0.0))
            done = threading.Event()
            consumer.loop.request(done.set)
            assert done.wait(45)
        assert lane.batch_buffer is not None
        assert len(lane.batch_buffer) == 0
    assert seen == []

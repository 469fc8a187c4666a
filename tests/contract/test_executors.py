"""What every executor keeps, whatever runs the handler: one suite over all of them, on both brokers."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from kconsume import App, BatchError, Batching, Partition
from tests.fix_arena import QUICK, Arena, told_to_stop
from tests.waiting import eventually

EXECUTORS = ["thread", "inline", "async", "batch", "async batch"]
BESIDE_THE_OWNER = [name for name in EXECUTORS if name != "inline"]

Handle = Callable[[str, sqlite3.Connection | None], None]

every = pytest.mark.parametrize("executor", EXECUTORS)
beside = pytest.mark.parametrize("executor", BESIDE_THE_OWNER)


def consume(app: App, topic: str, executor: str, handle: Handle, *, tx: bool = False, **options: Any) -> None:
    """Register `handle` in the form that this executor runs; with `tx`, in the store's transaction."""
    if executor == "inline":
        options["executor"] = "inline"
    if "batch" in executor:
        options["batch"] = Batching(records=7, wait=0.05)
    app.consume(topic, **options)(_FORMS[executor, tx](handle))


def _one(handle: Handle) -> Callable[..., None]:
    def one(value: str) -> None:
        handle(value, None)

    return one


def _one_in_tx(handle: Handle) -> Callable[..., None]:
    def one(value: str, tx: sqlite3.Connection) -> None:
        handle(value, tx)

    return one


def _async_one(handle: Handle) -> Callable[..., Awaitable[None]]:
    async def one(value: str) -> None:
        await asyncio.sleep(0)
        handle(value, None)

    return one


def _async_one_in_tx(handle: Handle) -> Callable[..., Awaitable[None]]:
    async def one(value: str, tx: sqlite3.Connection) -> None:
        await asyncio.sleep(0)
        handle(value, tx)

    return one


def _many(handle: Handle) -> Callable[..., None]:
    def many(values: list[str]) -> None:
        _each(values, handle, None)

    return many


def _many_in_tx(handle: Handle) -> Callable[..., None]:
    def many(values: list[str], tx: sqlite3.Connection) -> None:
        _each(values, handle, tx)

    return many


def _async_many(handle: Handle) -> Callable[..., Awaitable[None]]:
    async def many(values: list[str]) -> None:
        await asyncio.sleep(0)
        _each(values, handle, None)

    return many


def _async_many_in_tx(handle: Handle) -> Callable[..., Awaitable[None]]:
    async def many(values: list[str], tx: sqlite3.Connection) -> None:
        await asyncio.sleep(0)
        _each(values, handle, tx)

    return many


def _each(values: list[str], handle: Handle, tx: sqlite3.Connection | None) -> None:
    errors: dict[int, Exception] = {}
    for index, value in enumerate(values):
        try:
            handle(value, tx)
        except LookupError as error:
            errors[index] = error
    if errors:
        raise BatchError(errors)


_FORMS: dict[tuple[str, bool], Callable[[Handle], Callable[..., Any]]] = {
    ("thread", False): _one,
    ("thread", True): _one_in_tx,
    ("inline", False): _one,
    ("inline", True): _one_in_tx,
    ("async", False): _async_one,
    ("async", True): _async_one_in_tx,
    ("batch", False): _many,
    ("batch", True): _many_in_tx,
    ("async batch", False): _async_many,
    ("async batch", True): _async_many_in_tx,
}


def table(url: str) -> sqlite3.Connection:
    connection = sqlite3.connect(url.removeprefix("sqlite:///"), isolation_level=None)
    connection.execute("create table if not exists seen (value text)")
    return connection


def write(value: str, tx: sqlite3.Connection | None) -> None:
    assert tx is not None
    tx.execute("insert into seen values (?)", (value,))


def rows(connection: sqlite3.Connection) -> list[str]:
    return [row[0] for row in connection.execute("select value from seen order by rowid")]


# P1, P2, P7


@pytest.mark.dense
@every
def test_every_record_is_handled_once_in_order_and_passed(arena: Arena, group: str, executor: str) -> None:
    topic = arena.topic()
    expected = arena.fill(topic, 300)
    app, seen = arena.app(group), list[str]()
    consume(app, topic, executor, lambda value, tx: seen.append(value))

    report = app.catch_up(idle=0.2)

    assert sorted(seen) == sorted(expected)
    assert report.handled == 1200
    assert report.committed == {Partition(topic, n): 300 for n in range(4)}
    for number in range(4):
        assert [v for v in seen if v.startswith(f"{number}:")] == [f"{number}:{n}" for n in range(300)]


@pytest.mark.dense
@every
def test_rows_and_offset_commit_together(arena: Arena, group: str, sqlite_url: str, executor: str) -> None:
    topic = arena.topic()
    expected = arena.fill(topic, 100)
    seen, app = table(sqlite_url), arena.app(group, sqlite_url)
    consume(app, topic, executor, write, tx=True)

    app.catch_up(idle=0.2)

    assert sorted(rows(seen)) == sorted(expected)
    stored = seen.execute("select partition, next_offset from kconsume_offsets order by 1").fetchall()
    assert stored == [(n, 100) for n in range(4)]


@pytest.mark.dense
@every
@pytest.mark.parametrize("tx", [False, True])
def test_a_record_that_fails_stops_the_app_and_is_not_passed(
    arena: Arena, group: str, sqlite_url: str, executor: str, tx: bool
) -> None:
    topic = arena.topic(1)
    arena.produce(topic, [str(n) for n in range(30)], 0)
    seen, app = table(sqlite_url), arena.app(group, sqlite_url)

    def handle(value: str, connection: sqlite3.Connection | None) -> None:
        if connection is not None:
            write(value, connection)
        if value == "17":
            raise LookupError("no such order")

    consume(app, topic, executor, handle, tx=tx)
    with pytest.raises(LookupError, match="no such order") as caught:
        app.catch_up(idle=0.2)

    assert any(f"{topic}/0@17" in note for note in caught.value.__notes__)
    assert seen.execute("select next_offset from kconsume_offsets").fetchall() == [(17,)]
    assert rows(seen) == ([str(n) for n in range(17)] if tx else [])


@pytest.mark.dense
@every
@pytest.mark.parametrize("tx", [False, True])
def test_a_skipped_record_has_no_effect_and_its_neighbours_have_theirs_once(
    arena: Arena, group: str, sqlite_url: str, executor: str, tx: bool
) -> None:
    topic, bad = arena.topic(1), {"0", "17", "18", "29"}
    arena.produce(topic, [str(n) for n in range(30)], 0)
    seen, app = table(sqlite_url), arena.app(group, sqlite_url)
    good: list[str] = []

    def handle(value: str, connection: sqlite3.Connection | None) -> None:
        if connection is not None:
            write(value, connection)
        if value in bad:
            raise LookupError(value)
        good.append(value)

    consume(app, topic, executor, handle, tx=tx, on_error="skip")
    report = app.catch_up(idle=0.2)

    expected = [str(n) for n in range(30) if str(n) not in bad]
    assert (rows(seen) if tx else good) == expected
    assert (report.handled, report.skipped) == (26, 4)
    assert seen.execute("select next_offset from kconsume_offsets").fetchall() == [(30,)]


# P3


@every
def test_a_zombie_s_writes_are_undone(arena: Arena, group: str, sqlite_url: str, executor: str) -> None:
    topic = arena.topic(1)
    arena.produce(topic, [str(n) for n in range(5)], 0)
    seen, app = table(sqlite_url), arena.app(group, sqlite_url)
    claimed = threading.Event()

    def handle(value: str, tx: sqlite3.Connection | None) -> None:
        write(value, tx)
        if not claimed.is_set():
            claimed.set()
            assert tx is not None
            # What a new owner's claim does, but in the zombie's own transaction: the lock is on the whole file.
            tx.execute("update kconsume_offsets set epoch = epoch + 1")

    consume(app, topic, executor, handle, tx=True)
    with app.running():
        eventually(lambda: rows(seen) == [str(n) for n in range(5)], what="handled again under a new claim, once")
    ((epoch,),) = seen.execute("select epoch from kconsume_offsets").fetchall()
    assert epoch >= 2


# P5


@pytest.mark.dense
@beside
def test_a_slow_handler_is_not_evicted(arena: Arena, group: str, executor: str) -> None:
    topic = arena.topic(1)
    arena.produce(topic, ["a"], 0)
    app = arena.app(group, kafka={**QUICK, "max.poll.interval.ms": 2000})
    calls: list[str] = []

    def handle(value: str, tx: sqlite3.Connection | None) -> None:
        calls.append(value)
        time.sleep(4)  # the point of the test: longer than the poll interval

    consume(app, topic, executor, handle)
    report = app.catch_up(idle=0.2)
    assert calls == ["a"]
    assert report.committed == {Partition(topic, 0): 1}


@every
def test_only_inline_runs_on_the_polling_thread_however_fast_the_handler_is(
    arena: Arena, group: str, executor: str
) -> None:
    topic, threads = arena.topic(1), set[str]()
    arena.produce(topic, [str(n) for n in range(3000)], 0)
    app = arena.app(group)
    consume(app, topic, executor, lambda value, tx: threads.add(threading.current_thread().name))
    app.catch_up(idle=0.2)
    polling = f"kconsume-{group}"
    if executor == "inline":
        assert threads == {polling}
    else:
        assert threads
        assert polling not in threads


# P8


@beside
def test_what_runs_is_finished_and_what_has_not_begun_is_left(arena: Arena, group: str, executor: str) -> None:
    topic = arena.topic(1)
    arena.produce(topic, [str(n) for n in range(50)], 0)
    app, begun, go, done = arena.app(group), threading.Event(), threading.Event(), list[str]()

    def handle(value: str, tx: sqlite3.Connection | None) -> None:
        begun.set()
        assert go.wait(20)
        done.append(value)

    consume(app, topic, executor, handle)
    with app.running():
        assert begun.wait(20)
        app.stop()
        eventually(lambda: told_to_stop(app), what="told to stop")
        go.set()
    assert done
    assert len(done) < 50
    again: list[str] = []
    other = arena.app(group)
    consume(other, topic, executor, lambda value, tx: again.append(value))
    other.catch_up(idle=0.2)
    assert done + again == [str(n) for n in range(50)]


@beside
def test_at_most_so_many_run_at_once(arena: Arena, group: str, executor: str) -> None:
    topic = arena.topic(6)
    arena.fill(topic, 10, partitions=6)
    app, lock, running, most = arena.app(group), threading.Lock(), set[str](), list[int]()

    def enter(value: str) -> None:
        with lock:
            running.add(value)
            most.append(len(running))

    def leave(value: str) -> None:
        with lock:
            running.discard(value)

    if "async" in executor:

        async def wait(values: list[str]) -> None:
            enter(values[0])
            await asyncio.sleep(0.01)
            leave(values[0])

        app.consume(topic, concurrency=3, batch=Batching(1, 0))(wait)
    else:

        def handle(value: str, tx: sqlite3.Connection | None) -> None:
            enter(value)
            time.sleep(0.01)
            leave(value)

        consume(app, topic, executor, handle, concurrency=3)
    app.catch_up(idle=0.2)
    assert 2 <= max(most) <= 3

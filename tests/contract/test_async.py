"""Async handlers and the block around them: whose loop, what ends it, and what is left behind. On both brokers."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sqlite3
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import pytest

from kconsume import App, HandlerFailed, KconsumeError, Partition, Record, Report
from kconsume._runtime.lanes.event_loop import AsyncLanes
from kconsume._runtime.lanes.lane import Chunk, Lane
from kconsume.backends import SqliteStore, open_store
from kconsume.errors import ConfigurationError, ResourceFailed
from tests.fix_arena import QUICK, Arena, told_to_stop
from tests.waiting import eventually

LONG = 60.0
ROOT = Path(__file__).parents[2]

word: ContextVar[str] = ContextVar("word", default="nothing")


async def soon(predicate: Callable[[], object], what: str) -> None:
    """`eventually`, on the loop."""
    for _ in range(2000):
        if predicate():
            return
        await asyncio.sleep(0.01)
    raise AssertionError(f"not within 20 s: {what}")


def stored(arena: Arena, group: str, topic: str) -> int | None:
    position = open_store("kafka://", brokers=arena.bootstrap).load(group, [Partition(topic, 0)])
    return position[Partition(topic, 0)].next_offset if position else None


def members(arena: Arena, group: str) -> int:
    """Of a group; the embedded broker does not tell."""
    if arena.kind == "embedded":
        return 0
    (described,) = arena.admin.describe_consumer_groups([group]).values()
    return len(described.result(timeout=20).members)


@pytest.fixture
def nothing_left() -> Iterator[None]:
    """Threads and tasks are gone when the test has ended, but for those that were there before."""
    before = set(threading.enumerate())
    yield
    left = eventually_none(lambda: [t.name for t in threading.enumerate() if t not in before])
    assert left == [], "threads are left"


def eventually_none(look: Callable[[], list[str]]) -> list[str]:
    deadline = time.monotonic() + 30
    while (seen := look()) and time.monotonic() < deadline:
        time.sleep(0.02)
    return seen


def stopped(app: App, after: threading.Event) -> Report:
    """Run it until the event, and stop it then."""

    def stop() -> None:
        after.wait(LONG)
        app.stop()

    thread = threading.Thread(target=stop)
    thread.start()
    try:
        return app.catch_up(idle=LONG)
    finally:
        after.set()
        thread.join()


def table(url: str) -> sqlite3.Connection:
    connection = sqlite3.connect(url.removeprefix("sqlite:///"), isolation_level=None)
    connection.execute("create table if not exists seen (value text)")
    return connection


def rows(connection: sqlite3.Connection) -> list[str]:
    return [row[0] for row in connection.execute("select value from seen order by rowid")]


def another_process_can_write(url: str) -> bool:
    """To the same file, without waiting long for its turn."""
    code = f"""
        from kconsume.backends import SqliteStore
        from kconsume.backends.sqlite import connection
        from kconsume.records import Partition
        connection._PATIENCE = 2.0
        SqliteStore.from_url({url!r}).reset("another", {{Partition("orders", 0): 1}})
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], cwd=ROOT, capture_output=True, timeout=60)
    return done.returncode == 0


# Whose loop


def test_under_async_with_handlers_run_on_the_caller_s_loop_in_its_context(
    arena: Arena, group: str, nothing_left: None
) -> None:
    topic = arena.topic(4)
    arena.fill(topic, 10)
    app, seen = arena.app(group), list[tuple[object, str, str]]()

    @app.consume(topic)
    async def handle(value: str) -> None:
        seen.append((asyncio.get_running_loop(), threading.current_thread().name, word.get()))
        word.set("changed by a handler")
        await asyncio.sleep(0)

    async def main() -> None:
        word.set("the caller's")
        async with app.running() as running:
            assert running is app
            await soon(lambda: len(seen) == 40, "all handled")
            assert {loop for loop, _, _ in seen} == {asyncio.get_running_loop()}
            assert {thread for _, thread, _ in seen} == {threading.current_thread().name}
            assert seen[0][2] == "the caller's"
            assert word.get() == "the caller's"
        assert [task for task in asyncio.all_tasks() if task is not asyncio.current_task()] == []

    asyncio.run(main())
    assert members(arena, group) == 0


def test_otherwise_they_share_one_loop_in_a_thread_of_its_own_which_ends_with_the_app(
    arena: Arena, group: str, nothing_left: None
) -> None:
    one, two = arena.topic(2), arena.topic(2)
    arena.fill(one, 10, 2)
    arena.fill(two, 10, 2)
    app, seen = arena.app(group), list[tuple[object, threading.Thread]]()

    @app.consume(one)
    async def first(value: str) -> None:
        seen.append((asyncio.get_running_loop(), threading.current_thread()))

    @app.consume(two, group=f"{group}-two")
    async def second(value: str) -> None:
        seen.append((asyncio.get_running_loop(), threading.current_thread()))

    with app.running():
        eventually(lambda: len(seen) == 40, what="all handled")
    ((loop, thread),) = set(seen)
    assert thread is not threading.main_thread()
    assert isinstance(loop, asyncio.AbstractEventLoop)
    assert loop.is_closed()
    assert not thread.is_alive()


@pytest.mark.dense
def test_the_caller_s_other_tasks_run_on_while_handlers_run_and_while_they_drain(arena: Arena, group: str) -> None:
    topic = arena.topic(1)
    arena.produce(topic, ["a"], 0)
    app, ticks, drained = arena.app(group), list[float](), list[int]()
    begun = asyncio.Event()

    @app.consume(topic)
    async def handle(value: str) -> None:
        begun.set()
        await soon(lambda: len(ticks) > 20, "ticks while it runs")
        app.stop()
        now = len(ticks)
        await soon(lambda: len(ticks) > now + 50, "ticks while it drains")
        drained.append(len(ticks))

    async def tick() -> None:
        while True:
            ticks.append(time.monotonic())
            await asyncio.sleep(0.005)

    async def main() -> None:
        ticking = asyncio.create_task(tick())
        async with app.running():
            await asyncio.wait_for(begun.wait(), 30)
        assert drained
        assert not ticking.done()
        ticking.cancel()

    asyncio.run(main())
    assert stored(arena, group, topic) == 1


def test_two_apps_on_one_loop_do_not_meet(arena: Arena, group: str, nothing_left: None) -> None:
    topics = [arena.topic(1), arena.topic(1)]
    seen: dict[str, list[str]] = {topic: [] for topic in topics}
    apps = [arena.app(f"{group}-{number}") for number in range(2)]
    for app, topic in zip(apps, topics, strict=True):

        @app.consume(topic)
        async def handle(record: Record) -> None:
            seen[record.topic].append((record.value or b"").decode())
            if record.value == b"bad":
                raise LookupError("bad")

    async def fails() -> None:
        async with apps[1].running():
            arena.produce(topics[1], ["b", "bad"], 0)
            await asyncio.sleep(LONG)

    async def main() -> None:
        async with apps[0].running():
            with pytest.raises(LookupError):
                await fails()
            arena.produce(topics[0], ["a"], 0)
            await soon(lambda: seen[topics[0]] == ["a"], "the other one goes on")

    asyncio.run(main())
    assert seen == {topics[0]: ["a"], topics[1]: ["b", "bad"]}


def test_one_app_runs_once_at_a_time_however_many_ask_at_once(
    arena: Arena, group: str, nothing_left: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = arena.topic(1)
    arena.produce(topic, ["a"], 0)
    app, seen, plans = arena.app(group), list[str](), App.plans

    def slowly(app: App, **options: Any) -> Any:
        time.sleep(0.2)  # the point of the test: all have asked before the first one runs
        return plans(app, **options)

    monkeypatch.setattr(App, "plans", slowly)

    @app.consume(topic)
    async def handle(value: str) -> None:
        seen.append(value)

    async def run() -> str:
        try:
            async with app.running():
                await soon(lambda: seen, "handled")
                await asyncio.sleep(0.2)
                return "ran"
        except ConfigurationError as refused:
            return str(refused)

    async def main() -> list[str]:
        return await asyncio.gather(*(run() for _ in range(5)))

    said = asyncio.run(main())
    assert said.count("ran") == 1
    assert sum("is running already: stop it first, or make a second App" in each for each in said) == 4
    assert seen == ["a"]


def test_an_app_can_run_again_on_another_loop(arena: Arena, group: str, nothing_left: None) -> None:
    topic = arena.topic(1)
    app, seen = arena.app(group), list[tuple[str, object]]()

    @app.consume(topic)
    async def handle(value: str) -> None:
        seen.append((value, asyncio.get_running_loop()))

    async def main(value: str) -> None:
        arena.produce(topic, [value], 0)
        async with app.running():
            await soon(lambda: seen and seen[-1][0] == value, value)

    for value in ("a", "b"):
        asyncio.run(main(value))
    arena.produce(topic, ["c"], 0)
    app.catch_up(idle=0.2)
    assert [value for value, _ in seen] == ["a", "b", "c"]
    assert len({loop for _, loop in seen}) == 3


# What ends the block


@pytest.mark.dense
def test_a_handler_that_fails_ends_a_block_that_waits_with_its_exception(
    arena: Arena, group: str, nothing_left: None
) -> None:
    topic = arena.topic(1)
    app, cleaned = arena.app(group), list[str]()

    @app.consume(topic)
    async def handle(value: str) -> None:
        await asyncio.sleep(0)
        if value == "bad":
            raise LookupError("no such order")

    async def block() -> None:
        async with app.running():
            arena.produce(topic, ["a", "b", "bad", "c"], 0)  # not before: it would fail before the block is entered
            try:
                await asyncio.sleep(LONG)
                pytest.fail("the block went on")
            finally:
                await asyncio.sleep(0)
                cleaned.append("block")

    async def main() -> str:
        with pytest.raises(LookupError, match="no such order") as caught:
            await block()
        assert any(f"{topic}/0@2" in note for note in caught.value.__notes__)
        task = asyncio.current_task()
        assert task is not None
        assert task.cancelling() == 0
        return await asyncio.sleep(0, "the caller goes on")

    assert asyncio.run(main()) == "the caller goes on"
    assert cleaned == ["block"]
    assert stored(arena, group, topic) == 2
    assert members(arena, group) == 0


@pytest.mark.dense
@pytest.mark.parametrize("on_loop", [True, False])
def test_an_error_of_the_block_leaves_it_after_the_drain_and_a_failure_beside_it_is_told(
    arena: Arena, group: str, caplog: pytest.LogCaptureFixture, nothing_left: None, on_loop: bool
) -> None:
    good, bad = arena.topic(1), arena.topic(1)
    app, done, begun = arena.app(group), list[str](), list[str]()

    async def until_the_block_is_left(value: str) -> None:
        """A failure before that would interrupt the block, which then never raises an error of its own."""
        begun.append(value)
        await soon(lambda: told_to_stop(app), "told to stop")

    @app.consume(good)
    async def handle(value: str) -> None:
        await until_the_block_is_left(value)
        done.append(value)

    @app.consume(bad, group=f"{group}-bad")
    async def fail(value: str) -> None:
        await until_the_block_is_left(value)
        raise LookupError("no such order")

    arena.produce(good, ["a"], 0)
    arena.produce(bad, ["b"], 0)

    async def block() -> None:
        async with app.running():
            await soon(lambda: len(begun) == 2, "both handlers run")
            raise ValueError("the block's own")

    def blocking() -> None:
        with app.running():
            eventually(lambda: len(begun) == 2, what="both handlers run")
            raise ValueError("the block's own")

    with caplog.at_level(logging.ERROR, "kconsume"), pytest.raises(ValueError, match="the block's own"):
        asyncio.run(block()) if on_loop else blocking()
    assert done == ["a"]
    assert f"fail failed on {bad}/0@0: LookupError: no such order" in caplog.text
    assert members(arena, group) == 0


# The caller's task is cancelled


@pytest.mark.dense
def test_cancelled_in_the_block_it_drains_commits_leaves_and_is_cancelled(
    arena: Arena, group: str, nothing_left: None
) -> None:
    topic = arena.topic(1)
    arena.produce(topic, ["a", "b"], 0)
    app, begun, done = arena.app(group), threading.Event(), list[str]()

    @app.consume(topic)
    async def handle(value: str) -> None:
        begun.set()
        await soon(lambda: told_to_stop(app), "told to stop")
        done.append(value)

    async def serve() -> None:
        async with app.running():
            await asyncio.sleep(LONG)

    async def main() -> None:
        serving = asyncio.create_task(serve())
        await soon(begun.is_set, "a handler runs")
        serving.cancel()
        await asyncio.wait([serving])
        assert serving.cancelled()
        assert [task for task in asyncio.all_tasks() if task is not asyncio.current_task()] == []

    asyncio.run(main())
    assert done == ["a"], "what ran was finished, what had not begun was left"
    assert stored(arena, group, topic) == 1
    assert members(arena, group) == 0


def test_cancelled_while_it_starts_nothing_is_left(arena: Arena, group: str, nothing_left: None) -> None:
    topic = arena.topic(1)
    arena.produce(topic, ["a"], 0)
    app, events, building, go = arena.app(group), list[str](), threading.Event(), threading.Event()

    @app.resource
    def stock() -> Iterator[Stock]:
        building.set()
        go.wait(LONG)
        yield Stock()
        events.append("closed")

    @app.consume(topic)
    async def handle(value: str, stock: Stock) -> None:
        events.append(value)

    async def serve() -> None:
        async with app.running():
            events.append("in the block")
            await asyncio.sleep(LONG)

    async def main() -> None:
        serving = asyncio.create_task(serve())
        await soon(building.is_set, "a resource is being built")
        serving.cancel()
        await asyncio.sleep(0.05)
        go.set()
        await asyncio.wait([serving])
        assert serving.cancelled()
        assert "in the block" not in events
        assert events[-1] == "closed"
        assert [task for task in asyncio.all_tasks() if task is not asyncio.current_task()] == []

    asyncio.run(main())
    assert members(arena, group) == 0
    assert app._supervisor is None


@pytest.mark.parametrize("is_async", [False, True])
def test_cancelled_while_a_resource_hangs_in_building_it_gives_up_at_the_deadline(
    arena: Arena, group: str, nothing_left: None, is_async: bool
) -> None:
    """A task that cannot be cancelled keeps its whole program from ending."""
    app, building, go, closed = short(arena, group), threading.Event(), threading.Event(), list[str]()

    @app.resource
    def stock() -> Iterator[Stock]:
        yield Stock()
        closed.append("stock")

    def prices(stock: Stock) -> Iterator[Prices]:
        building.set()
        go.wait(LONG)
        yield Prices()

    async def prices_on_loop(stock: Stock) -> AsyncIterator[Prices]:
        building.set()
        await asyncio.sleep(LONG)
        yield Prices()

    app.resource(prices_on_loop if is_async else prices)

    @app.consume(arena.topic(1))
    async def handle(value: str, prices: Prices) -> None: ...

    async def serve() -> None:
        async with app.running():
            await asyncio.sleep(LONG)

    async def main() -> None:
        serving = asyncio.create_task(serve())
        await soon(building.is_set, "a resource is being built")
        serving.cancel()
        with pytest.raises(ResourceFailed, match=r"prices\w* was still not built 3\.0 s after the request to stop"):
            await serving
        if is_async:
            await soon(lambda: len(asyncio.all_tasks()) == 1, "no task is left")

    asyncio.run(main())
    go.set()
    eventually(lambda: closed == ["stock"], what="the one before it is closed, if its thread comes back")


def test_cancelled_while_another_runs_the_app_that_one_goes_on(arena: Arena, group: str) -> None:
    app = arena.app(group)

    @app.consume(arena.topic(1))
    async def handle(value: str) -> None: ...

    async def serve() -> None:
        async with app.running():
            await asyncio.sleep(LONG)

    async def main() -> None:
        async with app.running():
            starting = app._start_lock
            starting.acquire()
            late = asyncio.create_task(serve())
            await asyncio.sleep(0.1)
            late.cancel()
            await asyncio.sleep(0.1)
            starting.release()
            with pytest.raises(ConfigurationError, match="is running already"):
                await late
            supervisor = app._supervisor
            assert supervisor is not None
            assert supervisor._deadline is None, "nobody has asked it to stop"

    asyncio.run(main())


@pytest.mark.dense
def test_cancelled_while_it_drains_the_drain_is_finished_first(arena: Arena, group: str, nothing_left: None) -> None:
    topic = arena.topic(1)
    arena.produce(topic, ["a"], 0)
    app, begun, go, done = arena.app(group), threading.Event(), threading.Event(), list[str]()

    @app.consume(topic)
    async def handle(value: str) -> None:
        begun.set()
        await soon(go.is_set, "the word")
        done.append(value)

    async def serve() -> None:
        async with app.running():
            await soon(begun.is_set, "a handler runs")

    async def main() -> None:
        serving = asyncio.create_task(serve())
        await soon(begun.is_set, "a handler runs")
        for _ in range(3):
            await asyncio.sleep(0.1)
            serving.cancel()
        assert not serving.done()
        go.set()
        await asyncio.wait([serving])
        assert serving.cancelled()

    asyncio.run(main())
    assert done == ["a"]
    assert stored(arena, group, topic) == 1
    assert members(arena, group) == 0


@pytest.mark.dense
def test_a_timeout_around_the_block_is_a_timeout_and_drains(arena: Arena, group: str, nothing_left: None) -> None:
    topic = arena.topic(1)
    arena.produce(topic, ["a", "b"], 0)
    app, begun, done = arena.app(group), asyncio.Event(), list[str]()

    @app.consume(topic)
    async def handle(value: str) -> None:
        begun.set()
        await soon(lambda: told_to_stop(app), "told to stop")
        done.append(value)

    async def block() -> None:
        async with asyncio.timeout(LONG) as limit:
            async with app.running():
                await begun.wait()
                limit.reschedule(asyncio.get_running_loop().time())
                await asyncio.sleep(LONG)

    async def main() -> None:
        with pytest.raises(TimeoutError):
            await block()
        await asyncio.sleep(0)

    asyncio.run(main())
    assert done == ["a"]
    assert stored(arena, group, topic) == 1


# CancelledError


@pytest.mark.dense
@pytest.mark.parametrize("on_error", ["stop", "skip"])
def test_a_handler_s_own_cancelled_error_is_its_failure_and_is_not_taken_for_the_caller_s(
    arena: Arena, group: str, on_error: Any, nothing_left: None
) -> None:
    """It comes from any future that somebody cancelled. Raised as it is, a TaskGroup would pass over it."""
    topic = arena.topic(1)
    arena.produce(topic, ["a", "bad", "c"], 0)
    app = arena.app(group)

    @app.consume(topic, on_error=on_error)
    async def handle(value: str) -> None:
        if value == "bad":
            dead: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            dead.cancel()
            await dead

    async def serve() -> None:
        async with app.running():
            await asyncio.sleep(LONG)

    async def main() -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(serve())

    with pytest.raises(ExceptionGroup) as caught:
        asyncio.run(main())
    (failed,) = caught.value.exceptions
    assert isinstance(failed, HandlerFailed)
    assert isinstance(failed.__cause__, asyncio.CancelledError)
    assert f"handle failed on {topic}/0@1: CancelledError" in str(failed)
    assert stored(arena, group, topic) == 1


@pytest.mark.dense
@pytest.mark.parametrize("who", ["the handler", "somebody else"])
def test_a_handler_s_task_that_is_cancelled_is_told_and_not_silently_dropped(
    arena: Arena, group: str, who: str, nothing_left: None
) -> None:
    topic = arena.topic(1)
    arena.produce(topic, ["a", "b"], 0)
    app, begun = arena.app(group), threading.Event()

    @app.consume(topic)
    async def handle(value: str) -> None:
        begun.set()
        task = asyncio.current_task()
        assert task is not None
        if who == "the handler":
            task.cancel()
        await asyncio.sleep(LONG)

    async def main() -> None:
        async with app.running():
            await soon(begun.is_set, "a handler runs")
            for task in asyncio.all_tasks():
                if who == "somebody else" and task.get_name().startswith("kconsume"):
                    task.cancel()
            await asyncio.sleep(LONG)

    with pytest.raises(KconsumeError, match=f"'kconsume-handle {topic}/0' was cancelled, and not by kconsume"):
        asyncio.run(main())
    assert stored(arena, group, topic) in (None, 0)


# At the deadline (P8)


@pytest.mark.dense
def test_a_handler_that_has_not_ended_at_the_deadline_is_cancelled_abandoned_and_reported(
    arena: Arena, group: str, caplog: pytest.LogCaptureFixture, nothing_left: None
) -> None:
    topic = arena.topic(1)
    arena.produce(topic, ["a", "b"], 0)
    app, begun, ends = short(arena, group), threading.Event(), list[str]()

    @app.consume(topic)
    async def handle(value: str) -> None:
        begun.set()
        try:
            await asyncio.sleep(LONG)
        except asyncio.CancelledError:
            await asyncio.sleep(0.05)  # what it has to clean up
            ends.append("cancelled")
            raise

    with caplog.at_level(logging.ERROR, "kconsume"):
        report = stopped(app, begun)
    assert report.abandoned == [Partition(topic, 0)]
    assert report.exit_code == 3
    assert (report.handled, report.failure) == (0, None)
    assert ends == ["cancelled"]
    assert f"abandoned partition={topic}/0" in caplog.text
    assert stored(arena, group, topic) == 0
    assert members(arena, group) == 0


def test_also_on_the_caller_s_loop_where_it_may_still_use_its_resources_to_clean_up(
    arena: Arena, group: str, nothing_left: None
) -> None:
    topic = arena.topic(1)
    arena.produce(topic, ["a"], 0)
    app, begun, events = short(arena, group), threading.Event(), list[str]()

    @app.resource
    async def stock() -> AsyncIterator[Stock]:
        yield Stock()
        events.append("stock closed")

    @app.consume(topic)
    async def handle(value: str, stock: Stock) -> None:
        begun.set()
        try:
            await asyncio.sleep(LONG)
        finally:
            await asyncio.sleep(0.05)
            events.append("cleaned up")

    async def main() -> None:
        async with app.running():
            await soon(begun.is_set, "a handler runs")
        assert [task for task in asyncio.all_tasks() if task is not asyncio.current_task()] == []

    asyncio.run(main())
    assert events == ["cleaned up", "stock closed"]


@pytest.mark.dense
def test_one_that_swallows_the_cancellation_holds_up_nothing(
    arena: Arena, group: str, caplog: pytest.LogCaptureFixture
) -> None:
    topic = arena.topic(1)
    arena.produce(topic, ["a", "b"], 0)
    app, begun, end, swallowed = short(arena, group), threading.Event(), asyncio.Event(), list[str]()

    @app.consume(topic)
    async def handle(value: str) -> None:
        begun.set()
        while not end.is_set():
            try:
                await end.wait()
            except asyncio.CancelledError:
                swallowed.append(value)

    async def main() -> None:
        with caplog.at_level(logging.ERROR, "kconsume"):
            async with app.running():
                await soon(begun.is_set, "a handler runs")
        assert swallowed
        assert set(swallowed) == {"a"}
        assert f"abandoned partition={topic}/0" in caplog.text
        end.set()

    asyncio.run(main())
    assert stored(arena, group, topic) == 0


def test_one_that_blocks_the_loop_is_left_behind(arena: Arena, group: str, nothing_left: None) -> None:
    topic = arena.topic(1)
    arena.produce(topic, ["a"], 0)
    app, begun, end = short(arena, group), threading.Event(), threading.Event()

    @app.consume(topic)
    async def handle(value: str) -> None:
        begun.set()
        end.wait(LONG)

    report = stopped(app, begun)
    assert report.abandoned == [Partition(topic, 0)]
    assert report.exit_code == 3
    end.set()


@pytest.mark.dense
def test_in_its_transaction_its_rows_are_undone_and_the_file_is_free(
    arena: Arena, group: str, sqlite_url: str, nothing_left: None
) -> None:
    topic = arena.topic(1)
    arena.produce(topic, ["a"], 0)
    seen, app, begun = table(sqlite_url), short(arena, group, sqlite_url), threading.Event()

    @app.consume(topic)
    async def handle(value: str, tx: sqlite3.Connection) -> None:
        tx.execute("insert into seen values (?)", (value,))
        begun.set()
        await asyncio.sleep(LONG)

    report = stopped(app, begun)
    assert report.exit_code == 3
    assert another_process_can_write(sqlite_url)
    assert rows(seen) == []
    assert SqliteStore.from_url(sqlite_url).load(group, [Partition(topic, 0)])[Partition(topic, 0)].next_offset == 0


@pytest.mark.dense
@pytest.mark.parametrize("on_loop", [False, True])
def test_one_that_waits_for_its_turn_in_the_file_does_not_take_it_afterwards(
    arena: Arena, group: str, sqlite_url: str, nothing_left: None, on_loop: bool
) -> None:
    """The turn comes when nobody is there any more: kept, it would hold up every other process for good."""
    topic = arena.topic(1)
    seen, app, rival = table(sqlite_url), short(arena, group, sqlite_url), SqliteStore.from_url(sqlite_url)

    @app.consume(topic)
    async def handle(value: str, tx: sqlite3.Connection) -> None:
        tx.execute("insert into seen values (?)", (value,))

    def waits() -> bool:
        return any(thread.name == "turnstile" for thread in threading.enumerate())

    async def on_the_callers_loop() -> None:
        async with app.running():
            arena.produce(topic, ["a"], 0)
            await soon(lambda: rows(seen) == ["a"], "the first record")
            held.__enter__()
            arena.produce(topic, ["b"], 0)
            await soon(waits, "the second waits for its turn")

    def on_its_own() -> None:
        with app.running():
            arena.produce(topic, ["a"], 0)
            eventually(lambda: rows(seen) == ["a"], what="the first record")
            held.__enter__()
            arena.produce(topic, ["b"], 0)
            eventually(waits, what="the second waits for its turn")

    held = rival.database.writing()
    asyncio.run(on_the_callers_loop()) if on_loop else on_its_own()
    held.__exit__(None, None, None)
    eventually(lambda: not waits(), what="its turn has come")
    assert another_process_can_write(sqlite_url)
    assert rows(seen) == ["a"]
    rival.close()


def test_an_owner_that_ends_after_it_was_given_up_leaves_no_thread_behind(
    arena: Arena, group: str, sqlite_url: str, nothing_left: None
) -> None:
    topic, entered, may_end = arena.topic(1), threading.Event(), threading.Event()
    app = App(arena.bootstrap, group=group, offsets=sqlite_url, kafka=QUICK, shutdown=1)

    @app.consume(topic, executor="inline")
    def handle(value: str) -> None:
        entered.set()
        assert may_end.wait(LONG)

    arena.produce(topic, ["a"], 0)
    report = stopped(app, after=entered)
    assert report.hung == [group], "it was given up"
    may_end.set()


def cancelled_in_its_transaction(arena: Arena, group: str, url: str, on_loop: bool) -> tuple[int, list[str]]:
    """How far a handler came, and what it wrote, that skips what fails and turns its cancellation into an error."""
    topic = arena.topic(1)
    arena.produce(topic, ["a"], 0)
    seen, app, begun = table(url), short(arena, group, url), threading.Event()

    @app.consume(topic, on_error="skip")
    async def handle(value: str, tx: sqlite3.Connection) -> None:
        tx.execute("insert into seen values (?)", (value,))
        begun.set()
        try:
            await asyncio.sleep(LONG)
        except asyncio.CancelledError:
            raise ConnectionError("closed by a cancellation") from None

    async def main() -> None:
        async with app.running():
            await soon(begun.is_set, "a handler runs")

    if on_loop:
        asyncio.run(main())
    else:
        assert stopped(app, begun).exit_code == 3
    place = Partition(topic, 0)
    return SqliteStore.from_url(url).load(group, [place])[place].next_offset, rows(seen)


@pytest.mark.dense
@pytest.mark.parametrize("on_loop", [False, True])
def test_a_record_is_not_skipped_because_of_what_its_handler_raises_when_we_cancel_it(
    arena: Arena, group: str, sqlite_url: str, on_loop: bool
) -> None:
    """Libraries turn a cancellation into errors of their own. It was not the record's fault (P1)."""
    assert cancelled_in_its_transaction(arena, group, sqlite_url, on_loop) == (0, [])


@pytest.mark.dense
def test_control_it_would_be_skipped_if_we_did_not_know_that_it_was_us(
    arena: Arena, group: str, sqlite_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kconsume._runtime.processing.slice_result.CANCELLED", "never")
    assert cancelled_in_its_transaction(arena, group, sqlite_url, on_loop=False) == (1, [])


# Many at once


def test_more_handlers_than_the_loop_has_threads_share_one_file(
    arena: Arena, group: str, sqlite_url: str, nothing_left: None
) -> None:
    """If those who wait for the file took all the loop's threads, the one who has it could never let go of it."""
    partitions = 12
    topic = arena.topic(partitions)
    expected = arena.fill(topic, 10, partitions)
    seen, app = table(sqlite_url), arena.app(group, sqlite_url)

    @app.consume(topic, concurrency=partitions)
    async def handle(value: str, tx: sqlite3.Connection) -> None:
        await asyncio.to_thread(time.sleep, 0.001)  # the loop's threads are the person's
        tx.execute("insert into seen values (?)", (value,))

    app.catch_up(idle=0.2)
    assert sorted(rows(seen)) == sorted(expected)


@pytest.mark.dense
@pytest.mark.parametrize("first", [0.003, 0.15], ids=["swift", "slow at first"])
@pytest.mark.parametrize("tx", [False, True])
def test_no_partition_waits_until_another_has_worked_off_all_that_it_was_given(
    arena: Arena, group: str, sqlite_url: str, tx: bool, first: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor if its first record took long: only to look up, or because the machine was busy."""
    partitions, each = 6, 200
    shares = shares_of_time(arena, group, sqlite_url, partitions, each, tx=tx, first=first, monkeypatch=monkeypatch)
    assert min(shares) > max(shares) / 4, f"a partition has starved: {shares}"


@pytest.mark.dense
@pytest.mark.parametrize("tx", [False, True])
def test_control_partitions_starve_where_a_turn_has_no_end(
    arena: Arena, group: str, sqlite_url: str, tx: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kconsume._runtime.lanes.event_loop.TURN", 1e9)
    shares = shares_of_time(arena, group, sqlite_url, 6, 50, tx=tx, first=0.003, monkeypatch=monkeypatch)
    assert min(shares) < max(shares) / 4


def shares_of_time(
    arena: Arena,
    group: str,
    sqlite_url: str,
    partitions: int,
    each: int,
    *,
    tx: bool,
    first: float,
    monkeypatch: pytest.MonkeyPatch,
) -> list[float]:
    """Seconds in each partition's handler until the first partition was through. Nothing is handled before all have
    records: one that is fetched later is not starved."""
    topic = arena.topic(partitions)
    arena.fill(topic, each, partitions)
    table(sqlite_url)
    app, seen, given = arena.app(group, sqlite_url), list[tuple[int, float]](), set[int]()
    submit = AsyncLanes.submit

    def noted(lanes: AsyncLanes, lane: Lane, chunk: Chunk) -> None:
        given.add(lane.partition.number)
        submit(lanes, lane, chunk)

    monkeypatch.setattr(AsyncLanes, "submit", noted)

    async def work(record: Record) -> None:
        while len(given) < partitions:
            await asyncio.sleep(0.001)
        began = time.monotonic()
        await asyncio.sleep(0.003 if record.partition or record.offset else first)
        seen.append((record.partition, time.monotonic() - began))

    if tx:

        @app.consume(topic)  # one at a time, because the file has one writer
        async def write(record: Record, tx: sqlite3.Connection) -> None:
            await work(record)

    else:

        @app.consume(topic, concurrency=2)
        async def handle(record: Record) -> None:
            await work(record)

    app.catch_up(idle=0.2)
    assert len(seen) == partitions * each
    counts, shares = [0] * partitions, [0.0] * partitions
    for number, seconds in seen:
        counts[number] += 1
        shares[number] += seconds
        if counts[number] == each:
            break
    return shares


@pytest.mark.dense
def test_what_a_slow_handler_has_not_begun_is_bounded_whatever_the_lag(arena: Arena, group: str) -> None:
    topic, memory = arena.topic(2), 500_000
    for partition in range(2):
        arena.produce(topic, (b"x" * 100 for _ in range(20_000)), partition)
    app = App(arena.bootstrap, group=group, kafka=QUICK, memory=memory)
    most, calls = 0, 0

    @app.consume(topic)
    async def handle(value: bytes) -> None:
        nonlocal most, calls
        await asyncio.sleep(0.001)
        calls += 1
        supervisor = app._supervisor
        assert supervisor is not None
        owned_partitions = list(supervisor.consumers[0].assignment.partitions.values())
        most = max(most, sum(h.lane.queued_records for h in owned_partitions if h.lane is not None))

    with app.running():
        eventually(lambda: calls > 3000, within=60, what="it works on it")
    assert 0 < most < memory // 500 + 2 * 1000, "a window, and one fetch over it for each lane"


# Handlers that are not alone


@pytest.mark.dense
def test_a_handler_s_tasks_go_on_after_it_and_end_with_the_app(arena: Arena, group: str, nothing_left: None) -> None:
    topic = arena.topic(1)
    arena.produce(topic, ["a", "b"], 0)
    app, events = arena.app(group), list[str]()
    kept: list[asyncio.Task[None]] = []

    async def later(value: str) -> None:
        await asyncio.sleep(0.05)
        events.append(f"later {value}")
        try:
            await asyncio.sleep(LONG)
        finally:
            events.append(f"cancelled {value}")

    @app.consume(topic)
    async def handle(value: str) -> None:
        kept.append(asyncio.create_task(later(value)))
        events.append(value)

    with app.running():
        eventually(lambda: {"later a", "later b"} <= set(events), what="they run beside their handlers")
    assert sorted(events[-2:]) == ["cancelled a", "cancelled b"]
    assert stored(arena, group, topic) == 2


def test_a_task_of_a_handler_that_calls_exit_does_not_silence_the_app(
    arena: Arena, group: str, nothing_left: None
) -> None:
    topic = arena.topic(1)
    arena.produce(topic, ["a", "b", "c"], 0)
    app, seen = arena.app(group), list[str]()

    async def leave() -> None:
        sys.exit(4)

    @app.consume(topic)
    async def handle(value: str) -> None:
        seen.append(value)
        if value == "a":
            child = asyncio.create_task(leave())
            await asyncio.wait([child])
            assert isinstance(child.exception(), SystemExit)

    app.catch_up(idle=0.2)
    assert seen == ["a", "b", "c"]


def test_the_failures_of_a_task_group_in_a_handler_are_its_own(arena: Arena, group: str) -> None:
    topic = arena.topic(1)
    arena.produce(topic, ["a"], 0)
    app = arena.app(group)

    async def fail() -> None:
        raise LookupError("child")

    @app.consume(topic)
    async def handle(value: str) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(fail())
            await asyncio.sleep(LONG)

    with pytest.raises(ExceptionGroup) as caught:
        app.catch_up(idle=0.2)
    assert isinstance(caught.value.exceptions[0], LookupError)


# Rebalances


def test_a_handler_that_blocks_the_loop_while_its_partition_goes_costs_neither_membership_nor_records(
    arena: Arena, group: str, nothing_left: None
) -> None:
    topic = arena.topic(2)
    one, two = arena.app(group), arena.app(group)
    seen: list[tuple[str, str]] = []
    blocked, release = threading.Event(), threading.Event()

    @one.consume(topic)
    async def first(value: str) -> None:
        if value == "block":
            blocked.set()
            release.wait(LONG)
        seen.append(("one", value))

    @two.consume(topic)
    async def second(value: str) -> None:
        seen.append(("two", value))

    def assigned(app: App) -> int:
        supervisor = app._supervisor
        assert supervisor is not None
        return sum(h.lane is not None for h in dict(supervisor.consumers[0].assignment.partitions).values())

    with one.running():
        eventually(lambda: assigned(one) == 2, what="both assigned")
        for partition in range(2):
            arena.produce(topic, ["block", f"after {partition}"], partition)
        assert blocked.wait(20)
        with two.running():
            try:
                eventually(lambda: assigned(two) == 1, within=40, what="handed over while the loop is blocked")
                eventually(
                    lambda: any(who == "two" and value.startswith("after") for who, value in list(seen)),
                    what="handled by the new owner, while the old one is still blocked",
                )
            finally:
                release.set()
            eventually(lambda: {"after 0", "after 1"} <= {value for _, value in seen}, what="nothing is lost")
            assert assigned(one) == 1


# Elsewhere than on the main thread


@pytest.mark.dense
def test_in_another_thread_a_failure_is_raised_when_its_block_ends(arena: Arena, group: str) -> None:
    topic = arena.topic(1)
    arena.produce(topic, ["bad"], 0)
    app, failed, raised = arena.app(group), threading.Event(), list[BaseException]()

    @app.consume(topic)
    async def handle(value: str) -> None:
        failed.set()
        raise LookupError("no such order")

    def block() -> None:
        try:
            with app.running():
                failed.wait(LONG)
        except LookupError as error:
            raised.append(error)

    thread = threading.Thread(target=block)
    thread.start()
    thread.join(LONG)
    assert [str(error) for error in raised] == ["no such order"]
    assert stored(arena, group, topic) in (None, 0)


def test_run_in_another_thread_is_refused_and_nothing_is_started(arena: Arena, group: str, nothing_left: None) -> None:
    app, raised = arena.app(group), list[BaseException]()

    @app.consume(arena.topic(1))
    async def handle(value: str) -> None: ...

    def run() -> None:
        try:
            app.run()
        except ConfigurationError as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(LONG)
    (error,) = raised
    assert "only the main thread can: call it there, or consume in this thread with `with app.running():`" in str(error)


# As a process


SERVICE = """
    import asyncio, pathlib, sys
    from kconsume import App, Partition

    bootstrap, topic, group = sys.argv[1:]
    quick = {{"session.timeout.ms": 2000, "heartbeat.interval.ms": 250}}
    app = App(bootstrap, group=group, kafka=quick, shutdown={shutdown})

    @app.consume(topic)
    async def handle(value: str) -> None:
        pathlib.Path("entered").touch()
        {body}

    app.run()
"""
UNTIL_IT_IS_TOLD_TO_STOP = """partitions = app._supervisor.consumers[0].assignment.partitions
        while not partitions[Partition(topic, 0)].lane.stop_reasons:
            await asyncio.sleep(0.01)"""


@pytest.mark.dense
@pytest.mark.parametrize(
    ("body", "code", "said"),
    [
        (UNTIL_IT_IS_TOLD_TO_STOP, 0, "handled 1  skipped 0"),
        ("await asyncio.sleep(600)", 3, "abandoned"),
        ("import time; time.sleep(600)", 3, "abandoned"),
        ("await asyncio.to_thread(__import__('time').sleep, 600)", 3, "abandoned"),
        ("raise asyncio.CancelledError('dead')", 1, "CancelledError: dead"),
    ],
)
def test_sigterm_drains_async_handlers_and_the_exit_code_says_how_it_went(
    arena: Arena, group: str, tmp_path: Path, body: str, code: int, said: str
) -> None:
    topic = arena.topic(1)
    arena.produce(topic, ["a", "b"], 0)
    (tmp_path / "service.py").write_text(textwrap.dedent(SERVICE.format(body=body, shutdown=4 if code == 3 else 30)))
    process = subprocess.Popen(
        [sys.executable, "service.py", arena.bootstrap, topic, group],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        eventually((tmp_path / "entered").exists, what="a handler runs")
        if code != 1:
            process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=40)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == code, err
    assert said in err
    assert stored(arena, group, topic) in ((1,) if code == 0 else (None, 0))


class Stock: ...


class Prices: ...


def short(arena: Arena, group: str, offsets: str = "kafka://") -> App:
    """An app with little time to stop."""
    return App(arena.bootstrap, group=group, offsets=offsets, kafka=QUICK, shutdown=3)

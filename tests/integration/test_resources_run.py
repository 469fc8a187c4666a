"""Resources and wraps in a run: when they are built, by whom they are shared, when they are closed, and how a run ends
that cannot build or close one. On both brokers, and as a process."""

from __future__ import annotations

import asyncio
import os
import signal
import sqlite3
import subprocess
import sys
import textwrap
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kconsume import App, Partition, Record
from kconsume.backends import SqliteStore, open_store
from kconsume.errors import ConfigurationError, ResourceFailed
from tests.fix_arena import QUICK, Arena
from tests.waiting import eventually

ROOT = Path(__file__).parents[2]
LONG = 60.0


class Stock:
    """A resource that knows where it was made."""

    def __init__(self) -> None:
        self.thread = threading.current_thread()
        try:
            self.loop: object = asyncio.get_running_loop()
        except RuntimeError:
            self.loop = None


class Prices: ...


def stored(arena: Arena, group: str, topic: str) -> int | None:
    position = open_store("kafka://", brokers=arena.bootstrap).load(group, [Partition(topic, 0)])
    return position[Partition(topic, 0)].next_offset if position else None


def plain(app: App, events: list[str]) -> None:
    @app.resource
    def stock() -> Iterator[Stock]:
        events.append("built")
        yield Stock()
        events.append("closed")


def on_loop(app: App, events: list[str]) -> None:
    @app.resource
    async def stock() -> AsyncIterator[Stock]:
        await asyncio.sleep(0)
        events.append("built")
        yield Stock()
        await asyncio.sleep(0)
        events.append("closed")


made = pytest.mark.parametrize("declare", [plain, on_loop])


# When, and for whom


@made
def test_one_for_all_handlers_of_all_consumers_from_before_the_first_record_to_after_the_last(
    arena: Arena, group: str, declare: Callable[[App, list[str]], None]
) -> None:
    topics = [arena.topic(2) for _ in range(3)]
    for topic in topics:
        arena.fill(topic, 10, 2)
    app, events, given = arena.app(group), list[str](), list[Stock]()
    declare(app, events)

    @app.consume(topics[0])
    def first(value: str, stock: Stock) -> None:
        given.append(stock)
        events.append("handled")

    @app.consume(topics[1], group=f"{group}-two")
    async def second(value: str, stock: Stock) -> None:
        await asyncio.sleep(0)
        given.append(stock)
        events.append("handled")

    @app.consume(topics[2], group=f"{group}-three")
    def third(values: list[str], stock: Stock | None) -> None:
        assert stock is not None
        given.extend([stock] * len(values))
        events.append("handled")

    app.catch_up(idle=0.2)
    assert len(given) == 60
    assert len(set(given)) == 1
    assert events[0] == "built"
    assert events[-1] == "closed"
    assert set(events[1:-1]) == {"handled"}

    app.catch_up(idle=0.2)
    assert events[-2:] == ["built", "closed"], "and anew for the next run"
    assert events.count("built") == 2


def test_it_is_closed_after_the_handlers_that_the_drain_waits_for(arena: Arena, group: str) -> None:
    topic = arena.topic(2)
    arena.fill(topic, 1, 2)
    app, events, begun = arena.app(group), list[str](), threading.Barrier(3)
    on_loop(app, events)

    @app.consume(topic)
    def handle(value: str, stock: Stock) -> None:
        begun.wait(20)
        threading.Event().wait(0.4)
        events.append("handled")

    with app.running():
        begun.wait(20)
    assert events == ["built", "handled", "handled", "closed"]


def test_what_no_handler_asks_for_is_not_built(arena: Arena, group: str) -> None:
    topic = arena.topic(1)
    arena.produce(topic, ["a"], 0)
    app, events = arena.app(group), list[str]()
    on_loop(app, events)

    @app.consume(topic)
    def handle(value: str) -> None: ...

    assert app.catch_up(idle=0.2).handled == 1
    assert events == []


@pytest.mark.parametrize("is_async", [False, True])
def test_an_async_one_lives_on_the_loop_of_the_async_handlers_whoever_asks_for_it(
    arena: Arena, group: str, is_async: bool
) -> None:
    topic, events = arena.topic(1), list[str]()
    seen: list[tuple[object, object]] = []

    def app() -> App:
        arena.produce(topic, ["a"], 0)
        app = arena.app(group)
        on_loop(app, events)

        async def look(value: str, stock: Stock) -> None:
            seen.append((stock.loop, asyncio.get_running_loop()))

        def look_from_a_thread(value: str, stock: Stock) -> None:
            assert isinstance(stock.loop, asyncio.AbstractEventLoop)
            asked = asyncio.run_coroutine_threadsafe(asyncio.sleep(0, "it runs"), stock.loop)
            assert asked.result(20) == "it runs"
            seen.append((stock.loop, stock.loop))

        app.consume(topic)(look if is_async else look_from_a_thread)
        return app

    async def main() -> None:
        async with app().running():
            while len(seen) < 2:
                await asyncio.sleep(0.01)
        assert seen[1] == (asyncio.get_running_loop(), asyncio.get_running_loop())

    app().catch_up(idle=0.2)
    (one, other) = seen[0]
    assert one is other
    asyncio.run(asyncio.wait_for(main(), LONG))
    assert events == ["built", "closed"] * 2


def test_a_plain_one_is_made_off_the_caller_s_loop(arena: Arena, group: str) -> None:
    """It may connect somewhere, and take its time."""
    topic = arena.topic(1)
    arena.produce(topic, ["a"], 0)
    app, stocks, ticks = arena.app(group), list[Stock](), list[int]()

    @app.resource
    def stock() -> Iterator[Stock]:
        before = len(ticks)
        eventually(lambda: len(ticks) > before + 5, what="the loop goes on meanwhile")
        yield Stock()
        before = len(ticks)
        eventually(lambda: len(ticks) > before + 5, what="and while it is closed")

    @app.consume(topic)
    async def handle(value: str, stock: Stock) -> None:
        stocks.append(stock)

    async def tick() -> None:
        while True:
            ticks.append(1)
            await asyncio.sleep(0.005)

    async def main() -> None:
        ticking = asyncio.create_task(tick())
        async with app.running():
            while not stocks:
                await asyncio.sleep(0.01)
        ticking.cancel()

    asyncio.run(asyncio.wait_for(main(), LONG))
    assert stocks[0].loop is None
    assert stocks[0].thread.name == "kconsume-resources"


def test_a_stop_while_they_are_built_is_not_forgotten(arena: Arena, group: str) -> None:
    topic = arena.topic(1)
    app, building, go = arena.app(group), threading.Event(), threading.Event()

    @app.resource
    def stock() -> Iterator[Stock]:
        building.set()
        go.wait(LONG)
        yield Stock()

    @app.consume(topic)
    def handle(value: str, stock: Stock) -> None: ...

    def stop() -> None:
        building.wait(LONG)
        app.stop()
        go.set()

    thread = threading.Thread(target=stop)
    thread.start()
    report = app.catch_up(idle=LONG)
    thread.join()
    assert report.exit_code == 0
    assert report.hung == []


# One that fails


@pytest.mark.dense
@made
def test_one_that_cannot_be_built_stops_the_start_and_those_before_it_are_closed(
    arena: Arena, group: str, declare: Callable[[App, list[str]], None]
) -> None:
    topic = arena.topic(1)
    arena.produce(topic, ["a"], 0)
    app, events, before = arena.app(group), list[str](), set(threading.enumerate())
    broken = True
    declare(app, events)

    @app.resource
    def prices(stock: Stock) -> Iterator[Prices]:
        if broken:
            raise LookupError("no such host")
        yield Prices()

    @app.consume(topic)
    async def handle(value: str, prices: Prices) -> None:
        events.append(value)

    async def main() -> None:
        async with app.running():
            pytest.fail("the block was entered")

    def enter() -> None:
        with app.running():
            pytest.fail("the block was entered")

    for start in (lambda: app.catch_up(idle=0.2), enter, lambda: asyncio.run(main())):
        with pytest.raises(ResourceFailed, match="the resource prices could not be built: LookupError: no such host"):
            start()
        assert events == ["built", "closed"]
        events.clear()
    eventually(lambda: set(threading.enumerate()) <= before, what="no thread is left")
    assert stored(arena, group, topic) is None, "nothing was consumed"

    broken = False
    assert app.catch_up(idle=0.2).handled == 1
    assert events == ["built", "a", "closed"]


def test_a_consumer_that_cannot_be_made_leaves_nothing_behind(arena: Arena, group: str) -> None:
    app = App(arena.bootstrap, group=group, kafka={"fetch.wait.max.ms": "soon"})
    events, before = list[str](), set(threading.enumerate())
    on_loop(app, events)

    @app.consume("orders")
    async def handle(value: str, stock: Stock) -> None: ...

    @app.consume("orders", group=f"{group}-two")
    def other(value: str) -> None: ...

    with pytest.raises(ConfigurationError, match="check the property"):
        app.catch_up()
    assert events == ["built", "closed"]
    eventually(lambda: set(threading.enumerate()) <= before, what="no thread is left")


@pytest.mark.dense
@made
def test_one_that_cannot_be_closed_fails_the_run_and_what_was_handled_stays_committed(
    arena: Arena, group: str, declare: Callable[[App, list[str]], None]
) -> None:
    topic = arena.topic(1)
    arena.produce(topic, ["a"], 0)
    app, events = arena.app(group), list[str]()
    declare(app, events)

    @app.resource
    def prices(stock: Stock) -> Iterator[Prices]:
        yield Prices()
        raise LookupError("not flushed")

    @app.consume(topic)
    def handle(value: str, prices: Prices) -> None: ...

    with pytest.raises(ResourceFailed, match="the resource prices could not be closed: LookupError: not flushed"):
        app.catch_up(idle=0.2)
    assert events == ["built", "closed"]
    assert stored(arena, group, topic) == 1


def test_a_handler_s_failure_goes_before_that_of_a_resource(arena: Arena, group: str) -> None:
    topic = arena.topic(1)
    arena.produce(topic, ["a"], 0)
    app = arena.app(group)

    @app.resource
    def stock() -> Iterator[Stock]:
        yield Stock()
        raise LookupError("not flushed")

    @app.consume(topic)
    def handle(value: str, stock: Stock) -> None:
        raise ValueError("the first thing that went wrong")

    with pytest.raises(ValueError, match="the first thing that went wrong"):
        app.catch_up(idle=0.2)


@pytest.mark.dense
@pytest.mark.parametrize("is_async", [False, True])
def test_one_that_hangs_when_it_is_closed_is_left_behind_at_the_app_s_own_deadline(
    arena: Arena, group: str, is_async: bool
) -> None:
    topic = arena.topic(1)
    arena.produce(topic, ["a"], 0)
    app, go = App(arena.bootstrap, group=group, kafka=QUICK, shutdown=1), threading.Event()

    def hangs() -> Iterator[Stock]:
        yield Stock()
        go.wait(LONG)

    async def hangs_on_loop() -> AsyncIterator[Stock]:
        yield Stock()
        while not go.is_set():
            await asyncio.sleep(0.01)

    app.resource(hangs_on_loop if is_async else hangs)

    @app.consume(topic)
    def handle(value: str, stock: Stock) -> None: ...

    with pytest.raises(ResourceFailed, match=r"were not closed within [01]\.\d s: hangs\w* hangs"):
        app.catch_up(idle=0.2)
    go.set()
    assert stored(arena, group, topic) == 1


# Wraps, in a transaction


@pytest.mark.dense
@pytest.mark.parametrize("is_async", [False, True])
def test_a_wrap_is_inside_its_handler_s_transaction_and_its_failure_undoes_the_rows(
    arena: Arena, group: str, sqlite_url: str, is_async: bool
) -> None:
    topic = arena.topic(1)
    arena.produce(topic, [str(n) for n in range(20)], 0)
    seen = sqlite3.connect(sqlite_url.removeprefix("sqlite:///"), isolation_level=None)
    seen.execute("create table seen (value text)")
    app, around = arena.app(group, sqlite_url), list[int]()

    @app.wrap
    def swallows() -> Iterator[None]:
        try:
            yield
        except LookupError:
            return

    @app.wrap
    def checks(record: Record) -> Iterator[None]:
        around.append(record.offset)
        yield
        if record.offset == 13:
            raise LookupError("after the yield")

    def write(value: str, tx: sqlite3.Connection) -> None:
        tx.execute("insert into seen values (?)", (value,))

    async def write_on_loop(value: str, tx: sqlite3.Connection) -> None:
        await asyncio.sleep(0)
        tx.execute("insert into seen values (?)", (value,))

    app.consume(topic)(write_on_loop if is_async else write)
    with pytest.raises(LookupError, match="after the yield"):
        app.catch_up(idle=0.2)
    assert [row[0] for row in seen.execute("select value from seen order by rowid")] == [str(n) for n in range(13)]
    assert SqliteStore.from_url(sqlite_url).load(group, [Partition(topic, 0)])[Partition(topic, 0)].next_offset == 13
    assert max(around) == 13


# As a process

SERVICE = """
    import asyncio, pathlib, sys, threading, time
    from collections.abc import AsyncIterator, Iterator
    from kconsume import App

    bootstrap, topic, group = sys.argv[1:]
    app = App(
        bootstrap, group=group, shutdown={shutdown},
        kafka={{"session.timeout.ms": 2000, "heartbeat.interval.ms": 250}},
    )

    class Stock: ...
    class Prices: ...

    @app.resource
    def stock() -> Iterator[Stock]:
        print("stock built", file=sys.stderr)
        yield Stock()
        print("stock closed", file=sys.stderr)

    @app.resource
    {prices}

    @app.consume(topic)
    async def handle(value: str, prices: Prices) -> None:
        print("handled", value, file=sys.stderr)
        pathlib.Path("handled").touch()

    app.run()
"""

CANNOT_BE_BUILT = """
    def prices(stock: Stock) -> Iterator[Prices]:
        raise LookupError("no such host")
        yield
"""
CANNOT_BE_CLOSED = """
    async def prices(stock: Stock) -> AsyncIterator[Prices]:
        yield Prices()
        raise LookupError("not flushed")
"""
HANGS = """
    def prices(stock: Stock) -> Iterator[Prices]:
        yield Prices()
        pathlib.Path("closing").touch()
        time.sleep(600)
"""
HANGS_IN_A_THREAD_OF_THE_LOOP = """
    async def prices(stock: Stock) -> AsyncIterator[Prices]:
        yield Prices()
        pathlib.Path("closing").touch()
        await asyncio.to_thread(time.sleep, 600)
"""
NOBODY_PROVIDES = """
    def prices(currency: threading.Event) -> Iterator[Prices]:
        yield Prices()
"""
GOOD = """
    async def prices(stock: Stock) -> AsyncIterator[Prices]:
        yield Prices()
        print("prices closed", file=sys.stderr)
"""


class Service:
    """The service as a process of its own."""

    def __init__(self, folder: Path, arena: Arena, group: str, prices: str, shutdown: float = 4) -> None:
        self.folder = folder
        self.topic = arena.topic(1)
        arena.produce(self.topic, ["a"], 0)
        prices = textwrap.dedent(prices).strip()
        source = textwrap.dedent(SERVICE).format(prices=prices, shutdown=shutdown)
        (folder / "service.py").write_text(source)
        self.process = subprocess.Popen(
            [sys.executable, "service.py", arena.bootstrap, self.topic, group],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stderr=subprocess.PIPE,
            text=True,
        )

    def awaits(self, name: str) -> None:
        eventually((self.folder / name).exists, what=name)

    def end(self) -> tuple[int, str]:
        _, err = self.process.communicate(timeout=40)
        return self.process.returncode, err


@pytest.fixture
def service(arena: Arena, group: str, tmp_path: Path) -> Iterator[Callable[..., Service]]:
    started: list[Service] = []

    def start(prices: str, **options: Any) -> Service:
        started.append(Service(tmp_path, arena, group, prices, **options))
        return started[-1]

    yield start
    for each in started:
        each.process.kill()
        each.process.wait()


@pytest.mark.dense
def test_sigterm_closes_them_after_the_drain(service: Callable[..., Service], arena: Arena, group: str) -> None:
    running = service(GOOD, shutdown=30)
    running.awaits("handled")
    running.process.send_signal(signal.SIGTERM)
    code, err = running.end()
    said = [line for line in err.splitlines() if line.startswith(("stock", "prices", "handled"))]
    assert (code, said) == (0, ["stock built", "handled a", "prices closed", "stock closed"])
    assert stored(arena, group, running.topic) == 1


@pytest.mark.dense
def test_one_that_cannot_be_built_ends_the_process_with_1_and_its_cause(
    service: Callable[..., Service], arena: Arena, group: str
) -> None:
    failed = service(CANNOT_BE_BUILT)
    code, err = failed.end()
    assert code == 1
    assert "the resource prices could not be built: LookupError: no such host" in err
    assert 'raise LookupError("no such host")' in err, "the line where it happened"
    assert [line for line in err.splitlines() if line.startswith("stock")] == ["stock built", "stock closed"]
    assert "handled" not in err
    assert stored(arena, group, failed.topic) is None


def test_one_that_asks_for_what_nobody_provides_is_refused_before_any_is_built(
    service: Callable[..., Service],
) -> None:
    code, err = service(NOBODY_PROVIDES).end()
    assert code != 0
    assert "the resource prices asks for Event, which no @app.resource provides: declare one that does" in err
    assert "stock built" not in err


@pytest.mark.dense
def test_one_that_cannot_be_closed_ends_the_process_with_1_and_its_cause(
    service: Callable[..., Service], arena: Arena, group: str
) -> None:
    failed = service(CANNOT_BE_CLOSED, shutdown=30)
    failed.awaits("handled")
    failed.process.send_signal(signal.SIGTERM)
    code, err = failed.end()
    assert code == 1
    assert "the resource prices could not be closed: LookupError: not flushed" in err
    assert "stock closed" in err
    assert stored(arena, group, failed.topic) == 1


@pytest.mark.dense
@pytest.mark.parametrize("prices", [HANGS, HANGS_IN_A_THREAD_OF_THE_LOOP])
def test_one_that_hangs_when_it_is_closed_does_not_keep_the_process(
    service: Callable[..., Service], arena: Arena, group: str, prices: str
) -> None:
    hanging = service(prices)
    hanging.awaits("handled")
    hanging.process.send_signal(signal.SIGTERM)
    code, err = hanging.end()
    assert code == 1
    assert "prices hangs" in err
    assert stored(arena, group, hanging.topic) == 1


@pytest.mark.parametrize("prices", [HANGS, HANGS_IN_A_THREAD_OF_THE_LOOP])
def test_a_second_signal_while_they_are_closed_leaves_at_once(service: Callable[..., Service], prices: str) -> None:
    hanging = service(prices, shutdown=600)
    hanging.awaits("handled")
    hanging.process.send_signal(signal.SIGTERM)
    hanging.awaits("closing")
    hanging.process.send_signal(signal.SIGTERM)
    code, _ = hanging.end()
    assert code == 128 + signal.SIGTERM

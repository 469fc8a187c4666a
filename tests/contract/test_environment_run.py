"""`KCONSUME_*` variables win over the code in a run, each of them; one that nobody reads is said."""

from __future__ import annotations

import logging
import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Consumer, TopicPartition

from kconsume import App, Batch, Batching, Partition, Rate, Record, Router
from kconsume.backends import open_store
from kconsume.errors import ConfigurationError, InvalidHandler
from tests.fix_arena import Arena
from tests.fix_kafka import unique
from tests.waiting import eventually

ROOT = Path(__file__).parents[2]
NOWHERE = "127.0.0.1:1"


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only those that a test sets."""
    for name in list(os.environ):
        if name.startswith("KCONSUME_") and not name.startswith("KCONSUME_TEST_"):
            monkeypatch.delenv(name)


def say(monkeypatch: pytest.MonkeyPatch, **variables: object) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(f"KCONSUME_{name}", str(value))


def fed(arena: Arena, records: int = 10, partitions: int = 1) -> str:
    topic = arena.topic(partitions)
    for partition in range(partitions):
        arena.produce(topic, [str(n) for n in range(records)], partition)
    return topic


def collecting(app: App, topic: str, **options: Any) -> list[str]:
    seen: list[str] = []

    @app.consume(topic, **options)
    def handle(value: str) -> None:
        seen.append(value)

    return seen


def written_to(arena: Arena, topic: str) -> int:
    reader = Consumer({"bootstrap.servers": arena.bootstrap, "group.id": unique("reader"), "log_level": 0})
    try:
        return reader.get_watermark_offsets(TopicPartition(topic, 0), timeout=20)[1]
    finally:
        reader.close()


# Of the app


@pytest.mark.dense
def test_brokers_group_offsets_and_client_properties(
    arena: Arena, group: str, sqlite_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = fed(arena)
    say(
        monkeypatch,
        BROKERS=arena.bootstrap,
        GROUP=group,
        OFFSETS=sqlite_url,
        KAFKA_SESSION_TIMEOUT_MS=arena.quick({})["session.timeout.ms"],
        KAFKA_HEARTBEAT_INTERVAL_MS=250,
    )
    app = App(NOWHERE, group="not-this-one", offsets="memory://", kafka={"session.timeout.ms": 45_000})
    seen = collecting(app, topic)
    (plan,) = app.plans()
    assert (plan.settings["session.timeout.ms"], plan.settings["heartbeat.interval.ms"]) == (
        str(arena.quick({})["session.timeout.ms"]),
        "250",
    )
    report = app.catch_up(idle=0.2)
    assert len(seen) == 10
    assert report.committed == {Partition(topic, 0): 10}
    assert open_store(sqlite_url).load(group, [Partition(topic, 0)])[Partition(topic, 0)].next_offset == 10


def test_the_code_may_say_nothing_of_brokers_and_group(
    arena: Arena, group: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = fed(arena)
    say(monkeypatch, BROKERS=arena.bootstrap, GROUP=group)
    app = App(kafka=arena.quick({}))
    seen = collecting(app, topic)
    app.catch_up(idle=0.2)
    assert len(seen) == 10


def test_shutdown(arena: Arena, group: str, tmp_path: Path) -> None:
    """The code gives an hour; the variable three seconds, in which this handler does not end."""
    topic = fed(arena, 1)
    program = tmp_path / "slow.py"
    program.write_text(
        f"import time\n"
        f"from kconsume import App\n"
        f"app = App({arena.bootstrap!r}, group={group!r}, kafka={arena.quick({})!r}, shutdown=3600.0)\n"
        f"@app.consume({topic!r})\n"
        f"def handle(value: str) -> None:\n"
        f"    print('begun', flush=True)\n"
        f"    time.sleep(3600)\n"
        f"app.run()\n"
    )
    environment = {**os.environ, "KCONSUME_SHUTDOWN": "3"}
    process = subprocess.Popen(
        [sys.executable, str(program)], cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"begun\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 3, "the deadline passed, with work abandoned"
    finally:
        process.kill()
        process.wait(10)
        assert process.stdout is not None
        process.stdout.close()


def test_memory(arena: Arena, group: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of records that are larger than what the variable allows, few wait for their batch; in the code there is room."""
    topic, sizes = arena.topic(1), list[int]()
    arena.produce(topic, [b"x" * 50_000] * 40, 0)
    say(monkeypatch, MEMORY="100k")
    app = App(arena.bootstrap, group=group, kafka=arena.quick({}), memory=1 << 30)

    @app.consume(topic, batch=Batching(1000, wait=60.0))
    def handle(batch: Batch) -> None:
        sizes.append(len(batch))

    assert app.memory == 102_400
    with app.running():
        eventually(lambda: sum(sizes) >= 38, what="handed over though the wait is not over")


# Of a handler


def test_topics(arena: Arena, group: str, monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = fed(arena, 3), fed(arena, 4)
    say(monkeypatch, HANDLER_HANDLE_TOPICS=f"{one}, {two}")
    app = arena.app(group)
    seen = collecting(app, "not-this-one")
    app.catch_up(idle=0.2)
    assert len(seen) == 7


@pytest.mark.dense
def test_group_and_offsets(arena: Arena, group: str, sqlite_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    topic = fed(arena)
    say(monkeypatch, HANDLER_HANDLE_GROUP=f"{group}-mine", HANDLER_HANDLE_OFFSETS=sqlite_url)
    app = arena.app(group)
    collecting(app, topic, group="not-this-one", offsets="memory://")
    app.catch_up(idle=0.2)
    stored = open_store(sqlite_url).load(f"{group}-mine", [Partition(topic, 0)])
    assert stored[Partition(topic, 0)].next_offset == 10


def test_concurrency(arena: Arena, group: str, monkeypatch: pytest.MonkeyPatch) -> None:
    topic = fed(arena, 5, partitions=4)
    say(monkeypatch, HANDLER_HANDLE_CONCURRENCY=1)
    app, running, most, lock = arena.app(group), set[int](), list[int](), threading.Lock()

    @app.consume(topic, concurrency=4)
    def handle(record: Record) -> None:
        with lock:
            running.add(record.partition)
            most.append(len(running))
        time.sleep(0.01)
        with lock:
            running.discard(record.partition)

    app.catch_up(idle=0.2)
    assert (len(most), max(most)) == (20, 1)


def test_chunk(arena: Arena, group: str, sqlite_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One record a transaction: what failed takes no neighbour with it, so none is called again."""
    topic = fed(arena, 30)
    say(monkeypatch, HANDLER_HANDLE_CHUNK=1)
    app, calls = arena.app(group, sqlite_url), list[str]()

    @app.consume(topic, chunk=1000, on_error="skip")
    def handle(value: str, tx: sqlite3.Connection) -> None:
        calls.append(value)
        if value == "29":
            raise LookupError

    app.catch_up(idle=0.2)
    assert calls == [str(n) for n in range(30)]


def test_executor(arena: Arena, group: str, monkeypatch: pytest.MonkeyPatch) -> None:
    topic, threads = fed(arena), set[str]()
    say(monkeypatch, HANDLER_HANDLE_EXECUTOR="inline")
    app = arena.app(group)

    @app.consume(topic, executor="thread")
    def handle(value: str) -> None:
        threads.add(threading.current_thread().name)

    app.catch_up(idle=0.2)
    assert threads == {f"kconsume-{group}"}, "the thread that polls"


@pytest.mark.dense
def test_start(arena: Arena, group: str, monkeypatch: pytest.MonkeyPatch) -> None:
    topic = fed(arena)
    say(monkeypatch, HANDLER_HANDLE_START="latest")
    app = arena.app(group)
    seen = collecting(app, topic, start="earliest")
    assert app.catch_up(idle=0.2).committed == {Partition(topic, 0): 10}
    assert seen == []


def test_on_error(arena: Arena, group: str, monkeypatch: pytest.MonkeyPatch) -> None:
    topic = fed(arena)
    say(monkeypatch, HANDLER_HANDLE_ON_ERROR="skip")
    app = arena.app(group)

    @app.consume(topic, on_error="stop")
    def handle(value: str) -> None:
        if value == "3":
            raise LookupError

    report = app.catch_up(idle=0.2)
    assert (report.handled, report.skipped) == (9, 1)


@pytest.mark.dense
def test_to(arena: Arena, group: str, monkeypatch: pytest.MonkeyPatch) -> None:
    topic, out, other = fed(arena), arena.topic(1), arena.topic(1)
    say(monkeypatch, HANDLER_HANDLE_TO=out)
    app = arena.app(group)

    @app.consume(topic, to=other)
    def handle(value: str) -> str:
        return value

    app.catch_up(idle=0.2)
    assert (written_to(arena, out), written_to(arena, other)) == (10, 0)


@pytest.mark.dense
def test_to_makes_a_handler_that_returns_something_work(
    arena: Arena, group: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic, out = fed(arena), arena.topic(1)
    app = arena.app(group)

    def handle(value: str) -> str:
        return value

    with pytest.raises(InvalidHandler, match="nothing takes it"):
        app.consume(topic)(handle)
    say(monkeypatch, HANDLER_HANDLE_TO=out)
    app = arena.app(group)
    app.consume(topic)(handle)
    app.catch_up(idle=0.2)
    assert written_to(arena, out) == 10


def test_rate(arena: Arena, group: str, monkeypatch: pytest.MonkeyPatch) -> None:
    topic = fed(arena)
    say(monkeypatch, HANDLER_HANDLE_RATE="4/3600")
    app = arena.app(group)
    seen = collecting(app, topic, rate=Rate(1000))
    with app.running():
        eventually(lambda: len(seen) == 4, what="four, and no more for an hour")
    assert len(seen) == 4


def test_batch(arena: Arena, group: str, monkeypatch: pytest.MonkeyPatch) -> None:
    topic, sizes = fed(arena), list[int]()
    say(monkeypatch, HANDLER_HANDLE_BATCH="4/60")
    app = arena.app(group)

    @app.consume(topic, batch=Batching(1000, wait=0.0))
    def handle(values: list[str]) -> None:
        sizes.append(len(values))

    app.catch_up(idle=0.2)
    assert sizes == [4, 4, 2]


def test_partitions(arena: Arena, group: str, monkeypatch: pytest.MonkeyPatch) -> None:
    topic, seen = fed(arena, 3, partitions=4), set[int]()
    say(monkeypatch, HANDLER_HANDLE_PARTITIONS="1,3")
    app = arena.app(group)

    @app.consume(topic)
    def handle(record: Record) -> None:
        seen.add(record.partition)

    assert app.catch_up(idle=0.2).handled == 6
    assert seen == {1, 3}


def test_also_of_a_router_s_handler(arena: Arena, group: str, monkeypatch: pytest.MonkeyPatch) -> None:
    topic = fed(arena)
    say(monkeypatch, HANDLER_HANDLE_GROUP=f"{group}-mine", HANDLER_HANDLE_START="latest")
    router, app, seen = Router(group="not-this-one"), arena.app(group), list[str]()

    @router.consume(topic)
    def handle(value: str) -> None:
        seen.append(value)

    app.include(router)
    assert [registration.group for registration in app.registrations] == [f"{group}-mine"]
    app.catch_up(idle=0.2)
    assert seen == []


# What cannot be kept, and what nobody reads


@pytest.mark.parametrize(
    ("variable", "value", "sentence"),
    [
        ("HANDLER_HANDLE_BATCH", "5", "handle gets one record at a time, so batch= means nothing"),
        ("HANDLER_HANDLE_ORDER", "key", "order='key' is unknown to this version"),
        ("HANDLER_HANDLE_TO", "no spaces", "to= takes the name of a topic"),
        ("HANDLER_HANDLE_CONCURRENCY", "0", "KCONSUME_HANDLER_HANDLE_CONCURRENCY='0' cannot be read"),
        ("HANDLER_HANDLE_RATE", "fast", "KCONSUME_HANDLER_HANDLE_RATE='fast' cannot be read"),
        ("HANDLER_HANDLE_ON_ERROR", "ignore", "KCONSUME_HANDLER_HANDLE_ON_ERROR='ignore' cannot be read"),
        ("SHUTDOWN", "soon", "KCONSUME_SHUTDOWN='soon' cannot be read"),
        ("KAFKA_ENABLE_AUTO_COMMIT", "true", "KCONSUME_KAFKA_ENABLE_AUTO_COMMIT is refused"),
        ("KAFKA_GROUP_ID", "mine", "set KCONSUME_GROUP instead"),
        ("OFFSETS", "shop.db", "KCONSUME_OFFSETS='shop.db' cannot be read"),
        ("OFFSETS", "mongodb://db", "mongodb"),
    ],
)
def test_a_value_that_cannot_be_kept_is_refused_before_anything_runs(
    variable: str, value: str, sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    say(monkeypatch, **{variable: value})
    with pytest.raises(ConfigurationError, match=sentence):
        collecting(App(NOWHERE, group="shop"), "orders")


@pytest.mark.parametrize(
    ("variable", "meant"),
    [
        ("GRUOP", "KCONSUME_GROUP"),
        ("HANDLER_HANDEL_RATE", "KCONSUME_HANDLER_HANDLE_RATE"),
        ("HANDLER_HANDLE_CONCURENCY", "KCONSUME_HANDLER_HANDLE_CONCURRENCY"),
        ("KAKFA_SESSION_TIMEOUT_MS", "KCONSUME_KAFKA_SESSION_TIMEOUT_MS"),
    ],
)
def test_a_misspelt_variable_is_said_when_the_app_starts_and_changes_nothing(
    arena: Arena,
    group: str,
    variable: str,
    meant: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    topic = fed(arena, 1)
    say(monkeypatch, **{variable: "50"})
    app = arena.app(group)
    seen = collecting(app, topic)
    with caplog.at_level(logging.WARNING, "kconsume"):
        app.catch_up(idle=0.2)
    assert len(seen) == 1
    said = [line for line in caplog.messages if f"environment variable not read variable=KCONSUME_{variable} " in line]
    assert said == [f'environment variable not read variable=KCONSUME_{variable} hint="did you mean {meant}?"']


def test_those_that_are_read_are_not_said(
    arena: Arena, group: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    topic = fed(arena, 1)
    say(monkeypatch, GROUP=group, HANDLER_HANDLE_RATE="50", APP="shop:app", LOG_LEVEL="info")
    app = arena.app("not-this-one")
    collecting(app, topic)
    with caplog.at_level(logging.WARNING, "kconsume"):
        app.catch_up(idle=0.2)
    assert [line for line in caplog.messages if "environment variable not read" in line] == []


def test_a_password_in_a_variable_is_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("OFFSETS", "HANDLER_HANDLE_OFFSETS"):
        say(monkeypatch, **{variable: "mongodb://shop:hunter2@db/shop"})
        make: Callable[[], object] = lambda: collecting(App(NOWHERE, group="shop"), "orders")  # noqa: E731
        with pytest.raises(ConfigurationError) as refused:
            make()
        assert "hunter2" not in str(refused.value)
        monkeypatch.delenv(f"KCONSUME_{variable}")

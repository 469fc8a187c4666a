"""As `test_store_down.py`, with Redis and SQLite: down at assign, in work, at the commit and at shutdown (P8, P9)."""

from __future__ import annotations

import fcntl
import os
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, Protocol

import pytest
from redis.client import Pipeline

from kconsume import App, Record
from kconsume.backends.sqlite import connection
from kconsume.testing.services import KafkaService, LocalRedis
from tests.chaos.effects import Effects, RedisEffects, SqliteEffects
from tests.chaos.fleet import fleet
from tests.contract.redis_proxy import Cut, RedisProxy
from tests.fix_arena import QUICK
from tests.integration.test_store_down import PARTITIONS, RECORDS, filled, hurry, job, stop_in_time, take_time
from tests.waiting import eventually

__all__ = ["filled", "hurry"]

_QUEUED = b"\xa5RPUSH"
"""A command in a queue: in the request that applies it, and in no other."""


class Outage(Protocol):
    """A store that can be taken away."""

    effects: Effects

    def down(self) -> None: ...

    def up(self) -> None: ...

    def lose_a_commit(self) -> threading.Event:
        """The next commit does not succeed, and sets the event."""
        ...


class RedisOutage:
    def __init__(self, proxy: RedisProxy) -> None:
        self._proxy = proxy
        self.effects: Effects = RedisEffects(proxy.behind, proxy.url)

    def down(self) -> None:
        self._proxy.down()

    def up(self) -> None:
        self._proxy.up()

    def lose_a_commit(self) -> threading.Event:
        """It is done, and its answer lost."""
        hit = threading.Event()

        def once() -> Cut:
            if hit.is_set():
                return Cut.PASS
            hit.set()
            return Cut.AFTER

        self._proxy.decide = once
        return hit


class SqliteOutage:
    """Another program holds the file. It queues at the turnstile once, or it would wait for the end of the work."""

    def __init__(self, path: Path, stranger: sqlite3.Connection, monkeypatch: pytest.MonkeyPatch) -> None:
        self.effects: Effects = SqliteEffects(path)
        self._path = path
        self._stranger = stranger
        self._monkeypatch = monkeypatch

    def down(self) -> None:
        turnstile = os.open(f"{self._path}-turnstile", os.O_RDWR | os.O_CREAT)
        try:
            fcntl.flock(turnstile, fcntl.LOCK_EX)
            self._stranger.execute("begin immediate")
        finally:
            os.close(turnstile)

    def up(self) -> None:
        self._stranger.execute("rollback")

    def lose_a_commit(self) -> threading.Event:
        hit, execute = threading.Event(), connection.LentSqliteConnection.execute

        def failing(self: connection.LentSqliteConnection, sql: str, *values: Any) -> sqlite3.Cursor:
            if sql.startswith("commit") and not hit.is_set():
                hit.set()
                error = sqlite3.OperationalError("disk I/O error")
                error.sqlite_errorcode = sqlite3.SQLITE_IOERR_FSYNC
                raise error
            return execute(self, sql, *values)

        self._monkeypatch.setattr(connection.LentSqliteConnection, "execute", failing)
        return hit


@contextmanager
def sqlite_outage(path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SqliteOutage]:
    connect = sqlite3.connect
    with closing(connect(path, isolation_level=None, timeout=5.0, check_same_thread=False)) as stranger:
        # The app's connections give up soon; in the processes of a fleet they wait as they do.
        monkeypatch.setattr(sqlite3, "connect", lambda *given, **named: connect(*given, **{**named, "timeout": 0.1}))
        yield SqliteOutage(path, stranger, monkeypatch)


@pytest.fixture(params=["redis", "sqlite"])
def outage(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Outage]:
    if request.param == "redis":
        with LocalRedis() as server, RedisProxy(server.port, _QUEUED) as proxy:
            yield RedisOutage(proxy)
    else:
        with sqlite_outage(tmp_path / "shop.db", monkeypatch) as made:
            yield made


@pytest.fixture
def app(kafka: KafkaService, filled: str, group: str, outage: Outage, hurry: threading.Event) -> App:
    """Whose handler leaves an effect for each record."""
    app = App(kafka.bootstrap, group=group, offsets=outage.effects.offsets, kafka=QUICK)
    if isinstance(outage, RedisOutage):

        @app.consume(filled)
        def push(record: Record, tx: Pipeline) -> None:
            tx.rpush(f"seen:{record.partition}", f"{record.offset} here")
            take_time(record, hurry)

    else:

        @app.consume(filled)
        def insert(record: Record, tx: sqlite3.Connection) -> None:
            tx.execute("insert into seen values (?, ?, 'here')", (record.partition, record.offset))
            take_time(record, hurry)

    return app


def all_once(effects: Effects) -> None:
    eventually(lambda: effects.rows >= RECORDS, within=60, what="work is done by itself")
    assert (effects.rows, effects.distinct) == (RECORDS, RECORDS)


def test_nothing_is_consumed_while_the_store_is_down_at_assign(
    app: App, outage: Outage, caplog: pytest.LogCaptureFixture, hurry: threading.Event
) -> None:
    outage.down()
    app.startup = 0  # or the block would not be entered
    with app.running():
        eventually(lambda: "claim failed partitions=" in caplog.text, what="the reason is in the log")
        assert outage.effects.rows == 0
        hurry.set()
        outage.up()
        all_once(outage.effects)


def test_work_stops_while_the_store_is_down_and_resumes_by_itself(
    app: App, outage: Outage, caplog: pytest.LogCaptureFixture, hurry: threading.Event
) -> None:
    with app.running():
        eventually(lambda: outage.effects.rows > 20, what="work is under way")
        outage.down()
        eventually(lambda: caplog.text.count("stopped partition=") >= PARTITIONS, what="each partition stops")
        done = outage.effects.rows
        eventually(lambda: "claim failed partitions=" in caplog.text, what="it is tried again, and says so")
        assert outage.effects.rows == done < RECORDS
        hurry.set()
        outage.up()
        all_once(outage.effects)


def test_a_commit_that_is_lost_is_asked_about_and_not_repeated(
    app: App, outage: Outage, caplog: pytest.LogCaptureFixture, hurry: threading.Event
) -> None:
    with app.running():
        eventually(lambda: outage.effects.rows > 20, what="work is under way")
        hit = outage.lose_a_commit()
        assert hit.wait(20)
        eventually(lambda: "stopped partition=" in caplog.text, what="the partition stops")
        hurry.set()
        all_once(outage.effects)


# At shutdown: a process, because its end is what counts


def test_a_process_whose_store_is_down_ends_in_time_with_a_report(
    kafka: KafkaService, filled: str, group: str, outage: Outage, tmp_path: Path
) -> None:
    effects = outage.effects
    with fleet(job(kafka, filled, group, effects, tmp_path)) as workers:
        worker = workers.grow()
        workers.await_work(lambda: effects.rows > 20, within=60, what="work is under way")
        outage.down()
        eventually(lambda: "stopped partition=" in worker.log, what="it has noticed")
        assert stop_in_time(workers, worker) in (0, 3), worker.log  # 3: it was waiting for the file just then
        outage.up()
        workers.grow()
        workers.await_work(lambda: effects.rows >= RECORDS, within=60, what="the next process does the rest")
    assert (effects.rows, effects.distinct) == (RECORDS, RECORDS)

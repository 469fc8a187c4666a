"""Calls that hang, under `timeout=`: the record fails, its lane goes on, and what hangs can write nothing any more."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import psycopg
import pytest
import redis
from redis.client import Pipeline
from sqlalchemy import NullPool, create_engine, text
from sqlalchemy.orm import Session

from kconsume import App, Batching, ConfigurationError, DeadLetter, Record, Retry
from kconsume._embedded.controls import KafkaControls
from kconsume.backends import PostgresStore
from kconsume.backends.capabilities import Capabilities
from kconsume.backends.postgres.transaction import PostgresTx
from kconsume.errors import HandlerTimeout, TransactionMisused
from tests.contract.queue_store import Queue, QueueStore
from tests.contract.test_output import texts
from tests.fix_arena import Arena
from tests.waiting import eventually

TIMEOUT = 2.0
"""Seconds: enough for any call that does not hang, also on a busy machine."""
VALUES = ["a", "b", "hang", "c", "d"]
GOOD = ["a", "b", "c", "d"]


@pytest.fixture
def broker(embedded: KafkaControls) -> Arena:
    return Arena("embedded", embedded.bootstrap, embedded)


class Hang:
    """Waits on one value until it is released, then tries to write, and notes what came of it."""

    def __init__(self) -> None:
        self.entered, self.release, self.over = threading.Event(), threading.Event(), threading.Event()
        self.late: list[BaseException | None] = []

    def __call__(self, value: str, write: Callable[[], object]) -> None:
        if value != "hang":
            return
        self.entered.set()
        try:
            self.release.wait(60)
            write()
            self.late.append(None)
        except BaseException as error:
            self.late.append(error)
            raise
        finally:
            self.over.set()

    def let_go(self) -> None:
        self.release.set()
        assert self.over.wait(20)


def consumed(broker: Arena, app: App, handler: Callable[..., Any], **options: Any) -> list[str]:
    """Run it over the values. What hangs ends as a dead letter; answers which those are."""
    letters = broker.topic(1)
    topic = broker.topic(1)
    broker.produce(topic, VALUES)
    app.consume(topic, timeout=TIMEOUT, on_error=DeadLetter(letters), **options)(handler)
    app.catch_up(idle=0.2)
    return texts(broker, letters)


# In the store's transaction


def test_on_sqlite_the_file_is_free_for_the_next_and_a_late_write_is_refused(
    broker: Arena, group: str, sqlite_url: str
) -> None:
    path, hang = sqlite_url.removeprefix("sqlite:///"), Hang()
    with sqlite3.connect(path) as database:
        database.execute("create table effects (value text)")
    database.close()
    app = broker.app(group, sqlite_url)

    def write(value: str, tx: sqlite3.Connection) -> None:
        cursor = tx.execute("insert into effects values (?)", (value,))
        hang(value, lambda: cursor.execute("insert into effects values (?)", ("late",)))

    dead = consumed(broker, app, write)
    hang.let_go()
    with sqlite3.connect(path) as database:
        assert [value for (value,) in database.execute("select value from effects")] == GOOD
    database.close()
    assert dead == ["hang"]
    assert isinstance(hang.late[0], sqlite3.Error | TransactionMisused)


def test_on_sqlite_a_long_statement_is_broken_off(broker: Arena, group: str, sqlite_url: str) -> None:
    path, failed = sqlite_url.removeprefix("sqlite:///"), list[BaseException]()
    with sqlite3.connect(path) as database:
        database.execute("create table effects (value text)")
    database.close()
    for_ever = "with recursive n(i) as (select 1 union all select i + 1 from n) select count(*) from n"

    def write(value: str, tx: sqlite3.Connection) -> None:
        try:
            tx.execute("insert into effects values (?)", (value,))
            if value == "hang":
                tx.execute(for_ever)
        except BaseException as error:  # that it was interrupted; or, where the connection is closed by then, anything
            failed.append(error)
            raise

    dead = consumed(broker, broker.app(group, sqlite_url), write)
    with sqlite3.connect(path) as database:
        assert [value for (value,) in database.execute("select value from effects")] == GOOD
    database.close()
    assert dead == ["hang"]
    eventually(lambda: failed, what="the statement was broken off")


HOT = "update stock set reserved = reserved + 1"


def shelves(database: psycopg.Connection[Any]) -> Callable[[], list[tuple[Any, ...]]]:
    database.execute("create table effects (value text); create table stock (reserved int)")
    database.execute("insert into stock values (0)")
    return lambda: database.execute("select (select array_agg(value) from effects), reserved from stock").fetchall()


def test_on_postgres_its_locks_are_free_at_once_and_a_late_write_is_refused(
    broker: Arena, group: str, postgres_url: str, database: psycopg.Connection[Any]
) -> None:
    look, hang = shelves(database), Hang()

    def reserve(value: str, tx: psycopg.Connection) -> None:
        tx.execute("insert into effects values (%s)", (value,))
        cursor = tx.execute(HOT)  # the same row for all, so that the next one would wait for what hangs
        hang(value, lambda: cursor.execute(HOT))

    dead = consumed(broker, broker.app(group, postgres_url), reserve)
    hang.let_go()
    assert (look(), dead) == ([(GOOD, 4)], ["hang"])
    assert isinstance(hang.late[0], TransactionMisused)


def test_on_postgres_a_long_statement_is_ended_in_the_server(
    broker: Arena, group: str, postgres_url: str, database: psycopg.Connection[Any]
) -> None:
    look = shelves(database)

    def reserve(value: str, tx: psycopg.Connection) -> None:
        tx.execute("insert into effects values (%s)", (value,))
        tx.execute(HOT)
        if value == "hang":
            tx.execute("select pg_sleep(300)")

    dead = consumed(broker, broker.app(group, postgres_url), reserve)
    assert (look(), dead) == ([(GOOD, 4)], ["hang"])
    sleeping = "select 1 from pg_stat_activity where query like '%pg_sleep(300)%' and pid <> pg_backend_pid()"
    eventually(lambda: not database.execute(sleeping).fetchall(), what="the server has ended it")


def test_on_postgres_what_is_not_taken_away_holds_the_row_and_the_lane(
    broker: Arena, group: str, postgres_url: str, database: psycopg.Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control: without it, the next record waits for what hangs."""
    look, hang = shelves(database), Hang()
    monkeypatch.setattr(PostgresTx, "sever", lambda self: hang.release.wait(60))
    topic, app = broker.topic(1), broker.app(group, postgres_url)
    broker.produce(topic, VALUES)

    @app.consume(topic, timeout=TIMEOUT, on_error="skip", chunk=1)
    def reserve(value: str, tx: psycopg.Connection) -> None:
        tx.execute("insert into effects values (%s)", (value,))
        tx.execute(HOT)
        hang(value, lambda: None)

    with app.running():
        try:
            assert hang.entered.wait(20)
            with pytest.raises(AssertionError, match="the next record"):
                eventually(lambda: look()[0][1] > 2, within=2 * TIMEOUT, what="the next record is handled")
        finally:
            hang.release.set()
        eventually(lambda: look()[0][1] == 4, what="then they are")


def test_with_sqlalchemy_its_locks_are_free_at_once_and_a_late_write_is_refused(
    broker: Arena, group: str, postgres_url: str, database: psycopg.Connection[Any]
) -> None:
    look, hang = shelves(database), Hang()
    engine = create_engine(postgres_url.replace("postgresql://", "postgresql+psycopg://"), poolclass=NullPool)
    app = App(broker.bootstrap, group=group, offsets=PostgresStore(engine=engine), kafka=broker.quick({}))

    def reserve(value: str, session: Session) -> None:
        session.execute(text("insert into effects values (:value)"), {"value": value})
        session.execute(text(HOT))
        hang(value, lambda: session.execute(text(HOT)))

    dead = consumed(broker, app, reserve)
    hang.let_go()
    assert (look(), dead) == ([(GOOD, 4)], ["hang"])
    assert hang.late[0] is not None, "refused"
    engine.dispose()


def test_on_redis_what_it_queued_is_dropped_and_a_late_command_is_refused(
    broker: Arena, group: str, redis_url: str
) -> None:
    hang, key = Hang(), f"effects:{group}"

    def push(value: str, tx: Pipeline) -> None:
        tx.rpush(key, value)
        hang(value, lambda: tx.rpush(key, "late"))

    dead = consumed(broker, broker.app(group, redis_url), push)
    hang.let_go()
    with redis.Redis.from_url(redis_url, decode_responses=True) as server:
        assert (server.lrange(key, 0, -1), dead) == (GOOD, ["hang"])
    assert isinstance(hang.late[0], TransactionMisused)


def test_a_store_that_cannot_take_its_transaction_away_is_refused_with_a_timeout() -> None:
    class Keeps(QueueStore):
        @property
        def capabilities(self) -> Capabilities:
            return replace(super().capabilities, severs=False)

    app = App("localhost:9092", group="shop", offsets=Keeps())
    with pytest.raises(ConfigurationError, match="cannot end while a hanging thread uses it"):

        @app.consume("orders", timeout=1.0)
        def handle(value: bytes, tx: Queue) -> None: ...


# Without one


@pytest.mark.parametrize("form", ["thread", "async", "batch"])
def test_a_call_that_hangs_is_a_failure_and_its_lane_goes_on(broker: Arena, group: str, form: str) -> None:
    hang, seen, ended = Hang(), list[str](), list[str]()

    def one(value: str) -> None:
        hang(value, lambda: None)
        seen.append(value)

    async def later(value: str) -> None:
        try:
            await asyncio.sleep(3600 if value == "hang" else 0)
            seen.append(value)
        finally:
            ended.append(value)

    def many(values: list[str]) -> None:
        for value in values:
            hang(value, lambda: None)
        seen.extend(values)

    forms: dict[str, Callable[..., Any]] = {"thread": one, "async": later, "batch": many}
    options = {"batch": Batching(records=2, wait=0.1)} if form == "batch" else {}
    app = broker.app(group)
    dead = consumed(broker, app, forms[form], **options)
    assert (seen, dead) == (GOOD, ["hang"])
    assert form != "async" or "hang" in ended, "it was cancelled"
    hang.release.set()


def test_it_is_tried_again_as_other_failures_are_and_each_attempt_has_the_same_limit(broker: Arena, group: str) -> None:
    release, attempts, seen = threading.Event(), list[int](), list[str]()
    topic, app = broker.topic(1), broker.app(group)
    broker.produce(topic, VALUES)

    @app.consume(topic, timeout=TIMEOUT, retry=Retry(3, wait=0.0, on=HandlerTimeout))
    def handle(value: str, record: Record) -> None:
        if value == "hang":
            attempts.append(record.attempt)
            if record.attempt < 3:
                release.wait(60)
        seen.append(value)

    app.catch_up(idle=0.2)
    assert (attempts, seen) == ([1, 2, 3], VALUES)
    release.set()


def test_without_a_policy_the_app_stops_before_it_and_says_why(broker: Arena, group: str) -> None:
    release, seen = threading.Event(), list[str]()
    topic, app = broker.topic(1), broker.app(group)
    broker.produce(topic, VALUES)

    @app.consume(topic, timeout=TIMEOUT)
    def handle(value: str) -> None:
        if value == "hang":
            release.wait(60)
        seen.append(value)

    with pytest.raises(HandlerTimeout, match="handle took longer than timeout=2 s and was given up"):
        app.catch_up(idle=0.2)
    assert seen == ["a", "b"]
    release.set()


def test_while_one_partition_hangs_others_go_on(broker: Arena, group: str) -> None:
    release, entered, seen = threading.Event(), threading.Event(), list[str]()
    topic, app = broker.topic(2), broker.app(group)
    broker.produce(topic, ["hang"], 0)

    @app.consume(topic, timeout=60.0)
    def handle(value: str) -> None:
        if value == "hang":
            entered.set()
            release.wait(60)
        seen.append(value)

    with app.running():
        try:
            assert entered.wait(20)
            broker.produce(topic, GOOD, 1)
            eventually(lambda: seen == GOOD, what="the other partition goes on")
        finally:
            release.set()


def test_its_limit_can_come_from_the_environment(broker: Arena, group: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KCONSUME_HANDLER_HANDLE_TIMEOUT", "2.5")
    app = broker.app(group)

    @app.consume("orders")
    def handle(value: str) -> None: ...

    assert app.registrations[0].plan().options.timeout == 2.5

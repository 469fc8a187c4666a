"""What goes wrong with a real PostgreSQL: each has its error, and nothing is passed by mistake."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import cast

import psycopg
import pytest
from sqlalchemy import Engine, NullPool, create_engine
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from kconsume import App, Record
from kconsume.backends import PostgresStore, open_store
from kconsume.backends.base import Position, Tx
from kconsume.backends.claim import granted
from kconsume.errors import (
    ConfigurationError,
    Conflict,
    Fenced,
    StoreUnavailable,
    TransactionMisused,
)
from kconsume.records import Partition
from kconsume.testing import EmbeddedKafka
from kconsume.testing.services import LocalPostgres
from tests.fix_kafka import produce
from tests.integration.postgres_roles import a_role, a_server_with_passwords, as_user

ORDERS = Partition("orders", 0)
REFUSING = """
    create table effects (id integer);
    create sequence tries;
    create function refuse() returns trigger language plpgsql as $$ begin
        if nextval('tries') <= {times} then raise exception 'on purpose' using errcode = '{code}'; end if;
        return new;
    end $$;
    create trigger refuse before insert or update on {table} for each row execute function refuse();
"""
"""A table whose first writes are refused with an error of choice. A sequence counts them, for it is not rolled back."""


@pytest.fixture
def store(postgres_url: str) -> Iterator[PostgresStore]:
    store = PostgresStore(postgres_url)
    yield store
    store.close()


def start(partitions: Sequence[Partition]) -> dict[Partition, Position]:
    return {partition: Position(0) for partition in partitions}


def claimed(store: PostgresStore) -> Position:
    return granted(store.claim("shop", [ORDERS], "me", start))[ORDERS]


def lent(tx: Tx) -> psycopg.Connection:
    """What a handler gets."""
    return cast(psycopg.Connection, tx.connection)


def refuse(database: psycopg.Connection, code: str, *, times: int = 1_000_000, table: str = "effects") -> None:
    database.execute(REFUSING.format(code=code, times=times, table=table))


# Who is not let in


def test_a_role_that_is_not_there_is_a_configuration_error(postgres_url: str) -> None:
    with pytest.raises(ConfigurationError, match=r"refused the login .*check user, password and database"):
        PostgresStore(as_user(postgres_url, "nobody_at_all")).groups()


def test_a_database_that_is_not_there_is_a_configuration_error(postgres_url: str) -> None:
    with pytest.raises(ConfigurationError, match="does not exist"):
        PostgresStore(f"{postgres_url}_gone").groups()


def test_a_host_that_is_not_there_is_unavailable_and_tried_again() -> None:
    with pytest.raises(StoreUnavailable, match="cannot be reached"):
        open_store("postgresql://shop:hunter2@localhost:1/shop").groups()


def test_a_role_that_is_not_there_stops_an_app_before_it_consumes_anything(postgres_url: str) -> None:
    with EmbeddedKafka({"orders": 1}) as broker:
        app, seen = one_handler(broker, as_user(postgres_url, "nobody_at_all"))
        with pytest.raises(ConfigurationError, match="refused the login"):
            app.catch_up(idle=0.1)
    assert seen == []


def test_a_wrong_password_stops_an_app_before_it_consumes_anything_and_is_not_shown(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG)
    with a_server_with_passwords() as address, EmbeddedKafka({"orders": 1}) as broker:
        app, seen = one_handler(broker, address("hunter2"))
        with pytest.raises(ConfigurationError, match="refused the login") as refused:
            app.catch_up(idle=0.1)
        assert seen == []
        assert "password authentication failed" in str(refused.value)
        assert "hunter2" not in str(refused.value) + caplog.text
        mended, seen = one_handler(broker, address("right"))
        mended.catch_up(idle=0.1)
        assert seen == [b"1", b"1"]


def one_handler(broker: EmbeddedKafka, offsets: str) -> tuple[App, list[bytes]]:
    """An app with one more record to handle, and what it has handled."""
    app, seen = App(broker.bootstrap, group="shop", offsets=offsets), list[bytes]()

    @app.consume("orders", partitions=[0])
    def reserve(order: bytes, tx: psycopg.Connection) -> None:
        seen.append(order)

    produce(broker.bootstrap, "orders", ["1"])
    return app, seen


def test_a_role_without_rights_on_the_tables_is_told_which(
    postgres_url: str, store: PostgresStore, database: psycopg.Connection
) -> None:
    claimed(store)
    with a_role(postgres_url) as role:
        database.execute(f"grant select on kconsume_schema, kconsume_offsets to {role.name}")
        theirs = PostgresStore(role.url)
        assert theirs.groups() == ["shop"]
        with pytest.raises(ConfigurationError, match="select, insert, update, delete on kconsume_offsets"):
            claimed(theirs)
        theirs.close()


# Servers that do not write


def test_a_standby_is_waited_for_and_not_an_end() -> None:
    with LocalPostgres() as server:
        store = PostgresStore(server.url)
        claimed(store)
        store.close()
        server.stop()
        beside, signal = server.data / "PG_VERSION", server.data / "standby.signal"
        signal.touch()
        os.chown(signal, beside.stat().st_uid, beside.stat().st_gid)
        server.start()
        store = PostgresStore(server.url)
        with pytest.raises(StoreUnavailable, match="target_session_attrs"):
            claimed(store)
        with pytest.raises(StoreUnavailable, match="target_session_attrs"), store.transaction("shop", ORDERS, 1):
            raise AssertionError("it must not begin")
        store.close()


def test_read_only_by_default_is_overruled_because_each_transaction_asks_to_write(
    postgres_url: str, store: PostgresStore, database: psycopg.Connection
) -> None:
    assert store.groups() == []
    database.execute(f"alter database {database.info.dbname} set default_transaction_read_only = on")
    later = PostgresStore(postgres_url)
    position = claimed(later)
    with later.transaction("shop", ORDERS, position.epoch) as tx:
        tx.advance(0, 5)
    assert later.load("shop", [ORDERS])[ORDERS].next_offset == 5
    later.close()


# Errors of the server, and whose fault they are


@pytest.mark.parametrize(
    ("code", "fault"),
    [
        ("53100", StoreUnavailable),  # disk full
        ("53200", StoreUnavailable),  # out of memory
        ("57P01", StoreUnavailable),  # an administrator ends us
        ("57P03", StoreUnavailable),  # starting up
        ("58030", StoreUnavailable),  # input, output
        ("25006", StoreUnavailable),  # read-only
        ("40001", Conflict),  # serialization
        ("40P01", Conflict),  # deadlock
        ("57014", None),  # statement_timeout: the statement is the handler's
        ("23505", None),  # a constraint
        ("42501", None),  # a right on the handler's own table
        ("P0001", None),  # an exception of their own
    ],
)
def test_an_error_in_a_handlers_statement_is_laid_at_the_right_door(
    store: PostgresStore, database: psycopg.Connection, code: str, fault: type[Exception] | None
) -> None:
    position = claimed(store)
    refuse(database, code)

    class Undo(Exception):
        pass

    def handle() -> None:
        with store.transaction("shop", ORDERS, position.epoch) as tx:
            with pytest.raises(psycopg.Error) as failed:
                lent(tx).execute("insert into effects values (1)")
            assert failed.value.sqlstate == code
            assert type(tx.fault(failed.value)) is (type(None) if fault is None else fault)
            raise Undo

    with pytest.raises(Undo):
        handle()
    assert store.load("shop", [ORDERS])[ORDERS].next_offset == 0


@pytest.mark.parametrize(("code", "error"), [("53100", StoreUnavailable), ("40001", Conflict), ("40P01", Conflict)])
def test_an_error_in_our_own_statement_is_the_stores(
    store: PostgresStore, database: psycopg.Connection, code: str, error: type[Exception]
) -> None:
    position = claimed(store)
    refuse(database, code, table="kconsume_offsets")
    with pytest.raises(error), store.transaction("shop", ORDERS, position.epoch) as tx:
        tx.advance(0, 1)
    with pytest.raises(StoreUnavailable):  # nothing of a handler's is in it: it is just tried again
        store.save("shop", {ORDERS: Position(1, position.epoch)})


FORMS = ["transaction", "pipelined", "async", "session", "async session"]


@pytest.mark.parametrize("code", ["57014", "XX000"])
@pytest.mark.parametrize("where", ["advance", "commit"])
@pytest.mark.parametrize("form", FORMS)
def test_a_statement_of_ours_that_is_given_up_is_the_stores_in_every_form(
    postgres_url: str, database: psycopg.Connection, code: str, where: str, form: str
) -> None:
    """As by a `statement_timeout` of the role. A record must not be skipped for it."""
    with _moved(postgres_url, form) as (store, move):
        position = claimed(store)
        if where == "advance":
            refuse(database, code, table="kconsume_offsets")
        else:
            database.execute(AT_COMMIT.format(code=code))
        with pytest.raises(StoreUnavailable):
            move(position.epoch)
        assert store.load("shop", [ORDERS])[ORDERS].next_offset == 0


@pytest.mark.parametrize("form", FORMS)
def test_what_a_trigger_of_theirs_says_at_commit_is_theirs_in_every_form(
    postgres_url: str, database: psycopg.Connection, form: str
) -> None:
    with _moved(postgres_url, form) as (store, move):
        position = claimed(store)
        database.execute(AT_COMMIT.format(code="P0001"))
        with pytest.raises((psycopg.errors.RaiseException, DBAPIError)):
            move(position.epoch)


AT_COMMIT = """
    create function refuse() returns trigger language plpgsql as
        $$ begin raise exception 'on purpose' using errcode = '{code}'; end $$;
    create constraint trigger refuse after update on kconsume_offsets deferrable initially deferred
        for each row execute function refuse()
"""


@contextmanager
def _moved(url: str, form: str) -> Iterator[tuple[PostgresStore, Callable[[int], None]]]:
    """A store, and what moves its offset by one in a transaction of this form."""
    at = url.replace("postgresql://", "postgresql+psycopg://", 1)
    engine: Engine | AsyncEngine | None = None
    if form.endswith("session"):
        engine = create_async_engine(at, poolclass=NullPool) if form.startswith("async") else create_engine(at)
    store = PostgresStore(url if engine is None else None, engine=engine)

    def move(epoch: int) -> None:
        begin = store.pipelined if form == "pipelined" else store.transaction
        with begin("shop", ORDERS, epoch) as tx:
            tx.advance(0, 1)

    async def move_awaited(epoch: int) -> None:
        async with store.async_transaction("shop", ORDERS, epoch) as tx:
            await tx.advance(0, 1)

    try:
        yield store, (lambda epoch: asyncio.run(move_awaited(epoch))) if form.startswith("async") else move
    finally:
        store.close()
        if isinstance(engine, Engine):
            engine.dispose()


@pytest.mark.parametrize(
    ("code", "table"),
    [
        ("53100", "effects"),
        ("40P01", "effects"),
        ("53100", "kconsume_offsets"),
        ("40P01", "kconsume_offsets"),
        ("57014", "kconsume_offsets"),
    ],
)
def test_work_goes_on_by_itself_when_the_trouble_is_over_and_each_effect_is_there_once(
    postgres_url: str, store: PostgresStore, database: psycopg.Connection, code: str, table: str
) -> None:
    claimed(store)
    refuse(database, code, times=3, table=table)
    with EmbeddedKafka({"orders": 1}) as broker:
        app = App(broker.bootstrap, group="shop", offsets=postgres_url)

        @app.consume("orders", partitions=[0])
        def reserve(order: str, tx: psycopg.Connection) -> None:
            tx.execute("insert into effects values (%s)", (order,))

        produce(broker.bootstrap, "orders", [str(n) for n in range(7)])
        app.catch_up(idle=0.2)
    assert [n for (n,) in database.execute("select id from effects order by id")] == list(range(7))
    assert database.execute("select next_offset from kconsume_offsets").fetchall() == [(7,)]


# A transaction that is not used as it should be


def test_a_transaction_that_was_kept_is_refused_and_writes_in_nobodys_transaction(
    postgres_url: str, database: psycopg.Connection
) -> None:
    database.execute("create table effects (id integer)")
    kept: list[psycopg.Connection] = []
    with EmbeddedKafka({"orders": 1}) as broker:
        app = App(broker.bootstrap, group="shop", offsets=postgres_url)

        @app.consume("orders", partitions=[0], chunk=1)
        def reserve(order: str, tx: psycopg.Connection) -> None:
            kept.append(tx)
            kept[0].execute("insert into effects values (%s)", (order,))

        produce(broker.bootstrap, "orders", ["1", "2"])
        with pytest.raises(TransactionMisused) as failed:
            app.catch_up(idle=0.1)
    assert "has ended" in str(failed.value)
    assert database.execute("select id from effects").fetchall() == [(1,)]


def test_whatever_is_called_on_a_transaction_that_is_over_is_refused(store: PostgresStore) -> None:
    position = claimed(store)
    with store.transaction("shop", ORDERS, position.epoch) as tx:
        kept, cursor = lent(tx), lent(tx).cursor()
        tx.advance(0, 1)
    for late in (
        lambda: kept.execute("select 1"),
        lambda: kept.cursor(),
        lambda: cursor.execute("select 1"),
        lambda: cursor.executemany("select %s", [(1,)]),
        lambda: cursor.stream("select 1"),
        lambda: cursor.copy("copy pg_class to stdout"),
        kept.commit,
        kept.rollback,
        kept.close,
    ):
        with pytest.raises(TransactionMisused, match="has ended"):
            late()


def test_the_same_holds_for_async_handlers(store: PostgresStore) -> None:
    position = claimed(store)

    async def late() -> None:
        async with store.async_transaction("shop", ORDERS, position.epoch) as tx:
            kept = cast(psycopg.AsyncConnection, tx.connection)
            await tx.advance(0, 1)
        with pytest.raises(TransactionMisused, match="has ended"):
            await kept.execute("select 1")
        with pytest.raises(TransactionMisused, match="has ended"):
            await kept.commit()

    asyncio.run(late())


@pytest.mark.parametrize("how", ["execute", "executemany", "stream", "copy"])
def test_an_async_handler_cannot_commit_its_effect_without_the_offset(
    store: PostgresStore, database: psycopg.Connection, how: str
) -> None:
    database.execute("create table effects (id integer)")
    position = claimed(store)

    async def handle() -> None:
        async with store.async_transaction("shop", ORDERS, position.epoch) as tx:
            connection = cast(psycopg.AsyncConnection, tx.connection)
            await connection.execute("insert into effects values (1)")
            cursor = connection.cursor()
            if how == "execute":
                await cursor.execute("select 1; commit")
            elif how == "executemany":
                await cursor.executemany("commit", [()])
            elif how == "stream":
                assert [row async for row in cursor.stream("commit")] == []
            else:
                async with cursor.copy("commit"):
                    pass

    with pytest.raises(TransactionMisused, match="must not call `commit`"):
        asyncio.run(handle())
    assert database.execute("select count(*) from effects").fetchone() == (0,)


@pytest.mark.parametrize("chunk", [1, 100])
@pytest.mark.parametrize(
    "how", ["commit()", "rollback()", "close()", "commit", "rollback", "swallowed", "commit;begin"]
)
def test_a_handler_that_ends_its_transaction_is_stopped_and_nothing_is_passed(
    postgres_url: str, database: psycopg.Connection, how: str, chunk: int
) -> None:
    with EmbeddedKafka({"orders": 1}) as broker:
        app = App(broker.bootstrap, group="shop", offsets=postgres_url)

        @app.consume("orders", partitions=[0], chunk=chunk)
        def reserve(order: str, record: Record, tx: psycopg.Connection) -> None:
            if how == "swallowed":
                with pytest.raises(psycopg.errors.UndefinedTable):
                    tx.execute("select * from there_is_none").fetchone()
            elif how.endswith("()"):
                getattr(tx, how[:-2])()
            else:
                for statement in how.split(";"):
                    tx.execute(statement)

        produce(broker.bootstrap, "orders", ["1", "2", "3"])
        with pytest.raises(TransactionMisused) as failed:
            app.catch_up(idle=0.1)
    assert ": " in str(failed.value)  # and then what to do
    assert database.execute("select next_offset from kconsume_offsets").fetchall() == [(0,)]


# Clocks


@pytest.mark.parametrize("jump", ["1970-01-01", "2999-12-31"])
def test_epochs_and_offsets_do_not_depend_on_clocks(
    store: PostgresStore, database: psycopg.Connection, jump: str
) -> None:
    """The stored time is for people: wherever the clock of who wrote it stood, the order of owners stays."""
    old = claimed(store)
    with store.transaction("shop", ORDERS, old.epoch) as tx:
        tx.advance(0, 10)
    database.execute("update kconsume_offsets set updated_at = %s", (jump,))
    new = claimed(store)
    assert (new.epoch, new.next_offset) == (old.epoch + 1, 10)
    database.execute("update kconsume_offsets set updated_at = %s", (jump,))
    with pytest.raises(Fenced), store.transaction("shop", ORDERS, old.epoch):
        raise AssertionError("it must not begin")
    with pytest.raises(Fenced):
        store.save("shop", {ORDERS: Position(11, old.epoch)})
    with store.transaction("shop", ORDERS, new.epoch) as tx:
        tx.advance(10, 20)
    database.execute("update kconsume_offsets set updated_at = %s", (jump,))
    store.save("shop", {ORDERS: Position(30, new.epoch)})
    assert store.load("shop", [ORDERS])[ORDERS].next_offset == 30

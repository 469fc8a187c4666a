"""What PostgresStore waits for, and for how long: rows that somebody keeps, servers that do not answer, roles that may
not end each other."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Any

import psycopg
import pytest
from sqlalchemy import create_engine, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from kconsume.backends import Position, PostgresStore
from kconsume.backends.claim import granted
from kconsume.backends.postgres import database as database_module
from kconsume.backends.postgres import schema, tables, takeover, tx_statements, watchdog
from kconsume.backends.postgres import transaction as postgres_tx
from kconsume.errors import Fenced, StoreUnavailable
from kconsume.records import Partition
from kconsume.testing.services import LocalPostgres
from tests.integration.postgres_roles import a_role
from tests.waiting import eventually

ORDERS, CLICKS = Partition("orders", 0), Partition("clicks", 0)
GROUP = "shop"
PIN = "insert into kconsume_offsets (group_id, topic, partition, next_offset, epoch) values ('shop', 'orders', 0, 0, 0)"


@pytest.fixture
def store(postgres_url: str) -> Iterator[PostgresStore]:
    with closing(PostgresStore(postgres_url)) as opened:
        yield opened


def claim(store: PostgresStore, owner: str = "me", partition: Partition = ORDERS) -> Position:
    return granted(store.claim(GROUP, [partition], owner, lambda ps: dict.fromkeys(ps, Position(0))))[partition]


@contextmanager
def behind(work: Callable[[], object]) -> Iterator[threading.Thread]:
    """Work that goes on in a thread while the block looks at it."""
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    yield thread
    thread.join(30)
    assert not thread.is_alive()


def sooner(text: str) -> str:
    """Locks are waited for a moment only. For everything else there is the time that there was: a machine is busy."""
    shorter, replaced = re.subn(r"(lock_timeout'?[ =,]+)'10s'", r"\1'300ms'", text)
    assert replaced == 1
    return shorter


class TestAClaimThatMeetsALockedRow:
    def test_ends_who_froze_between_making_the_row_and_committing_it(
        self, store: PostgresStore, postgres_url: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        """Nobody can see that row, so it names nobody."""
        store.groups()
        with closing(psycopg.connect(postgres_url)) as frozen:
            frozen.execute(PIN)
            assert claim(store).epoch == 1
            with pytest.raises(psycopg.OperationalError):
                frozen.execute("select 1")
        eventually(lambda: "kept a row locked" in caplog.text, what="who ended it says so, a moment later")

    def test_control_without_a_lookout_it_gives_up_in_the_end(
        self, postgres_url: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(takeover, "_end_row_blockers", lambda *_: None)
        monkeypatch.setattr(database_module, "BEGIN_OWN", sooner(tx_statements.BEGIN_OWN))
        with closing(PostgresStore(postgres_url)) as store, closing(psycopg.connect(postgres_url)) as frozen:
            store.groups()
            frozen.execute(PIN)
            with pytest.raises(StoreUnavailable, match="keeps a row locked"):
                claim(store)

    def test_ends_who_locked_it_in_a_savepoint_that_is_released(self, store: PostgresStore, postgres_url: str) -> None:
        claim(store)
        with closing(psycopg.connect(postgres_url)) as frozen:
            frozen.execute("savepoint a")
            frozen.execute("select * from kconsume_offsets for update")
            frozen.execute("release savepoint a")
            assert claim(store, "other").epoch == 2
            with pytest.raises(psycopg.OperationalError):
                frozen.execute("select 1")

    def test_ends_all_who_share_the_lock_and_nobody_else(
        self, store: PostgresStore, postgres_url: str, database: psycopg.Connection
    ) -> None:
        """Several shared locks are one number on the row, and somebody's transaction may have the same."""
        database.execute("create table other (n int)")
        claim(store)
        holders = [psycopg.connect(postgres_url) for _ in range(2)]
        bystanders = [psycopg.connect(postgres_url) for _ in range(4)]
        try:
            for bystander in bystanders:
                bystander.execute("insert into other values (1)")
            for holder in holders:
                holder.execute("select * from kconsume_offsets for share")
            assert claim(store, "other").epoch == 2
            for holder in holders:
                with pytest.raises(psycopg.OperationalError):
                    holder.execute("select 1")
            for bystander in bystanders:
                bystander.execute("select 1")
        finally:
            for connection in [*holders, *bystanders]:
                connection.close()

    def test_does_not_end_a_claim_that_waits_before_it(
        self,
        postgres_url: str,
        database: psycopg.Connection,
        caplog: pytest.LogCaptureFixture,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setattr(takeover, "GRACE", 2.0)  # on a busy machine, a claim may keep its row for a while
        with closing(PostgresStore(postgres_url)) as one, closing(PostgresStore(postgres_url)) as two:
            claim(one)
            with closing(psycopg.connect(postgres_url)) as frozen:
                pid = frozen.info.backend_pid
                frozen.execute("select * from kconsume_offsets for update")
                epochs: list[int] = []
                with behind(lambda: epochs.append(claim(one, "one").epoch)):
                    with behind(lambda: epochs.append(claim(two, "two").epoch)):
                        pass
        assert sorted(epochs) == [2, 3]
        ended = {int(word.partition("=")[2]) for word in caplog.text.split() if word.startswith("backend=")}
        assert ended == {pid}

    def test_is_itself_ended_by_the_server_if_it_freezes(self, store: PostgresStore) -> None:
        with store.database.transaction() as connection:
            limit = connection.execute("show idle_in_transaction_session_timeout").fetchone()
        assert limit == ("10s",)
        with store.database.connection() as connection:
            assert connection.execute("show idle_in_transaction_session_timeout").fetchone() == ("0",)


class TestARowThatStaysLocked:
    """Not in a claim, where nobody is ended: the wait has an end."""

    @pytest.fixture
    def impatient(self, monkeypatch: pytest.MonkeyPatch, postgres_url: str) -> Iterator[PostgresStore]:
        monkeypatch.setattr(database_module, "BEGIN_OWN", sooner(tx_statements.BEGIN_OWN))
        monkeypatch.setattr(tx_statements, "_LIMIT_LOCK_WAIT", sooner(tx_statements._LIMIT_LOCK_WAIT))
        with closing(PostgresStore(postgres_url)) as store:
            yield store

    @pytest.mark.parametrize("call", ["save", "reset", "delete", "delete all"])
    def test_is_not_waited_for_without_end(self, impatient: PostgresStore, postgres_url: str, call: str) -> None:
        position = claim(impatient)
        calls: dict[str, Callable[[], object]] = {
            "save": lambda: impatient.save(GROUP, {ORDERS: Position(1, position.epoch)}),
            "reset": lambda: impatient.reset(GROUP, {ORDERS: 1}),
            "delete": lambda: impatient.delete(GROUP, [ORDERS]),
            "delete all": lambda: impatient.delete(GROUP),
        }
        with closing(psycopg.connect(postgres_url)) as person:
            person.execute("select * from kconsume_offsets for update")
            with pytest.raises(StoreUnavailable, match="locked"):
                calls[call]()
            person.execute("select 1")

    def test_is_not_waited_for_without_end_by_an_advance(self, impatient: PostgresStore, postgres_url: str) -> None:
        position = claim(impatient)
        with closing(psycopg.connect(postgres_url)) as person, pytest.raises(StoreUnavailable, match="locked"):  # noqa: PT012
            with impatient.transaction(GROUP, ORDERS, position.epoch) as tx:
                person.execute("select * from kconsume_offsets for update")
                tx.advance(0, 1)

    def test_the_handlers_own_patience_is_as_it_was(self, impatient: PostgresStore) -> None:
        position = claim(impatient)
        with impatient.transaction(GROUP, ORDERS, position.epoch) as tx:
            connection: Any = tx.connection
            connection.execute("set local lock_timeout = '7s'")
            tx.advance(0, 1)
            assert connection.execute("show lock_timeout").fetchone() == ("7s",)  # for what is deferred to COMMIT

    def test_who_freezes_while_it_makes_the_tables_is_ended_by_the_server(self, database: psycopg.Connection) -> None:
        database.execute(tx_statements.BEGIN_SCHEMA)
        assert database.execute("show idle_in_transaction_session_timeout").fetchone() == ("10s",)
        database.execute("rollback")

    def test_nor_is_the_lock_of_who_makes_the_tables(
        self, monkeypatch: pytest.MonkeyPatch, postgres_url: str, database: psycopg.Connection
    ) -> None:
        monkeypatch.setattr(schema, "BEGIN_SCHEMA", sooner(tx_statements.BEGIN_SCHEMA))
        database.execute("begin")
        database.execute(schema._LOCK_SCHEMA)
        with closing(PostgresStore(postgres_url)) as store, pytest.raises(StoreUnavailable, match="lock"):
            store.groups()
        database.execute("rollback")


class TestAServerThatDoesNotAnswer:
    @pytest.fixture
    def server(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalPostgres]:
        monkeypatch.setattr(watchdog, "CHECK_EVERY", 0.05)
        with LocalPostgres() as server:
            yield server

    @contextmanager
    def due_soon(self) -> Iterator[None]:
        """Who waits now, or comes to it. Not before: on a busy machine everything takes long."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(watchdog, "LIMIT", 0.5)
            with watchdog.watch._lock:
                for use in watchdog.watch._by_id.values():
                    use.due = time.monotonic() + 0.5
            yield

    @contextmanager
    def frozen(self, server: LocalPostgres) -> Iterator[None]:
        server.freeze()
        try:
            with self.due_soon(), pytest.MonkeyPatch.context() as patch:
                patch.setattr(watchdog, "ANSWER_WITHIN", 0.5)
                yield
        finally:
            server.thaw()

    def test_is_unavailable_for_statements_of_ours(
        self, server: LocalPostgres, caplog: pytest.LogCaptureFixture
    ) -> None:
        with closing(PostgresStore(server.url)) as store:
            claim(store)
            with self.frozen(server), pytest.raises(StoreUnavailable):
                store.load(GROUP, [ORDERS])
            assert "connection cut" in caplog.text
            assert store.load(GROUP, [ORDERS])[ORDERS].next_offset == 0  # and then it works again

    @pytest.mark.parametrize("form", ["transaction", "pipelined"])
    def test_is_unavailable_in_a_handlers_statement(self, server: LocalPostgres, form: str) -> None:
        with closing(PostgresStore(server.url)) as store:
            position = claim(store)
            with pytest.raises(StoreUnavailable), getattr(store, form)(GROUP, ORDERS, position.epoch) as tx:
                with self.frozen(server):
                    tx.connection.execute("select 1").fetchone()

    def test_is_unavailable_in_an_awaited_statement(self, server: LocalPostgres) -> None:
        async def handle() -> None:
            async with store.async_transaction(GROUP, ORDERS, position.epoch) as tx:
                connection: Any = tx.connection
                with self.frozen(server):
                    await connection.execute("select 1")

        with closing(PostgresStore(server.url)) as store:
            position = claim(store)
            with pytest.raises(StoreUnavailable):
                asyncio.run(handle())

    def test_is_unavailable_in_a_session(self, server: LocalPostgres) -> None:
        engine = create_engine(server.url.replace("postgresql://", "postgresql+psycopg://"))
        with closing(PostgresStore(engine=engine)) as store:
            position = claim(store)
            with pytest.raises(LookupError), store.transaction(GROUP, ORDERS, position.epoch) as tx:  # noqa: PT012
                session = tx.connection
                assert isinstance(session, Session)
                with self.frozen(server), pytest.raises(DBAPIError) as failed:
                    session.execute(text("select 1"))
                assert isinstance(tx.fault(failed.value), StoreUnavailable)
                raise LookupError
        engine.dispose()

    def test_a_slow_statement_of_a_handler_is_waited_for(self, server: LocalPostgres) -> None:
        with closing(PostgresStore(server.url)) as store:
            position = claim(store)
            with store.transaction(GROUP, ORDERS, position.epoch) as tx:
                connection: Any = tx.connection
                with self.due_soon():
                    connection.execute("select pg_sleep(2)")
                tx.advance(0, 1)
            assert store.load(GROUP, [ORDERS])[ORDERS].next_offset == 1


class TestRolesThatDiffer:
    def test_the_right_that_lacks_is_named_and_the_zombie_is_bounded(
        self, postgres_url: str, store: PostgresStore, database: psycopg.Connection, caplog: pytest.LogCaptureFixture
    ) -> None:
        store.groups()
        with a_role(postgres_url) as one, a_role(postgres_url) as other:
            for role in (one, other):
                for table, rights in tables.RIGHTS:
                    database.execute(f"grant {rights} on {table} to {role.name}")
            with closing(PostgresStore(one.url)) as theirs, closing(PostgresStore(other.url)) as ours:
                mine = claim(theirs)
                with pytest.raises(Fenced), theirs.transaction(GROUP, ORDERS, mine.epoch) as tx:  # noqa: PT012
                    connection: Any = tx.connection
                    limit = connection.execute("show idle_in_transaction_session_timeout").fetchone()
                    assert limit == (postgres_tx.IDLE_LIMIT,)
                    with caplog.at_level(logging.ERROR, "kconsume.stores"):
                        claim(ours)
                    tx.advance(0, 1)
                assert f"of role {one.name} and we are {other.name}" in caplog.text
                assert f"or grant pg_signal_backend to {other.name}" in caplog.text
                caplog.clear()
                database.execute(f"grant pg_signal_backend to {other.name}")
                mine = claim(theirs)
                with pytest.raises(StoreUnavailable), theirs.transaction(GROUP, ORDERS, mine.epoch) as tx:  # noqa: PT012
                    claim(ours)
                    tx.advance(0, 1)
                assert "cannot end" not in caplog.text


class TestADeleteDuringAClaim:
    def test_no_epoch_is_given_out_twice(
        self, store: PostgresStore, postgres_url: str, database: psycopg.Connection
    ) -> None:
        """A claim that makes the row waits for the delete that is about to raise the last epoch."""
        for _ in range(5):
            zombie = claim(store)
        with closing(psycopg.connect(postgres_url)) as deleting:
            sql = store.database.statements
            deleting.execute(sql.lock_last_epoch, {})
            deleting.execute(sql.delete_group, {"group": GROUP})
            pinned: list[int] = []
            with behind(lambda: pinned.append(claim(store, "next").epoch)):
                eventually(lambda: _waits(database), what="the claim waits")
                deleting.commit()
        assert pinned == [zombie.epoch + 1]

    def test_a_row_of_another_partition_waits_too(
        self, store: PostgresStore, postgres_url: str, database: psycopg.Connection
    ) -> None:
        for _ in range(3):
            claim(store)
        with closing(psycopg.connect(postgres_url)) as deleting:
            deleting.execute(store.database.statements.lock_last_epoch, {})
            deleting.execute(store.database.statements.delete_group, {"group": GROUP})
            pinned: list[int] = []
            with behind(lambda: pinned.append(claim(store, "next", CLICKS).epoch)):
                eventually(lambda: _waits(database), what="the claim waits")
                deleting.commit()
        assert pinned == [4]


def _waits(database: psycopg.Connection) -> bool:
    waiting = "select count(*) from pg_stat_activity where wait_event_type = 'Lock' and datname = current_database()"
    return database.execute(waiting).fetchone() == (1,)


def test_a_forked_process_does_not_touch_the_connections_of_its_parent(store: PostgresStore) -> None:
    with store.database.connection() as connection, watchdog.watch.over(connection.pgconn, "here", own=True):
        child = os.fork()
        if not child:
            os._exit(len(watchdog.watch._by_id))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert connection.execute("select 1").fetchone() == (1,)


def test_the_watch_ends_when_nothing_is_watched(store: PostgresStore, monkeypatch: pytest.MonkeyPatch) -> None:
    watch = watchdog.Watchdog()
    monkeypatch.setattr(watchdog, "CHECK_EVERY", 0.01)
    with store.database.connection() as connection, watch.over(connection.pgconn, "here", own=True):
        assert watch._thread is not None
    eventually(lambda: watch._thread is None, what="the thread ends")


@pytest.mark.parametrize("isolation", ["repeatable read", "serializable"])
def test_a_transaction_that_had_its_snapshot_before_the_claim_and_its_lock_after_it_is_ended(
    postgres_url: str, database: psycopg.Connection, isolation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does not see the claim, whose first look does not see it. Frozen, it would keep its rows for an hour."""
    gate, is_there, may_end = 4242, threading.Event(), threading.Event()
    slow = tx_statements._LOCK.replace("select ", f"select pg_advisory_xact_lock({gate}), ", 1)
    monkeypatch.setattr(takeover, "GRACE", 1.0)
    database.execute("create table stock (left_over integer); insert into stock values (1)")
    errors: list[BaseException] = []
    with closing(PostgresStore(postgres_url, isolation=isolation)) as rival:
        with monkeypatch.context() as patch, closing(PostgresStore(postgres_url, isolation=isolation)) as store:
            patch.setattr(tx_statements, "_LOCK", slow)
            mine = claim(store)

            def frozen() -> None:
                try:
                    with store.transaction(GROUP, ORDERS, mine.epoch) as tx:
                        tx.connection.execute("update stock set left_over = 0")  # type: ignore[attr-defined]
                        is_there.set()
                        may_end.wait(60)
                        tx.advance(0, 1)
                except BaseException as error:  # noqa: BLE001
                    errors.append(error)

            def epoch() -> int:
                return rival.load(GROUP, [ORDERS])[ORDERS].epoch

            database.execute("select pg_advisory_lock(%s)", (gate,))
            with behind(frozen):
                waits = "select 1 from pg_locks where locktype = 'advisory' and not granted"
                eventually(lambda: database.execute(waits).fetchone(), what="it has its snapshot and not its lock")
                with behind(lambda: claim(rival, "rival")):
                    eventually(lambda: epoch() > mine.epoch, what="the claim has raised the epoch")
                    database.execute("select pg_advisory_unlock(%s)", (gate,))
                    eventually(is_there.is_set, what="its handler runs")
                database.execute("set lock_timeout = '5s'")
                database.execute("update stock set left_over = left_over + 1")
                may_end.set()
    assert database.execute("select left_over from stock").fetchone() == (2,)
    assert [type(error) for error in errors] == [StoreUnavailable]

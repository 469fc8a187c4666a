"""PostgreSQL as a store: the whole suite, in each form in which handlers get its transaction; and what only a server
can be asked: who is ended, what is waited for, what a role may do."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, suppress
from typing import Any

import psycopg
import pytest
from psycopg import pq
from psycopg.conninfo import make_conninfo

from kconsume.backends import Position, PostgresStore, TransactionalStore
from kconsume.backends.claim import granted
from kconsume.backends.postgres import database as database_module
from kconsume.backends.postgres import tx_statements
from kconsume.backends.postgres.statements import Statements
from kconsume.errors import Conflict, Fenced, KconsumeError, StoreUnavailable, TransactionMisused
from kconsume.records import Partition
from kconsume.testing.conformance import Subject, TransactionalSuite, awaited, pipelined
from tests.chaos.proxy import Cut, CuttingProxy
from tests.contract.forms import only_transactions

ORDERS = Partition("orders", 0)
GROUP = "shop"


def subject_of(
    proxy: CuttingProxy, database: psycopg.Connection, form: Callable[[PostgresStore], TransactionalStore]
) -> Subject:
    database.execute("create table effects (number bigint)")

    @contextmanager
    def away() -> Iterator[None]:
        proxy.down()
        try:
            yield
        finally:
            proxy.up()

    return Subject(
        open=lambda: form(PostgresStore(proxy.url)),
        write=lambda connection, number: connection.execute("insert into effects values (%s)", (number,)),
        effects=lambda: [number for (number,) in database.execute("select number from effects").fetchall()],
        away=away,
    )


class TestPlain(TransactionalSuite):
    @pytest.fixture
    def subject(self, cutting_proxy: CuttingProxy, database: psycopg.Connection) -> Subject:
        return subject_of(cutting_proxy, database, lambda store: store)


@only_transactions
class TestPipelined(TransactionalSuite):
    fence_shows_at_the_end = True

    @pytest.fixture
    def subject(self, cutting_proxy: CuttingProxy, database: psycopg.Connection) -> Subject:
        return subject_of(cutting_proxy, database, pipelined)


@only_transactions
class TestAwaited(TransactionalSuite):
    @pytest.fixture
    def subject(self, cutting_proxy: CuttingProxy, database: psycopg.Connection) -> Subject:
        return subject_of(cutting_proxy, database, awaited)


@pytest.fixture
def store(postgres_url: str) -> Iterator[PostgresStore]:
    with closing(PostgresStore(postgres_url)) as opened:
        yield opened


def claim(store: PostgresStore, owner: str = "me") -> Position:
    return granted(store.claim(GROUP, [ORDERS], owner, lambda ps: dict.fromkeys(ps, Position(0))))[ORDERS]


def begun(store: PostgresStore, position: Position) -> AbstractContextManager[Any]:
    return store.transaction(GROUP, ORDERS, position.epoch)


def offset_in(store: PostgresStore) -> int:
    return store.load(GROUP, [ORDERS])[ORDERS].next_offset


class TestAZombieInItsTransaction:
    def test_is_ended_with_the_locks_that_it_holds(
        self, store: PostgresStore, postgres_url: str, database: psycopg.Connection, caplog: pytest.LogCaptureFixture
    ) -> None:
        database.execute("create table stock (n int); insert into stock values (0)")
        zombie = claim(store, "zombie")
        with pytest.raises(StoreUnavailable, match="broke the connection"):  # noqa: PT012
            with begun(store, zombie) as tx:
                tx.connection.execute("update stock set n = n + 1")
                with closing(PostgresStore(postgres_url)) as other:
                    began = time.monotonic()
                    position = claim(other, "other")
                    with begun(other, position) as taken:
                        taken.connection.execute("set local lock_timeout = '5s'")
                        taken.connection.execute("update stock set n = n + 10")
                        taken.advance(0, 1)
                    assert time.monotonic() - began < 10
                tx.advance(0, 1)
        assert database.execute("select n from stock").fetchone() == (10,)
        assert "still in a transaction of an earlier epoch" in caplog.text

    def test_control_without_that_the_next_owner_waits_for_its_locks(
        self, store: PostgresStore, postgres_url: str, database: psycopg.Connection, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(PostgresStore, "_end_earlier_owners", lambda *_: None)
        database.execute("create table stock (n int); insert into stock values (0)")
        zombie = claim(store, "zombie")
        with pytest.raises(Fenced):  # noqa: PT012
            with begun(store, zombie) as tx:
                tx.connection.execute("update stock set n = n + 1")
                with closing(PostgresStore(postgres_url)) as other:
                    position = claim(other, "other")
                    with pytest.raises(TransactionMisused), begun(other, position) as taken:  # noqa: PT012
                        taken.connection.execute("set local lock_timeout = '300ms'")
                        with pytest.raises(psycopg.errors.LockNotAvailable):
                            taken.connection.execute("update stock set n = n + 10")
                        taken.advance(0, 1)
                tx.advance(0, 1)

    def test_one_that_ends_in_time_is_left_alone(
        self, store: PostgresStore, postgres_url: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        """A claim in the moment in which the owner commits: no backend is ended."""
        mine = claim(store)
        with begun(store, mine) as tx:
            tx.advance(0, 5)
        with closing(PostgresStore(postgres_url)) as other:
            assert claim(other, "other").next_offset == 5
        assert "backend ended" not in caplog.text

    def test_a_newer_owner_is_not_ended_by_an_older_claim(
        self, store: PostgresStore, postgres_url: str, database: psycopg.Connection
    ) -> None:
        older = claim(store, "older")
        with closing(PostgresStore(postgres_url)) as other:
            newer = claim(other, "newer")
            with begun(other, newer) as tx:
                store._end_earlier_owners(GROUP, {ORDERS: older.epoch})
                tx.advance(0, 1)
            assert offset_in(other) == 1

    def test_a_row_that_somebody_keeps_locked_is_freed(self, store: PostgresStore, postgres_url: str) -> None:
        claim(store)
        with psycopg.connect(postgres_url) as person:
            person.execute("select * from kconsume_offsets for update")
            assert claim(store, "other").epoch == 2
            with pytest.raises(psycopg.OperationalError):
                person.execute("select 1")


class TestAnUnknownOutcome:
    @pytest.mark.parametrize(("cut", "stored"), [(Cut.BEFORE, 0), (Cut.AFTER, 1)])
    @pytest.mark.parametrize("form", ["transaction", "pipelined"])
    def test_is_known_after_the_reclaim(
        self, cutting_proxy: CuttingProxy, database: psycopg.Connection, cut: Cut, stored: int, form: str
    ) -> None:
        database.execute("create table effects (number bigint)")
        with closing(PostgresStore(cutting_proxy.url)) as store:
            mine = claim(store)
            cutting_proxy.decide = lambda _: cut
            begin: Callable[..., object] = getattr(store, form)
            with pytest.raises(StoreUnavailable, match="not known yet"):  # noqa: PT012
                with begin(GROUP, ORDERS, mine.epoch) as tx:  # type: ignore[attr-defined]
                    tx.connection.execute("insert into effects values (0)")
                    tx.advance(0, 1)
            cutting_proxy.decide = lambda _: Cut.PASS
            again = store.reclaim(GROUP, {ORDERS: mine.epoch}, "me")[ORDERS]
            assert again.next_offset == stored
            assert again.epoch == mine.epoch + 1
            assert database.execute("select count(*) from effects").fetchone() == (stored,)


class TestTheFenceInTheServer:
    def test_control_with_a_plain_update_a_commit_behind_it_keeps_the_zombie_s_effect(
        self, store: PostgresStore, postgres_url: str, database: psycopg.Connection, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """In a pipeline COMMIT is on its way before the answer to the update is known."""
        database.execute("create table effects (number bigint)")
        monkeypatch.setattr(PostgresStore, "_end_earlier_owners", lambda *_: None)
        assert self._effects_of_a_zombie(store, postgres_url, database) == 0
        guarded = Statements.advance.fget  # type: ignore[attr-defined]
        plain = property(lambda sql: guarded(sql).replace("1 / count(*)", "count(*)"))
        monkeypatch.setattr(Statements, "advance", plain)
        with closing(PostgresStore(postgres_url)) as careless:
            assert self._effects_of_a_zombie(careless, postgres_url, database) == 1

    @staticmethod
    def _effects_of_a_zombie(store: PostgresStore, url: str, database: psycopg.Connection) -> int:
        mine = claim(store, "zombie")
        try:
            with store.pipelined(GROUP, ORDERS, mine.epoch) as tx:
                tx.connection.execute("insert into effects values (0)")
                with closing(PostgresStore(url)) as other:
                    claim(other, "other")
                tx.advance(0, 1)
        except KconsumeError:
            pass
        (count,) = database.execute("select count(*) from effects").fetchone() or (None,)
        assert isinstance(count, int)
        return count


class TestARoleThatMayNotEndOthers:
    def test_says_so_and_is_bounded_by_its_idle_limit(
        self, postgres_url: str, database: psycopg.Connection, caplog: pytest.LogCaptureFixture
    ) -> None:
        name = database.info.dbname.replace("-", "_")
        database.execute(f'create role "{name}" login; grant all on schema public to "{name}"')
        database.execute("revoke execute on function pg_terminate_backend from public")
        try:
            with closing(PostgresStore(make_conninfo(postgres_url, user=name))) as store:
                mine = claim(store)
                with store.pipelined(GROUP, ORDERS, mine.epoch) as tried:  # it would not count as idle in one
                    assert tried.connection.pgconn.pipeline_status == pq.PipelineStatus.OFF
                with begun(store, mine) as tx:
                    limit = tx.connection.execute("show idle_in_transaction_session_timeout").fetchone()
                    assert limit == ("30s",)
                    with caplog.at_level(logging.ERROR, "kconsume.stores"):
                        with closing(PostgresStore(make_conninfo(postgres_url, user=name))) as other:
                            assert claim(other, "other").epoch == 2
                    assert "cannot end backend" in caplog.text
                    assert "grant execute on function pg_terminate_backend" in caplog.text
                    with pytest.raises(Fenced):
                        tx.advance(0, 1)
                    raise _Enough
        except _Enough:
            pass
        finally:
            database.execute("grant execute on function pg_terminate_backend to public")
            database.execute(f'drop owned by "{name}"; drop role "{name}"')


class _Enough(Exception):
    pass


class TestConflicts:
    @pytest.mark.parametrize("isolation", ["repeatable read", "serializable"])
    def test_a_claim_during_the_transaction_is_one_and_then_a_fence(
        self, postgres_url: str, isolation: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(PostgresStore, "_end_earlier_owners", lambda *_: None)
        with closing(PostgresStore(postgres_url, isolation=isolation)) as store:
            mine = claim(store)
            with pytest.raises((Conflict, Fenced)):  # noqa: PT012
                with begun(store, mine) as tx:
                    tx.connection.execute("select 1")
                    claim(store, "other")
                    tx.advance(0, 1)
            with pytest.raises(Fenced), begun(store, mine):
                pass
            assert offset_in(store) == 0

    def test_partitions_that_have_nothing_to_do_with_each_other_do_not_meet(
        self, postgres_url: str, database: psycopg.Connection
    ) -> None:
        """After ANALYZE PostgreSQL knows how small our table is, and would rather read all of it."""
        assert self._conflicts(postgres_url, database) == 0

    def test_control_where_the_table_may_be_read_whole_they_do(
        self, postgres_url: str, database: psycopg.Connection, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(tx_statements, "_BY_INDEX", "set_config('enable_seqscan', 'on', true)")
        assert self._conflicts(postgres_url, database) > 0

    @staticmethod
    def _conflicts(url: str, database: psycopg.Connection) -> int:
        """Of four partitions, each in steps that overlap with those of the others."""
        database.execute("create table effects (number bigint)")
        partitions = [Partition("orders", number) for number in range(4)]
        with closing(PostgresStore(url, isolation="serializable")) as store:
            claimed = granted(store.claim(GROUP, partitions, "me", lambda ps: dict.fromkeys(ps, Position(0))))
            database.execute("analyze kconsume_offsets")
            conflicts: list[KconsumeError] = []
            for step in range(100):
                with ExitStack() as together:
                    begun = [
                        together.enter_context(_noted(conflicts, store.transaction(GROUP, p, claimed[p].epoch)))
                        for p in partitions
                    ]
                    for number, tx in enumerate(begun):
                        tx.connection.execute("insert into effects values (%s)", (number,))
                    for tx in begun:
                        with suppress(Conflict):
                            tx.advance(step, step + 1)
                if conflicts:
                    break
            return len(conflicts)

    def test_what_a_handlers_statements_may_is_as_it_was(self, postgres_url: str) -> None:
        with closing(PostgresStore(postgres_url, isolation="serializable")) as store:
            with begun(store, claim(store)) as tx:
                assert tx.connection.execute("show enable_seqscan").fetchone() == ("on",)

    def test_one_on_another_connection_of_the_handlers_is_its_own_affair(
        self, store: PostgresStore, postgres_url: str, database: psycopg.Connection
    ) -> None:
        database.execute("create table stock (n int); insert into stock values (0)")

        def meet(connection: Any) -> psycopg.errors.SerializationFailure:
            with pytest.raises(psycopg.errors.SerializationFailure) as met:
                connection.execute("do $$ begin raise exception 'met' using errcode = '40001'; end $$")
            return met.value

        with begun(store, claim(store)) as tx:
            with closing(psycopg.connect(postgres_url)) as elsewhere:
                assert tx.fault(meet(elsewhere)) is None
            with pytest.raises(psycopg.errors.SerializationFailure) as met, tx.connection.transaction():
                tx.connection.execute("do $$ begin raise exception 'met' using errcode = '40001'; end $$")
            assert isinstance(tx.fault(met.value), Conflict)


@contextmanager
def _noted(conflicts: list[KconsumeError], transaction: AbstractContextManager[Any]) -> Iterator[Any]:
    try:
        with transaction as tx:
            yield tx
    except (Conflict, TransactionMisused) as conflict:
        conflicts.append(conflict)


class TestTheSchema:
    def test_is_the_same_whatever_a_handler_does_with_its_search_path(
        self, store: PostgresStore, database: psycopg.Connection
    ) -> None:
        database.execute("create schema tenant; create table tenant.kconsume_offsets (nothing int)")
        with begun(store, claim(store)) as tx:
            tx.connection.execute("set local search_path = tenant")
            tx.advance(0, 1)
        assert offset_in(store) == 1

    def test_is_one_lock_whether_it_is_named_or_found(self, store: PostgresStore, postgres_url: str) -> None:
        zombie = claim(store)
        with closing(PostgresStore(postgres_url, schema="public")) as named:
            with pytest.raises(StoreUnavailable, match="broke the connection"), begun(store, zombie) as tx:  # noqa: PT012
                claim(named, "other")
                tx.advance(0, 1)

    @pytest.mark.parametrize("schema", ["50%s", "%(epoch)s", 'a"b', "a.b", "{schema}", "größe"])
    def test_may_have_any_name(self, postgres_url: str, schema: str) -> None:
        with closing(PostgresStore(postgres_url, schema=schema)) as store:
            position = claim(store)
            with begun(store, position) as tx:
                tx.advance(0, 1)
            store.save(GROUP, {ORDERS: Position(2, position.epoch)})
            store.reset(GROUP, {ORDERS: 3})
            assert (store.groups(), offset_in(store)) == ([GROUP], 3)
            store.delete(GROUP, [ORDERS])
            store.delete(GROUP)
            assert store.groups() == []


class TestAConnectionThatEndsWhileItIsPrepared:
    def test_is_the_stores_fault(
        self, postgres_url: str, database: psycopg.Connection, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def ended(connection: psycopg.Connection, sql: Statements) -> Statements:
            database.execute("select pg_terminate_backend(%s, 5000)", (connection.info.backend_pid,))
            return sql

        monkeypatch.setattr(database_module, "with_actual_schema", ended)
        with closing(PostgresStore(postgres_url)) as store, pytest.raises(StoreUnavailable):
            store.groups()

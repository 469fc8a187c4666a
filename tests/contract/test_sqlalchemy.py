"""`PostgresStore(engine=…)` on a real PostgreSQL: the suite of its level, then what only sessions are asked."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, cast

import psycopg
import pytest
from sqlalchemy import Engine, ForeignKey, NullPool, QueuePool, create_engine, event, insert, select, text
from sqlalchemy.exc import DBAPIError, IntegrityError, InvalidRequestError, PendingRollbackError
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from kconsume import App
from kconsume._embedded.controls import KafkaControls
from kconsume.backends import Position, PostgresStore
from kconsume.backends.claim import granted
from kconsume.backends.postgres.sqlalchemy.engine_transaction import EngineTransaction
from kconsume.errors import (
    ConfigurationError,
    Conflict,
    Fenced,
    InvalidHandler,
    StoreUnavailable,
    TransactionMisused,
)
from kconsume.records import Partition
from kconsume.testing import afeed, feed
from kconsume.testing.conformance import Subject, TransactionalSuite, awaited
from tests.contract.forms import only_transactions
from tests.fix_arena import QUICK, Arena
from tests.fix_kafka import unique

EACH = 1500
ORDERS = Partition("orders", 0)
GROUP = "shop"


class Base(DeclarativeBase):
    pass


class Known(Base):
    __tablename__ = "known"
    value: Mapped[str] = mapped_column(primary_key=True)


class Seen(Base):
    __tablename__ = "seen"
    id: Mapped[int] = mapped_column(primary_key=True)
    value: Mapped[str] = mapped_column(unique=True)


class Promised(Base):
    """May name what is not known yet, until COMMIT."""

    __tablename__ = "promised"
    id: Mapped[int] = mapped_column(primary_key=True)
    value: Mapped[str] = mapped_column(ForeignKey("known.value", deferrable=True, initially="DEFERRED"))


@pytest.fixture
def url(postgres_url: str) -> str:
    return postgres_url.replace("postgresql://", "postgresql+psycopg://", 1)


@pytest.fixture
def engine(url: str) -> Iterator[Engine]:
    made = create_engine(url)
    Base.metadata.create_all(made)
    yield made
    made.dispose()


@pytest.fixture
def async_engine(url: str, engine: Engine) -> AsyncEngine:
    """Its connections belong to a loop that the test does not have, so none is kept. `engine` has made the tables."""
    assert engine.url.render_as_string(hide_password=False) == url
    return create_async_engine(url, poolclass=NullPool)


@pytest.fixture
def store(engine: Engine) -> Iterator[PostgresStore]:
    made = PostgresStore(engine=engine)
    yield made
    made.close()


@pytest.fixture
def async_store(async_engine: AsyncEngine) -> Iterator[PostgresStore]:
    made = PostgresStore(engine=async_engine)
    yield made
    made.close()


def claimed(store: PostgresStore) -> int:
    return granted(store.claim(GROUP, [ORDERS], "me", lambda missing: dict.fromkeys(missing, Position(0))))[
        ORDERS
    ].epoch


def stored(store: PostgresStore) -> int:
    return store.load(GROUP, [ORDERS])[ORDERS].next_offset


def values(database: psycopg.Connection) -> list[str]:
    return [value for (value,) in database.execute("select value from seen").fetchall()]


@contextmanager
def session_of(store: PostgresStore, epoch: int) -> Iterator[Session]:
    """A handler's session, with the offset advanced by one at the end."""
    with store.transaction(GROUP, ORDERS, epoch) as tx:
        yield cast(Session, tx.connection)
        old = stored(store)
        tx.advance(old, old + 1)


# What a store is


@only_transactions
class TestSession(TransactionalSuite):
    @pytest.fixture
    def subject(self, engine: Engine, database: psycopg.Connection) -> Subject:
        return Subject(open=lambda: PostgresStore(engine=engine), write=_effect, effects=_effects(database))


@only_transactions
class TestAsyncSession(TransactionalSuite):
    @pytest.fixture
    def subject(self, async_engine: AsyncEngine, database: psycopg.Connection) -> Subject:
        """An engine for each owner: several event loops must not share one, says SQLAlchemy."""
        return Subject(
            open=lambda: awaited(PostgresStore(engine=create_async_engine(async_engine.url, poolclass=NullPool))),
            write=_effect,
            effects=_effects(database),
        )


def _effect(session: Session | AsyncSession, number: int) -> object:
    return session.execute(text("insert into effects values (:number)"), {"number": number})


def _effects(database: psycopg.Connection) -> Callable[[], list[int]]:
    database.execute("create table effects (number bigint)")
    return lambda: [number for (number,) in database.execute("select number from effects").fetchall()]


# In a run


class Shop:
    """A topic of two partitions, and an app."""

    def __init__(self, broker: Arena, store: PostgresStore, database: psycopg.Connection) -> None:
        self.store, self.database = store, database
        self.topic, self.group = broker.topic(2), unique("group")
        self.expected = broker.fill(self.topic, EACH, 2)
        self.app = App(broker.bootstrap, group=self.group, offsets=store, kafka=QUICK)

    def offsets(self) -> int:
        stored = self.store.load(self.group, [Partition(self.topic, 0), Partition(self.topic, 1)])
        return sum(position.next_offset for position in stored.values())

    def assert_once(self, *, without: frozenset[str] = frozenset()) -> None:
        assert sorted(values(self.database)) == sorted(self.expected - without)
        assert self.offsets() == len(self.expected)


@pytest.fixture
def broker(embedded: KafkaControls) -> Iterator[Arena]:
    arena = Arena("embedded", embedded.bootstrap, embedded)
    yield arena
    arena.clean_up()


@pytest.fixture
def shop(broker: Arena, store: PostgresStore, database: psycopg.Connection) -> Shop:
    return Shop(broker, store, database)


@pytest.fixture
def async_shop(broker: Arena, async_store: PostgresStore, database: psycopg.Connection) -> Shop:
    return Shop(broker, async_store, database)


class TestARun:
    @pytest.mark.dense
    def test_has_one_effect_a_record_with_a_session(self, shop: Shop) -> None:
        @shop.app.consume(shop.topic)
        def write(value: str, session: Session) -> None:
            session.add(Seen(value=value))

        shop.app.catch_up(idle=0.3)
        shop.assert_once()

    def test_has_one_effect_a_record_with_an_async_session(self, async_shop: Shop) -> None:
        shop = async_shop

        @shop.app.consume(shop.topic)
        async def write(value: str, session: AsyncSession) -> None:
            session.add(Seen(value=value))
            await session.flush()

        shop.app.catch_up(idle=0.3)
        shop.assert_once()

    @pytest.mark.dense
    def test_has_one_effect_a_record_of_a_batch(self, shop: Shop) -> None:
        @shop.app.consume(shop.topic)
        def write(batch: list[str], session: Session) -> None:
            session.execute(insert(Seen), [{"value": value} for value in batch])

        shop.app.catch_up(idle=0.3)
        shop.assert_once()

    @pytest.mark.dense
    @pytest.mark.parametrize("queries", [True, False], ids=["found by a query", "found at the end"])
    def test_skips_only_the_record_whose_flush_fails(self, shop: Shop, queries: bool) -> None:
        """Also where it fails late: in a query of a later record, which flushes, or at the end of the transaction."""
        bad = frozenset(f"0:{n}" for n in range(50, EACH, 500))
        shop.database.execute("alter table seen add check (value not like 'bad%')")

        @shop.app.consume(shop.topic, on_error="skip")
        def write(value: str, session: Session) -> None:
            if queries:
                session.scalar(select(Seen.id).where(Seen.value == value))
            session.add(Seen(value=f"bad {value}" if value in bad else value))

        shop.app.catch_up(idle=0.3)
        shop.assert_once(without=bad)

    def test_skips_only_the_record_that_fails_with_an_async_session(self, async_shop: Shop) -> None:
        shop, bad = async_shop, frozenset(f"1:{n}" for n in range(50, EACH, 500))

        @shop.app.consume(shop.topic, on_error="skip")
        async def write(value: str, session: AsyncSession) -> None:
            session.add(Seen(value=value))
            if value in bad:
                await session.execute(text("select 1 / 0"))

        shop.app.catch_up(idle=0.3)
        shop.assert_once(without=bad)

    @pytest.mark.dense
    def test_skips_only_the_record_that_a_deferred_constraint_refuses_at_commit(self, shop: Shop) -> None:
        bad = frozenset({"0:77"})

        @shop.app.consume(shop.topic, on_error="skip")
        def write(value: str, session: Session) -> None:
            session.add_all([Seen(value=value), Promised(value=value)])
            session.flush()
            if value not in bad:
                session.add(Known(value=value))

        shop.app.catch_up(idle=0.3)
        shop.assert_once(without=bad)

    @pytest.mark.dense
    def test_stops_at_a_handler_that_commits(self, shop: Shop) -> None:
        @shop.app.consume(shop.topic)
        def write(value: str, session: Session) -> None:
            session.add(Seen(value=value))
            session.commit()

        with pytest.raises(TransactionMisused, match=r"commit\(\)"):
            shop.app.catch_up(idle=0.3)
        assert (values(shop.database), shop.offsets()) == ([], 0)


# The transaction is kconsume's


MISUSES: list[tuple[Callable[[Session], object], str]] = [
    (lambda session: session.commit(), r"commit\(\)"),
    (lambda session: session.rollback(), r"rollback\(\)"),
    (lambda session: session.close(), r"close\(\)"),
    (lambda session: session.reset(), r"reset\(\)"),
    (lambda session: session.invalidate(), r"invalidate\(\)"),
    (lambda session: session.begin(), r"begin\(\)"),
    (lambda session: session.__enter__(), "with session"),
    (lambda session: session.connection().commit(), r"commit\(\)"),
    (lambda session: session.connection().rollback(), "rolled back"),
    (lambda session: cast(Any, session.get_transaction()).rollback(), "rolled back"),
    (lambda session: session.execute(text("rollback")), "must not call `rollback`"),
    (lambda session: session.execute(text("insert into known values ('x'); commit")), "must not call `commit`"),
    (lambda session: session.connection().exec_driver_sql("/*\n*/ commit"), "must not call `commit`"),
    (lambda session: _driver_of(session).execute("rollback"), "ended by a statement"),
]


def _driver_of(session: Session) -> psycopg.Connection:
    """Past SQLAlchemy, and past all that looks at statements."""
    return cast(psycopg.Connection, session.connection().connection.driver_connection)


class TestAMisuse:
    @pytest.mark.parametrize(("misuse", "said"), MISUSES)
    @pytest.mark.parametrize("swallows", [False, True], ids=["let out", "swallowed"])
    def test_is_refused_and_nothing_passes(
        self,
        store: PostgresStore,
        database: psycopg.Connection,
        misuse: Callable[[Session], object],
        said: str,
        swallows: bool,
    ) -> None:
        epoch = claimed(store)
        with pytest.raises(TransactionMisused, match=said), session_of(store, epoch) as session:  # noqa: PT012  (the block is the handler)
            session.add(Seen(value="a"))
            session.flush()
            with suppress(*[TransactionMisused] * swallows):
                misuse(session)
        assert (values(database), stored(store)) == ([], 0)
        with session_of(store, epoch) as session:  # and the connection is as good as before
            session.add(Seen(value="b"))
        assert (values(database), stored(store)) == (["b"], 1)

    def test_by_a_commit_in_sql_keeps_no_effect_and_passes_no_offset(
        self, store: PostgresStore, database: psycopg.Connection
    ) -> None:
        epoch = claimed(store)
        with pytest.raises(TransactionMisused, match="`commit`"), session_of(store, epoch) as session:  # noqa: PT012  (the block is the handler)
            session.add(Seen(value="a"))
            session.flush()
            session.execute(text("commit"))
        assert (values(database), stored(store)) == ([], 0)

    def test_by_a_transaction_of_its_own_after_ours_passes_no_offset(self, store: PostgresStore) -> None:
        epoch = claimed(store)
        with pytest.raises(TransactionMisused, match="ended by a statement"), session_of(store, epoch) as session:  # noqa: PT012  (the block is the handler)
            _driver_of(session).execute("rollback")
            _driver_of(session).execute("begin")
        assert stored(store) == 0

    @pytest.mark.parametrize("call", ["commit", "rollback", "close", "reset", "invalidate"])
    def test_of_an_async_session_is_refused_and_nothing_passes(
        self, async_store: PostgresStore, database: psycopg.Connection, call: str
    ) -> None:
        async def run() -> None:
            async with async_store.async_transaction(GROUP, ORDERS, epoch) as tx:
                session = cast(AsyncSession, tx.connection)
                session.add(Seen(value="a"))
                with suppress(TransactionMisused):
                    await cast("Awaitable[None]", getattr(session, call)())
                await tx.advance(0, 1)

        epoch = claimed(async_store)
        with pytest.raises(TransactionMisused, match=call):
            asyncio.run(run())
        assert (values(database), stored(async_store)) == ([], 0)

    def test_of_an_async_block_is_refused(self, async_store: PostgresStore) -> None:
        async def run(enter: Callable[[AsyncSession], Any]) -> None:
            async with async_store.async_transaction(GROUP, ORDERS, epoch) as tx:
                async with enter(cast(AsyncSession, tx.connection)):
                    pass

        epoch = claimed(async_store)
        for enter in (lambda session: session, lambda session: session.begin()):
            with pytest.raises(TransactionMisused, match=r"async with session|begin"):
                asyncio.run(run(enter))

    def test_is_found_out_only_because_it_is_looked_for(
        self, store: PostgresStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The negative control: without the look at the end, a handler that swallowed the refusal passes."""
        monkeypatch.setattr(EngineTransaction, "_check", lambda _: None)
        with session_of(store, claimed(store)) as session, suppress(TransactionMisused):
            session.commit()
        assert stored(store) == 1


class TestAFailureThatTheHandlerSwallows:
    def test_passes_nothing_if_the_transaction_went_with_it(
        self, store: PostgresStore, database: psycopg.Connection
    ) -> None:
        epoch = claimed(store)
        with pytest.raises(TransactionMisused, match="begin_nested"), session_of(store, epoch) as session:  # noqa: PT012  (the block is the handler)
            session.add_all([Seen(id=1, value="a"), Seen(id=1, value="b")])
            with suppress(IntegrityError):
                session.flush()
        with pytest.raises(TransactionMisused, match="begin_nested"), session_of(store, epoch) as session:
            with suppress(DBAPIError):
                session.execute(text("select 1 / 0"))
        assert (values(database), stored(store)) == ([], 0)

    def test_leaves_a_session_that_says_so(self, store: PostgresStore) -> None:
        with pytest.raises(PendingRollbackError), session_of(store, claimed(store)) as session:  # noqa: PT012  (the block is the handler)
            session.add_all([Seen(id=1, value="a"), Seen(id=1, value="b")])
            with suppress(IntegrityError):
                session.flush()
            session.execute(text("select 1"))

    def test_is_undone_alone_in_a_savepoint(self, store: PostgresStore, database: psycopg.Connection) -> None:
        with session_of(store, claimed(store)) as session:
            session.add(Seen(value="a"))
            for value in ("a", "b"):
                with suppress(IntegrityError), session.begin_nested():
                    session.add(Seen(value=value))
        assert (sorted(values(database)), stored(store)) == (["a", "b"], 1)

    def test_is_undone_alone_in_an_async_savepoint(
        self, async_store: PostgresStore, database: psycopg.Connection
    ) -> None:
        async def run() -> None:
            async with async_store.async_transaction(GROUP, ORDERS, epoch) as tx:
                session = cast(AsyncSession, tx.connection)
                session.add(Seen(value="a"))
                for value in ("a", "b"):
                    with suppress(IntegrityError):
                        async with session.begin_nested():
                            session.add(Seen(value=value))
                await tx.advance(0, 1)

        epoch = claimed(async_store)
        asyncio.run(run())
        assert (sorted(values(database)), stored(async_store)) == (["a", "b"], 1)


# Whose fault


class TestAnError:
    def test_of_a_constraint_at_commit_is_the_handlers_in_sqlalchemys_words(self, store: PostgresStore) -> None:
        with pytest.raises(IntegrityError), session_of(store, claimed(store)) as session:
            session.add(Promised(value="nobody knows"))
        assert stored(store) == 0

    @pytest.mark.parametrize("how", ["in a statement", "in a flush", "in a savepoint"])
    def test_of_two_transactions_that_met_is_a_conflict(self, engine: Engine, how: str) -> None:
        """Also after the session has rolled back, as it does by itself when a flush fails."""
        store = PostgresStore(engine=engine, isolation="repeatable read")
        with Session(engine) as outside:
            outside.add(Known(value="a"))
            outside.commit()
        with suppress(LookupError), store.transaction(GROUP, ORDERS, claimed(store)) as tx:
            session = cast(Session, tx.connection)
            known = session.scalars(select(Known)).one()
            with engine.begin() as other:
                other.execute(text("update known set value = 'b'"))
            with pytest.raises(DBAPIError) as met:  # noqa: PT012  (the block is the handler)
                if how == "in a flush":
                    known.value = "c"
                    session.flush()
                elif how == "in a savepoint":
                    with session.begin_nested():
                        session.execute(text("update known set value = 'c'"))
                else:
                    session.execute(text("update known set value = 'c'"))
            assert isinstance(tx.fault(met.value), Conflict)
            assert tx.fault(LookupError()) is None
            raise LookupError
        store.close()

    def test_of_the_last_flush_is_a_conflict_too(self, engine: Engine) -> None:
        store = PostgresStore(engine=engine, isolation="repeatable read")
        with engine.begin() as outside:
            outside.execute(insert(Known).values(value="a"))
        with pytest.raises(Conflict), session_of(store, claimed(store)) as session:  # noqa: PT012  (the block is the handler)
            session.scalars(select(Known)).one().value = "c"
            with engine.begin() as other:
                other.execute(text("update known set value = 'b'"))
        assert stored(store) == 0
        store.close()

    def test_of_a_backend_that_was_ended_is_the_stores(
        self, store: PostgresStore, database: psycopg.Connection, engine: Engine
    ) -> None:
        with pytest.raises(StoreUnavailable, match="not known"):  # noqa: PT012  (the block is the handler)
            with store.transaction(GROUP, ORDERS, claimed(store)) as tx:
                session = cast(Session, tx.connection)
                pid = session.scalar(text("select pg_backend_pid()"))
                database.execute("select pg_terminate_backend(%s)", (pid,))
                tx.advance(0, 1)
        assert stored(store) == 0
        with Session(engine) as own:
            assert own.scalar(text("select 1")) == 1

    def test_of_another_connection_is_the_handlers_also_after_a_savepoint_that_failed(
        self, store: PostgresStore, postgres_url: str
    ) -> None:
        met = "do $$ begin raise exception 'met' using errcode = '40001'; end $$"
        with store.transaction(GROUP, ORDERS, claimed(store)) as tx:
            session = cast(Session, tx.connection)
            with suppress(DBAPIError), session.begin_nested():
                session.execute(text("select 1 / 0"))
            with psycopg.connect(postgres_url) as elsewhere, pytest.raises(psycopg.Error) as theirs:
                elsewhere.execute(met)
            assert tx.fault(theirs.value) is None
            with pytest.raises(DBAPIError) as ours, session.begin_nested():
                session.execute(text(met))
            assert isinstance(tx.fault(ours.value), Conflict)

    def test_of_another_database_is_the_handlers(self, store: PostgresStore) -> None:
        with store.transaction(GROUP, ORDERS, claimed(store)) as tx:
            elsewhere = psycopg.errors.DiskFull("elsewhere")
            assert tx.fault(elsewhere) is None

    def test_the_engines_overflow_counts_for_what_runs_in_parallel(self, url: str) -> None:
        """The overflow is private to SQLAlchemy's pool: this fails if it is gone."""
        wide = create_engine(url, pool_size=3, max_overflow=2)
        store = PostgresStore(engine=wide)
        assert store.parallel == 5
        store.close()
        wide.dispose()

    def test_of_a_pool_that_is_too_small_is_the_stores(self, url: str) -> None:
        tight = create_engine(url, pool_size=1, max_overflow=0, pool_timeout=0.1)
        store = PostgresStore(engine=tight)
        assert store.parallel == 1
        epoch = claimed(store)
        with store.transaction(GROUP, ORDERS, epoch), pytest.raises(StoreUnavailable, match="pool_size"):
            with store.transaction(GROUP, ORDERS, epoch):
                pass
        store.close()
        tight.dispose()


# What is left


class TestAfterTheHandler:
    def test_a_session_that_was_kept_is_dead_and_its_objects_are_detached(self, store: PostgresStore) -> None:
        with session_of(store, claimed(store)) as kept:
            seen = Seen(value="a")
            kept.add(seen)
        with pytest.raises(InvalidRequestError, match="permanently closed"):
            kept.execute(text("select 1"))
        with pytest.raises(TransactionMisused, match="ended"):
            kept.commit()
        assert seen not in kept
        assert seen.value == "a"

    def test_a_fenced_transaction_leaves_nothing(self, store: PostgresStore, database: psycopg.Connection) -> None:
        epoch = claimed(store)
        with pytest.raises((Fenced, StoreUnavailable)), session_of(store, epoch) as session:  # noqa: PT012  (the block is the handler)
            session.add(Seen(value="a"))
            session.flush()
            claimed(store)
        with pytest.raises(Fenced), session_of(store, epoch):
            raise AssertionError("a stale epoch got a session")
        assert (values(database), stored(store)) == ([], 0)

    def test_the_events_of_the_session_tell_the_real_commit(
        self, store: PostgresStore, database: psycopg.Connection
    ) -> None:
        seen: list[list[str]] = []
        with session_of(store, claimed(store)) as session:
            session.add(Seen(value="a"))
            event.listen(session, "after_commit", lambda _: seen.append(values(database)))
        assert seen == [["a"]]

    def test_the_persons_engine_is_as_it_was(self, engine: Engine, store: PostgresStore) -> None:
        with session_of(store, claimed(store)):
            pass
        with Session(engine) as own:
            own.add(Seen(value="mine"))
            own.commit()
            own.rollback()
        assert isinstance(engine.pool, QueuePool)
        assert engine.pool.checkedout() == 0


# Setting it up


class TestAnEngine:
    def test_that_commits_by_itself_is_used_in_transactions(self, url: str, database: psycopg.Connection) -> None:
        own = create_engine(url, isolation_level="AUTOCOMMIT", connect_args={"application_name": "the shop"})
        Base.metadata.create_all(own)
        store = PostgresStore(engine=own, schema="aside", isolation="serializable")
        with pytest.raises(LookupError), session_of(store, claimed(store)) as session:  # noqa: PT012  (the block is the handler)
            session.execute(insert(Seen).values(value="a"))
            assert session.scalar(text("show transaction_isolation")) == "serializable"
            names = select(text("distinct application_name")).select_from(text("pg_stat_activity"))
            assert "kconsume" not in session.scalars(names).all()
            raise LookupError
        assert values(database) == []
        store.close()
        own.dispose()

    def test_of_another_driver_is_refused(self) -> None:
        for wrong in ("sqlite://", "postgresql+psycopg2://host/shop"):
            with pytest.raises((ConfigurationError, ModuleNotFoundError), match=r"postgresql\+psycopg://|psycopg2"):
                PostgresStore(engine=create_engine(wrong))
        with pytest.raises(ConfigurationError, match="create_engine"):
            PostgresStore(engine=cast(Engine, "postgresql+psycopg://host/shop"))
        with pytest.raises(ConfigurationError, match="engine="):
            PostgresStore()

    def test_never_shows_its_password(self) -> None:
        store = PostgresStore(engine=create_engine("postgresql+psycopg://me:s3cret@localhost:1/shop"))
        assert store.address == "postgresql://me:********@localhost:1/shop"
        with pytest.raises(StoreUnavailable) as refused:
            store.groups()
        assert "s3cret" not in str(refused.value)

    def test_gives_its_own_kind_of_session(self, engine: Engine, async_engine: AsyncEngine) -> None:
        plain, awaiting = PostgresStore(engine=engine), PostgresStore(engine=async_engine)
        assert (plain.connection_types, plain.async_connection_types) == ((Session,), ())
        assert (awaiting.connection_types, awaiting.async_connection_types) == ((AsyncSession,), (AsyncSession,))
        app = App("embedded://", group=GROUP, offsets=plain)
        with pytest.raises(InvalidHandler, match="AsyncSession"):

            @app.consume("orders")
            async def handle(value: str, session: AsyncSession) -> None: ...

    def test_that_nobody_uses_costs_no_import(self) -> None:
        look = "import sys, kconsume.backends.postgres.store; assert 'sqlalchemy' not in sys.modules"
        subprocess.run([sys.executable, "-c", look], check=True)

    def test_without_sqlalchemy_names_the_extra(self) -> None:
        look = (
            "import sys; sys.modules['sqlalchemy'] = None\n"
            "from kconsume.backends import PostgresStore\n"
            "from kconsume.errors import MissingExtra\n"
            "try: PostgresStore(engine=object())\n"
            "except MissingExtra as error: assert 'kconsume[sqlalchemy]' in str(error)\n"
            "else: raise AssertionError"
        )
        subprocess.run([sys.executable, "-c", look], check=True)


# Trying it out


class TestATrial:
    def test_of_a_session_leaves_nothing(self, store: PostgresStore, database: psycopg.Connection) -> None:
        with store.dry_run() as dry_run:
            session = cast(Session, dry_run.connection)
            session.add(Seen(value="a"))
            assert session.scalars(select(Seen.value)).all() == ["a"]
        assert values(database) == []
        with pytest.raises(IntegrityError), store.dry_run() as dry_run:
            cast(Session, dry_run.connection).add(Promised(value="nobody knows"))

    def test_of_an_async_session_leaves_nothing(self, async_store: PostgresStore, database: psycopg.Connection) -> None:
        async def run() -> None:
            async with async_store.async_dry_run() as dry_run:
                session = cast(AsyncSession, dry_run.connection)
                session.add(Seen(value="a"))
                assert (await session.scalars(select(Seen.value))).all() == ["a"]

        asyncio.run(run())
        assert values(database) == []

    def test_by_feed_writes_in_the_callers_session(self, engine: Engine) -> None:
        app = App("embedded://", group=GROUP, offsets=PostgresStore(engine=engine))

        @app.consume("orders", on_error="skip")
        def write(value: str, session: Session) -> None:
            session.add(Seen(id=1, value=value))

        with Session(engine) as session:
            assert feed(app, "orders", "a", tx=session).outcome == "handled"
            assert session.scalars(select(Seen.value)).all() == ["a"]
            assert isinstance(feed(app, "orders", "b", tx=session).error, IntegrityError)
            assert session.scalars(select(Seen.value)).all() == ["a"]
            session.rollback()
            assert session.scalars(select(Seen.value)).all() == []

    def test_by_feed_of_a_handler_that_commits_says_so(self, engine: Engine) -> None:
        app = App("embedded://", group=GROUP, offsets=PostgresStore(engine=engine))

        @app.consume("orders", on_error="skip")
        def write(value: str, session: Session) -> None:
            session.add(Seen(value=value))
            session.commit()

        with Session(engine) as session:
            assert isinstance(feed(app, "orders", "a", tx=session).error, TransactionMisused)

    def test_by_afeed_writes_in_the_callers_session(self, async_engine: AsyncEngine) -> None:
        app = App("embedded://", group=GROUP, offsets=PostgresStore(engine=async_engine))

        @app.consume("orders", on_error="skip")
        async def write(value: str, session: AsyncSession) -> None:
            session.add(Seen(id=1, value=value))

        async def run() -> None:
            async with AsyncSession(async_engine) as session:
                assert (await afeed(app, "orders", "a", tx=session)).outcome == "handled"
                assert (await afeed(app, "orders", "b", tx=session)).outcome == "skipped"
                assert (await session.scalars(select(Seen.value))).all() == ["a"]

        asyncio.run(run())

    def test_by_afeed_undoes_what_a_failing_handler_wrote_on_an_async_connection(
        self, postgres_url: str, database: psycopg.Connection
    ) -> None:
        database.execute("create table seen (value text)")
        app = App("embedded://", group=GROUP, offsets=postgres_url)

        @app.consume("orders", on_error="skip")
        async def write(value: str, tx: psycopg.AsyncConnection) -> None:
            await tx.execute("insert into seen values (%s)", (value,))
            if value == "bad":
                raise LookupError

        async def run() -> None:
            async with await psycopg.AsyncConnection.connect(postgres_url) as tx:
                assert (await afeed(app, "orders", "good", tx=tx)).outcome == "handled"
                assert (await afeed(app, "orders", "bad", tx=tx)).outcome == "skipped"
                assert [row async for row in await tx.execute("select value from seen")] == [("good",)]
                await tx.rollback()

        asyncio.run(run())

"""Handlers' transactions on a person's SQLAlchemy engine: a `Session` for `def`, an `AsyncSession` for `async def`.

The same transaction as in `postgres_tx.py`, statement by statement, on a connection of the engine, so with its pool,
its listeners and its settings. What is done in it is written once, in blocking words: on an event loop SQLAlchemy runs
those in a greenlet. The engine is the person's: nothing here disposes of it.

A session rolls its transaction back by itself when a flush fails. That is seen by a listener, on a copy of the engine
that shares its pool: so it is known, afterwards, whether the server had given up the transaction.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager, suppress
from typing import Any, NamedTuple

import psycopg
from psycopg.pq import TransactionStatus
from sqlalchemy import Connection, Engine, ExceptionContext, QueuePool, event
from sqlalchemy.exc import DBAPIError, SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, AsyncSession
from sqlalchemy.orm import Session

from kconsume.backends import postgres_letters as letter_statements
from kconsume.backends.causes import causes_of
from kconsume.backends.outbox_table import postgres_numbers
from kconsume.backends.postgres_engine import EngineAddress, reached
from kconsume.backends.postgres_faults import fault_of, meaning_of
from kconsume.backends.postgres_lent import ENDED, sever
from kconsume.backends.postgres_scan import ending
from kconsume.backends.postgres_sessions import NOT_YOURS, LentAsyncSession, LentSession
from kconsume.backends.postgres_tx import COMMIT, Row, Terms
from kconsume.backends.postgres_watch import watch
from kconsume.errors import ConfigurationError, StoreError, TransactionMisused
from kconsume.failures.letters import Letter
from kconsume.output import Outgoing
from kconsume.records import Partition

_HELD = "kconsume_held"
_WHOLE = (TransactionStatus.IDLE, TransactionStatus.INTRANS, TransactionStatus.INERROR)

_UNDONE = (
    "a statement or a flush of the handler failed, or it rolled back, and the handler went on; but the transaction was "
    "given up with it, so its offset was not passed: let the error out, or put the part into `session.begin_nested()`"
)


class Sessions:
    """The transactions of an engine."""

    def __init__(self, engine: Engine | AsyncEngine, address: EngineAddress) -> None:
        self._address = address
        sync = engine if isinstance(engine, Engine) else engine.sync_engine
        # A copy that shares the pool: what is set and heard here does not reach what the person does with theirs.
        lent = sync.execution_options(isolation_level=address.isolation.upper(), postgresql_readonly=False)
        event.listen(lent, "before_cursor_execute", _before_statement)
        event.listen(lent, "handle_error", _after_error)
        event.listen(lent, "commit", _before_commit)
        event.listen(lent, "rollback", _before_rollback)
        event.listen(lent, "rollback_savepoint", _before_rollback)
        self._engine = lent if isinstance(engine, Engine) else None
        self._async_engine = None if isinstance(engine, Engine) else AsyncEngine(lent)
        self.types: tuple[type, ...] = (Session,) if self._engine is not None else (AsyncSession,)
        self.async_types: tuple[type, ...] = () if self._engine is not None else (AsyncSession,)
        self.parallel = min(address.pool, _capacity(sync) or address.pool)

    @contextmanager
    def transaction(self, terms: Terms, group: str, partition: Partition, epoch: int) -> Iterator[SessionTx]:
        with self._held(Row(terms, group, partition, epoch)) as held:
            held.open()
            yield SessionTx(held)
            held.commit()

    @asynccontextmanager
    async def async_transaction(
        self, terms: Terms, group: str, partition: Partition, epoch: int
    ) -> AsyncIterator[AsyncSessionTx]:
        async with self._awaited(Row(terms, group, partition, epoch)) as (session, held):
            await session.run_sync(lambda _: held.open())
            yield AsyncSessionTx(session, held)
            await session.run_sync(lambda _: held.commit())

    @contextmanager
    def rehearsal(self) -> Iterator[Rehearsal]:
        with self._held(None) as held:
            held.rehearse()
            yield Rehearsal(held.session)
            held.rehearsed()

    @asynccontextmanager
    async def async_rehearsal(self) -> AsyncIterator[Rehearsal]:
        async with self._awaited(None) as (session, held):
            await session.run_sync(lambda _: held.rehearse())
            yield Rehearsal(session)
            await session.run_sync(lambda _: held.rehearsed())

    @contextmanager
    def _held(self, row: Row | None) -> Iterator[_Held]:
        if self._engine is None:
            raise ConfigurationError(f"the engine of {self._address.shown} is for `async def` handlers: {_BOTH}")
        with reached(self._address):
            connection = self._engine.connect()
        with connection:
            held = _Held(row, LentSession(connection), connection)
            with held.watched(self._address.shown):
                try:
                    yield held
                finally:
                    held.end()

    @asynccontextmanager
    async def _awaited(self, row: Row | None) -> AsyncIterator[tuple[LentAsyncSession, _Held]]:
        if self._async_engine is None:
            raise ConfigurationError(f"the engine of {self._address.shown} is for plain `def` handlers: {_BOTH}")
        connecting = self._async_engine.connect()
        with reached(self._address):
            await connecting.start()
        async with _closing(connecting) as connection:
            session = LentAsyncSession(connection)
            held = _Held(row, session.lent, _blocking(connection))
            with held.watched(self._address.shown):
                try:
                    yield session, held
                finally:
                    await asyncio.shield(asyncio.ensure_future(session.run_sync(lambda _: held.end())))


_BOTH = (
    "give each kind of handler a store of its own, with create_engine(…) for `def`, create_async_engine(…) for others"
)


def _capacity(engine: Engine) -> int | None:
    """How many connections its pool lends at most, if there is a limit."""
    pool = engine.pool
    if not isinstance(pool, QueuePool):
        return None
    overflow = getattr(pool, "_max_overflow", 0)
    return None if overflow < 0 or not pool.size() else pool.size() + overflow


@asynccontextmanager
async def _closing(connection: AsyncConnection) -> AsyncIterator[AsyncConnection]:
    try:
        yield connection
    finally:
        await asyncio.shield(asyncio.ensure_future(connection.close()))


def _blocking(connection: AsyncConnection) -> Connection:
    assert connection.sync_connection is not None
    return connection.sync_connection


class Rehearsal(NamedTuple):
    """A transaction that is only tried out."""

    connection: Session | AsyncSession


# The transaction


class _Held:
    """A transaction, in blocking words. `row` is None where no offset moves."""

    def __init__(self, row: Row | None, session: LentSession, connection: Connection) -> None:
        self.session = session
        self._row = row
        self._connection = connection
        self._driver = _driver_of(connection)
        self.failed = False
        """Whether the server had given up the transaction, or a part of it, when it was rolled back."""
        self.undone = False
        self.ours = False
        """Whether what is done now is done by us."""
        self.numbers: list[int] = []
        """Of what was posted."""
        self._raised: deque[BaseException] = deque(maxlen=16)
        connection.info[_HELD] = self
        # So that commit() has something to commit, also of a handler that does nothing with its session.
        session.connection()

    @property
    def row(self) -> Row:
        assert self._row is not None
        return self._row

    @property
    def backslashes(self) -> bool:
        return self._driver.pgconn.parameter_status(b"standard_conforming_strings") == b"off"

    @property
    def status(self) -> TransactionStatus:
        return TransactionStatus(self._driver.pgconn.transaction_status)

    def watched(self, address: str) -> AbstractContextManager[None]:
        return watch.over(self._driver.pgconn, address, ours=False)

    def note(self, error: BaseException) -> None:
        self._raised.append(error)

    def raised(self, error: BaseException) -> bool:
        """Whether it was on this connection, and not on another of the handler's."""
        return any(error is noted for noted in self._raised)

    def open(self) -> None:
        with self._our_statement():
            for text, values in self.row.entry():
                answer = self._connection.exec_driver_sql(text, values)
            if answer.first() is None:
                raise self.row.stale(self._peek())

    def advance(self, old: int, new: int, leader_epoch: int | None) -> None:
        self._flush()
        try:
            with self._our_statement():
                for statement in self.row.move(old, new, leader_epoch):
                    self._connection.exec_driver_sql(*statement)
        except _NotMoved:
            raise self.row.not_moved(old, self._peek()) from None

    def keep(self, table: str, letters: Sequence[Letter]) -> None:
        with self._our_statement():
            there = self._connection.exec_driver_sql(*letter_statements.looked_for(table)).scalar()
            for statement in () if there else letter_statements.made(table):
                self._connection.exec_driver_sql(*statement)
            for statement in letter_statements.kept(table, letters):
                self._connection.exec_driver_sql(*statement)

    def post(self, outgoing: Sequence[Outgoing]) -> None:
        self._flush()
        with self._our_statement():
            self.numbers += postgres_numbers(self._connection.exec_driver_sql(*self.row.posting(outgoing)).scalar_one())

    def take_in(self, origins: Sequence[str]) -> set[str]:
        with self._our_statement():
            return set(self._connection.exec_driver_sql(*self.row.taking_in(origins)).scalars())

    def commit(self) -> None:
        self._flush()
        with self._our_statement(COMMIT):
            Session.commit(self.session)

    def rehearse(self) -> None:
        self._connection.exec_driver_sql("select 1")  # with it, the driver begins the transaction

    def rehearsed(self) -> None:
        """As far as it goes without a COMMIT."""
        self._flush()
        self._connection.exec_driver_sql("set constraints all immediate")

    def fault(self, error: BaseException) -> StoreError | None:
        if self.failed and self.status != TransactionStatus.INERROR and not self._driver.closed:
            was_here = any(map(self.raised, causes_of(error)))
            return meaning_of(error, self.row.terms.address) if was_here else None
        return fault_of(error, self.row.terms.address, self._driver, self.raised)

    def sever(self) -> None:
        """Its handler does not come back: whatever SQLAlchemy still does with the connection, it does with none."""
        assert isinstance(self._driver, psycopg.Connection)
        self.session.over = True
        sever(self._driver)

    def end(self) -> None:
        """Roll back what is not committed; the session and its objects are of no more use."""
        self.ours = self.session.over = True
        if self.status not in _WHOLE:
            self._connection.invalidate()  # not for the next one; and a rollback would only fail
        elif not self._connection.invalidated:
            self._connection.info.pop(_HELD, None)
        with suppress(SQLAlchemyError):  # then the pool closes the connection, which undoes it as well
            Session.close(self.session)
            if self.status != TransactionStatus.IDLE and not self._connection.invalidated:
                self._connection.connection.rollback()  # a commit() that we refused was the end of it for SQLAlchemy

    def _flush(self) -> None:
        """What the handler left to be written. An error in it is the handler's."""
        self._check()
        try:
            self.session.flush()
        except SQLAlchemyError as error:
            if self._row is None or (fault := self.fault(error)) is None:
                raise
            raise fault from error

    def _check(self) -> None:
        """Whether the transaction is still the handler's to leave, and whole."""
        if self.session.refused is not None:
            raise TransactionMisused(NOT_YOURS.format(call=self.session.refused))
        if self.undone or self.status == TransactionStatus.INERROR:
            raise TransactionMisused(_UNDONE)
        if self.status == TransactionStatus.IDLE:
            raise TransactionMisused(ENDED)

    @contextmanager
    def _our_statement(self, statement: str = "") -> Iterator[None]:
        self.ours = True
        try:
            yield
        except DBAPIError as error:
            driver = error.orig
            if isinstance(driver, psycopg.errors.DivisionByZero):
                raise _NotMoved from None
            if not isinstance(driver, psycopg.Error):
                raise
            meaning = self.row.failed(driver, self._driver, statement)
            if meaning is None or meaning is driver:
                raise  # as SQLAlchemy says it
            raise meaning from error
        finally:
            self.ours = False

    def _peek(self) -> tuple[Any, ...] | None:
        """The row as it is now, in a transaction of its own."""
        self.ours = True
        Session.rollback(self.session)
        answer = self._connection.exec_driver_sql(self.row.terms.course.peek, self.row.key).first()
        self._connection.rollback()
        return None if answer is None else tuple(answer)


class _NotMoved(Exception):
    """The offset was not ours to move."""


def _driver_of(connection: Connection) -> psycopg.BaseConnection[Any]:
    driver = connection.connection.driver_connection
    assert isinstance(driver, psycopg.BaseConnection)
    return driver


def _before_statement(connection: Connection, _cursor: object, statement: str, *_: object) -> None:
    held = connection.info.get(_HELD)
    if held is not None and not held.ours and (words := ending(statement, backslashes=held.backslashes)) is not None:
        held.session.refuse(f"`{words}`")


def _after_error(context: ExceptionContext) -> None:
    held = None if context.connection is None else context.connection.info.get(_HELD)
    if held is not None:
        held.note(context.original_exception)


def _before_commit(connection: Connection) -> None:
    held = connection.info.get(_HELD)
    if held is not None and not held.ours:
        held.session.refuse("commit()")


def _before_rollback(connection: Connection, *savepoint: object) -> None:
    held = connection.info.get(_HELD)
    if held is not None and not held.ours:
        held.failed = held.failed or held.status == TransactionStatus.INERROR
        held.undone = held.undone or not savepoint


class SessionTx:
    """The transaction of a plain function."""

    def __init__(self, held: _Held) -> None:
        self.connection = held.session
        self._held = held

    def advance(self, old: int, new: int, leader_epoch: int | None = None) -> None:
        self._held.advance(old, new, leader_epoch)

    def keep(self, table: str, letters: Sequence[Letter]) -> None:
        self._held.keep(table, letters)

    def post(self, outgoing: Sequence[Outgoing]) -> None:
        self._held.post(outgoing)

    def numbers(self) -> list[int]:
        return self._held.numbers

    def take_in(self, origins: Sequence[str]) -> set[str]:
        return self._held.take_in(origins)

    def sever(self) -> None:
        self._held.sever()

    def fault(self, error: BaseException) -> StoreError | None:
        return self._held.fault(error)


class AsyncSessionTx:
    """The transaction of an `async def`."""

    def __init__(self, session: LentAsyncSession, held: _Held) -> None:
        self.connection = session
        self._held = held

    async def advance(self, old: int, new: int, leader_epoch: int | None = None) -> None:
        await self.connection.run_sync(lambda _: self._held.advance(old, new, leader_epoch))

    async def keep(self, table: str, letters: Sequence[Letter]) -> None:
        await self.connection.run_sync(lambda _: self._held.keep(table, letters))

    async def post(self, outgoing: Sequence[Outgoing]) -> None:
        await self.connection.run_sync(lambda _: self._held.post(outgoing))

    def numbers(self) -> list[int]:
        return self._held.numbers

    async def take_in(self, origins: Sequence[str]) -> set[str]:
        return await self.connection.run_sync(lambda _: self._held.take_in(origins))

    def fault(self, error: BaseException) -> StoreError | None:
        return self._held.fault(error)

"""Handlers' transactions on a user's SQLAlchemy engine: a `Session` for `def`, an `AsyncSession` for `async def`.

The statements are those of `kconsume.backends.postgres.transaction`, sent on a connection of the engine, with the
engine's pool, listeners and settings. The user owns the engine: nothing here disposes of it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import NamedTuple

from sqlalchemy import Connection, Engine, QueuePool
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, AsyncSession
from sqlalchemy.orm import Session

from kconsume._kafka.outgoing import Outgoing
from kconsume.backends.postgres.sqlalchemy.address import EngineAddress, connection_errors
from kconsume.backends.postgres.sqlalchemy.engine_transaction import EngineTransaction, listen
from kconsume.backends.postgres.sqlalchemy.sessions import AsyncHandlerSession, HandlerSession
from kconsume.backends.postgres.transaction import OffsetRow, TxSettings
from kconsume.errors import ConfigurationError, StoreError
from kconsume.failures.letter_headers import Letter
from kconsume.records import Partition


class SqlAlchemyTransactions:
    """The transactions of one engine."""

    def __init__(self, engine: Engine | AsyncEngine, address: EngineAddress) -> None:
        self._address = address
        sync = engine if isinstance(engine, Engine) else engine.sync_engine
        # A copy that shares the pool. The copy's options and listeners do not affect the user's own use of the engine.
        copy = sync.execution_options(isolation_level=address.isolation.upper(), postgresql_readonly=False)
        listen(copy)
        self._engine = copy if isinstance(engine, Engine) else None
        self._async_engine = None if isinstance(engine, Engine) else AsyncEngine(copy)
        self.types: tuple[type, ...] = (Session,) if self._engine is not None else (AsyncSession,)
        """The types of handler parameters that get the session."""
        self.async_types: tuple[type, ...] = () if self._engine is not None else (AsyncSession,)
        """The `types` that only `async def` handlers may use."""
        self.parallel = min(address.pool, _capacity(sync) or address.pool)
        """How many transactions may be open at once."""

    @contextmanager
    def transaction(self, settings: TxSettings, group: str, partition: Partition, epoch: int) -> Iterator[SessionTx]:
        with self._transaction(OffsetRow(settings, group, partition, epoch)) as transaction:
            transaction.open()
            yield SessionTx(transaction)
            transaction.commit()

    @asynccontextmanager
    async def async_transaction(
        self, settings: TxSettings, group: str, partition: Partition, epoch: int
    ) -> AsyncIterator[AsyncSessionTx]:
        row = OffsetRow(settings, group, partition, epoch)
        async with self._async_transaction(row) as (session, transaction):
            await session.run_sync(lambda _: transaction.open())
            yield AsyncSessionTx(session, transaction)
            await session.run_sync(lambda _: transaction.commit())

    @contextmanager
    def dry_run(self) -> Iterator[SqlAlchemyDryRun]:
        with self._transaction(None) as transaction:
            transaction.begin_dry_run()
            yield SqlAlchemyDryRun(transaction.session)
            transaction.check_dry_run()

    @asynccontextmanager
    async def async_dry_run(self) -> AsyncIterator[SqlAlchemyDryRun]:
        async with self._async_transaction(None) as (session, transaction):
            await session.run_sync(lambda _: transaction.begin_dry_run())
            yield SqlAlchemyDryRun(session)
            await session.run_sync(lambda _: transaction.check_dry_run())

    @contextmanager
    def _transaction(self, row: OffsetRow | None) -> Iterator[EngineTransaction]:
        if self._engine is None:
            raise ConfigurationError(f"the engine of {self._address.shown} is for `async def` handlers: {_TWO_STORES}")
        with connection_errors(self._address):
            connection = self._engine.connect()
        with connection:
            transaction = EngineTransaction(row, HandlerSession(connection), connection)
            with transaction.watched(self._address.shown):
                try:
                    yield transaction
                finally:
                    transaction.end()

    @asynccontextmanager
    async def _async_transaction(
        self, row: OffsetRow | None
    ) -> AsyncIterator[tuple[AsyncHandlerSession, EngineTransaction]]:
        if self._async_engine is None:
            raise ConfigurationError(f"the engine of {self._address.shown} is for plain `def` handlers: {_TWO_STORES}")
        connecting = self._async_engine.connect()
        with connection_errors(self._address):
            await connecting.start()
        async with _closing(connecting) as connection:
            session = AsyncHandlerSession(connection)
            transaction = EngineTransaction(row, session.handler_session, _sync_connection(connection))
            with transaction.watched(self._address.shown):
                try:
                    yield session, transaction
                finally:
                    await asyncio.shield(asyncio.ensure_future(session.run_sync(lambda _: transaction.end())))


_TWO_STORES = (
    "give each kind of handler a store of its own, with create_engine(…) for `def`, create_async_engine(…) for others"
)


def _capacity(engine: Engine) -> int | None:
    """How many connections the engine's pool lends at most; None if there is no limit."""
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


def _sync_connection(connection: AsyncConnection) -> Connection:
    assert connection.sync_connection is not None
    return connection.sync_connection


class SqlAlchemyDryRun(NamedTuple):
    """The transaction that `kconsume try` gives a handler."""

    connection: Session | AsyncSession


class SessionTx:
    """The transaction of a plain function."""

    def __init__(self, transaction: EngineTransaction) -> None:
        self.connection = transaction.session
        self._transaction = transaction

    def advance(self, old: int, new: int, leader_epoch: int | None = None) -> None:
        self._transaction.advance(old, new, leader_epoch)

    def keep(self, table: str, letters: Sequence[Letter]) -> None:
        self._transaction.keep(table, letters)

    def post(self, outgoing: Sequence[Outgoing]) -> None:
        self._transaction.post(outgoing)

    def record_origins(self, origins: Sequence[str]) -> set[str]:
        return self._transaction.record_origins(origins)

    def sever(self) -> None:
        self._transaction.sever()

    def fault(self, error: BaseException) -> StoreError | None:
        return self._transaction.fault(error)


class AsyncSessionTx:
    """The transaction of an `async def`."""

    def __init__(self, session: AsyncHandlerSession, transaction: EngineTransaction) -> None:
        self.connection = session
        self._transaction = transaction

    async def advance(self, old: int, new: int, leader_epoch: int | None = None) -> None:
        await self.connection.run_sync(lambda _: self._transaction.advance(old, new, leader_epoch))

    async def keep(self, table: str, letters: Sequence[Letter]) -> None:
        await self.connection.run_sync(lambda _: self._transaction.keep(table, letters))

    async def post(self, outgoing: Sequence[Outgoing]) -> None:
        await self.connection.run_sync(lambda _: self._transaction.post(outgoing))

    async def record_origins(self, origins: Sequence[str]) -> set[str]:
        return await self.connection.run_sync(lambda _: self._transaction.record_origins(origins))

    def fault(self, error: BaseException) -> StoreError | None:
        return self._transaction.fault(error)

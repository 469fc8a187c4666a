"""The database of a PostgreSQL store: its connections, and the state of kconsume's tables in it.

This module knows nothing of offsets and groups. The first connection that a pool opens makes or updates the tables; no
connection is opened before the first use. There are two pools, one for handlers' transactions and one for the store's
own statements, so that a claim never waits for handlers, and handlers never wait for a claim.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import psycopg

from kconsume.backends.postgres.address import Address
from kconsume.backends.postgres.errors import store_error
from kconsume.backends.postgres.pool import AsyncPool, Pool, PooledConnection
from kconsume.backends.postgres.schema import ensure_tables, with_actual_schema
from kconsume.backends.postgres.statements import MAY_END_OTHERS, Statements
from kconsume.backends.postgres.transaction import TxSettings
from kconsume.backends.postgres.tx_statements import BEGIN_OWN
from kconsume.backends.postgres.watchdog import watch
from kconsume.errors import Conflict, StoreUnavailable

OWN_CONNECTIONS = 2
"""Connections that a store may open beside its pool for handlers."""


class PostgresDatabase:
    """`PostgresStore.database`: the access to the database, also for parts of kconsume outside of the store.

    Several threads may use it. `_lock` guards `_settings`, `statements` and `_async_pools`; the first two are written
    once, by the first connection, and read without the lock.
    """

    def __init__(self, address: Address) -> None:
        """address: where the database is, and the schema, pool size and isolation that the user chose."""
        self.address = address
        self.statements = Statements(address.prefix)
        """Statements for the schema of the address; after `prepare`, for the schema in which the tables were found."""
        self.pool = Pool(address, address.pool, self._prepare)
        """Connections for handlers' transactions. Borrowing the first one prepares the tables."""
        self._own_pool = Pool(address, OWN_CONNECTIONS, self._prepare)
        self._settings: TxSettings | None = None
        self._lock = threading.Lock()
        self._async_pools: list[AsyncPool] = []

    @property
    def is_prepared(self) -> bool:
        """True once a connection has found, made or updated the tables."""
        return self._settings is not None

    def prepare(self) -> None:
        """Make or update the tables, unless a connection of this process has done so. Blocks.

        Raises `ConfigurationError` if the role lacks a right, `StoreError` if the tables are newer than this kconsume,
        and `StoreUnavailable` if the server cannot be reached.
        """
        if self._settings is None:
            with self.connection():
                pass

    @property
    def tx_settings(self) -> TxSettings:
        """The settings of every handler's transaction. Must not be read before `prepare` or the first `borrow`."""
        assert self._settings is not None
        return self._settings

    @contextmanager
    def connection(self) -> Iterator[PooledConnection]:
        """Borrow a connection for the store's own statements; each statement is its own transaction.

        Raises errors of psycopg as the store's errors. Raises `StoreUnavailable` for a conflict: the block has no
        statement of a handler, so the caller can retry it unchanged.
        """
        with self._own_pool.borrow() as connection, self._store_errors(connection):
            yield connection

    @contextmanager
    def transaction(self) -> Iterator[PooledConnection]:
        """Borrow a connection with a transaction of the store's own: committed at the end, rolled back on an error."""
        with self.connection() as connection:
            connection.execute(BEGIN_OWN)
            try:
                yield connection
                connection.execute("commit")
            finally:
                if not connection.broken and connection.pgconn.transaction_status:
                    connection.execute("rollback")

    def async_pool(self) -> AsyncPool:
        """The pool of the running event loop, for transactions of `async def` handlers. Call `prepare` first."""
        loop = asyncio.get_running_loop()
        with self._lock:
            for pool in self._async_pools:
                if pool.loop is loop:
                    return pool
            self._async_pools = [pool for pool in self._async_pools if not pool.loop.is_closed()]
            self._async_pools.append(AsyncPool(self.address, self.address.pool))
            return self._async_pools[-1]

    def close(self) -> None:
        """Close the idle connections of all pools."""
        self._own_pool.close()
        self.pool.close()
        with self._lock:
            pools, self._async_pools = self._async_pools, []
        for pool in pools:
            pool.close()

    @contextmanager
    def _store_errors(self, connection: PooledConnection) -> Iterator[None]:
        with watch.over(connection.pgconn, self.address.shown, own=True):
            try:
                yield
            except psycopg.Error as error:
                fault = store_error(error, self.address.shown)
                raise StoreUnavailable(str(fault)) if isinstance(fault, Conflict) else fault from error

    def _prepare(self, connection: PooledConnection) -> None:
        """On the first connection: prepare the tables, and find out if the role may end other backends."""
        if self._settings is not None:
            return
        with self._lock:
            if self._settings is None:
                with self._store_errors(connection):
                    ensure_tables(connection, self.statements, self.address)
                    self.statements = with_actual_schema(connection, self.statements)
                    (may_end,) = connection.execute(MAY_END_OTHERS).fetchone() or (False,)
                self._settings = TxSettings.of(self.address.shown, self.statements, self.address.isolation, may_end)

"""Pools of connections: `Pool` for threads, `AsyncPool` for an event loop.

A connection is opened when it is first needed. A connection that is returned broken, or with an open transaction, is
closed. If it is broken, the idle connections are closed too: the cause, such as a restart of the server, has probably
broken all of them.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any, TypeAlias

from psycopg import AsyncConnection, Connection
from psycopg.pq import TransactionStatus

from kconsume.backends.postgres.address import Address
from kconsume.errors import StoreUnavailable

PooledConnection: TypeAlias = Connection[tuple[Any, ...]]
AsyncPooledConnection: TypeAlias = AsyncConnection[tuple[Any, ...]]

PATIENCE = 30.0
"""Seconds to wait for a free connection. A borrower waits only if there are more workers than connections."""


class Pool:
    """Connections for threads. Any thread may call any method."""

    def __init__(self, address: Address, size: int, prepare: Callable[[PooledConnection], None]) -> None:
        """address: the server. size: the most connections open at once. prepare: called with each new connection."""
        self._address = address
        self._prepare = prepare
        self._free = threading.BoundedSemaphore(size)
        self._idle: list[PooledConnection] = []

    @contextmanager
    def borrow(self) -> Iterator[PooledConnection]:
        """Lend a connection to the block. Raises `StoreUnavailable` if no connection becomes free in `PATIENCE` seconds
        or the server cannot be reached."""
        if not self._free.acquire(timeout=PATIENCE):
            raise _exhausted(self._address)
        try:
            connection = self._take()
            try:
                yield connection
            finally:
                self._give_back(connection)
        finally:
            self._free.release()

    def close(self) -> None:
        """Close the idle connections."""
        while self._idle:
            self._idle.pop().close()

    def _take(self) -> PooledConnection:
        while True:
            try:
                connection = self._idle.pop()
            except IndexError:
                break
            if not connection.closed:
                return connection
        connection = self._address.connect()
        try:
            self._prepare(connection)
        except BaseException:
            connection.close()
            raise
        return connection

    def _give_back(self, connection: PooledConnection) -> None:
        if connection.pgconn.transaction_status == TransactionStatus.IDLE:
            return self._idle.append(connection)
        if connection.broken:
            self.close()
        return connection.close()


class AsyncPool:
    """Connections for one event loop: the loop that runs when the pool is made. Only its tasks may borrow them."""

    def __init__(self, address: Address, size: int) -> None:
        """address: the server. size: the most connections open at once."""
        self._address = address
        self._free = asyncio.Semaphore(size)
        self._idle: list[AsyncPooledConnection] = []
        self.loop = asyncio.get_running_loop()

    @asynccontextmanager
    async def borrow(self) -> AsyncIterator[AsyncPooledConnection]:
        """Lend a connection to the block. Raises `StoreUnavailable` if no connection becomes free in `PATIENCE` seconds
        or the server cannot be reached."""
        try:
            await asyncio.wait_for(self._free.acquire(), PATIENCE)
        except TimeoutError:
            raise _exhausted(self._address) from None
        try:
            connection = await self._take()
            try:
                yield connection
            finally:
                self._give_back(connection)
        finally:
            self._free.release()

    def close(self) -> None:
        """Close the idle connections. Any thread may call this, because no task uses idle connections."""
        while self._idle:
            connection = self._idle.pop()
            connection.pgconn.finish()

    def _give_back(self, connection: AsyncPooledConnection) -> None:
        if connection.pgconn.transaction_status == TransactionStatus.IDLE:
            return self._idle.append(connection)
        if connection.broken:
            self.close()
        return connection.pgconn.finish()

    async def _take(self) -> AsyncPooledConnection:
        while self._idle:
            connection = self._idle.pop()
            if not connection.closed:
                return connection
        return await self._address.connect_async()


def _exhausted(address: Address) -> StoreUnavailable:
    return StoreUnavailable(
        f"all {address.pool} connections to {address.shown} have been in use for {PATIENCE:g} s: look for a handler "
        f"that is slow inside its transaction, or allow more with ?pool="
    )

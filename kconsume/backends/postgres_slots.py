"""Connections to lend, as many as may have a transaction open at once: for threads, and for an event loop.

One is opened when it is first needed. One that comes back with a transaction still open, or broken, is closed; and
with a broken one the idle ones go too, for what ended it (a restart of the server) has ended them.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any, TypeAlias

from psycopg import AsyncConnection, Connection
from psycopg.pq import TransactionStatus

from kconsume.backends.postgres_address import Address
from kconsume.errors import StoreUnavailable

Plain: TypeAlias = Connection[tuple[Any, ...]]
Awaited: TypeAlias = AsyncConnection[tuple[Any, ...]]

PATIENCE = 30.0
"""Seconds to wait for a free connection; more workers than connections is the only reason to wait at all."""


class Slots:
    """For threads."""

    def __init__(self, address: Address, size: int, prepare: Callable[[Plain], None]) -> None:
        self._address = address
        self._prepare = prepare
        self._free = threading.BoundedSemaphore(size)
        self._idle: list[Plain] = []

    @contextmanager
    def borrow(self) -> Iterator[Plain]:
        if not self._free.acquire(timeout=PATIENCE):
            raise _too_few(self._address)
        try:
            connection = self._take()
            try:
                yield connection
            finally:
                self._give_back(connection)
        finally:
            self._free.release()

    def close(self) -> None:
        while self._idle:
            self._idle.pop().close()

    def _take(self) -> Plain:
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

    def _give_back(self, connection: Plain) -> None:
        if connection.pgconn.transaction_status == TransactionStatus.IDLE:
            return self._idle.append(connection)
        if connection.broken:
            self.close()
        return connection.close()


class LoopSlots:
    """For the event loop that first uses it."""

    def __init__(self, address: Address, size: int) -> None:
        self._address = address
        self._free = asyncio.Semaphore(size)
        self._idle: list[Awaited] = []
        self.loop = asyncio.get_running_loop()

    @asynccontextmanager
    async def borrow(self) -> AsyncIterator[Awaited]:
        try:
            await asyncio.wait_for(self._free.acquire(), PATIENCE)
        except TimeoutError:
            raise _too_few(self._address) from None
        try:
            connection = await self._take()
            try:
                yield connection
            finally:
                self._give_back(connection)
        finally:
            self._free.release()

    def close(self) -> None:
        """From any thread: nobody uses those that are idle."""
        while self._idle:
            connection = self._idle.pop()
            connection.pgconn.finish()

    def _give_back(self, connection: Awaited) -> None:
        if connection.pgconn.transaction_status == TransactionStatus.IDLE:
            return self._idle.append(connection)
        if connection.broken:
            self.close()
        return connection.pgconn.finish()

    async def _take(self) -> Awaited:
        while self._idle:
            connection = self._idle.pop()
            if not connection.closed:
                return connection
        return await self._address.connect_async()


def _too_few(address: Address) -> StoreUnavailable:
    return StoreUnavailable(
        f"all {address.pool} connections to {address.shown} have been in use for {PATIENCE:g} s: look for a handler "
        f"that is slow inside its transaction, or allow more with ?pool="
    )

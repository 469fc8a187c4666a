"""A transaction on a handler's connection that is always rolled back: for `kconsume try`. No offset moves in it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import NamedTuple

from kconsume.backends.postgres.connection import AsyncHandlerConnection, HandlerConnection
from kconsume.backends.postgres.pool import AsyncPooledConnection, PooledConnection
from kconsume.backends.postgres.tx_statements import BEGIN


class PostgresDryRun(NamedTuple):
    """The transaction that `kconsume try` gives a handler."""

    connection: HandlerConnection | AsyncHandlerConnection


@contextmanager
def dry_run(pooled: PooledConnection) -> Iterator[PostgresDryRun]:
    """A dry run for a plain function."""
    pooled.execute(BEGIN)
    connection = HandlerConnection(pooled.pgconn)
    try:
        yield PostgresDryRun(connection)
    finally:
        connection.detach()
        pooled.execute("rollback")


@asynccontextmanager
async def async_dry_run(pooled: AsyncPooledConnection) -> AsyncIterator[PostgresDryRun]:
    """A dry run for an `async def`."""
    await pooled.execute(BEGIN)
    connection = AsyncHandlerConnection(pooled.pgconn)
    try:
        yield PostgresDryRun(connection)
    finally:
        connection.detach()
        await pooled.execute("rollback")

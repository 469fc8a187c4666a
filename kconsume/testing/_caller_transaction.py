"""Lends the caller's own transaction to a handler. The handler's writes stay in it, or are undone if the handler fails.

This module must not commit. If no transaction is open on the connection, this module begins one and leaves it open: the
owner of the connection sees the writes in the transaction, and commits or rolls back.
"""

from __future__ import annotations

import inspect
import sqlite3
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, AbstractContextManager, asynccontextmanager, contextmanager
from typing import Protocol, TypeAlias, cast, runtime_checkable

from kconsume._runtime.processing.dry_run_tx import AsyncConnectionSource, ConnectionSource
from kconsume.backends.sqlite.connection import ENDED, HANDLER_ENDS_IT
from kconsume.errors import ConfigurationError, TransactionMisused

_SAVEPOINT = "kconsume_feed"


def connection_source(connection: object) -> ConnectionSource | AsyncConnectionSource:
    """Return a source that lends the connection to a handler for each call. Begins a transaction if none is open.

    Args:
        connection: the caller's connection or session. An object of an unknown kind is lent without a savepoint.
    """
    if isinstance(connection, sqlite3.Connection):
        _begin(lambda: None if connection.in_transaction else connection.execute("BEGIN"))
        return lambda: _lent_sqlite(connection)
    if isinstance(connection, _Session):
        if inspect.iscoroutinefunction(connection.flush):
            return AsyncConnectionSource(lambda: _lent_async_session(connection))
        return lambda: _lent_session(connection)
    if isinstance(connection, _Executes) and inspect.iscoroutinefunction(connection.execute):
        return AsyncConnectionSource(lambda: _lent_async(connection))
    if isinstance(connection, _Executes):
        if getattr(connection, "autocommit", False):  # without autocommit the first statement begins one
            _begin(lambda: connection.execute("BEGIN"))
        return lambda: _lent(connection)
    return lambda: _lent_as_it_is(connection)


@runtime_checkable
class _Executes(Protocol):
    """A connection to a database that takes SQL. An object with only `execute` may be something else."""

    def cursor(self) -> object: ...
    def commit(self) -> object: ...
    def execute(self, query: str, /) -> object: ...


@runtime_checkable
class _Session(Protocol):
    """A session of SQLAlchemy, recognised without importing SQLAlchemy."""

    def begin_nested(self) -> object: ...
    def flush(self) -> object: ...
    def expunge_all(self) -> object: ...


class _Savepoint(Protocol):
    @property
    def is_active(self) -> bool: ...


_Nested: TypeAlias = AbstractContextManager[_Savepoint]
_AsyncNested: TypeAlias = AbstractAsyncContextManager[_Savepoint]


def _begin(begin: Callable[[], object]) -> None:
    try:
        begin()
    except Exception as error:
        raise ConfigurationError(
            f"tx= is a connection that cannot begin a transaction ({type(error).__name__}: {error}): give an open "
            f"connection that was made in this thread"
        ) from error


@contextmanager
def _lent_sqlite(connection: sqlite3.Connection) -> Iterator[object]:
    """While the connection is lent, SQLite itself refuses BEGIN, COMMIT and ROLLBACK, as in a run.

    An authorizer that the caller has set is lost, because SQLite cannot return it.
    """
    refused: list[int] = []

    def authorize(action: int, *_: object) -> int:
        if action != sqlite3.SQLITE_TRANSACTION and connection.in_transaction:
            return sqlite3.SQLITE_OK
        refused.append(action)
        return sqlite3.SQLITE_DENY

    connection.execute(f"SAVEPOINT {_SAVEPOINT}")
    connection.set_authorizer(authorize)
    try:
        yield connection
        if refused:
            raise TransactionMisused(HANDLER_ENDS_IT)
        if not connection.in_transaction:
            raise TransactionMisused(ENDED)
    except BaseException as error:
        connection.set_authorizer(None)
        if connection.in_transaction:  # otherwise the database has rolled back
            connection.execute(f"ROLLBACK TO {_SAVEPOINT}")
            connection.execute(f"RELEASE {_SAVEPOINT}")
        if refused and not isinstance(error, TransactionMisused):
            raise TransactionMisused(HANDLER_ENDS_IT) from error
        raise
    connection.set_authorizer(None)
    connection.execute(f"RELEASE {_SAVEPOINT}")


@contextmanager
def _lent(connection: _Executes) -> Iterator[object]:
    connection.execute(f"SAVEPOINT {_SAVEPOINT}")
    try:
        yield connection
        connection.execute(f"RELEASE SAVEPOINT {_SAVEPOINT}")
    except BaseException as error:
        _undo(connection, error)
        raise


@contextmanager
def _lent_session(session: _Session) -> Iterator[object]:
    """Lend the session in a savepoint of its own, so that its objects are rolled back with the rows.

    At the end the session writes its pending changes, as in a run.
    """
    with cast("_Nested", session.begin_nested()) as nested:
        yield session
        _must_be_open(nested)
        session.flush()


@asynccontextmanager
async def _lent_async_session(session: _Session) -> AsyncIterator[object]:
    async with cast("_AsyncNested", session.begin_nested()) as nested:
        yield session
        _must_be_open(nested)
        await cast("Awaitable[None]", session.flush())


def _must_be_open(nested: _Savepoint) -> None:
    if not nested.is_active:  # the handler committed, rolled back, or swallowed an error that ended the savepoint
        raise TransactionMisused(HANDLER_ENDS_IT)


@asynccontextmanager
async def _lent_async(connection: _Executes) -> AsyncIterator[object]:
    execute = cast("Callable[[str], Awaitable[object]]", connection.execute)
    if getattr(connection, "autocommit", False):  # BEGIN inside an open transaction only causes a notice
        await execute("BEGIN")
    await execute(f"SAVEPOINT {_SAVEPOINT}")
    try:
        yield connection
        await execute(f"RELEASE SAVEPOINT {_SAVEPOINT}")
    except BaseException as error:
        try:
            await execute(f"ROLLBACK TO SAVEPOINT {_SAVEPOINT}")
            await execute(f"RELEASE SAVEPOINT {_SAVEPOINT}")
        except Exception:  # noqa: BLE001  (as below)
            raise TransactionMisused(HANDLER_ENDS_IT) from error
        raise


def _undo(connection: _Executes, error: BaseException) -> None:
    try:
        connection.execute(f"ROLLBACK TO SAVEPOINT {_SAVEPOINT}")
        connection.execute(f"RELEASE SAVEPOINT {_SAVEPOINT}")
    except Exception:  # noqa: BLE001  (the savepoint is gone, and each database raises its own error)
        raise TransactionMisused(HANDLER_ENDS_IT) from error


@contextmanager
def _lent_as_it_is(connection: object) -> Iterator[object]:
    """Lend an object of an unknown kind. Its writes cannot be undone."""
    yield connection

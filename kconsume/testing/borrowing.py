"""The caller's own transaction, lent to a handler: what it writes stays there, or is undone if it fails.

Nothing here ever commits. A connection on which no transaction is open gets one, which stays open: whoever owns the
connection sees the writes in it, and commits or rolls back.
"""

from __future__ import annotations

import inspect
import sqlite3
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, AbstractContextManager, asynccontextmanager, contextmanager
from typing import Protocol, TypeAlias, cast, runtime_checkable

from kconsume.backends.sqlite_door import _NOT_YOURS as NOT_YOURS
from kconsume.backends.sqlite_door import ENDED
from kconsume.errors import ConfigurationError, TransactionMisused
from kconsume.trial import AsyncLend, Lend

_MARK = "kconsume_feed"


def borrow(connection: object) -> Lend | AsyncLend:
    """Lends the connection to a handler, as often as it is called. Begins a transaction if none is open."""
    if isinstance(connection, sqlite3.Connection):
        _begin(lambda: None if connection.in_transaction else connection.execute("BEGIN"))
        return lambda: _lent_sqlite(connection)
    if isinstance(connection, _Session):
        if inspect.iscoroutinefunction(connection.flush):
            return AsyncLend(lambda: _lent_async_session(connection))
        return lambda: _lent_session(connection)
    if isinstance(connection, _Executes) and inspect.iscoroutinefunction(connection.execute):
        return AsyncLend(lambda: _lent_async(connection))
    if isinstance(connection, _Executes):
        if getattr(connection, "autocommit", False):  # otherwise the first statement begins one
            _begin(lambda: connection.execute("BEGIN"))
        return lambda: _lent(connection)
    return lambda: _as_it_is(connection)


@runtime_checkable
class _Executes(Protocol):
    """A connection to a database that knows SQL: not everything with an `execute` does."""

    def cursor(self) -> object: ...
    def commit(self) -> object: ...
    def execute(self, query: str, /) -> object: ...


@runtime_checkable
class _Session(Protocol):
    """A session of SQLAlchemy, which this does not import."""

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
            f"tx= is a connection that cannot begin a transaction ({type(error).__name__}: {error}): give one that is "
            f"open, and belongs to this thread"
        ) from error


@contextmanager
def _lent_sqlite(connection: sqlite3.Connection) -> Iterator[object]:
    """As in a run, SQLite itself refuses BEGIN, COMMIT and ROLLBACK meanwhile. An authorizer of the caller's own would
    be lost; there is no way to ask for it."""
    refused: list[int] = []

    def authorize(action: int, *_: object) -> int:
        if action != sqlite3.SQLITE_TRANSACTION and connection.in_transaction:
            return sqlite3.SQLITE_OK
        refused.append(action)
        return sqlite3.SQLITE_DENY

    connection.execute(f"SAVEPOINT {_MARK}")
    connection.set_authorizer(authorize)
    try:
        yield connection
        if refused:
            raise TransactionMisused(NOT_YOURS)
        if not connection.in_transaction:
            raise TransactionMisused(ENDED)
    except BaseException as error:
        connection.set_authorizer(None)
        if connection.in_transaction:  # else it was the database that rolled back
            connection.execute(f"ROLLBACK TO {_MARK}")
            connection.execute(f"RELEASE {_MARK}")
        if refused and not isinstance(error, TransactionMisused):
            raise TransactionMisused(NOT_YOURS) from error
        raise
    connection.set_authorizer(None)
    connection.execute(f"RELEASE {_MARK}")


@contextmanager
def _lent(connection: _Executes) -> Iterator[object]:
    connection.execute(f"SAVEPOINT {_MARK}")
    try:
        yield connection
        connection.execute(f"RELEASE SAVEPOINT {_MARK}")
    except BaseException as error:
        _undo(connection, error)
        raise


@contextmanager
def _lent_session(session: _Session) -> Iterator[object]:
    """In a savepoint of the session's own, so that its objects go back with the rows. What it has not written yet is
    written at the end, as in a run."""
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
    if not nested.is_active:  # committed, rolled back, or undone by a failure that the handler swallowed
        raise TransactionMisused(NOT_YOURS)


@asynccontextmanager
async def _lent_async(connection: _Executes) -> AsyncIterator[object]:
    execute = cast("Callable[[str], Awaitable[object]]", connection.execute)
    if getattr(connection, "autocommit", False):  # in an open transaction this is only a notice
        await execute("BEGIN")
    await execute(f"SAVEPOINT {_MARK}")
    try:
        yield connection
        await execute(f"RELEASE SAVEPOINT {_MARK}")
    except BaseException as error:
        try:
            await execute(f"ROLLBACK TO SAVEPOINT {_MARK}")
            await execute(f"RELEASE SAVEPOINT {_MARK}")
        except Exception:  # noqa: BLE001  (as below)
            raise TransactionMisused(NOT_YOURS) from error
        raise


def _undo(connection: _Executes, error: BaseException) -> None:
    try:
        connection.execute(f"ROLLBACK TO SAVEPOINT {_MARK}")
        connection.execute(f"RELEASE SAVEPOINT {_MARK}")
    except Exception:  # noqa: BLE001  (the mark is gone, whatever the database says to that)
        raise TransactionMisused(NOT_YOURS) from error


@contextmanager
def _as_it_is(connection: object) -> Iterator[object]:
    """What it is, nobody here knows, so nothing of it can be undone."""
    yield connection

"""The caller's own transaction, lent to a handler: what it writes stays there, or is undone if it fails.

Nothing here ever commits. A connection on which no transaction is open gets one, which stays open: whoever owns the
connection sees the writes in it, and commits or rolls back.
"""

from __future__ import annotations

import inspect
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol, runtime_checkable

from kconsume.backends.sqlite_door import _NOT_YOURS as NOT_YOURS
from kconsume.backends.sqlite_door import ENDED
from kconsume.errors import ConfigurationError, TransactionMisused
from kconsume.trial import Lend

_MARK = "kconsume_feed"


def borrow(connection: object) -> Lend:
    """Lends the connection to a handler, as often as it is called. Begins a transaction if none is open."""
    if isinstance(connection, sqlite3.Connection):
        _begin(lambda: None if connection.in_transaction else connection.execute("BEGIN"))
        return lambda: _lent_sqlite(connection)
    if isinstance(connection, _Executes) and not inspect.iscoroutinefunction(connection.execute):
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

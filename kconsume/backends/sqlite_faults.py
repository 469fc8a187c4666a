"""Whose fault an error of SQLite's is: that of the file, which may pass and is tried again, or that of a statement.

Judges errors, and raises ours. What is done about them is the caller's business.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager

from kconsume.backends.causes import causes_of
from kconsume.errors import StoreError, StoreUnavailable

_DURING = {sqlite3.SQLITE_IOERR, sqlite3.SQLITE_FULL, sqlite3.SQLITE_CORRUPT}
_BEFORE = {
    sqlite3.SQLITE_BUSY,
    sqlite3.SQLITE_LOCKED,
    sqlite3.SQLITE_PROTOCOL,
    sqlite3.SQLITE_READONLY,
    sqlite3.SQLITE_PERM,
    sqlite3.SQLITE_CANTOPEN,
    sqlite3.SQLITE_NOTADB,
    sqlite3.SQLITE_NOMEM,
    sqlite3.SQLITE_INTERRUPT,
}
"""Faults that may pass, as against a wrong statement: in a transaction, and on the way to one or out of it."""

STATEMENT_ERRORS = (sqlite3.Error, MemoryError)
"""What a statement raises: Python makes a MemoryError of SQLITE_NOMEM."""


@contextmanager
def ours(address: str) -> Iterator[None]:
    """Around statements of our own: whatever SQLite raises there is the store's."""
    try:
        yield
    except STATEMENT_ERRORS as error:
        raise may_pass(address, error) or StoreError(
            f"{address} refused a statement of kconsume's ({error}): were the tables kconsume_… changed by hand?"
        ) from error


def may_pass(address: str, error: BaseException) -> StoreUnavailable | None:
    """The file's fault, at the begin or at the end of a transaction; None for what a handler's statements led to."""
    if isinstance(error, MemoryError) or (isinstance(error, sqlite3.Error) and _code_of(error) in _DURING | _BEFORE):
        return _unavailable(address, error)
    return None


def in_a_handler(address: str, error: BaseException) -> StoreUnavailable | None:
    """The file's, wherever in the chain of causes it is. SQLite does not say which file: if another database that the
    handler uses is damaged or its disk full, that is taken for ours, and its record is tried again. Only what can
    happen to the one who holds the lock counts: a file that is locked, or not there, is another."""
    for cause in causes_of(error):
        if isinstance(cause, sqlite3.Error) and _code_of(cause) in _DURING:
            return _unavailable(address, cause)
    return None


def _unavailable(address: str, error: BaseException) -> StoreUnavailable:
    return StoreUnavailable(f"{address} cannot be written: {str(error) or type(error).__name__}")


def _code_of(error: sqlite3.Error) -> int | None:
    """Without what is special about it: SQLITE_IOERR has thirty variants."""
    code = getattr(error, "sqlite_errorcode", None)
    return None if code is None else code & 0xFF

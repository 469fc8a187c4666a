"""Decides whether the database file or a statement caused an error of SQLite.

An error of the file may be temporary. It becomes `StoreUnavailable`, and the caller tries again.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager

from kconsume.backends.error_chain import causes_of
from kconsume.errors import StoreError, StoreUnavailable

_INSIDE = {sqlite3.SQLITE_IOERR, sqlite3.SQLITE_FULL, sqlite3.SQLITE_CORRUPT}
"""Errors of the file that can occur inside a transaction. They may be temporary; an error of a statement is not."""
_AT_THE_ENDS = {
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
"""Errors of the file that may be temporary when a transaction begins or ends."""

STATEMENT_ERRORS = (sqlite3.Error, MemoryError)
"""The errors that a statement raises: Python turns SQLITE_NOMEM into a MemoryError."""


@contextmanager
def store_errors(address: str) -> Iterator[None]:
    """For a block with statements of kconsume: raises every error of SQLite as an error of the store."""
    try:
        yield
    except STATEMENT_ERRORS as error:
        raise passing_fault(address, error) or StoreError(
            f"{address} refused a statement of kconsume ({error}): were the tables kconsume_… changed by hand?"
        ) from error


def passing_fault(address: str, error: BaseException) -> StoreUnavailable | None:
    """Return the store's error if the file caused an error at the begin or the end of a transaction. Return None if the
    handler's statements caused the error."""
    known = _INSIDE | _AT_THE_ENDS
    if isinstance(error, MemoryError) or (isinstance(error, sqlite3.Error) and _code_of(error) in known):
        return _unavailable(address, error)
    return None


def handler_fault(address: str, error: BaseException) -> StoreUnavailable | None:
    """Return the store's error if an error of the file is in a handler's error or in its chain of causes; else None.

    SQLite does not say which file caused the error. If another database that the handler uses is damaged or its disk is
    full, the error is attributed to the store, and the record is tried again. An error about a locked or missing file
    is not attributed to the store, because the store's file is open and locked by this transaction.
    """
    for cause in causes_of(error):
        if isinstance(cause, sqlite3.Error) and _code_of(cause) in _INSIDE:
            return _unavailable(address, cause)
    return None


def _unavailable(address: str, error: BaseException) -> StoreUnavailable:
    return StoreUnavailable(f"{address} cannot be written: {str(error) or type(error).__name__}")


def _code_of(error: sqlite3.Error) -> int | None:
    """The primary result code: SQLITE_IOERR for all its thirty variants. None for an error of Python's sqlite3 module
    itself."""
    code = getattr(error, "sqlite_errorcode", None)
    return None if code is None else code & 0xFF

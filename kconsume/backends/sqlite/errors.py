"""Decides whether the file or a statement caused an error of SQLite. Faults of the file may pass and are tried again.

Classifies errors and raises the errors of kconsume. The caller decides what to do about them.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager

from kconsume.backends.error_chain import causes_of
from kconsume.errors import StoreError, StoreUnavailable

_INSIDE = {sqlite3.SQLITE_IOERR, sqlite3.SQLITE_FULL, sqlite3.SQLITE_CORRUPT}
"""Faults of the file that can happen inside a transaction. They may pass, unlike a wrong statement."""
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
"""Faults that may pass when a transaction begins or ends."""

STATEMENT_ERRORS = (sqlite3.Error, MemoryError)
"""The errors that a statement raises: Python turns SQLITE_NOMEM into a MemoryError."""


@contextmanager
def store_errors(address: str) -> Iterator[None]:
    """Put around statements of kconsume: raises every error of SQLite in the block as an error of the store."""
    try:
        yield
    except STATEMENT_ERRORS as error:
        raise passing_fault(address, error) or StoreError(
            f"{address} refused a statement of kconsume's ({error}): were the tables kconsume_… changed by hand?"
        ) from error


def passing_fault(address: str, error: BaseException) -> StoreUnavailable | None:
    """The fault of the file when a transaction begins or ends; None if the handler's statements caused the error."""
    known = _INSIDE | _AT_THE_ENDS
    if isinstance(error, MemoryError) or (isinstance(error, sqlite3.Error) and _code_of(error) in known):
        return _unavailable(address, error)
    return None


def handler_fault(address: str, error: BaseException) -> StoreUnavailable | None:
    """The fault of the file, if it is in the error of a handler or in the error's chain of causes.

    SQLite does not say which file has the fault. If another database that the handler uses is damaged or its disk is
    full, the fault is attributed to the store, and the record is tried again. Only faults that can happen while we hold
    the lock count: if a file is locked or missing, it is not the store's file.
    """
    for cause in causes_of(error):
        if isinstance(cause, sqlite3.Error) and _code_of(cause) in _INSIDE:
            return _unavailable(address, cause)
    return None


def _unavailable(address: str, error: BaseException) -> StoreUnavailable:
    return StoreUnavailable(f"{address} cannot be written: {str(error) or type(error).__name__}")


def _code_of(error: sqlite3.Error) -> int | None:
    """The primary code: SQLITE_IOERR has thirty variants. None for an error that Python's module raised itself."""
    code = getattr(error, "sqlite_errorcode", None)
    return None if code is None else code & 0xFF

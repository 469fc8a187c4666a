"""The file of an SQLite store: its connections, and the state of kconsume's tables in it.

This module knows nothing of offsets and groups. The first connection is opened at the first use, and makes or updates
the tables.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kconsume.backends.sqlite.connection import LentSqliteConnection, SqliteConnection
from kconsume.backends.sqlite.errors import STATEMENT_ERRORS, passing_fault, store_errors
from kconsume.backends.sqlite.location import must_be_local
from kconsume.backends.sqlite.schema import (
    BEGIN,
    COMMIT,
    ROLLBACK,
    SCHEMA_VERSION,
    bring_up_to_date,
    is_up_to_date,
    version_of,
)
from kconsume.errors import StoreError, StoreUnavailable


class SqliteDatabase:
    """`SqliteStore.database`: the access to the file, also for parts of kconsume outside of the store.

    Several threads may use it, in one process: `_lock` guards `_idle` and `_opened_by`.
    """

    def __init__(self, path: Path, address: str) -> None:
        """
        Args:
            path: the file.
            address: the name of the file in messages.
        """
        self.path = path
        self.address = address
        self._idle: list[SqliteConnection] = []
        self._lock = threading.Lock()
        self._ready = False
        self._opened_by: int | None = None

    @contextmanager
    def transaction(self) -> Iterator[LentSqliteConnection]:
        """A write transaction of the store's own statements. Raises errors of SQLite as the store's errors."""
        with self.writing() as connection, store_errors(self.address):
            yield connection

    @contextmanager
    def writing(self, end: str = COMMIT) -> Iterator[LentSqliteConnection]:
        """A write transaction for statements of a handler: takes the turnstile lock, executes BEGIN IMMEDIATE, and ends
        with COMMIT or ROLLBACK.

        Args:
            end: the statement that ends the transaction if the block raises nothing.
        """
        with self._borrowed() as borrowed, borrowed.turnstile():
            connection = borrowed.connection
            with store_errors(self.address):
                connection.execute(BEGIN)
            try:
                yield connection
                _end(self.address, connection, end)
            finally:
                if connection.in_transaction:
                    # Roll back before the turnstile lock is released. If this fails, closing the connection rolls back.
                    with contextlib.suppress(*STATEMENT_ERRORS):
                        connection.execute(ROLLBACK)

    @contextmanager
    def connection(self) -> Iterator[LentSqliteConnection]:
        """Borrow a connection without a transaction. If the block raises, the connection is closed and not reused."""
        with self._borrowed() as borrowed:
            yield borrowed.connection

    def close(self) -> None:
        """Close the idle connections. A later use opens new ones."""
        if self._is_forked():
            return  # the connections belong to the parent process; SQLite forbids even to close them here
        with self._lock:
            idle, self._idle = self._idle, []
        for each in idle:
            each.close()

    @contextmanager
    def _borrowed(self) -> Iterator[SqliteConnection]:
        borrowed = self._take()
        borrowed.connection.activate()
        try:
            yield borrowed
        except BaseException:
            borrowed.close()
            raise
        borrowed.connection.deactivate()
        with self._lock:
            self._idle.append(borrowed)

    def _take(self) -> SqliteConnection:
        if self._is_forked():
            raise StoreError(
                f"{self.address} was opened by process {self._opened_by}, and this process is a fork of that one. A "
                f"fork cannot use open SQLite files: make the store in this process, or start processes by spawn"
            )
        with self._lock:
            self._opened_by = os.getpid()
            if self._idle:
                return self._idle.pop()
        if not self._ready:
            must_be_local(self.path)
        try:
            opened = SqliteConnection(self.path)
        except (*STATEMENT_ERRORS, OSError) as error:
            raise StoreUnavailable(f"{self.address} cannot be opened ({error})") from error
        try:
            if not self._ready:
                self._prepare(opened)
        except STATEMENT_ERRORS as error:
            opened.close()
            raise StoreUnavailable(f"{self.address} cannot be prepared ({error})") from error
        except BaseException:
            opened.close()
            raise
        return opened

    def _is_forked(self) -> bool:
        return self._opened_by is not None and self._opened_by != os.getpid()

    def _prepare(self, opened: SqliteConnection) -> None:
        """Make or update the tables. Waits for the turnstile lock only if something is missing. Two threads may call
        this at once."""
        if not is_up_to_date(opened.connection):
            with opened.turnstile():
                bring_up_to_date(opened.connection)
        if (version := version_of(opened.connection)) > SCHEMA_VERSION:
            raise StoreError(
                f"{self.address} has schema version {version}, and this kconsume writes version "
                f"{SCHEMA_VERSION}: upgrade kconsume here"
            )
        self._ready = True


def _end(address: str, connection: LentSqliteConnection, end: str) -> None:
    try:
        connection.execute(end)
    except STATEMENT_ERRORS as error:
        fault = passing_fault(address, error)
        if fault is None:
            raise  # the handler's error, for instance a constraint that fails only at COMMIT
        raise fault from error

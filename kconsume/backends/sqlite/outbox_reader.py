"""Reads the rows of an outbox in an SQLite file over read-only connections. Deletes rows in a transaction."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager

from kconsume.backends.outbox.reader import WaitingRow, select_rows, waiting_row
from kconsume.backends.sqlite.store import SqliteStore
from kconsume.errors import StoreError


class SqliteOutbox:
    """The outbox in the file of an SQLite store."""

    def __init__(self, store: SqliteStore) -> None:
        self._store = store

    def exists(self) -> bool:
        if not self._store.path.exists():
            return False
        with self._reading() as connection:
            query = "select 1 from sqlite_master where type = 'table' and name = 'kconsume_outbox'"
            return connection.execute(query).fetchone() is not None

    def rows(self) -> list[WaitingRow]:
        with self._reading() as connection:
            return [waiting_row(row) for row in connection.execute(select_rows("kconsume_outbox"))]

    def value(self, row: WaitingRow) -> tuple[bytes | None] | None:
        with self._reading() as connection:
            found = connection.execute("select value from kconsume_outbox where id = ?", (row.number,)).fetchone()
        return None if found is None else (found[0],)

    def delete(self, rows: Sequence[WaitingRow]) -> set[int]:
        statement = "delete from kconsume_outbox where id = ?"
        with self._store.database.transaction() as connection:
            return {row.number for row in rows if connection.execute(statement, (row.number,)).rowcount == 1}

    @contextmanager
    def _reading(self) -> Iterator[sqlite3.Connection]:
        try:
            with closing(sqlite3.connect(f"{self._store.path.absolute().as_uri()}?mode=ro", uri=True)) as connection:
                yield connection
        except sqlite3.Error as error:
            raise StoreError(
                f"{self._store.address} cannot be read ({error}): is it a database of SQLite that this user may read?"
            ) from error

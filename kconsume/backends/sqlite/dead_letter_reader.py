"""Reads a table of dead letters in an SQLite file, over read-only connections."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from datetime import UTC, datetime

from kconsume.backends.dead_letters.reader import (
    CauseSummary,
    KeptLetter,
    PurgeSelection,
    count_purgeable,
    numbered_letter_of,
    purge_condition,
    select_letter,
    select_page,
    select_summaries,
    summary_of,
    wrong_table,
)
from kconsume.backends.dead_letters.tables import quoted
from kconsume.backends.sqlite.store import SqliteStore
from kconsume.errors import StoreError


class SqliteLetters:
    """Reads a table of dead letters in the file of an SQLite store."""

    def __init__(self, store: SqliteStore, table: str) -> None:
        self._store = store
        self._table = table

    def exists(self) -> bool:
        if not self._store.path.exists():
            return False
        with self._reading() as connection:
            try:
                connection.execute(f"select 1 from {quoted(self._table)} limit 0")
            except sqlite3.OperationalError as error:
                if str(error).startswith("no such table"):
                    return False
                raise
        return True

    def summaries(self, since: datetime | None = None, group: str | None = None) -> list[CauseSummary]:
        values = {"since": None if since is None else since.astimezone(UTC).isoformat(), "group": group}
        with self._reading() as connection:
            query = select_summaries(self._table, "sqlite", values, knows_sent=self._knows_sent(connection))
            rows = connection.execute(query, values)
            return [summary_of(row) for row in rows]

    def letter(self, row: int) -> KeptLetter | None:
        with self._reading() as connection:
            query = select_letter(self._table, "sqlite", knows_sent=self._knows_sent(connection))
            try:
                found = connection.execute(query, {"row": row}).fetchone()
            except OverflowError:  # SQLite has no row with such a number
                return None
        return None if found is None else numbered_letter_of(found)

    def page(self, after: int, most: int) -> list[KeptLetter]:
        with self._reading() as connection:
            query = select_page(self._table, "sqlite", knows_sent=self._knows_sent(connection))
            return [numbered_letter_of(row) for row in connection.execute(query, {"after": after, "most": most})]

    def purgeable(self, selection: PurgeSelection) -> tuple[int, int]:
        with self._reading() as connection:
            condition, values = purge_condition(selection, "sqlite", knows_sent=self._knows_sent(connection))
            selected, total = connection.execute(count_purgeable(self._table, condition), values).fetchone()
        return selected, total

    def _knows_sent(self, connection: sqlite3.Connection) -> bool:
        """True if the table has the column `sent_back`. A table of an earlier version has none until a letter is sent
        back."""
        columns = connection.execute(f"pragma table_info({quoted(self._table)})")
        return "sent_back" in {column[1] for column in columns}

    @contextmanager
    def _reading(self) -> Iterator[sqlite3.Connection]:
        file = f"{self._store.path.absolute().as_uri()}?mode=ro"
        try:
            with closing(sqlite3.connect(file, uri=True)) as connection:
                yield connection
        except sqlite3.Error as error:
            if str(error).startswith("no such column"):
                raise wrong_table(self._table, self._store.address, str(error)) from error
            raise StoreError(
                f"{self._store.address} cannot be read ({error}): is it a database of SQLite that this user may read?"
            ) from error

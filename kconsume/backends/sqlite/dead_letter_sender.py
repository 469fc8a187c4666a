"""Sends dead letters of an SQLite table back to Kafka, in write transactions of the store."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import cast

from kconsume.backends.dead_letters.reader import PurgeSelection, delete_purgeable, purge_condition, select_rows
from kconsume.backends.dead_letters.sender import ToOutgoing, unsent_of
from kconsume.backends.dead_letters.tables import add_sent_back, mark_sent_back, quoted
from kconsume.backends.sqlite.store import SqliteStore


class SqliteSender:
    """Sends dead letters of a table in the file of an SQLite store."""

    def __init__(self, store: SqliteStore, table: str) -> None:
        self._store = store
        self._table = table

    def prepare(self) -> None:
        with self._store.database.transaction() as connection:
            columns = connection.execute(f"pragma table_info({quoted(self._table)})").fetchall()
            if "sent_back" not in {column[1] for column in columns}:
                connection.execute(add_sent_back(self._table, "sqlite"))

    def send_back(self, rows: Sequence[int], to_outgoing: ToOutgoing) -> int:
        with self._store.database.transaction() as connection:
            unsent = unsent_of(connection.execute(select_rows(self._table, rows)).fetchall())
            for each in unsent:
                connection.execute(*self._store.insert_statement(to_outgoing(each.letter)))
                connection.execute(mark_sent_back(self._table, "sqlite"), {"row": each.row})
        return len(unsent)

    def waiting(self, topics: Collection[str]) -> int:
        marks = ", ".join("?" * len(topics))
        query = f"select count(*) from kconsume_outbox where group_id = '' and target in ({marks})"
        with self._store.database.connection() as connection:
            return cast(int, connection.execute(query, list(topics)).fetchone()[0])

    def purge(self, selection: PurgeSelection) -> int:
        self.prepare()
        condition, values = purge_condition(selection, "sqlite", knows_sent=True)
        with self._store.database.transaction() as connection:
            return connection.execute(delete_purgeable(self._table, condition), values).rowcount

    def release_lease(self, owner: str) -> None:
        with self._store.database.transaction() as connection:
            connection.execute("update kconsume_schema set relay = null, relay_at = null where relay = ?", (owner,))

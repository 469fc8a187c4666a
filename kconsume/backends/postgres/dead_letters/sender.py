"""Sends dead letters of a PostgreSQL table back to Kafka. Each call opens its own connection and transaction."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import closing, contextmanager
from typing import Any, cast

import psycopg
from psycopg import Connection

from kconsume.backends.base import OffsetStore
from kconsume.backends.dead_letters.reader import PurgeSelection, delete_purgeable, purge_condition, select_rows
from kconsume.backends.dead_letters.sender import ToOutgoing, unsent_of
from kconsume.backends.dead_letters.tables import add_sent_back, mark_sent_back
from kconsume.backends.postgres.dead_letters.writer import has_sent_back_column
from kconsume.backends.postgres.errors import store_error
from kconsume.backends.postgres.store import PostgresStore
from kconsume.errors import ConfigurationError

_SENDING = "send letters of {table} back"
_GRANT_TO_SEND = (
    "grant select and update on it to this role, and run: alter table {table} add column if not exists sent_back "
    "timestamptz"
)


class PostgresSender:
    """Sends dead letters of the table that `PostgresLetters` reads."""

    def __init__(self, store: OffsetStore, table: str) -> None:
        assert isinstance(store, PostgresStore)
        self._store = store
        self._table = table

    def prepare(self) -> None:
        with self._transaction() as connection:
            if connection.execute(*has_sent_back_column(self._table)).fetchone() is None:
                statement = add_sent_back(self._table, "postgres")
                connection.execute(statement.replace("add column", "add column if not exists"))

    def send_back(self, rows: Sequence[int], to_outgoing: ToOutgoing) -> int:
        with self._transaction() as connection:
            # With `for update`, the statement waits for a process that changes the rows, and then reads the new rows.
            unsent = unsent_of(connection.execute(f"{select_rows(self._table, rows)} for update").fetchall())
            for each in unsent:
                connection.execute(*self._store.insert_statement(to_outgoing(each.letter)))
                connection.execute(mark_sent_back(self._table, "postgres"), {"row": each.row})
        return len(unsent)

    def waiting(self, topics: Collection[str]) -> int:
        with self._transaction() as connection:
            statement = self._store.database.statements.count_unsent
            (count,) = connection.execute(statement, {"topics": list(topics)}).fetchone() or (0,)
            return cast(int, count)

    def purge(self, selection: PurgeSelection) -> int:
        with self._transaction("delete letters of {table}", "grant select and delete on it to this role") as connection:
            knows_sent = connection.execute(*has_sent_back_column(self._table)).fetchone() is not None
            condition, values = purge_condition(selection, "postgres", knows_sent=knows_sent)
            return connection.execute(delete_purgeable(self._table, condition), values).rowcount

    def release_lease(self, owner: str) -> None:
        with self._transaction() as connection:
            connection.execute(self._store.database.statements.release_lease, {"owner": owner})

    @contextmanager
    def _transaction(self, doing: str = _SENDING, grant: str = _GRANT_TO_SEND) -> Iterator[Connection[tuple[Any, ...]]]:
        address = self._store.database.address
        self._store.database.prepare()  # makes the outbox if it does not exist
        with closing(address.connect()) as connection:
            try:
                connection.execute("begin isolation level read committed")
                yield connection
                connection.execute("commit")
            except psycopg.errors.InsufficientPrivilege as error:
                raise ConfigurationError(
                    f"{address.shown} does not let this role {doing.format(table=self._table)} "
                    f"({error.diag.message_primary}): let the table's owner {grant.format(table=self._table)}"
                ) from error
            except psycopg.Error as error:
                raise store_error(error, address.shown) from error

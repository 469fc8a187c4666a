"""Sending letters of a table back on PostgreSQL, in transactions of a connection of its own."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import closing, contextmanager
from typing import Any, cast

import psycopg
from psycopg import Connection

from kconsume.backends.abc import OffsetStore
from kconsume.backends.letter_reading import select_rows
from kconsume.backends.letter_sending import Addressed, unsent_of
from kconsume.backends.letter_table import add_sent_back, mark_sent_back
from kconsume.backends.postgres import PostgresStore
from kconsume.backends.postgres_faults import store_error
from kconsume.backends.postgres_letters import has_sent_back
from kconsume.errors import ConfigurationError


class PostgresSender:
    """The table as `PostgresLetters` finds it."""

    def __init__(self, store: OffsetStore, table: str) -> None:
        assert isinstance(store, PostgresStore)
        self._store = store
        self._table = table

    def prepare(self) -> None:
        with self._changing() as connection:
            if connection.execute(*has_sent_back(self._table)).fetchone() is None:
                adding = add_sent_back(self._table, "postgres")
                connection.execute(adding.replace("add column", "add column if not exists"))

    def send_back(self, rows: Sequence[int], addressed: Addressed) -> int:
        with self._changing() as connection:
            # Who waits here for another that sends them back reads them again, as that one has left them.
            unsent = unsent_of(connection.execute(f"{select_rows(self._table, rows)} for update").fetchall())
            for each in unsent:
                connection.execute(*self._store.posting(addressed(each.letter)))
                connection.execute(mark_sent_back(self._table, "postgres"), {"row": each.row})
        return len(unsent)

    def waiting(self, topics: Collection[str]) -> int:
        with self._changing() as connection:
            asked = f"select count(*) from {self._store._sql._outbox} where group_id = '' and target = any(%(topics)s)"
            (count,) = connection.execute(asked, {"topics": list(topics)}).fetchone() or (0,)
            return cast(int, count)

    def let_go(self, owner: str) -> None:
        with self._changing() as connection:
            letting = f"update {self._store._sql._schema} set relay = null, relay_at = null where relay = %(owner)s"
            connection.execute(letting, {"owner": owner})

    @contextmanager
    def _changing(self) -> Iterator[Connection[tuple[Any, ...]]]:
        at = self._store._at
        self._store._desk_is_ready()  # then the outbox is there
        with closing(at.connect()) as connection:
            try:
                connection.execute("begin isolation level read committed")
                yield connection
                connection.execute("commit")
            except psycopg.errors.InsufficientPrivilege as error:
                raise ConfigurationError(
                    f"{at.shown} does not let our role send letters of {self._table} back "
                    f"({error.diag.message_primary}): let the table's owner grant select and update on it to our role, "
                    f"and run: alter table {self._table} add column if not exists sent_back timestamptz"
                ) from error
            except psycopg.Error as error:
                raise store_error(error, at.shown) from error

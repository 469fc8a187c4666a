"""Reads a table of dead letters on PostgreSQL, in read-only transactions, which a standby accepts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from datetime import datetime
from typing import Any

import psycopg
from psycopg import Connection

from kconsume.backends.base import OffsetStore
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
from kconsume.backends.postgres.dead_letters.writer import has_sent_back_column, table_exists
from kconsume.backends.postgres.errors import store_error
from kconsume.backends.postgres.store import PostgresStore
from kconsume.errors import ConfigurationError

_MOST_ROW = 2**63 - 1


class PostgresLetters:
    """Reads one table of dead letters. If the name has no schema, the table is found by the role's `search_path`."""

    def __init__(self, store: OffsetStore, table: str) -> None:
        assert isinstance(store, PostgresStore)
        self._address = store.database.address
        self._table = table

    def exists(self) -> bool:
        with self._reading() as connection:
            return connection.execute(*table_exists(self._table)).fetchone() == (True,)

    def summaries(self, since: datetime | None = None, group: str | None = None) -> list[CauseSummary]:
        values = {"since": since, "group": group}
        with self._reading() as connection:
            query = select_summaries(self._table, "postgres", values, knows_sent=self._knows_sent(connection))
            rows = connection.execute(query, values)
            return [summary_of(row) for row in rows]

    def letter(self, row: int) -> KeptLetter | None:
        if row > _MOST_ROW:
            return None
        with self._reading() as connection:
            query = select_letter(self._table, "postgres", knows_sent=self._knows_sent(connection))
            found = connection.execute(query, {"row": row}).fetchone()
        return None if found is None else numbered_letter_of(found)

    def page(self, after: int, most: int) -> list[KeptLetter]:
        with self._reading() as connection:
            query = select_page(self._table, "postgres", knows_sent=self._knows_sent(connection))
            return [numbered_letter_of(row) for row in connection.execute(query, {"after": after, "most": most})]

    def purgeable(self, selection: PurgeSelection) -> tuple[int, int]:
        with self._reading() as connection:
            condition, values = purge_condition(selection, "postgres", knows_sent=self._knows_sent(connection))
            selected, total = connection.execute(count_purgeable(self._table, condition), values).fetchone() or (0, 0)
        return selected, total

    def _knows_sent(self, connection: Connection[tuple[Any, ...]]) -> bool:
        """True if the table has the column `sent_back`. A table of an earlier version has none until a letter is sent
        back."""
        return connection.execute(*has_sent_back_column(self._table)).fetchone() is not None

    @contextmanager
    def _reading(self) -> Iterator[Connection[tuple[Any, ...]]]:
        with closing(self._address.connect()) as connection:
            try:
                # Not a session setting: behind a pooler, it would apply to other clients too.
                connection.execute("begin read only")
                yield connection
                connection.execute("rollback")
            except psycopg.errors.UndefinedColumn as error:
                raise wrong_table(self._table, self._address.shown, error.diag.message_primary or str(error)) from error
            except psycopg.errors.InsufficientPrivilege as error:
                raise ConfigurationError(
                    f"{self._address.shown} does not let this role read {self._table} ({error.diag.message_primary}): "
                    f"let the table's owner grant select on {self._table} to this role"
                ) from error
            except psycopg.Error as error:
                raise store_error(error, self._address.shown) from error

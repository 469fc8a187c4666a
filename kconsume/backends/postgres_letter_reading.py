"""Reading a table of dead letters on PostgreSQL, in transactions that may only read: also on a standby."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from datetime import datetime
from typing import Any

import psycopg
from psycopg import Connection

from kconsume.backends.abc import OffsetStore
from kconsume.backends.letter_reading import (
    Heap,
    KeptLetter,
    heap_of,
    kept_of,
    other_table,
    paged_of,
    select_heaps,
    select_letter,
    select_page,
)
from kconsume.backends.postgres import PostgresStore
from kconsume.backends.postgres_faults import store_error
from kconsume.backends.postgres_letters import has_sent_back, looked_for
from kconsume.errors import ConfigurationError

_MOST_ROW = 2**63 - 1


class PostgresLetters:
    """The table as the store's own role finds it, by its `search_path` if the name has no schema."""

    def __init__(self, store: OffsetStore, table: str) -> None:
        assert isinstance(store, PostgresStore)
        self._at = store._at
        self._table = table

    def is_there(self) -> bool:
        with self._reading() as connection:
            return connection.execute(*looked_for(self._table)).fetchone() == (True,)

    def heaps(self, since: datetime | None = None, group: str | None = None) -> list[Heap]:
        values = {"since": since, "group": group}
        with self._reading() as connection:
            return [heap_of(row) for row in connection.execute(select_heaps(self._table, "postgres", values), values)]

    def letter(self, row: int) -> KeptLetter | None:
        if row > _MOST_ROW:
            return None
        with self._reading() as connection:
            found = connection.execute(select_letter(self._table, "postgres"), {"row": row}).fetchone()
        return None if found is None else kept_of(found)

    def page(self, after: int, most: int) -> list[KeptLetter]:
        with self._reading() as connection:
            knows_sent = connection.execute(*has_sent_back(self._table)).fetchone() is not None
            asked = select_page(self._table, "postgres", knows_sent=knows_sent)
            return [paged_of(row) for row in connection.execute(asked, {"after": after, "most": most})]

    @contextmanager
    def _reading(self) -> Iterator[Connection[tuple[Any, ...]]]:
        with closing(self._at.connect()) as connection:
            try:
                connection.execute("begin read only")  # and not by a setting, which a pooler would hand on to others
                yield connection
                connection.execute("rollback")
            except psycopg.errors.UndefinedColumn as error:
                raise other_table(self._table, self._at.shown, error.diag.message_primary or str(error)) from error
            except psycopg.errors.InsufficientPrivilege as error:
                raise ConfigurationError(
                    f"{self._at.shown} does not let our role read {self._table} ({error.diag.message_primary}): let "
                    f"its owner grant select on {self._table} to it"
                ) from error
            except psycopg.Error as error:
                raise store_error(error, self._at.shown) from error

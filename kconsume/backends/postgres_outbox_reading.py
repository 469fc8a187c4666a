"""The rows of an outbox in PostgreSQL, for people: read in transactions that may only read, also on a standby."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from typing import Any

import psycopg
from psycopg import Connection

from kconsume.backends.abc import OffsetStore
from kconsume.backends.outbox_reading import WaitingRow, select_rows, waiting_row
from kconsume.backends.postgres import PostgresStore
from kconsume.backends.postgres_faults import store_error
from kconsume.errors import ConfigurationError


class PostgresOutbox:
    """The table where the store's tables are."""

    def __init__(self, store: OffsetStore) -> None:
        assert isinstance(store, PostgresStore)
        self._at = store._at
        self._table = f"{store._at.prefix}kconsume_outbox"

    def is_there(self) -> bool:
        with self._connected("begin read only") as connection:
            return connection.execute("select to_regclass(%s) is not null", (self._table,)).fetchone() == (True,)

    def rows(self) -> list[WaitingRow]:
        with self._connected("begin read only") as connection:
            asked = select_rows(self._table, "coalesce(octet_length(value), -1)")
            return [waiting_row(row) for row in connection.execute(asked)]

    def value(self, row: WaitingRow) -> tuple[bytes | None] | None:
        with self._connected("begin read only") as connection:
            asked = f"select value from {self._table} where {_KEY} and id = %(number)s"
            found = connection.execute(asked, _values(row)).fetchone()
        return None if found is None else (None if found[0] is None else bytes(found[0]),)

    def delete(self, rows: Sequence[WaitingRow]) -> set[int]:
        with self._connected("begin") as connection:
            statement = f"delete from {self._table} where {_KEY} and id = %(number)s"
            return {row.number for row in rows if connection.execute(statement, _values(row)).rowcount == 1}

    @contextmanager
    def _connected(self, begin: str) -> Iterator[Connection[tuple[Any, ...]]]:
        with closing(self._at.connect()) as connection:
            try:
                connection.execute(begin)  # and not by a setting, which a pooler would hand on to others
                yield connection
                connection.execute("commit")
            except psycopg.errors.InsufficientPrivilege as error:
                raise ConfigurationError(
                    f"{self._at.shown} does not let our role do that ({error.diag.message_primary}): let the owner of "
                    f"{self._table} grant select and delete on it"
                ) from error
            except psycopg.Error as error:
                raise store_error(error, self._at.shown) from error


_KEY = "group_id = %(group)s and topic = %(topic)s and partition = %(partition)s"


def _values(row: WaitingRow) -> dict[str, str | int]:
    partition = row.partition
    return {"group": row.group, "topic": partition.topic, "partition": partition.number, "number": row.number}

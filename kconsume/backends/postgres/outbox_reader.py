"""Reads and deletes outbox rows in PostgreSQL, for users. Reads are read-only transactions, which a standby accepts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from typing import Any

import psycopg
from psycopg import Connection

from kconsume.backends.base import OffsetStore
from kconsume.backends.outbox.reader import WaitingRow, select_rows, waiting_row
from kconsume.backends.postgres.errors import store_error
from kconsume.backends.postgres.store import PostgresStore
from kconsume.errors import ConfigurationError


class PostgresOutbox:
    """The outbox in the schema of the store's tables."""

    def __init__(self, store: OffsetStore) -> None:
        assert isinstance(store, PostgresStore)
        self._address = store.database.address
        self._table = f"{store.database.address.prefix}kconsume_outbox"

    def exists(self) -> bool:
        with self._transaction("begin read only") as connection:
            return connection.execute("select to_regclass(%s) is not null", (self._table,)).fetchone() == (True,)

    def rows(self) -> list[WaitingRow]:
        with self._transaction("begin read only") as connection:
            query = select_rows(self._table, "coalesce(octet_length(value), -1)")
            return [waiting_row(row) for row in connection.execute(query)]

    def value(self, row: WaitingRow) -> tuple[bytes | None] | None:
        with self._transaction("begin read only") as connection:
            query = f"select value from {self._table} where {_KEY} and id = %(number)s"
            found = connection.execute(query, _values(row)).fetchone()
        return None if found is None else (None if found[0] is None else bytes(found[0]),)

    def delete(self, rows: Sequence[WaitingRow]) -> set[int]:
        with self._transaction("begin") as connection:
            statement = f"delete from {self._table} where {_KEY} and id = %(number)s"
            return {row.number for row in rows if connection.execute(statement, _values(row)).rowcount == 1}

    @contextmanager
    def _transaction(self, begin: str) -> Iterator[Connection[tuple[Any, ...]]]:
        with closing(self._address.connect()) as connection:
            try:
                connection.execute(begin)  # not a session setting, which a pooler would pass on to other clients
                yield connection
                connection.execute("commit")
            except psycopg.errors.InsufficientPrivilege as error:
                raise ConfigurationError(
                    f"{self._address.shown} does not let this role use the outbox ({error.diag.message_primary}): let "
                    f"the owner of {self._table} grant select and delete on it"
                ) from error
            except psycopg.Error as error:
                raise store_error(error, self._address.shown) from error


_KEY = "group_id = %(group)s and topic = %(topic)s and partition = %(partition)s"


def _values(row: WaitingRow) -> dict[str, str | int]:
    partition = row.partition
    return {"group": row.group, "topic": partition.topic, "partition": partition.number, "number": row.number}

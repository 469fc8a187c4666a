"""The rows of an outbox, for people: what waits there, and taking rows out.

Beside the stores and not in them: reading has a connection of its own, makes nothing and waits for no writer. What the
table is, is `outbox_table.py`'s.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Protocol

from kconsume.backends.abc import OffsetStore
from kconsume.backends.outbox_table import headers_of
from kconsume.backends.sqlite import SqliteStore
from kconsume.errors import ConfigurationError, StoreError
from kconsume.output import ORIGIN, Outgoing
from kconsume.records import Headers, Partition
from kconsume.settings import masked_address, scheme_in

MOST_ROW = 2**63 - 1
_COLUMNS = "id, group_id, topic, partition, target, key, headers, record_timestamp, posted_at"
_SIZE = "coalesce(length(value), -1)"
_ORDER = "order by group_id, topic, partition, id"


@dataclass(frozen=True, slots=True)
class WaitingRow:
    """A row of the outbox, without its value."""

    number: int
    group: str
    """Empty for a row of `Outbox.send`."""
    partition: Partition
    """Whose record it came from; `NOBODYS` for a row of `Outbox.send`."""
    target: str
    key: bytes | None
    headers: Headers
    timestamp: datetime | None
    posted_at: datetime
    value_bytes: int | None

    @property
    def origin(self) -> str | None:
        return next((value.decode(errors="replace") for name, value in self.headers if name == ORIGIN), None)

    @property
    def size(self) -> int:
        """Bytes of key, value and headers."""
        headers = sum(len(name.encode()) + len(value) for name, value in self.headers)
        return (self.value_bytes or 0) + len(self.key or b"") + headers

    def outgoing(self, value: bytes | None) -> Outgoing:
        return Outgoing(value, self.key, self.headers, self.target, self.timestamp)


class OutboxReader(Protocol):
    """The outbox of one store. Each call connects, asks and leaves."""

    def is_there(self) -> bool: ...

    def rows(self) -> list[WaitingRow]:
        """All of it: by group, partition and number."""
        ...

    def value(self, row: WaitingRow) -> tuple[bytes | None] | None:
        """The value of a row; None if the row is gone."""
        ...

    def delete(self, rows: Sequence[WaitingRow]) -> set[int]:
        """Take rows out. Returns the numbers of those that were still there."""
        ...


def outbox_in(store: OffsetStore) -> OutboxReader:
    """The outbox beside the store's offsets. It need not be there."""
    if isinstance(store, SqliteStore):
        return _SqliteOutbox(store)
    if scheme_in(store.address) in ("postgresql", "postgres"):
        from kconsume.backends.postgres_outbox_reading import PostgresOutbox

        return PostgresOutbox(store)
    raise ConfigurationError(
        f"{masked_address(store.address)} has no outbox, because it is no database: name a postgresql:// or "
        f"sqlite:/// address"
    )


def select_rows(table: str, size: str = _SIZE) -> str:
    return f"select {_COLUMNS}, {size} from {table} {_ORDER}"


def waiting_row(row: tuple[Any, ...]) -> WaitingRow:
    number, group, topic, partition, target, key, headers, moment, posted_at, size = row
    return WaitingRow(
        number, group, Partition(topic, partition), target, None if key is None else bytes(key), headers_of(headers),
        _moment(moment), _moment(posted_at) or datetime.now(UTC), None if size < 0 else size,
    )  # fmt: skip


def _moment(moment: datetime | str | None) -> datetime | None:
    return datetime.fromisoformat(moment) if isinstance(moment, str) else moment


class _SqliteOutbox:
    def __init__(self, store: SqliteStore) -> None:
        self._store = store

    def is_there(self) -> bool:
        if not self._store.path.exists():
            return False
        with self._reading() as connection:
            asked = "select 1 from sqlite_master where type = 'table' and name = 'kconsume_outbox'"
            return connection.execute(asked).fetchone() is not None

    def rows(self) -> list[WaitingRow]:
        with self._reading() as connection:
            return [waiting_row(row) for row in connection.execute(select_rows("kconsume_outbox"))]

    def value(self, row: WaitingRow) -> tuple[bytes | None] | None:
        with self._reading() as connection:
            found = connection.execute("select value from kconsume_outbox where id = ?", (row.number,)).fetchone()
        return None if found is None else (found[0],)

    def delete(self, rows: Sequence[WaitingRow]) -> set[int]:
        statement = "delete from kconsume_outbox where id = ?"
        with self._store._changing() as connection:
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

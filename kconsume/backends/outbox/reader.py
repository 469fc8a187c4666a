"""Reads and deletes the rows of an outbox, for users.

A reader opens a connection for each call and creates nothing. A read never waits for a writer. This module has the
protocol of a reader, and the values of a row. The readers are `sqlite.outbox_reader` and `postgres.outbox_reader`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Protocol

from kconsume._config.client_settings import masked_address, scheme_in
from kconsume._kafka.outgoing import ORIGIN, Outgoing
from kconsume.backends.base import OffsetStore
from kconsume.backends.outbox.tables import headers_of
from kconsume.backends.sqlite.store import SqliteStore
from kconsume.errors import ConfigurationError
from kconsume.records import Headers, Partition

MOST_ROW = 2**63 - 1
"""The highest number that a row may have."""
_COLUMNS = "id, group_id, topic, partition, target, key, headers, record_timestamp, posted_at"
_SIZE = "coalesce(length(value), -1)"
_ORDER = "order by group_id, topic, partition, id"


@dataclass(frozen=True, slots=True)
class WaitingRow:
    """A row of the outbox, without its value."""

    number: int
    group: str
    """The group of the consumer; empty for a row of `Outbox.send`."""
    partition: Partition
    """The partition that the handler was consuming when it sent this record; `UNOWNED` for a row of `Outbox.send`."""
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
    """The outbox of one store. Each call opens a connection and closes it."""

    def exists(self) -> bool: ...

    def rows(self) -> list[WaitingRow]:
        """All rows, sorted by group, partition and number."""
        ...

    def value(self, row: WaitingRow) -> tuple[bytes | None] | None:
        """The value of a row as a tuple with one element; None if the row does not exist any more."""
        ...

    def delete(self, rows: Sequence[WaitingRow]) -> set[int]:
        """Delete rows. Returns the numbers of the rows that still existed."""
        ...


def outbox_in(store: OffsetStore) -> OutboxReader:
    """Return the reader for the outbox in the store's database. The outbox table need not exist. Raises
    `ConfigurationError` if the store is not a database."""
    if isinstance(store, SqliteStore):
        from kconsume.backends.sqlite.outbox_reader import SqliteOutbox

        return SqliteOutbox(store)
    if scheme_in(store.address) in ("postgresql", "postgres"):
        from kconsume.backends.postgres.outbox_reader import PostgresOutbox

        return PostgresOutbox(store)
    raise ConfigurationError(
        f"{masked_address(store.address)} has no outbox, because it is not a database: give a postgresql:// or "
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

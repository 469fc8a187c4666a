"""`sqlite:///file`: offsets in the person's own SQLite file, in the handler's own transaction.

One writer a file is SQLite's rule, so a transaction goes through two doors: a turnstile (`flock` on a file
beside the database; the kernel queues those who wait, where SQLite's own busy handler lets one busy process
starve the others) and `BEGIN IMMEDIATE`. A handler that is slow inside its transaction therefore holds up
everybody who writes to that file, and a frozen process does so until it ends: no server can evict it. Who
waits too long gives up with `StoreUnavailable`. Readers go through neither door.

The file belongs to one host. Rows and offset are in it together, so losing its tail in a power cut
(`synchronous=NORMAL`) loses both together, and the records are handled again.
"""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import ClassVar, NamedTuple, TypeAlias

from kconsume.backends.abc import Position, Positions, Start
from kconsume.backends.sqlite_door import ENDED, Door, LentConnection
from kconsume.errors import ConfigurationError, Fenced, StoreError, StoreUnavailable, TransactionMisused
from kconsume.records import Partition
from kconsume.settings import masked_address

SCHEMA_VERSION = 1


# `last_epoch` is the highest epoch of all deleted rows: rows made later begin above it, so that no epoch is
# ever given out twice and a zombie from before the delete stays fenced.
_SCHEMA = f"""
begin immediate;
create table if not exists kconsume_schema (version integer not null, last_epoch bigint not null default 0);
insert into kconsume_schema (version) select {SCHEMA_VERSION} where not exists (select 1 from kconsume_schema);
create table if not exists kconsume_offsets (
    group_id text not null, topic text not null, partition integer not null,
    next_offset bigint not null, epoch bigint not null, topic_id text, owner text,
    leader_epoch integer, metadata text not null default '', updated_at text not null,
    primary key (group_id, topic, partition)
) without rowid;
commit;
"""
_HAS_SCHEMA = "select count(*) from sqlite_master where type = 'table' and name = 'kconsume_schema'"

_KEY = "group_id = ? and topic = ? and partition = ?"
_READ = f"""select next_offset, epoch, topic_id, owner, leader_epoch, metadata, updated_at
            from kconsume_offsets where {_KEY}"""
_PIN = """insert into kconsume_offsets
          (group_id, topic, partition, next_offset, epoch, topic_id, leader_epoch, updated_at)
          values (?, ?, ?, ?, (select last_epoch from kconsume_schema), ?, ?, ?) on conflict do nothing"""
_CLAIM = f"update kconsume_offsets set epoch = epoch + 1, owner = ?, updated_at = ? where {_KEY}"
_SAVE = f"""update kconsume_offsets set next_offset = ?, leader_epoch = ?, updated_at = ?,
            topic_id = coalesce(?, topic_id) where {_KEY} and epoch = ? and next_offset <= ?"""
_MARK = f"update kconsume_offsets set updated_at = ? where {_KEY} and epoch = ?"
_ADVANCE = f"""update kconsume_offsets set next_offset = ?, leader_epoch = ?
               where updated_at = ? and {_KEY} and epoch = ? and next_offset = ?"""
_RESET = """insert into kconsume_offsets (group_id, topic, partition, next_offset, epoch, updated_at)
            values (?, ?, ?, ?, (select last_epoch + 1 from kconsume_schema), ?) on conflict do update
            set next_offset = excluded.next_offset, epoch = epoch + 1, owner = null,
                leader_epoch = null, updated_at = excluded.updated_at"""
_RETIRE = """update kconsume_schema set last_epoch =
             max(last_epoch, (select coalesce(max(epoch), 0) from kconsume_offsets where {rows}))"""
# Texts of our own: a handler's "commit" must not find ours, already authorised, in the statement cache.
_BEGIN, _COMMIT, _ROLLBACK = "begin immediate -- kconsume", "commit -- kconsume", "rollback -- kconsume"

_Row: TypeAlias = tuple[int, int, str | None, str | None, int | None, str, str]


class SqliteStore:
    """Offsets in an SQLite file: `SqliteStore("shop.db")`. Opens nothing until it is used."""

    guarantee: ClassVar[str] = "exactly once: what the handler writes and the offset commit together"
    connection_types: ClassVar[tuple[type, ...]] = (sqlite3.Connection,)
    parallel: ClassVar[int | None] = 1

    def __init__(self, path: str | Path) -> None:
        if not str(path) or str(path) == ":memory:":
            raise ConfigurationError(
                "sqlite:// needs a file, because offsets must outlive the process: write "
                "sqlite:///relative.db or sqlite:////absolute.db, or use memory://"
            )
        self.path = Path(path)
        self.address = f"sqlite:///{path}"
        self._idle: list[Door] = []
        self._lock = threading.Lock()
        self._ready = False

    @classmethod
    def from_url(cls, url: str) -> SqliteStore:
        """`sqlite:///relative.db` or `sqlite:////absolute.db`."""
        prefix, path = url[: len("sqlite:///")], url[len("sqlite:///") :]
        if prefix != "sqlite:///" or not path:
            raise ConfigurationError(
                f"{masked_address(url)!r} names no file: write sqlite:///relative.db or sqlite:////absolute.db"
            )
        return cls(path)

    def load(self, group: str, partitions: Iterable[Partition]) -> dict[Partition, Position]:
        with self._door() as door:
            return _load(door.connection, group, partitions)

    def save(self, group: str, positions: Positions) -> None:
        with self._writing() as connection:
            for partition, position in positions.items():
                _save(connection, group, partition, position)

    def claim(self, group: str, partitions: Sequence[Partition], owner: str, start: Start) -> dict[Partition, Position]:
        wanted = sorted(partitions)
        known = self.load(group, wanted)
        pinned: dict[Partition, Position] = {}
        missing = [p for p in wanted if p not in known]
        while True:
            # Asked for before the transaction: it talks to Kafka, and nobody else should wait for that.
            starts = start(missing) if missing else {}
            pinned.update({p: starts[p] for p in missing})
            with self._writing() as connection:
                known = _load(connection, group, wanted)
                missing = [p for p in wanted if p not in known and p not in pinned]
                if not missing:
                    return _claim(connection, group, wanted, owner, pinned)
            # Rows that were there have been deleted meanwhile. They are pinned too, and there are only so many.

    @contextmanager
    def transaction(self, group: str, partition: Partition, epoch: int) -> Iterator[SqliteTx]:
        with self._writing() as connection:
            tx = SqliteTx(connection, group, partition, epoch)
            tx.begin()
            with connection.lent():
                yield tx

    @contextmanager
    def rehearsal(self) -> Iterator[Rehearsal]:
        """A transaction as a handler gets it, of which nothing stays: for `kconsume try`."""
        with self._writing(_ROLLBACK) as connection, connection.lent():
            yield Rehearsal(connection)

    def reset(self, group: str, offsets: Mapping[Partition, int]) -> None:
        with self._writing() as connection:
            for partition, offset in offsets.items():
                connection.execute(_RESET, (group, *partition, offset, _now()))

    def delete(self, group: str, partitions: Iterable[Partition] | None = None) -> None:
        with self._writing() as connection:
            if partitions is None:
                _delete(connection, "group_id = ?", (group,))
            for partition in partitions or ():
                _delete(connection, _KEY, (group, *partition))

    def groups(self) -> list[str]:
        with self._door() as door:
            rows = door.connection.execute("select distinct group_id from kconsume_offsets order by 1")
            return [row[0] for row in rows.fetchall()]

    def close(self) -> None:
        with self._lock:
            doors, self._idle = self._idle, []
        for door in doors:
            door.close()

    @contextmanager
    def _writing(self, end: str = _COMMIT) -> Iterator[LentConnection]:
        """A write transaction: turnstile, BEGIN IMMEDIATE, then COMMIT or ROLLBACK."""
        with self._door() as door, door.turnstile():
            connection = door.connection
            connection.execute(_BEGIN)
            try:
                yield connection
                connection.execute(end)
            finally:
                if connection.in_transaction:
                    connection.execute(_ROLLBACK)

    @contextmanager
    def _door(self) -> Iterator[Door]:
        """Borrow a connection. One that an error went through is closed, not lent again."""
        door = self._borrow()
        try:
            yield door
        except sqlite3.Error as error:
            door.close()
            if _is_the_files_fault(error):
                raise StoreUnavailable(f"{self.address} cannot be written: {error}") from error
            raise
        except BaseException:
            door.close()
            raise
        with self._lock:
            self._idle.append(door)

    def _borrow(self) -> Door:
        with self._lock:
            if self._idle:
                return self._idle.pop()
        try:
            door = Door(self.path)
        except (sqlite3.Error, OSError) as error:
            raise StoreUnavailable(f"{self.address} cannot be opened: {error}") from error
        try:
            if not self._ready:
                self._prepare(door)
        except sqlite3.Error as error:
            door.close()
            raise StoreUnavailable(f"{self.address} cannot be prepared: {error}") from error
        except BaseException:
            door.close()
            raise
        return door

    def _prepare(self, door: Door) -> None:
        """Looks before it writes: a file that is ready is not waited for. Twice at once does no harm."""
        connection = door.connection
        if connection.execute(_HAS_SCHEMA).fetchone() == (0,):
            with door.turnstile():
                connection.executescript(_SCHEMA)
        (version,) = connection.execute("select version from kconsume_schema").fetchone()
        if version != SCHEMA_VERSION:
            raise StoreError(
                f"{self.address} has schema version {version}, and this kconsume writes version "
                f"{SCHEMA_VERSION}: run the kconsume that made the file, or upgrade this one"
            )
        self._ready = True


class Rehearsal(NamedTuple):
    """A transaction that is only tried out."""

    connection: sqlite3.Connection


class SqliteTx:
    """The handler's transaction and the row that is advanced in it."""

    __slots__ = ("_epoch", "_group", "_mark", "_partition", "connection")

    def __init__(self, connection: LentConnection, group: str, partition: Partition, epoch: int) -> None:
        self.connection = connection
        self._group = group
        self._partition = partition
        self._epoch = epoch
        self._mark = ""

    def begin(self) -> None:
        """Check the epoch, and mark the row with the time of this transaction. Should a statement of the handler
        end it and another begin one, then the mark is gone, and `advance` knows that it is not the same."""
        self._mark = _now()
        key = (self._group, *self._partition)
        if self.connection.execute(_MARK, (self._mark, *key, self._epoch)).rowcount != 1:
            raise _fenced(self._group, self._partition, self._epoch, self._row())

    def advance(self, old: int, new: int, leader_epoch: int | None = None) -> None:
        connection = self.connection
        if not connection.in_transaction:
            raise TransactionMisused(ENDED)
        key = (self._group, *self._partition)
        values = (new, leader_epoch, self._mark, *key, self._epoch, old)
        if connection.execute(_ADVANCE, values).rowcount != 1:
            connection.restore()
            row = self._row()
            if row is not None and row[:2] == (old, self._epoch):
                raise TransactionMisused(ENDED)
            raise _fenced(self._group, self._partition, self._epoch, row, old)

    def _row(self) -> _Row | None:
        row: _Row | None = self.connection.execute(_READ, (self._group, *self._partition)).fetchone()
        return row


def _load(connection: sqlite3.Connection, group: str, partitions: Iterable[Partition]) -> dict[Partition, Position]:
    rows = {p: connection.execute(_READ, (group, *p)).fetchone() for p in partitions}
    return {p: _position(row) for p, row in rows.items() if row is not None}


def _claim(
    connection: sqlite3.Connection, group: str, partitions: Sequence[Partition], owner: str, pinned: Positions
) -> dict[Partition, Position]:
    now = _now()
    for partition, position in pinned.items():
        values = (position.next_offset, position.topic_id, position.leader_epoch, now)
        connection.execute(_PIN, (group, *partition, *values))
    for partition in partitions:
        connection.execute(_CLAIM, (owner, now, group, *partition))
    return _load(connection, group, partitions)


def _delete(connection: sqlite3.Connection, rows: str, key: Sequence[str | int]) -> None:
    connection.execute(_RETIRE.format(rows=rows), key)
    connection.execute(f"delete from kconsume_offsets where {rows}", key)


def _save(connection: sqlite3.Connection, group: str, partition: Partition, position: Position) -> None:
    offset = position.next_offset
    values = (offset, position.leader_epoch, _now(), position.topic_id)
    moved = connection.execute(_SAVE, (*values, group, *partition, position.epoch, offset)).rowcount
    if moved != 1:
        row = connection.execute(_READ, (group, *partition)).fetchone()
        raise _fenced(group, partition, position.epoch, row, offset)


def _fenced(group: str, partition: Partition, epoch: int, row: _Row | None, offset: int | None = None) -> Fenced:
    stored = "no row" if row is None else f"epoch {row[1]} at offset {row[0]}, owner {row[3]}"
    ours = f"epoch {epoch}" if offset is None else f"epoch {epoch} at offset {offset}"
    return Fenced(f"{partition} of group {group!r} is not ours any more: we hold {ours}, the store has {stored}")


def _position(row: _Row) -> Position:
    next_offset, epoch, topic_id, owner, leader_epoch, metadata, updated_at = row
    moment = datetime.fromisoformat(updated_at)
    return Position(next_offset, epoch, topic_id, owner, leader_epoch, metadata, moment)


def _now() -> str:
    return datetime.now(UTC).isoformat()


def _is_the_files_fault(error: sqlite3.Error) -> bool:
    """Faults that may pass (locked, full, unreadable), as against a wrong statement of a handler."""
    code = getattr(error, "sqlite_errorcode", None)
    return code is not None and (code & 0xFF) in {
        sqlite3.SQLITE_BUSY,
        sqlite3.SQLITE_LOCKED,
        sqlite3.SQLITE_READONLY,
        sqlite3.SQLITE_IOERR,
        sqlite3.SQLITE_FULL,
        sqlite3.SQLITE_CANTOPEN,
        sqlite3.SQLITE_NOTADB,
        sqlite3.SQLITE_CORRUPT,
    }

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

import contextlib
import os
import socket
import sqlite3
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import ClassVar, NamedTuple, TypeAlias

from kconsume.backends import claiming, letter_table, outbox_table
from kconsume.backends.abc import ALWAYS, ClaimTerms, Position, Positions, Refused, Start
from kconsume.backends.claiming import Answers, fenced
from kconsume.backends.outbox_table import NO_TARGETS, Posted, Targets
from kconsume.backends.sqlite_door import ENDED, Door, LentConnection
from kconsume.backends.sqlite_faults import STATEMENT_ERRORS, in_a_handler, may_pass, ours
from kconsume.backends.sqlite_place import must_be_local, trouble_at
from kconsume.backends.sqlite_schema import (
    BEGIN,
    COMMIT,
    ROLLBACK,
    SCHEMA_VERSION,
    bring_up_to_date,
    is_up_to_date,
    version_of,
)
from kconsume.errors import ConfigurationError, Fenced, StoreError, StoreUnavailable, TransactionMisused
from kconsume.failures.letters import Letter
from kconsume.output import Outgoing
from kconsume.records import Partition
from kconsume.settings import masked_address

_KEY = "group_id = ? and topic = ? and partition = ?"
_READ = f"""select next_offset, epoch, topic_id, owner, leader_epoch, metadata, updated_at, generation,
            coalesce(reset_epoch, 0) from kconsume_offsets where {_KEY}"""
_PIN = """insert into kconsume_offsets
          (group_id, topic, partition, next_offset, epoch, reset_epoch, topic_id, leader_epoch, updated_at)
          select ?, ?, ?, ?, last_epoch, last_epoch, ?, ?, ? from kconsume_schema where true on conflict do nothing"""
_CLAIM = f"""update kconsume_offsets
             set epoch = epoch + 1, owner = ?, generation = coalesce(?, generation), updated_at = ? where {_KEY}"""
_RECLAIM = f"update kconsume_offsets set epoch = epoch + 1, owner = ?, updated_at = ? where {_KEY} and epoch = ?"
_SAVE = f"""update kconsume_offsets set next_offset = ?, leader_epoch = ?, updated_at = ?,
            topic_id = coalesce(?, topic_id)
            where {_KEY} and epoch = ? and next_offset <= ? and next_offset in (coalesce(?, next_offset), ?)"""
_MARK = f"update kconsume_offsets set updated_at = ? where {_KEY} and epoch = ?"
_NOTE = f"update kconsume_offsets set metadata = ? where {_KEY} and epoch = ?"
_ADVANCE = f"""update kconsume_offsets set next_offset = ?, leader_epoch = ?
               where updated_at = ? and {_KEY} and epoch = ? and next_offset = ?"""
_RESET = """insert into kconsume_offsets (group_id, topic, partition, next_offset, epoch, reset_epoch, updated_at)
            select ?, ?, ?, ?, last_epoch + 1, last_epoch + 1, ? from kconsume_schema where true on conflict do update
            set next_offset = excluded.next_offset, epoch = epoch + 1, reset_epoch = epoch + 1, topic_id = null,
                owner = null,
                leader_epoch = null, metadata = '', updated_at = excluded.updated_at"""
_RETIRE = f"""update kconsume_schema set last_epoch =
              max(last_epoch, (select coalesce(max(epoch), 0) from kconsume_offsets where {_KEY}))"""
_OF_GROUP = "select topic, partition from kconsume_offsets where group_id = ?"

_BURY = """insert into kconsume_deleted (group_id, topic, partition, epoch, deleted_at) values (?, ?, ?, ?, ?)
           on conflict do update set epoch = excluded.epoch, deleted_at = excluded.deleted_at"""
_WAS_DELETED = """select epoch from kconsume_deleted where group_id = ?
                  and (topic = ? and partition = ? or topic = '') order by topic desc limit 1"""
_LAST_EPOCH = "select last_epoch from kconsume_schema"

_Row: TypeAlias = tuple[int, int, str | None, str | None, int | None, str, str, int | None, int]


class SqliteStore:
    """Offsets in an SQLite file: `SqliteStore("shop.db")`. Opens nothing until it is used."""

    guarantee: ClassVar[str] = "exactly once: what the handler writes and the offset commit together"
    connection_types: ClassVar[tuple[type, ...]] = (sqlite3.Connection,)
    parallel: ClassVar[int | None] = 1
    by_record: ClassVar[bool] = False
    keeps_letters: ClassVar[bool] = True
    severs: ClassVar[bool] = True

    def __init__(self, path: str | Path) -> None:
        if not isinstance(path, str | os.PathLike):
            raise ConfigurationError(f"SqliteStore takes a path, and this is a {type(path).__name__}: write 'shop.db'")
        if "\0" in str(path):
            raise ConfigurationError(f"{str(path)!r} is no path: remove the NUL")
        if not str(path) or str(path) == ":memory:":
            raise ConfigurationError(
                "sqlite:// needs a file, because offsets must outlive the process: write "
                "sqlite:///relative.db or sqlite:////absolute.db, or use memory://"
            )
        self.path = Path(path)
        self.address = f"sqlite:///{path}"
        self.place: str | None = f"{socket.gethostname()}:{self.path.absolute()}"
        self._idle: list[Door] = []
        self._lock = threading.Lock()
        self._ready = False
        self._home: int | None = None

    @classmethod
    def from_url(cls, url: str) -> SqliteStore:
        """`sqlite:///relative.db` or `sqlite:////absolute.db`."""
        prefix, path = url[: len("sqlite:///")], url[len("sqlite:///") :]
        if prefix != "sqlite:///" or not path:
            raise ConfigurationError(
                f"{masked_address(url)!r} names no file: write sqlite:///relative.db or sqlite:////absolute.db"
            )
        if "?" in path or "#" in path:
            raise ConfigurationError(
                f"{masked_address(url)!r} has something behind the file's name, and SQLite has no settings here: write "
                f"sqlite:///file.db, or give SqliteStore(path) for a name with ? or # in it"
            )
        return cls(path)

    def load(self, group: str, partitions: Iterable[Partition]) -> dict[Partition, Position]:
        with self._door() as door, ours(self.address):
            return _load(door.connection, group, partitions)

    def save(self, group: str, positions: Positions) -> None:
        with self._changing() as connection:
            for partition, position in positions.items():
                _save(connection, group, partition, position)

    def claim(
        self,
        group: str,
        partitions: Sequence[Partition],
        owner: str,
        start: Start,
        terms: ClaimTerms | None = None,
    ) -> dict[Partition, Position | Refused]:
        def claim(wanted: Sequence[Partition], pinned: Positions) -> Answers | list[Partition]:
            with self._changing() as connection:
                rows = _load(connection, group, wanted)
                accepted = [p for p in wanted if claiming.accepts(rows.get(p), p, owner, terms)]
                if missing := [p for p in accepted if p not in rows and p not in pinned]:
                    return missing
                late = {p: claiming.refused(group, p, terms, rows.get(p)) for p in wanted if p not in accepted}
                return {**_claim(connection, group, accepted, owner, pinned, terms), **late}

        return claiming.claim_pinned(partitions, start, self.load(group, partitions), claim, terms)

    def reclaim(self, group: str, epochs: Mapping[Partition, int], owner: str) -> dict[Partition, Position]:
        """Waits at the turnstile for what is under way; so it has ended when this looks."""
        with self._changing() as connection:
            for partition, epoch in sorted(epochs.items()):
                if connection.execute(_RECLAIM, (owner, _now(), group, *partition, epoch)).rowcount != 1:
                    row = connection.execute(_READ, (group, *partition)).fetchone()
                    raise _fenced(group, partition, epoch, row)
            return _load(connection, group, epochs)

    @contextmanager
    def transaction(self, group: str, partition: Partition, epoch: int) -> Iterator[SqliteTx]:
        with self._writing() as connection:
            tx = SqliteTx(connection, self.address, group, partition, epoch)
            with ours(self.address):
                tx.begin()
            with connection.lent():
                yield tx
            tx.end()

    @contextmanager
    def rehearsal(self) -> Iterator[Rehearsal]:
        """A transaction as a handler gets it, of which nothing stays: for `kconsume try`."""
        with self._writing(ROLLBACK) as connection, connection.lent():
            yield Rehearsal(connection)

    def note(self, group: str, partition: Partition, epoch: int, text: str) -> None:
        with self._changing() as connection:
            connection.execute(_NOTE, (text, group, *partition, epoch))

    def posted(
        self,
        group: str,
        epochs: Mapping[Partition, int],
        most: int,
        targets: Mapping[Partition, Targets] = NO_TARGETS,
    ) -> dict[Partition, list[Posted]]:
        with self._door() as door, ours(self.address):
            ask = door.connection.execute
            return {
                p: rows
                for p, epoch in epochs.items()
                if ask(outbox_table.SQLITE_IS_OURS, (group, *p, epoch)).fetchone() is not None
                and (rows := _posted(ask(*outbox_table.sqlite_read(group, p, most, targets.get(p)))))
            }

    def delivered(self, group: str, numbers: Mapping[Partition, Sequence[int]]) -> None:  # noqa: ARG002  (ids are enough)
        with self._changing() as connection:
            gone = [(number,) for each in numbers.values() for number in each]
            connection.executemany(outbox_table.SQLITE_DELETE, gone)

    def strays(self, owner: str, most: int, targets: Targets | None = None) -> list[Posted]:
        with self._door() as door, ours(self.address):
            if door.connection.execute(outbox_table.SQLITE_HAS_STRAYS).fetchone() is None:
                return []
        with self._changing() as connection:
            now, lease = datetime.now(UTC), timedelta(seconds=outbox_table.LEASE)
            times = [moment.isoformat() for moment in (now, now - lease, now + lease)]
            if connection.execute(outbox_table.SQLITE_LEASE, (owner, *times)).rowcount != 1:
                return []
            return _posted(connection.execute(*outbox_table.sqlite_read("", outbox_table.NOBODYS, most, targets)))

    def posting(self, outgoing: Outgoing) -> tuple[str, tuple[object, ...]]:
        with self._door():
            (row,) = outbox_table.sqlite_rows("", outbox_table.NOBODYS, [outgoing], _now())
            return outbox_table.SQLITE_POST, row

    def forget_origins(self) -> bool:
        with self._changing() as connection:
            long_ago = datetime.now(UTC) - timedelta(days=outbox_table.KEPT_DAYS)
            done = connection.execute(outbox_table.SQLITE_FORGET, (long_ago.isoformat(),))
            return done.rowcount >= outbox_table.FORGOTTEN_AT_ONCE

    def reset(self, group: str, offsets: Mapping[Partition, int]) -> None:
        with self._changing() as connection:
            for partition, offset in offsets.items():
                _about_to_make(connection, group, partition)
                connection.execute(_RESET, (group, *partition, offset, _now()))

    def delete(self, group: str, partitions: Iterable[Partition] | None = None) -> None:
        with self._changing() as connection:
            chosen = partitions
            if chosen is None:
                chosen = [Partition(*row) for row in connection.execute(_OF_GROUP, (group,)).fetchall()]
                connection.execute(_BURY, (group, "", -1, ALWAYS, _now()))
            for partition in chosen:
                _delete(connection, group, partition)

    def identity(self) -> str:
        """Host and path are a part of it: a copy of the file is another store."""
        with self._door() as door, ours(self.address):
            (name,) = door.connection.execute("select store_id from kconsume_schema").fetchone()
        return f"{name} {self.place}"

    def deleted(self, group: str, partitions: Iterable[Partition]) -> dict[Partition, int]:
        with self._door() as door, ours(self.address):
            rows = {p: door.connection.execute(_WAS_DELETED, (group, *p)).fetchone() for p in partitions}
        return {p: row[0] for p, row in rows.items() if row is not None}

    def groups(self) -> list[str]:
        with self._door() as door, ours(self.address):
            rows = door.connection.execute("select distinct group_id from kconsume_offsets order by 1")
            return [row[0] for row in rows.fetchall()]

    def close(self) -> None:
        if self._is_forked():
            return  # they are the parent's; SQLite forbids even to close them here
        with self._lock:
            doors, self._idle = self._idle, []
        for door in doors:
            door.close()

    def trouble(self) -> str | None:
        """Why offsets cannot be kept here, with the fix, for `kconsume check`; None if they can. Makes nothing."""
        return trouble_at(self.path, SCHEMA_VERSION)

    @contextmanager
    def _changing(self) -> Iterator[LentConnection]:
        """A write transaction of our own statements."""
        with self._writing() as connection, ours(self.address):
            yield connection

    @contextmanager
    def _writing(self, end: str = COMMIT) -> Iterator[LentConnection]:
        """A write transaction: turnstile, BEGIN IMMEDIATE, then COMMIT or ROLLBACK."""
        with self._door() as door, door.turnstile():
            connection = door.connection
            with ours(self.address):
                connection.execute(BEGIN)
            try:
                yield connection
                self._end(connection, end)
            finally:
                if connection.in_transaction:
                    # Before the next one is let in. Where it fails, the door that is closed then does it.
                    with contextlib.suppress(*STATEMENT_ERRORS):
                        connection.execute(ROLLBACK)

    def _end(self, connection: LentConnection, end: str) -> None:
        try:
            connection.execute(end)
        except STATEMENT_ERRORS as error:
            fault = may_pass(self.address, error)
            if fault is None:
                raise  # a constraint that is checked at COMMIT: what the handler wrote
            raise fault from error

    @contextmanager
    def _door(self) -> Iterator[Door]:
        """Borrow a connection. One that an error went through is closed, not lent again."""
        door = self._borrow()
        door.connection.wake()
        try:
            yield door
        except BaseException:
            door.close()
            raise
        door.connection.rest()
        with self._lock:
            self._idle.append(door)

    def _borrow(self) -> Door:
        if self._is_forked():
            raise StoreError(
                f"{self.address} was opened by process {self._home}, of which this one is a fork, and SQLite's files "
                f"do not survive that: make the store in this process, or start processes by spawn"
            )
        with self._lock:
            self._home = os.getpid()
            if self._idle:
                return self._idle.pop()
        if not self._ready:
            must_be_local(self.path)
        try:
            door = Door(self.path)
        except (*STATEMENT_ERRORS, OSError) as error:
            raise StoreUnavailable(f"{self.address} cannot be opened: {error}") from error
        try:
            if not self._ready:
                self._prepare(door)
        except STATEMENT_ERRORS as error:
            door.close()
            raise StoreUnavailable(f"{self.address} cannot be prepared: {error}") from error
        except BaseException:
            door.close()
            raise
        return door

    def _is_forked(self) -> bool:
        return self._home is not None and self._home != os.getpid()

    def _prepare(self, door: Door) -> None:
        """Looks before it writes: a file that is ready is not waited for. Twice at once does no harm."""
        if not is_up_to_date(door.connection):
            with door.turnstile():
                bring_up_to_date(door.connection)
        if (version := version_of(door.connection)) > SCHEMA_VERSION:
            raise StoreError(
                f"{self.address} has schema version {version}, and this kconsume writes version "
                f"{SCHEMA_VERSION}: upgrade kconsume here"
            )
        self._ready = True


class Rehearsal(NamedTuple):
    """A transaction that is only tried out."""

    connection: sqlite3.Connection


class SqliteTx:
    """The handler's transaction and the row that is advanced in it."""

    __slots__ = ("_address", "_epoch", "_group", "_mark", "_partition", "_refused", "connection")

    def __init__(self, connection: LentConnection, address: str, group: str, partition: Partition, epoch: int) -> None:
        self.connection = connection
        self._address = address
        self._group = group
        self._partition = partition
        self._epoch = epoch
        self._mark = ""
        self._refused: Fenced | None = None

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
        with ours(self._address):
            moved = connection.execute(_ADVANCE, values).rowcount
            if moved == 1:
                return
            connection.restore()
            row = self._row()
        if row is not None and row[:2] == (old, self._epoch):
            raise TransactionMisused(ENDED)
        self._refused = _fenced(self._group, self._partition, self._epoch, row, old)
        raise self._refused

    def keep(self, table: str, letters: Sequence[Letter]) -> None:
        with ours(self._address):
            self.connection.execute(letter_table.create(table, "sqlite"))
            for letter in letters:
                self.connection.execute(letter_table.insert(table, "sqlite"), letter_table.row_of(letter, "sqlite"))

    def post(self, outgoing: Sequence[Outgoing]) -> None:
        rows = outbox_table.sqlite_rows(self._group, self._partition, outgoing, _now())
        with ours(self._address):
            self.connection.executemany(outbox_table.SQLITE_POST, rows)

    def take_in(self, origins: Sequence[str]) -> set[str]:
        with ours(self._address):
            take, now = self.connection.execute, _now()
            return {o for o in origins if take(outbox_table.SQLITE_TAKE_IN, (self._group, o, now)).rowcount == 1}

    def sever(self) -> None:
        self.connection.sever()

    def end(self) -> None:
        """An advance that was refused is refused for good: who goes on all the same commits nothing."""
        if self._refused is not None:
            raise self._refused

    def fault(self, error: BaseException) -> StoreUnavailable | None:
        return in_a_handler(self._address, error)

    def _row(self) -> _Row | None:
        row: _Row | None = self.connection.execute(_READ, (self._group, *self._partition)).fetchone()
        return row


def _load(connection: sqlite3.Connection, group: str, partitions: Iterable[Partition]) -> dict[Partition, Position]:
    rows = {p: connection.execute(_READ, (group, *p)).fetchone() for p in partitions}
    return {p: _position(row) for p, row in rows.items() if row is not None}


def _claim(
    connection: sqlite3.Connection,
    group: str,
    partitions: Sequence[Partition],
    owner: str,
    pinned: Positions,
    terms: ClaimTerms | None,
) -> dict[Partition, Position]:
    now, generation = _now(), None if terms is None else terms.generation
    for partition, position in pinned.items():
        _about_to_make(connection, group, partition)
        values = (position.next_offset, position.topic_id, position.leader_epoch, now)
        connection.execute(_PIN, (group, *partition, *values))
    for partition in partitions:
        connection.execute(_CLAIM, (owner, generation, now, group, *partition))
    return _load(connection, group, partitions)


def _delete(connection: sqlite3.Connection, group: str, partition: Partition) -> None:
    row = connection.execute(_READ, (group, *partition)).fetchone()
    connection.execute(_BURY, (group, *partition, ALWAYS if row is None else row[1], _now()))
    connection.execute(_RETIRE, (group, *partition))
    connection.execute(f"delete from kconsume_offsets where {_KEY}", (group, *partition))


def _about_to_make(connection: sqlite3.Connection, group: str, partition: Partition) -> None:
    """A row that is made is not deleted from there on."""
    if connection.execute(_READ, (group, *partition)).fetchone() is not None:
        return
    if connection.execute(_WAS_DELETED, (group, *partition)).fetchone() is not None:
        (last_epoch,) = connection.execute(_LAST_EPOCH).fetchone()
        connection.execute(_BURY, (group, *partition, last_epoch, _now()))


def _save(connection: sqlite3.Connection, group: str, partition: Partition, position: Position) -> None:
    offset = position.next_offset
    values = (offset, position.leader_epoch, _now(), position.topic_id)
    expected = (position.epoch, offset, position.previous, offset)
    moved = connection.execute(_SAVE, (*values, group, *partition, *expected)).rowcount
    if moved != 1:
        row = connection.execute(_READ, (group, *partition)).fetchone()
        raise _fenced(group, partition, position.epoch, row, offset)


def _fenced(group: str, partition: Partition, epoch: int, row: _Row | None, offset: int | None = None) -> Fenced:
    return fenced(group, partition, epoch, None if row is None else _position(row), offset)


def _position(row: _Row) -> Position:
    next_offset, epoch, topic_id, owner, leader_epoch, metadata, updated_at, generation, reset_epoch = row
    moment = datetime.fromisoformat(updated_at)
    rest = (owner, leader_epoch, metadata, moment)
    return Position(next_offset, epoch, topic_id, *rest, generation=generation, reset_epoch=reset_epoch)


def _posted(rows: sqlite3.Cursor) -> list[Posted]:
    return list(map(outbox_table.sqlite_posted, rows.fetchall()))


def _now() -> str:
    return datetime.now(UTC).isoformat()

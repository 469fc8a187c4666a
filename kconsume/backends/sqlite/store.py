"""`sqlite:///file`: offsets in the user's own SQLite file, in the handler's own transaction.

SQLite allows one writer for each file. So a transaction waits twice: for the turnstile lock, and in `BEGIN IMMEDIATE`.
The turnstile lock is a `flock` on a file beside the database. The kernel queues the processes that wait for this lock;
with SQLite's own busy handler, one busy process would starve the others. A handler that is slow inside its transaction
blocks all writers of the file. A frozen process blocks all writers until the process ends, because no server can end
its transaction. A writer that has waited too long raises `StoreUnavailable`. Readers do not wait.

The file belongs to one host. The handler's rows and the offset are in the same file. If a power cut loses the last
transactions (`synchronous=NORMAL`), rows and offset are lost together, and the records are handled again.
"""

from __future__ import annotations

import os
import socket
import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import ClassVar

from kconsume._config.client_settings import masked_address
from kconsume._kafka.outgoing import Outgoing
from kconsume.backends import claim as claiming
from kconsume.backends.base import ClaimTerms, Position, Positions, Refused, Start
from kconsume.backends.capabilities import ALWAYS, Capabilities
from kconsume.backends.claim import ClaimResults
from kconsume.backends.outbox import tables as outbox_table
from kconsume.backends.outbox.tables import NO_TARGETS, Posted, Targets
from kconsume.backends.sqlite import statements as sql
from kconsume.backends.sqlite.database import SqliteDatabase
from kconsume.backends.sqlite.errors import store_errors
from kconsume.backends.sqlite.location import trouble_at
from kconsume.backends.sqlite.schema import ROLLBACK, SCHEMA_VERSION
from kconsume.backends.sqlite.transaction import SqliteDryRun, SqliteTx
from kconsume.errors import ConfigurationError
from kconsume.records import Partition


class SqliteStore:
    """Offsets in an SQLite file: `SqliteStore("shop.db")`. Opens the file at the first use."""

    guarantee: ClassVar[str] = "exactly once: what the handler writes and the offset commit together"
    connection_types: ClassVar[tuple[type, ...]] = (sqlite3.Connection,)
    parallel: ClassVar[int | None] = 1
    by_record: ClassVar[bool] = False

    def __init__(self, path: str | Path) -> None:
        """path: the file, which is made on first use. Its folder must exist, on a disk of this host."""
        if not isinstance(path, str | os.PathLike):
            raise ConfigurationError(f"SqliteStore takes a path, and this is a {type(path).__name__}: write 'shop.db'")
        if "\0" in str(path):
            raise ConfigurationError(f"{str(path)!r} is not a path: remove the NUL character")
        if not str(path) or str(path) == ":memory:":
            raise ConfigurationError(
                "sqlite:// needs a file, because offsets must outlive the process: write "
                "sqlite:///relative.db or sqlite:////absolute.db, or use memory://"
            )
        self.path = Path(path)
        self.address = f"sqlite:///{path}"
        self.location = f"{socket.gethostname()}:{self.path.absolute()}"
        """Host and absolute path, because a relative path is another file on another host."""
        self.database = SqliteDatabase(self.path, self.address)
        """Used by the store, and by the command line, dead letters and the outbox."""

    @classmethod
    def from_url(cls, url: str) -> SqliteStore:
        """Return a store for `sqlite:///relative.db` or `sqlite:////absolute.db`."""
        prefix, path = url[: len("sqlite:///")], url[len("sqlite:///") :]
        if prefix != "sqlite:///" or not path:
            raise ConfigurationError(
                f"{masked_address(url)!r} names no file: write sqlite:///relative.db or sqlite:////absolute.db"
            )
        if "?" in path or "#" in path:
            raise ConfigurationError(
                f"{masked_address(url)!r} has a query or a fragment after the file's name, and a SQLite address has "
                f"no settings: write sqlite:///file.db, or give SqliteStore(path) for a name with ? or # in it"
            )
        return cls(path)

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(
            self,
            outbox=self,
            noting=self,
            named=self,
            dry_run=self,
            keeps_letters=True,
            severs=True,
            location=self.location,
        )

    # Offsets and owners

    def load(self, group: str, partitions: Iterable[Partition]) -> dict[Partition, Position]:
        with self._reading() as connection:
            return sql.positions_of(connection, group, partitions)

    def save(self, group: str, positions: Positions) -> None:
        with self.database.transaction() as connection:
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
        def claim(wanted: Sequence[Partition], pinned: Positions) -> ClaimResults | list[Partition]:
            with self.database.transaction() as connection:
                rows = sql.positions_of(connection, group, wanted)
                accepted = [p for p in wanted if claiming.accepts(rows.get(p), p, owner, terms)]
                if missing := [p for p in accepted if p not in rows and p not in pinned]:
                    return missing
                late = {p: claiming.refused(group, p, terms, rows.get(p)) for p in wanted if p not in accepted}
                return {**_claim(connection, group, accepted, owner, pinned, terms), **late}

        return claiming.claim_pinned(partitions, start, self.load(group, partitions), claim, terms)

    def reclaim(self, group: str, epochs: Mapping[Partition, int], owner: str) -> dict[Partition, Position]:
        """As `FencedStore.reclaim`. Waits for the turnstile lock, so an open transaction ends before rows are read."""
        with self.database.transaction() as connection:
            for partition, epoch in sorted(epochs.items()):
                if connection.execute(sql.RECLAIM, (owner, sql.now(), group, *partition, epoch)).rowcount != 1:
                    raise sql.fenced_at(group, partition, epoch, sql.row_of(connection, group, partition))
            return sql.positions_of(connection, group, epochs)

    # Handlers

    @contextmanager
    def transaction(self, group: str, partition: Partition, epoch: int) -> Iterator[SqliteTx]:
        with self.database.writing() as connection:
            tx = SqliteTx(connection, self.address, group, partition, epoch)
            with store_errors(self.address):
                tx.begin()
            with connection.lent():
                yield tx
            tx.end()

    @contextmanager
    def dry_run(self) -> Iterator[SqliteDryRun]:
        with self.database.writing(ROLLBACK) as connection, connection.lent():
            yield SqliteDryRun(connection)

    def note(self, group: str, partition: Partition, epoch: int, text: str) -> None:
        with self.database.transaction() as connection:
            connection.execute(sql.NOTE, (text, group, *partition, epoch))

    # The outbox

    def posted(
        self,
        group: str,
        epochs: Mapping[Partition, int],
        most: int,
        targets: Mapping[Partition, Targets] = NO_TARGETS,
    ) -> dict[Partition, list[Posted]]:
        with self._reading() as connection:
            execute = connection.execute
            return {
                p: rows
                for p, epoch in epochs.items()
                if execute(outbox_table.SQLITE_IS_OURS, (group, *p, epoch)).fetchone() is not None
                and (rows := _posted(execute(*outbox_table.sqlite_read(group, p, most, targets.get(p)))))
            }

    def delivered(self, group: str, numbers: Mapping[Partition, Sequence[int]]) -> None:  # noqa: ARG002  (ids are enough)
        with self.database.transaction() as connection:
            gone = [(number,) for each in numbers.values() for number in each]
            connection.executemany(outbox_table.SQLITE_DELETE, gone)

    def unowned_rows(self, owner: str, most: int, targets: Targets | None = None) -> list[Posted]:
        with self._reading() as connection:
            if connection.execute(outbox_table.SQLITE_HAS_UNOWNED).fetchone() is None:
                return []
        with self.database.transaction() as connection:
            now, lease = datetime.now(UTC), timedelta(seconds=outbox_table.LEASE)
            times = [moment.isoformat() for moment in (now, now - lease, now + lease)]
            if connection.execute(outbox_table.SQLITE_LEASE, (owner, *times)).rowcount != 1:
                return []
            return _posted(connection.execute(*outbox_table.sqlite_read("", outbox_table.UNOWNED, most, targets)))

    def insert_statement(self, outgoing: Outgoing) -> tuple[str, tuple[object, ...]]:
        with self.database.connection():
            (row,) = outbox_table.sqlite_rows("", outbox_table.UNOWNED, [outgoing], sql.now())
            return outbox_table.SQLITE_POST, row

    def forget_origins(self) -> bool:
        with self.database.transaction() as connection:
            long_ago = datetime.now(UTC) - timedelta(days=outbox_table.KEPT_DAYS)
            done = connection.execute(outbox_table.SQLITE_FORGET, (long_ago.isoformat(),))
            return done.rowcount >= outbox_table.FORGOTTEN_AT_ONCE

    # Users and tools

    def reset(self, group: str, offsets: Mapping[Partition, int]) -> None:
        with self.database.transaction() as connection:
            for partition, offset in offsets.items():
                _record_new_row(connection, group, partition)
                connection.execute(sql.RESET, (group, *partition, offset, sql.now()))

    def delete(self, group: str, partitions: Iterable[Partition] | None = None) -> None:
        with self.database.transaction() as connection:
            chosen = partitions
            if chosen is None:
                chosen = [Partition(*row) for row in connection.execute(sql.PARTITIONS_OF_GROUP, (group,)).fetchall()]
                connection.execute(sql.RECORD_DELETION, (group, "", -1, ALWAYS, sql.now()))
            for partition in chosen:
                _delete(connection, group, partition)

    def identity(self) -> str:
        """The id of the store. It contains host and path, so a copy of the file is another store."""
        with self._reading() as connection:
            (name,) = connection.execute(sql.STORE_ID).fetchone()
        return f"{name} {self.location}"

    def deleted(self, group: str, partitions: Iterable[Partition]) -> dict[Partition, int]:
        with self._reading() as connection:
            rows = {p: connection.execute(sql.DELETED_EPOCH, (group, *p)).fetchone() for p in partitions}
        return {p: row[0] for p, row in rows.items() if row is not None}

    def groups(self) -> list[str]:
        with self._reading() as connection:
            return [row[0] for row in connection.execute(sql.GROUPS).fetchall()]

    def close(self) -> None:
        self.database.close()

    def trouble(self) -> str | None:
        """Why offsets cannot be kept here, with the fix, for `kconsume check`; None if they can. Creates no file."""
        return trouble_at(self.path, SCHEMA_VERSION)

    @contextmanager
    def _reading(self) -> Iterator[sqlite3.Connection]:
        with self.database.connection() as connection, store_errors(self.address):
            yield connection


def _claim(
    connection: sqlite3.Connection,
    group: str,
    partitions: Sequence[Partition],
    owner: str,
    pinned: Positions,
    terms: ClaimTerms | None,
) -> dict[Partition, Position]:
    now, generation = sql.now(), None if terms is None else terms.generation
    for partition, position in pinned.items():
        _record_new_row(connection, group, partition)
        values = (position.next_offset, position.topic_id, position.leader_epoch, now)
        connection.execute(sql.PIN, (group, *partition, *values))
    for partition in partitions:
        connection.execute(sql.CLAIM, (owner, generation, now, group, *partition))
    return sql.positions_of(connection, group, partitions)


def _save(connection: sqlite3.Connection, group: str, partition: Partition, position: Position) -> None:
    offset = position.next_offset
    values = (offset, position.leader_epoch, sql.now(), position.topic_id)
    expected = (position.epoch, offset, position.previous, offset)
    moved = connection.execute(sql.SAVE, (*values, group, *partition, *expected)).rowcount
    if moved != 1:
        raise sql.fenced_at(group, partition, position.epoch, sql.row_of(connection, group, partition), offset)


def _delete(connection: sqlite3.Connection, group: str, partition: Partition) -> None:
    row = sql.row_of(connection, group, partition)
    connection.execute(sql.RECORD_DELETION, (group, *partition, ALWAYS if row is None else row[1], sql.now()))
    connection.execute(sql.KEEP_LAST_EPOCH, (group, *partition))
    connection.execute(sql.DELETE, (group, *partition))


def _record_new_row(connection: sqlite3.Connection, group: str, partition: Partition) -> None:
    """Record that the row of a deleted partition is created again: its higher epochs do not count as deleted."""
    if sql.row_of(connection, group, partition) is not None:
        return
    if connection.execute(sql.DELETED_EPOCH, (group, *partition)).fetchone() is not None:
        (last_epoch,) = connection.execute(sql.LAST_EPOCH).fetchone()
        connection.execute(sql.RECORD_DELETION, (group, *partition, last_epoch, sql.now()))


def _posted(rows: sqlite3.Cursor) -> list[Posted]:
    return list(map(outbox_table.sqlite_posted, rows.fetchall()))

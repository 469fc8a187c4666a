"""The handler's transaction in an SQLite file, and the offset row that moves in this transaction."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from typing import NamedTuple

from kconsume._kafka.outgoing import Outgoing
from kconsume.backends.dead_letters import tables as letter_table
from kconsume.backends.outbox import tables as outbox_table
from kconsume.backends.sqlite import statements as sql
from kconsume.backends.sqlite.connection import ENDED, LentSqliteConnection
from kconsume.backends.sqlite.errors import handler_fault, store_errors
from kconsume.errors import Fenced, StoreUnavailable, TransactionMisused
from kconsume.failures.letter_headers import Letter
from kconsume.records import Partition


class SqliteDryRun(NamedTuple):
    """A transaction that is always rolled back."""

    connection: sqlite3.Connection


class SqliteTx:
    """The handler's transaction. It begins and ends with the block of `SqliteStore.transaction`."""

    __slots__ = ("_address", "_epoch", "_group", "_mark", "_partition", "_refused", "connection")

    def __init__(
        self, connection: LentSqliteConnection, address: str, group: str, partition: Partition, epoch: int
    ) -> None:
        self.connection = connection
        self._address = address
        self._group = group
        self._partition = partition
        self._epoch = epoch
        self._mark = ""
        self._refused: Fenced | None = None

    def begin(self) -> None:
        """Check the epoch, and mark the row with the time of this transaction.

        If a statement of the handler ends the transaction and another one begins, the mark is gone, and `advance`
        notices that this is another transaction.
        """
        self._mark = sql.now()
        key = (self._group, *self._partition)
        if self.connection.execute(sql.MARK, (self._mark, *key, self._epoch)).rowcount != 1:
            raise sql.fenced_at(self._group, self._partition, self._epoch, self._row())

    def advance(self, old: int, new: int, leader_epoch: int | None = None) -> None:
        connection = self.connection
        if not connection.in_transaction:
            raise TransactionMisused(ENDED)
        key = (self._group, *self._partition)
        values = (new, leader_epoch, self._mark, *key, self._epoch, old)
        with store_errors(self._address):
            moved = connection.execute(sql.ADVANCE, values).rowcount
            if moved == 1:
                return
            connection.restore()
            row = self._row()
        if row is not None and row[:2] == (old, self._epoch):
            raise TransactionMisused(ENDED)
        self._refused = sql.fenced_at(self._group, self._partition, self._epoch, row, old)
        raise self._refused

    def keep(self, table: str, letters: Sequence[Letter]) -> None:
        with store_errors(self._address):
            self.connection.execute(letter_table.create(table, "sqlite"))
            for letter in letters:
                self.connection.execute(letter_table.insert(table, "sqlite"), letter_table.row_of(letter, "sqlite"))

    def post(self, outgoing: Sequence[Outgoing]) -> None:
        rows = outbox_table.sqlite_rows(self._group, self._partition, outgoing, sql.now())
        with store_errors(self._address):
            self.connection.executemany(outbox_table.SQLITE_POST, rows)

    def record_origins(self, origins: Sequence[str]) -> set[str]:
        with store_errors(self._address):
            take, now = self.connection.execute, sql.now()
            return {o for o in origins if take(outbox_table.SQLITE_RECORD_ORIGIN, (self._group, o, now)).rowcount == 1}

    def sever(self) -> None:
        self.connection.sever()

    def end(self) -> None:
        """If `advance` raised `Fenced`, raise this error again, so that nothing is committed if the caller caught
        it."""
        if self._refused is not None:
            raise self._refused

    def fault(self, error: BaseException) -> StoreUnavailable | None:
        return handler_fault(self._address, error)

    def _row(self) -> sql.Row | None:
        return sql.row_of(self.connection, self._group, self._partition)

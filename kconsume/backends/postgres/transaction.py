"""A handler's transaction on PostgreSQL: begun under an epoch, and ended together with the offset.

    BEGIN · lock · mark · epoch?    one round trip; under a stale epoch the transaction ends here
    … the handler's statements …    in a pipeline, for handlers of one record at a time
    limit · offset → new · COMMIT   one round trip; fails in the server if another consumer claimed the partition
                                    (two round trips if the caller does something before COMMIT)

The lock is a shared advisory lock that is held until the transaction ends. By this lock a claim finds every backend
that is still in a transaction on the partition, frozen or slow, and ends that backend, which frees all its locks. The
mark is a setting of the transaction: if a statement of the handler ends this transaction and begins another, the mark
is gone.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any

import psycopg
from psycopg.pq import TransactionStatus

from kconsume._kafka.outgoing import Outgoing
from kconsume.backends.base import Position
from kconsume.backends.claim import fenced
from kconsume.backends.outbox.tables import postgres_rows
from kconsume.backends.postgres.connection import ENDED, AsyncHandlerConnection, HandlerConnection, sever
from kconsume.backends.postgres.dead_letters import writer as letter_statements
from kconsume.backends.postgres.errors import advance_and_commit_error, commit_error, fault_of, store_error
from kconsume.backends.postgres.pool import AsyncPooledConnection, PooledConnection
from kconsume.backends.postgres.statements import Statements, lock_number
from kconsume.backends.postgres.tx_statements import Statement, TxStatements
from kconsume.backends.postgres.watchdog import watch
from kconsume.errors import KconsumeError, StoreError, StoreUnavailable, TransactionMisused
from kconsume.failures.letter_headers import Letter
from kconsume.records import Partition

COMMIT, ROLLBACK = "commit", "rollback"

IDLE_LIMIT = "1h"
"""The idle limit of a transaction if a claim may end other backends. The limit then matters only for backends of
another role, which the claim may not end. Must be longer than any pause of a handler between two statements."""
SHORT_IDLE_LIMIT = "30s"
"""The idle limit of a transaction if a claim may not end other backends."""

_mark_numbers = itertools.count()


@dataclass(frozen=True, slots=True)
class TxSettings:
    """The settings that all transactions of a store share."""

    address: str
    prefix: str
    statements: TxStatements
    may_end: bool
    """True if claims may end a transaction of another process; if not, only the idle limit ends such a transaction."""
    idle: str
    """How long a transaction may be idle."""

    @classmethod
    def of(cls, address: str, statements: Statements, isolation: str, may_end: bool) -> TxSettings:
        idle = IDLE_LIMIT if may_end else SHORT_IDLE_LIMIT
        return cls(address, statements.prefix, TxStatements.of(statements, isolation), may_end, idle)


class OffsetRow:
    """The partition's row in one transaction: the statements about this row, and the errors for their results.

    An `OffsetRow` sends nothing; the transaction does.
    """

    def __init__(self, settings: TxSettings, group: str, partition: Partition, epoch: int) -> None:
        self.settings = settings
        self.group = group
        self.partition = partition
        self.epoch = epoch
        self.moved_from: int | None = None
        """The argument `old` of `move_statements`; None before that call."""
        self._mark = f"{os.getpid()}.{next(_mark_numbers)}"

    @property
    def key(self) -> dict[str, Any]:
        return {"group": self.group, "topic": self.partition.topic, "partition": self.partition.number}

    def opening_statements(self) -> list[tuple[str, dict[str, Any] | None]]:
        """BEGIN, then `entry_statements`."""
        return [(self.settings.statements.begin, None), *self.entry_statements()]

    def entry_statements(self) -> list[tuple[str, dict[str, Any]]]:
        """The statements after BEGIN: the lock, then the check of the epoch, which returns a row if the epoch is
        current."""
        statements = self.settings.statements
        lock = lock_number(self.settings.prefix, self.group, self.partition)
        return [
            (statements.lock, {"lock": lock, "mark": self._mark, "idle": self.settings.idle}),
            (statements.check, {**self.key, "epoch": self.epoch}),
        ]

    def move_statements(self, old: int, new: int, leader_epoch: int | None) -> list[tuple[str, dict[str, Any] | None]]:
        self.moved_from = old
        values = {"epoch": self.epoch, "mark": self._mark, "old": old, "new": new, "leader_epoch": leader_epoch}
        statements = self.settings.statements
        return [(statements.limit_lock_wait, None), (statements.advance, {**self.key, **values})]

    def post_statement(self, outgoing: Sequence[Outgoing]) -> tuple[str, dict[str, Any]]:
        return self.settings.statements.post, postgres_rows(self.group, self.partition, outgoing)

    def record_origins_statement(self, origins: Sequence[str]) -> tuple[str, dict[str, Any]]:
        return self.settings.statements.record_origins, {"group": self.group, "origins": list(origins)}

    def not_moved(self, old: int, row: tuple[Any, ...] | None) -> KconsumeError:
        """Return the error for an offset that could not be moved from `old`. row: the current row."""
        if row is not None and row[:2] == (old, self.epoch):
            return TransactionMisused(ENDED)
        return self.stale(row, old)

    def stale(self, row: tuple[Any, ...] | None, offset: int | None = None) -> KconsumeError:
        return fenced(self.group, self.partition, self.epoch, None if row is None else Position(*row), offset)

    def failed(
        self, error: psycopg.Error, connection: psycopg.BaseConnection[Any], statement: str | None
    ) -> BaseException | None:
        """The error to raise when a statement of kconsume, or COMMIT, failed; None for a statement of the handler.

        Args:
            statement: the text that failed; None for a statement of the handler.
        """
        if connection.broken or connection.closed:
            return StoreUnavailable(
                f"{self.settings.address} broke the connection, and it is not known yet if the transaction was "
                f"committed ({' '.join(str(error).split())})"
            )
        if statement is None:
            return None
        if statement == COMMIT:
            return commit_error(error, self.settings.address)
        if statement.endswith(COMMIT):
            return advance_and_commit_error(error, self.settings.address)
        return store_error(error, self.settings.address)


class PostgresTx:
    """The transaction of a plain function."""

    def __init__(
        self, row: OffsetRow, connection: HandlerConnection, pooled: PooledConnection, *, pipelined: bool
    ) -> None:
        self.connection = connection
        self._pooled = pooled
        self._row = row
        self._pipelined = pipelined
        self._ending: list[Statement] = [(COMMIT, None)]

    def advance(self, old: int, new: int, leader_epoch: int | None = None) -> None:
        self.finish(old, new, leader_epoch)
        if not self._pipelined:
            *moving, commit = self._ending
            self._ending = [commit]
            self._send(*moving)

    def finish(self, old: int, new: int, leader_epoch: int | None = None) -> None:
        """As `advance`, but the statements are sent together with COMMIT, in one message or in one pipeline. Errors of
        these statements are raised only at the commit."""
        statements = self._row.move_statements(old, new, leader_epoch)
        if self._pipelined:
            for statement in statements:
                self.connection.execute_own(*statement)
        else:
            self.connection.check()
            self._ending = [*statements, *self._ending]

    def commit(self) -> None:
        """Send the statements that are left, COMMIT last. Must not be called in a pipeline."""
        self.connection.check()
        self._send(*self._ending)

    def _send(self, *statements: Statement) -> None:
        try:
            self.connection.execute_together(*statements)
        except psycopg.errors.DivisionByZero:
            if (old := self._row.moved_from) is None:
                raise
            self.connection.execute_own(ROLLBACK)
            row = self.connection.execute_own(self._row.settings.statements.read_row, self._row.key).fetchone()
            raise self._row.not_moved(old, row) from None

    def keep(self, table: str, letters: Sequence[Letter]) -> None:
        keep_letters(self.connection, table, letters)

    def post(self, outgoing: Sequence[Outgoing]) -> None:
        if not self._pipelined:
            self.connection.check()
        self.connection.execute_own(*self._row.post_statement(outgoing))

    def record_origins(self, origins: Sequence[str]) -> set[str]:
        cursor = self.connection.execute_own(*self._row.record_origins_statement(origins))
        return {origin for (origin,) in cursor.fetchall()}

    def sever(self) -> None:
        sever(self._pooled, self.connection)

    def fault(self, error: BaseException) -> StoreError | None:
        return fault_of(error, self._row.settings.address, self.connection, self.connection.has_raised)


@contextmanager
def transaction(
    settings: TxSettings, pooled: PooledConnection, group: str, partition: Partition, epoch: int, *, pipelined: bool
) -> Iterator[PostgresTx]:
    """A transaction on a pooled connection, committed when the block ends.

    Args:
        pipelined: True to send the handler's statements without waiting for each; their errors are raised later.

    Raises `Fenced` if the epoch is stale, at the beginning or at the end.
    """
    row, connection = OffsetRow(settings, group, partition, epoch), HandlerConnection(pooled.pgconn)
    with watch.over(pooled.pgconn, settings.address, own=False):
        try:
            if not connection.execute_together(*row.opening_statements()):
                connection.execute_own(ROLLBACK)
                raise row.stale(connection.execute_own(settings.statements.read_row, row.key).fetchone())
            tx = PostgresTx(row, connection, pooled, pipelined=pipelined)
            with _pipeline(connection) if pipelined else nullcontext():
                yield tx
                if connection.refused:
                    connection.check()
                if pipelined:
                    connection.execute_own(COMMIT)
            if not pipelined:
                tx.commit()
        except psycopg.Error as error:
            raise _stale_row(row, connection) or _meaning(row, connection, error) from error
        finally:
            roll_back(connection)
            connection.detach()


def _meaning(
    row: OffsetRow, connection: HandlerConnection | AsyncHandlerConnection, error: psycopg.Error
) -> BaseException:
    """The error to raise for an error that ended the transaction, in a statement of kconsume or of the handler."""
    if (meaning := row.failed(error, connection, connection.own_statement(error))) is not None:
        return meaning
    return fault_of(error, row.settings.address, connection, connection.has_raised) or error


def _stale_row(row: OffsetRow, connection: HandlerConnection) -> KconsumeError | None:
    """Return the fencing error if the row has another epoch or offset than this transaction expects; else None. Called
    after an error, because a pipelined statement reports a stale epoch only as an error of SQL."""
    with suppress(psycopg.Error):
        roll_back(connection)
        now = connection.execute_own(row.settings.statements.read_row, row.key).fetchone()
        is_current = now is not None and now[1] == row.epoch and row.moved_from in (None, now[0])
        return None if is_current else row.stale(now, row.moved_from)
    return None


@contextmanager
def _pipeline(connection: HandlerConnection) -> Iterator[None]:
    """A pipeline that fetches its results before an error leaves the block: otherwise psycopg logs the pipeline's
    content."""
    with connection.portioned_pipeline() as pipeline:
        try:
            yield
        except BaseException:
            with suppress(psycopg.Error):
                pipeline.sync()
            raise


def keep_letters(connection: HandlerConnection, table: str, letters: Sequence[Letter]) -> None:
    """Write dead letters in the transaction of the connection. Makes the table if it is missing."""
    if connection.execute_own(*letter_statements.table_exists(table)).fetchone() != (True,):
        for statement in letter_statements.create_table(table):
            connection.execute_own(*statement)
    for statement in letter_statements.insert_letters(table, letters):
        connection.execute_own(*statement)


def roll_back(connection: HandlerConnection) -> None:
    """Roll back an open transaction. Never raises an error of psycopg."""
    if connection.status in (TransactionStatus.INTRANS, TransactionStatus.INERROR):
        with suppress(psycopg.Error):  # the pool then closes the connection, which rolls back as well
            connection.execute_own(ROLLBACK)


class AsyncPostgresTx:
    """The transaction of an `async def`."""

    def __init__(self, row: OffsetRow, connection: AsyncHandlerConnection) -> None:
        self.connection = connection
        self._row = row

    async def advance(self, old: int, new: int, leader_epoch: int | None = None) -> None:
        self.connection.check()
        try:
            async with self.connection.pipeline():
                for statement in self._row.move_statements(old, new, leader_epoch):
                    await self.connection.execute_own(*statement)
        except psycopg.errors.DivisionByZero:
            await self.connection.execute_own(ROLLBACK)
            cursor = await self.connection.execute_own(self._row.settings.statements.read_row, self._row.key)
            raise self._row.not_moved(old, await cursor.fetchone()) from None

    async def keep(self, table: str, letters: Sequence[Letter]) -> None:
        cursor = await self.connection.execute_own(*letter_statements.table_exists(table))
        if await cursor.fetchone() != (True,):
            for statement in letter_statements.create_table(table):
                await self.connection.execute_own(*statement)
        for statement in letter_statements.insert_letters(table, letters):
            await self.connection.execute_own(*statement)

    async def post(self, outgoing: Sequence[Outgoing]) -> None:
        self.connection.check()
        await self.connection.execute_own(*self._row.post_statement(outgoing))

    async def record_origins(self, origins: Sequence[str]) -> set[str]:
        cursor = await self.connection.execute_own(*self._row.record_origins_statement(origins))
        return {origin for (origin,) in await cursor.fetchall()}

    def fault(self, error: BaseException) -> StoreError | None:
        return fault_of(error, self._row.settings.address, self.connection, self.connection.has_raised)


@asynccontextmanager
async def async_transaction(
    settings: TxSettings, pooled: AsyncPooledConnection, group: str, partition: Partition, epoch: int
) -> AsyncIterator[AsyncPostgresTx]:
    """As `transaction`, for `async def` handlers, and never pipelined."""
    row, connection = OffsetRow(settings, group, partition, epoch), AsyncHandlerConnection(pooled.pgconn)
    with watch.over(pooled.pgconn, settings.address, own=False):
        try:
            async with connection.pipeline():
                for statement in row.opening_statements():
                    checked = await connection.execute_own(*statement)
            if await checked.fetchone() is None:
                await connection.execute_own(ROLLBACK)
                now = await connection.execute_own(settings.statements.read_row, row.key)
                raise row.stale(await now.fetchone())
            yield AsyncPostgresTx(row, connection)
            connection.check()
            await connection.execute_own(COMMIT)
        except psycopg.Error as error:
            raise _meaning(row, connection, error) from error
        finally:
            if connection.status in (TransactionStatus.INTRANS, TransactionStatus.INERROR):
                with suppress(psycopg.Error):
                    await connection.execute_own(ROLLBACK)
            connection.detach()

"""A handler's transaction on PostgreSQL: begun under an epoch, ended with the offset in it.

    BEGIN · lock · mark · epoch?    one round trip; a stale epoch goes no further
    … the handler's statements …    in a pipeline, for handlers of one record at a time
    limit · offset → new · COMMIT   one round trip; fails in the server if we were fenced
                                    (two where something is done in between)

The lock is shared and lives as long as the transaction: by it a claim finds whoever is still at work on the partition,
frozen or slow, and ends that backend, with every lock that it has. The mark is a setting of the transaction: if a
statement of the handler ends ours and begins another, it is gone.
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

from kconsume.backends import postgres_letters as letter_statements
from kconsume.backends.abc import Position
from kconsume.backends.claiming import fenced
from kconsume.backends.outbox_table import postgres_numbers, postgres_rows
from kconsume.backends.postgres_faults import commit_error, ending_error, fault_of, store_error
from kconsume.backends.postgres_lent import ENDED, LentAsyncConnection, LentConnection, sever
from kconsume.backends.postgres_slots import Awaited, Plain
from kconsume.backends.postgres_sql import Course, Statement, Statements, lock_of
from kconsume.backends.postgres_watch import watch
from kconsume.errors import KconsumeError, StoreError, StoreUnavailable, TransactionMisused
from kconsume.failures.letters import Letter
from kconsume.output import Outgoing
from kconsume.records import Partition

COMMIT, _ROLLBACK = "commit", "rollback"

IDLE_LIMIT = "1h"
"""Where a claim may end zombies: it bounds those that it may not, of another role. Longer than any handler should wait
between two statements."""
SHORT_IDLE_LIMIT = "30s"

_numbers = itertools.count()


@dataclass(frozen=True, slots=True)
class Terms:
    """What all transactions of a store have in common."""

    address: str
    prefix: str
    course: Course
    may_end: bool
    """Whether claims may end a transaction of another process; where they may not, only its idle limit does."""
    idle: str
    """The most that a transaction may be idle."""

    @classmethod
    def of(cls, address: str, statements: Statements, isolation: str, may_end: bool) -> Terms:
        idle = IDLE_LIMIT if may_end else SHORT_IDLE_LIMIT
        return cls(address, statements.prefix, Course.of(statements, isolation), may_end, idle)


class Row:
    """The partition's row, as this transaction knows it: parameters for statements, and words for what they say."""

    def __init__(self, terms: Terms, group: str, partition: Partition, epoch: int) -> None:
        self.terms = terms
        self.group = group
        self.partition = partition
        self.epoch = epoch
        self.moved_from: int | None = None
        self._mark = f"{os.getpid()}.{next(_numbers)}"

    @property
    def key(self) -> dict[str, Any]:
        return {"group": self.group, "topic": self.partition.topic, "partition": self.partition.number}

    def opening(self) -> list[tuple[str, dict[str, Any] | None]]:
        return [(self.terms.course.begin, None), *self.entry()]

    def entry(self) -> list[tuple[str, dict[str, Any]]]:
        """After BEGIN: the lock and, last, the question whether the epoch is ours."""
        course = self.terms.course
        lock = lock_of(self.terms.prefix, self.group, self.partition)
        return [
            (course.lock, {"lock": lock, "mark": self._mark, "idle": self.terms.idle}),
            (course.check, {**self.key, "epoch": self.epoch}),
        ]

    def move(self, old: int, new: int, leader_epoch: int | None) -> list[tuple[str, dict[str, Any] | None]]:
        self.moved_from = old
        values = {"epoch": self.epoch, "mark": self._mark, "old": old, "new": new, "leader_epoch": leader_epoch}
        return [(self.terms.course.impatient, None), (self.terms.course.advance, {**self.key, **values})]

    def posting(self, outgoing: Sequence[Outgoing]) -> tuple[str, dict[str, Any]]:
        return self.terms.course.post, postgres_rows(self.group, self.partition, outgoing)

    def taking_in(self, origins: Sequence[str]) -> tuple[str, dict[str, Any]]:
        return self.terms.course.take_in, {"group": self.group, "origins": list(origins)}

    def not_moved(self, old: int, row: tuple[Any, ...] | None) -> KconsumeError:
        """Why the offset could not be moved from `old`, by what the row is now."""
        if row is not None and row[:2] == (old, self.epoch):
            return TransactionMisused(ENDED)
        return self.stale(row, old)

    def stale(self, row: tuple[Any, ...] | None, offset: int | None = None) -> KconsumeError:
        return fenced(self.group, self.partition, self.epoch, None if row is None else Position(*row), offset)

    def failed(
        self, error: psycopg.Error, connection: psycopg.BaseConnection[Any], statement: str | None
    ) -> BaseException | None:
        """What it means that a statement of ours failed, COMMIT included; None if it was none of ours."""
        if connection.broken or connection.closed:
            return StoreUnavailable(
                f"{self.terms.address} broke the connection, and whether the transaction was committed is not known "
                f"yet: {' '.join(str(error).split())}"
            )
        if statement is None:
            return None
        meaning = commit_error if statement == COMMIT else ending_error if statement.endswith(COMMIT) else store_error
        return meaning(error, self.terms.address)


class PostgresTx:
    """The transaction of a plain function."""

    def __init__(self, row: Row, connection: LentConnection, below: Plain, pipelined: bool) -> None:
        self.connection = connection
        self._below = below
        self._row = row
        self._pipelined = pipelined
        self._posted: list[psycopg.Cursor[Any]] = []
        self._ending: list[Statement] = [(COMMIT, None)]

    def advance(self, old: int, new: int, leader_epoch: int | None = None) -> None:
        self.finish(old, new, leader_epoch)
        if not self._pipelined:
            *moving, commit = self._ending
            self._ending = [commit]
            self._send(*moving)

    def finish(self, old: int, new: int, leader_epoch: int | None = None) -> None:
        """COMMIT goes behind it in the same message, or the same pipeline, and how both went shows then."""
        statements = self._row.move(old, new, leader_epoch)
        if self._pipelined:
            for statement in statements:
                self.connection.own(*statement)
        else:
            self.connection.check()
            self._ending = [*statements, *self._ending]

    def commit(self) -> None:
        """Where there is no pipeline."""
        self.connection.check()
        self._send(*self._ending)

    def _send(self, *statements: Statement) -> None:
        try:
            self.connection.at_once(*statements)
        except psycopg.errors.DivisionByZero:
            if (old := self._row.moved_from) is None:
                raise
            self.connection.own(_ROLLBACK)
            raise self._row.not_moved(
                old, self.connection.own(self._row.terms.course.peek, self._row.key).fetchone()
            ) from None

    def keep(self, table: str, letters: Sequence[Letter]) -> None:
        if self.connection.own(*letter_statements.looked_for(table)).fetchone() != (True,):
            for statement in letter_statements.made(table):
                self.connection.own(*statement)
        for statement in letter_statements.kept(table, letters):
            self.connection.own(*statement)

    def post(self, outgoing: Sequence[Outgoing]) -> None:
        if not self._pipelined:
            self.connection.check()
        self._posted.append(self.connection.own(*self._row.posting(outgoing)))

    def numbers(self) -> list[int]:
        return _numbers_in(self._posted)

    def take_in(self, origins: Sequence[str]) -> set[str]:
        return {origin for (origin,) in self.connection.own(*self._row.taking_in(origins)).fetchall()}

    def sever(self) -> None:
        sever(self._below, self.connection)

    def fault(self, error: BaseException) -> StoreError | None:
        return fault_of(error, self._row.terms.address, self.connection, self.connection.raised)


def _numbers_in(answers: Sequence[psycopg.Cursor[Any] | psycopg.AsyncCursor[Any]]) -> list[int]:
    """By libpq's own results: the connection is gone."""
    results = [answer.pgresult for answer in answers]
    texts = [None if result is None else result.get_value(0, 0) for result in results]
    return [number for text in texts if text is not None for number in postgres_numbers(text)]


@contextmanager
def transaction(
    terms: Terms, below: Plain, group: str, partition: Partition, epoch: int, *, pipelined: bool
) -> Iterator[PostgresTx]:
    row, connection = Row(terms, group, partition, epoch), LentConnection(below.pgconn)
    with watch.over(below.pgconn, terms.address, ours=False):
        try:
            if not connection.at_once(*row.opening()):
                connection.own(_ROLLBACK)
                raise row.stale(connection.own(terms.course.peek, row.key).fetchone())
            tx = PostgresTx(row, connection, below, pipelined)
            with _drained(connection) if pipelined else nullcontext():
                yield tx
                if connection.refused:
                    connection.check()
                if pipelined:
                    connection.own(COMMIT)
            if not pipelined:
                tx.commit()
        except psycopg.Error as error:
            raise _found_stale(row, connection) or _meaning(row, connection, error) from error
        finally:
            _undo(connection)
            connection.end()


def _meaning(row: Row, connection: LentConnection | LentAsyncConnection, error: psycopg.Error) -> BaseException:
    """Of an error that ended the transaction: in a statement of ours, or in one of the handler's."""
    if (ours := row.failed(error, connection, connection.failing(error))) is not None:
        return ours
    return fault_of(error, row.terms.address, connection, connection.raised) or error


def _found_stale(row: Row, connection: LentConnection) -> KconsumeError | None:
    """After an error, whose cause may be that we were fenced: in a pipeline, nobody has looked yet."""
    with suppress(psycopg.Error):
        _undo(connection)
        now = connection.own(row.terms.course.peek, row.key).fetchone()
        is_ours = now is not None and now[1] == row.epoch and row.moved_from in (None, now[0])
        return None if is_ours else row.stale(now, row.moved_from)
    return None


@contextmanager
def _drained(connection: LentConnection) -> Iterator[None]:
    """A pipeline. When it is left with an error, what is still in it is fetched first, or psycopg would log that."""
    with connection.gather() as pipeline:
        try:
            yield
        except BaseException:
            with suppress(psycopg.Error):
                pipeline.sync()
            raise


def _undo(connection: LentConnection) -> None:
    if connection.status in (TransactionStatus.INTRANS, TransactionStatus.INERROR):
        with suppress(psycopg.Error):  # then the connection is closed, which undoes it as well
            connection.own(_ROLLBACK)


class AsyncPostgresTx:
    """The transaction of an `async def`."""

    def __init__(self, row: Row, connection: LentAsyncConnection) -> None:
        self.connection = connection
        self._row = row
        self._posted: list[psycopg.AsyncCursor[Any]] = []

    async def advance(self, old: int, new: int, leader_epoch: int | None = None) -> None:
        self.connection.check()
        try:
            async with self.connection.pipeline():
                for statement in self._row.move(old, new, leader_epoch):
                    await self.connection.own(*statement)
        except psycopg.errors.DivisionByZero:
            await self.connection.own(_ROLLBACK)
            answer = await self.connection.own(self._row.terms.course.peek, self._row.key)
            raise self._row.not_moved(old, await answer.fetchone()) from None

    async def keep(self, table: str, letters: Sequence[Letter]) -> None:
        there = await self.connection.own(*letter_statements.looked_for(table))
        if await there.fetchone() != (True,):
            for statement in letter_statements.made(table):
                await self.connection.own(*statement)
        for statement in letter_statements.kept(table, letters):
            await self.connection.own(*statement)

    async def post(self, outgoing: Sequence[Outgoing]) -> None:
        self.connection.check()
        self._posted.append(await self.connection.own(*self._row.posting(outgoing)))

    def numbers(self) -> list[int]:
        return _numbers_in(self._posted)

    async def take_in(self, origins: Sequence[str]) -> set[str]:
        answer = await self.connection.own(*self._row.taking_in(origins))
        return {origin for (origin,) in await answer.fetchall()}

    def fault(self, error: BaseException) -> StoreError | None:
        return fault_of(error, self._row.terms.address, self.connection, self.connection.raised)


@asynccontextmanager
async def async_transaction(
    terms: Terms, below: Awaited, group: str, partition: Partition, epoch: int
) -> AsyncIterator[AsyncPostgresTx]:
    row, connection = Row(terms, group, partition, epoch), LentAsyncConnection(below.pgconn)
    with watch.over(below.pgconn, terms.address, ours=False):
        try:
            async with connection.pipeline():
                for statement in row.opening():
                    answer = await connection.own(*statement)
            if await answer.fetchone() is None:
                await connection.own(_ROLLBACK)
                now = await connection.own(terms.course.peek, row.key)
                raise row.stale(await now.fetchone())
            yield AsyncPostgresTx(row, connection)
            connection.check()
            await connection.own(COMMIT)
        except psycopg.Error as error:
            raise _meaning(row, connection, error) from error
        finally:
            if connection.status in (TransactionStatus.INTRANS, TransactionStatus.INERROR):
                with suppress(psycopg.Error):
                    await connection.own(_ROLLBACK)
            connection.end()

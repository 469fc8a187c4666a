"""A stream's ledger on PostgreSQL: in the offset rows of the store, under its epochs, with its fence.

    BEGIN · locks · mark · epochs?   one round trip; under one stale epoch it goes no further
    … the handler's statements …
    offsets → ends · plan done · COMMIT

It is the transaction of `backends/postgres_tx.py` over many partitions at once: the same rows, the same advisory locks,
so a claim by anybody (an embedded app, another stream) finds and ends it. The ranges are moved by a statement that
fails in the server unless every row is at the beginning of its range: that row *is* the ledger. A range ledger of its
own would leave, after a crash, ranges that are done and that an embedded app could not see.

Beside them there is a row a query, `kconsume_streams`: the plan that was begun, its number, who runs, whether to stop.
"""

from __future__ import annotations

import itertools
import logging
import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, ClassVar

import psycopg
from psycopg.pq import TransactionStatus

from kconsume.backends import postgres_letters as letter_statements
from kconsume.backends.abc import Position, Positions
from kconsume.backends.claiming import fenced
from kconsume.backends.outbox_table import postgres_rows
from kconsume.backends.postgres import PostgresStore
from kconsume.backends.postgres_faults import commit_error, fault_of, store_error
from kconsume.backends.postgres_lent import ENDED, LentConnection
from kconsume.backends.postgres_slots import Plain
from kconsume.backends.postgres_sql import Statement
from kconsume.backends.postgres_tx import Terms
from kconsume.backends.postgres_watch import watch
from kconsume.errors import ConfigurationError, Fenced, KconsumeError, StoreError, StoreUnavailable, TransactionMisused
from kconsume.failures.letters import Letter
from kconsume.output import Outgoing
from kconsume.records import Partition
from kconsume.spark import ledger_sql as texts
from kconsume.spark.ledger import RangesTx, taken_by
from kconsume.spark.ledger_sql import StreamStatements
from kconsume.spark.ranges import OffsetRange, Plan

_log = logging.getLogger("kconsume.spark")
_COMMIT, _ROLLBACK = "commit", "rollback"
_PATIENCE = 2.0
_numbers = itertools.count()


class PostgresLedger:
    """Of the query `name` of a group."""

    exactly_once: ClassVar[bool] = True

    def __init__(self, store: PostgresStore, group: str, name: str, owner: str, *, by_handler: bool = False) -> None:
        """`by_handler`: the name is the handler's, and other queries of the group, of other topics, may have it too."""
        self._store = store
        self._group = group
        self._who = {"group": group, "name": name, "owner": owner}
        self._by_handler = by_handler
        self._topics: set[str] = set()
        self._hold: Plain | None = None
        self._guard = threading.Lock()

    # Who runs

    def enter(self, topics: Sequence[str]) -> None:
        self._make_table()
        self._take(topics)
        name, read = self._who["name"], sorted(self._topics)
        for each in [name, f"{name} {','.join(read)}"] if self._by_handler else [name]:
            values = {**self._who, "name": each, "topics": texts.array(read), "mine": not self._by_handler}
            if self._execute(self._sql.enter, values):
                self._who["name"] = each
                return
        raise ConfigurationError(
            f"group {self._group!r} has two queries named {name!r}, and neither reads {', '.join(read)}: give this one "
            f"a name of its own, foreach_batch(…, name=…)"
        )

    def also(self, topics: Sequence[str]) -> None:
        if new := set(topics) - self._topics:
            self._take(sorted(new))
            self._execute(self._sql.also, {**self._who, "topics": texts.array(sorted(self._topics))})

    def beat(self) -> bool:
        with self._guard:
            if self._hold is not None:
                try:
                    self._hold.execute("select 1")
                except psycopg.Error:
                    self._hold = None
        if self._hold is None and self._topics:
            self._take(sorted(self._topics))
        rows = self._execute(self._sql.beat, self._who)
        if not rows:
            raise Fenced(f"group {self._group!r} has another query named {self._who['name']!r} now: this one stops")
        return bool(rows[0][0])

    def ask_to_stop(self, name: str | None) -> list[str]:
        """Of the group's queries, or of one; the names of those that are to hear it."""
        self._make_table()
        return sorted(row[0] for row in self._execute(self._sql.ask_to_stop, {"group": self._group, "name": name}))

    def leave(self) -> None:
        with self._guard:
            if self._hold is not None:
                self._hold.close()  # and with it go its locks
            self._hold = None
            self._topics.clear()

    def _take(self, topics: Sequence[str]) -> None:
        """The locks of these topics, in the transaction that stays open."""
        with self._guard, self._in_our_words():
            if self._hold is None:
                self._hold = self._store._at.connect()
                self._hold.execute(texts.HOLD)
            for topic in topics:
                self._take_one(self._hold, topic)
            self._topics.update(topics)

    def _take_one(self, hold: Plain, topic: str) -> None:
        values = {"lock": texts.stream_lock(self._store._known().prefix, self._group, topic)}
        deadline = time.monotonic() + _PATIENCE
        while True:
            (got,) = hold.execute(texts.TRY_LOCK, values).fetchone() or (False,)
            if got:
                return
            if alive := self._execute(self._sql.alive, {**self._who, "topic": topic}):
                raise taken_by(self._group, topic, str(alive[0][0]))
            # Who holds its lock for long and is not heard of is frozen, or cut off: it is not to block anybody.
            if self._execute(texts.END_HOLDER, values):
                _log.warning("took over a silent query group=%s topic=%s", self._group, topic)
            elif time.monotonic() > deadline:
                raise taken_by(self._group, topic, "a process that has only just started")
            time.sleep(0.05)

    # Plans

    def pending(self) -> Plan | None:
        rows = self._execute(self._sql.pending, self._who)
        return Plan.from_json(rows[0][0]) if rows and rows[0][0] else None

    def begin(self, plan: Plan) -> int:
        rows = self._execute(self._sql.begin, {**self._who, "plan": plan.to_json()})
        if not rows:
            raise Fenced(f"group {self._group!r} has another query named {self._who['name']!r} now: this one stops")
        return int(rows[0][0])

    def reserve(self, count: int) -> int:
        rows = self._execute(self._sql.reserve, {**self._who, "count": count + 1})
        if not rows:
            raise Fenced(f"group {self._group!r} has another query named {self._who['name']!r} now: this one stops")
        return int(rows[0][0]) - count

    def drop(self) -> None:
        self._execute(self._sql.drop, self._who)

    # A batch

    @contextmanager
    def transaction(self, positions: Positions) -> Iterator[RangesTx]:
        with self._store._slots.borrow() as below:
            with _transaction(self._store._known(), self._sql, below, self._group, positions, self._who) as tx:
                yield tx

    # Connections

    @property
    def _sql(self) -> StreamStatements:
        return StreamStatements(self._store._sql)

    def _make_table(self) -> None:
        self._store._desk_is_ready()
        with self._in_our_words(), self._store._ours() as connection:
            sql = self._sql
            (there,) = connection.execute(sql.looked_for, {"table": sql.table}).fetchone() or (False,)
            if not there:
                try:
                    with connection.transaction():
                        connection.execute("select pg_advisory_xact_lock(hashtextextended('kconsume schema', 0))")
                        connection.execute(sql.create)
                except psycopg.errors.InsufficientPrivilege as error:
                    raise ConfigurationError(
                        f"{self._store.address} does not let our role make a table ({error.diag.message_primary}): let "
                        f"a role that may run this, and grant select, insert and update on it: {sql.create}"
                    ) from error

    def _execute(self, query: str, values: dict[str, Any]) -> list[tuple[Any, ...]]:
        with self._in_our_words(), self._store._ours() as connection:
            cursor = connection.execute(query, values)
            return cursor.fetchall() if cursor.description else []

    @contextmanager
    def _in_our_words(self) -> Iterator[None]:
        try:
            yield
        except psycopg.Error as error:
            raise store_error(error, self._store.address) from error


class PostgresRangesTx:
    """The transaction of a batch."""

    def __init__(
        self,
        terms: Terms,
        sql: StreamStatements,
        connection: LentConnection,
        group: str,
        mark: str,
        who: dict[str, str],
    ) -> None:
        self.connection = connection
        self.moving: tuple[OffsetRange, ...] = ()
        self._terms = terms
        self._sql = sql
        self._group = group
        self._mark = mark
        self._who = who
        self._pieces = 0

    @contextmanager
    def piece(self) -> Iterator[None]:
        self._pieces += 1
        name = f"kconsume_piece_{self._pieces}"
        self.connection.own(f"savepoint {name}")
        try:
            yield
            self.connection.check()
        except BaseException:
            if not self.connection.closed and self.connection.status is not TransactionStatus.IDLE:
                self.connection.own(f"rollback to savepoint {name}")
            raise
        self.connection.own(f"release savepoint {name}")

    def keep(self, table: str, letters: Sequence[Letter]) -> None:
        if self.connection.own(*letter_statements.looked_for(table)).fetchone() != (True,):
            for statement in letter_statements.made(table):
                self.connection.own(*statement)
        for statement in letter_statements.kept(table, letters):
            self.connection.own(*statement)

    def post(self, partition: Partition, outgoing: Sequence[Outgoing]) -> None:
        self.connection.own(self._terms.course.post, postgres_rows(self._group, partition, outgoing))

    def finish(self, ranges: Sequence[OffsetRange], positions: Positions) -> None:
        self.connection.check()
        self.moving = tuple(sorted(each for each in ranges if each.first < each.end))
        statements: list[Statement] = [(self._sql.drop, self._who)]
        if self.moving:
            epochs = {p: position.epoch for p, position in positions.items()}
            values = texts.moves(self._group, self.moving, epochs, self._mark)
            statements += [(self._terms.course.impatient, None), (self._sql.advance, values)]
        self.connection.at_once(*statements)

    def fault(self, error: BaseException) -> StoreError | None:
        return fault_of(error, self._terms.address, self.connection, self.connection.raised)


@contextmanager
def _transaction(
    terms: Terms, sql: StreamStatements, below: Plain, group: str, positions: Positions, who: dict[str, str]
) -> Iterator[PostgresRangesTx]:
    connection = LentConnection(below.pgconn)
    mark = f"{os.getpid()}.spark.{next(_numbers)}"
    tx = PostgresRangesTx(terms, sql, connection, group, mark, who)
    with watch.over(below.pgconn, terms.address, ours=False):
        try:
            if not connection.at_once(*_opening(terms, sql, group, positions, mark)):
                connection.own(_ROLLBACK)
                raise _stale(connection, terms, group, positions, ())
            yield tx
            connection.check()
            connection.at_once((_COMMIT, None))
        except psycopg.errors.DivisionByZero as error:
            if not tx.moving or connection.failing(error) is None:
                raise
            connection.own(_ROLLBACK)
            raise _stale(connection, terms, group, positions, tx.moving) from None
        except psycopg.Error as error:
            raise _meaning(tx, terms, error) from error
        finally:
            _undo(connection)
            connection.end()


def _opening(terms: Terms, sql: StreamStatements, group: str, positions: Positions, mark: str) -> list[Statement]:
    return [
        (terms.course.begin, None),
        (sql.lock, {"locks": texts.locks_of(terms.prefix, group, list(positions))}),
        (sql.mark, {"mark": mark, "idle": terms.idle}),
        (sql.check, texts.held(group, positions)),
    ]


def _stale(
    connection: LentConnection, terms: Terms, group: str, positions: Positions, moving: Sequence[OffsetRange]
) -> KconsumeError:
    """Which of them is not ours any more, or not where it should be."""
    firsts = {each.partition: each.first for each in moving}
    for partition, position in positions.items():
        key = {"group": group, "topic": partition.topic, "partition": partition.number}
        row = connection.own(terms.course.peek, key).fetchone()
        stored = None if row is None else Position(*row)
        offset = firsts.get(partition)
        if stored is None or stored.epoch != position.epoch or (offset is not None and stored.next_offset != offset):
            return fenced(group, partition, position.epoch, stored, offset)
    return TransactionMisused(ENDED)


def _meaning(tx: PostgresRangesTx, terms: Terms, error: psycopg.Error) -> BaseException:
    """Of an error that ended the transaction: in a statement of ours, or in one of the handler's."""
    connection = tx.connection
    if connection.broken or connection.closed:
        return StoreUnavailable(
            f"{terms.address} broke the connection, and whether the transaction was committed is not known yet: "
            f"{' '.join(str(error).split())}"
        )
    ours = connection.failing(error)
    if ours is None:
        return tx.fault(error) or error
    return (commit_error if ours == _COMMIT else store_error)(error, terms.address)


def _undo(connection: LentConnection) -> None:
    if connection.status in (TransactionStatus.INTRANS, TransactionStatus.INERROR):
        with suppress(psycopg.Error):  # then the connection is closed, which undoes it as well
            connection.own(_ROLLBACK)

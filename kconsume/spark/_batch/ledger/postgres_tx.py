"""The transaction of a micro-batch on PostgreSQL: over all its partitions, under their epochs.

    BEGIN · locks · mark · epochs?   one round trip; if an epoch is stale, the transaction ends here
    … the handler's statements …
    offsets → ends · plan dropped · COMMIT

The transaction is that of `kconsume.backends.postgres.transaction`, over many partitions at once: the same rows, the
same advisory locks. So a claim by any consumer (an embedded app, another stream) finds this transaction and ends it.
The offsets move by a statement that fails in the server unless every row is at the beginning of its range. There is no
separate table of applied ranges: an embedded app reads only the offset rows, and would handle such ranges again.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import psycopg
from psycopg.pq import TransactionStatus

from kconsume._kafka.outgoing import Outgoing
from kconsume.backends.base import Position, Positions
from kconsume.backends.claim import fenced
from kconsume.backends.outbox.tables import postgres_rows
from kconsume.backends.postgres.connection import ENDED, HandlerConnection
from kconsume.backends.postgres.errors import commit_error, fault_of, store_error
from kconsume.backends.postgres.pool import PooledConnection
from kconsume.backends.postgres.transaction import COMMIT, ROLLBACK, TxSettings, keep_letters, roll_back
from kconsume.backends.postgres.tx_statements import Statement
from kconsume.backends.postgres.watchdog import watch
from kconsume.errors import KconsumeError, StoreError, StoreUnavailable, TransactionMisused
from kconsume.failures.letter_headers import Letter
from kconsume.records import Partition
from kconsume.spark._batch.ledger import statements as texts
from kconsume.spark._batch.ledger.statements import StreamStatements
from kconsume.spark._batch.ranges import OffsetRange

_mark_numbers = itertools.count()


class PostgresRangesTx:
    """The transaction of a batch."""

    def __init__(
        self,
        settings: TxSettings,
        sql: StreamStatements,
        connection: HandlerConnection,
        group: str,
        mark: str,
        identity: dict[str, str],
    ) -> None:
        self.connection = connection
        self.moving: tuple[OffsetRange, ...] = ()
        """The ranges whose offsets `finish` moves; empty until `finish` is called."""
        self._settings = settings
        self._sql = sql
        self._group = group
        self._mark = mark
        self._identity = identity
        self._savepoints = 0

    @contextmanager
    def savepoint(self) -> Iterator[None]:
        self._savepoints += 1
        name = f"kconsume_piece_{self._savepoints}"
        self.connection.execute_own(f"savepoint {name}")
        try:
            yield
            self.connection.check()
        except BaseException:
            if not self.connection.closed and self.connection.status is not TransactionStatus.IDLE:
                self.connection.execute_own(f"rollback to savepoint {name}")
            raise
        self.connection.execute_own(f"release savepoint {name}")

    def keep(self, table: str, letters: Sequence[Letter]) -> None:
        keep_letters(self.connection, table, letters)

    def post(self, partition: Partition, outgoing: Sequence[Outgoing]) -> None:
        self.connection.execute_own(self._settings.statements.post, postgres_rows(self._group, partition, outgoing))

    def finish(self, ranges: Sequence[OffsetRange], positions: Positions) -> None:
        self.connection.check()
        self.moving = tuple(sorted(each for each in ranges if each.first < each.end))
        statements: list[Statement] = [(self._sql.drop_plan, self._identity)]
        if self.moving:
            epochs = {p: position.epoch for p, position in positions.items()}
            values = texts.advance_values(self._group, self.moving, epochs, self._mark)
            statements += [(self._settings.statements.limit_lock_wait, None), (self._sql.advance, values)]
        self.connection.execute_together(*statements)

    def fault(self, error: BaseException) -> StoreError | None:
        return fault_of(error, self._settings.address, self.connection, self.connection.has_raised)


@contextmanager
def ranges_transaction(
    settings: TxSettings,
    sql: StreamStatements,
    pooled: PooledConnection,
    group: str,
    positions: Positions,
    identity: dict[str, str],
) -> Iterator[PostgresRangesTx]:
    """A transaction on a pooled connection, committed when the block ends.

    Args:
        positions: the partitions, with the epochs under which they are claimed.
        identity: the query, as parameters of its statements.

    Raises `Fenced` if an epoch is stale, at the beginning or at the end.
    """
    connection = HandlerConnection(pooled.pgconn)
    mark = f"{os.getpid()}.spark.{next(_mark_numbers)}"
    tx = PostgresRangesTx(settings, sql, connection, group, mark, identity)
    with watch.over(pooled.pgconn, settings.address, own=False):
        try:
            if not connection.execute_together(*_opening(settings, sql, group, positions, mark)):
                connection.execute_own(ROLLBACK)
                raise _stale(connection, settings, group, positions, ())
            yield tx
            connection.check()
            connection.execute_together((COMMIT, None))
        except psycopg.errors.DivisionByZero as error:
            if not tx.moving or connection.own_statement(error) is None:
                raise
            connection.execute_own(ROLLBACK)
            raise _stale(connection, settings, group, positions, tx.moving) from None
        except psycopg.Error as error:
            raise _meaning(tx, settings, error) from error
        finally:
            roll_back(connection)
            connection.detach()


def _opening(
    settings: TxSettings, sql: StreamStatements, group: str, positions: Positions, mark: str
) -> list[Statement]:
    return [
        (settings.statements.begin, None),
        (sql.lock, {"locks": texts.partition_locks(settings.prefix, group, list(positions))}),
        (sql.mark, {"mark": mark, "idle": settings.idle}),
        (sql.check, texts.check_values(group, positions)),
    ]


def _stale(
    connection: HandlerConnection, settings: TxSettings, group: str, positions: Positions, moving: Sequence[OffsetRange]
) -> KconsumeError:
    """The error for the first partition whose epoch is stale, or whose offset is not at the beginning of its range."""
    firsts = {each.partition: each.first for each in moving}
    for partition, position in positions.items():
        key = {"group": group, "topic": partition.topic, "partition": partition.number}
        row = connection.execute_own(settings.statements.read_row, key).fetchone()
        stored = None if row is None else Position(*row)
        offset = firsts.get(partition)
        if stored is None or stored.epoch != position.epoch or (offset is not None and stored.next_offset != offset):
            return fenced(group, partition, position.epoch, stored, offset)
    return TransactionMisused(ENDED)


def _meaning(tx: PostgresRangesTx, settings: TxSettings, error: psycopg.Error) -> BaseException:
    """What to raise for an error of a statement of kconsume or of the handler that ended the transaction."""
    connection = tx.connection
    if connection.broken or connection.closed:
        return StoreUnavailable(
            f"{settings.address} broke the connection, and whether the transaction was committed is not known yet: "
            f"{' '.join(str(error).split())}"
        )
    own = connection.own_statement(error)
    if own is None:
        return tx.fault(error) or error
    return (commit_error if own == COMMIT else store_error)(error, settings.address)

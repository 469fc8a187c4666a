"""What runs in an executor: a handler on the rows of one range, in a transaction that also moves the offset.

    rows ─► applied before? ─► BEGIN under the epoch ─► handler ─► offset first → end ─► COMMIT ─► one row of status

A task takes its partition from its first row, because a task's number is not the partition's number. The task takes the
bounds of its range from the driver's plan. The offset in the store shows what is applied. If the offset has moved, the
task skips its range: another task of the same range, a task that died after its COMMIT, or an earlier run of the job
has applied it. No task learns the partition of a range without rows, so the driver finishes such a range.

If the handler fails, the task returns a status and does not fail: Spark would run a failed task again, and `Retry`
alone decides how often a handler is called. A failure of the store is raised: another executor may reach the store.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from kconsume._handlers.arrow import schema as embedded_schema
from kconsume.backends.postgres.address import Address
from kconsume.errors import BatchError, ConfigurationError, Conflict, Fenced, StoreUnavailable, TransactionMisused
from kconsume.failures.dead_letter import DeadLetter
from kconsume.failures.letter_headers import trace_of
from kconsume.failures.policy import Policy, Verdict
from kconsume.records import Partition
from kconsume.spark._batch.dead_letters import (
    FailedRow,
    TableMessages,
    failed_row,
    record_of_row,
    rows_of,
    write_letters,
)
from kconsume.spark._batch.handler_call import HandlerCall
from kconsume.spark._batch.range_rows import RangeRows
from kconsume.spark._batch.ranges import Decision, OffsetRange
from kconsume.spark._batch.stream_batch import RangeBatch, StreamBatch

if TYPE_CHECKING:
    import pyarrow as pa

    from kconsume.backends.postgres.store import PostgresStore
    from kconsume.backends.postgres.transaction import PostgresTx

STATUS_SCHEMA = "topic string, partition int, outcome string, rows long, letters int, detail string"
_MOST_CONFLICTS = 20
"""How often a transaction is run again after a conflict with another transaction."""


class RangeStatus(NamedTuple):
    """The result of a task for its range."""

    topic: str
    partition: int
    outcome: str
    """`applied`, `skipped`, `fenced`, `misused` or `failed`."""
    rows: int
    letters: int
    """The number of new outbox rows."""
    detail: str

    def row(self) -> pa.RecordBatch:
        """The status with the columns of `STATUS_SCHEMA`."""
        import pyarrow as pa

        kinds = (pa.string(), pa.int32(), pa.string(), pa.int64(), pa.int32(), pa.string())
        arrays = [pa.array([value], kind) for value, kind in zip(self, cast(Any, kinds), strict=True)]
        return pa.RecordBatch.from_arrays(arrays, list(self._fields))


@dataclass(frozen=True, slots=True)
class Task:
    """What Spark sends to each task of a batch: values, and a handler that can be pickled."""

    address: Address = field(repr=False)
    group: str
    call: HandlerCall
    policy: Policy
    ranges: Mapping[Partition, OffsetRange]
    """The ranges that must be applied, by partition."""
    epochs: Mapping[Partition, int]
    scopes: Mapping[str, str]
    """The beginning of `Record.id`, by topic."""
    most_bytes: int
    """The size in bytes of the largest record that the outbox takes."""
    batch_id: int | None
    in_stream: bool = False
    """True if the rows are whole records, as `stream` reads them. The handler then gets the columns and types that it
    gets in an embedded app."""

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        status = self._run(batches)
        if status is not None:
            yield status.row()

    def _run(self, batches: Iterator[pa.RecordBatch]) -> RangeStatus | None:
        rows = RangeRows(batches, embedded_schema() if self.in_stream else None)
        partition = rows.partition
        if partition is None:
            return None
        planned = self.ranges.get(partition)
        if planned is None:
            return RangeStatus(*partition, "skipped", 0, 0, "the range was applied before the batch began")
        rows.planned = planned
        try:
            return _RangeRun(self, planned, rows).status()
        except Fenced as error:
            return self._after_fenced(planned, error)
        except TransactionMisused as error:
            return RangeStatus(*partition, "misused", 0, 0, str(error))

    def _after_fenced(self, planned: OffsetRange, error: Fenced) -> RangeStatus:
        """Returns `skipped` if another task of this range committed first, `fenced` if the partition was claimed."""
        stored = worker_store(self.address).load(self.group, [planned.partition]).get(planned.partition)
        ours = stored is not None and stored.epoch == self.epochs[planned.partition]
        if stored is not None and ours and planned.decide(stored.next_offset) is Decision.SKIP:
            return RangeStatus(*planned.partition, "skipped", 0, 0, "another task of the same range committed first")
        return RangeStatus(*planned.partition, "fenced", 0, 0, str(error))


class _RangeRun:
    """Applies one range."""

    def __init__(self, task: Task, planned: OffsetRange, rows: RangeRows) -> None:
        self._task = task
        self._range = planned
        self._rows = rows
        self._store = worker_store(task.address)
        policy = task.policy
        # Rows are kept in memory if the handler may get them a second time. A table holds all rows in any case.
        may_repeat = policy.retry is not None or policy.dead_letter is not None or policy.verdict(_ANY) != Verdict.STOP
        self._keeps_rows = may_repeat or task.call.form == "table"

    def status(self) -> RangeStatus:
        partition = self._range.partition
        stored = self._store.load(self._task.group, [partition]).get(partition)
        if stored is not None and self._range.decide(stored.next_offset) is Decision.SKIP:
            return RangeStatus(*partition, "skipped", 0, 0, "an earlier attempt applied the range")
        began, attempt, conflicts = time.monotonic(), 1, 0
        while True:
            try:
                return self._apply(attempt)
            except Conflict:
                conflicts += 1
                if conflicts > _MOST_CONFLICTS or not self._keeps_rows:
                    raise
            except (Fenced, StoreUnavailable, TransactionMisused):
                raise
            except Exception as error:  # noqa: BLE001  (whatever a handler raises)
                pause = None if _is_misuse(error) else self._task.policy.pause(attempt, error, time.monotonic() - began)
                if pause is not None:
                    time.sleep(pause)
                    attempt += 1
                    continue
                return self._no_more_attempts(error, attempt)

    def _apply(self, attempt: int) -> RangeStatus:
        with self._transaction() as tx:
            table = self._rows.kept() if self._keeps_rows else None
            batch = self._batch(attempt, table)
            count = self._rows.count
            self._call(table, tx, batch)
            self._rows.drain()
            return self._finish(tx, max(count, self._rows.count), self._rejected(batch, attempt))

    def _no_more_attempts(self, error: Exception, attempt: int) -> RangeStatus:
        task = self._task
        verdict = task.policy.verdict(error)
        if verdict is Verdict.STOP or _is_misuse(error):
            detail = f"{type(error).__module__}.{type(error).__qualname__}: {error}\n{trace_of(error)}"
            return RangeStatus(*self._range.partition, "failed", 0, 0, detail)
        with self._transaction() as tx:
            failed = self._search(tx, self._rows.kept(), attempt, error)
            if verdict is Verdict.SKIP:
                failed = []
            return self._finish(tx, self._rows.count, failed)

    def _finish(self, tx: PostgresTx, rows: int, failed: list[FailedRow]) -> RangeStatus:
        letters = 0
        dead_letter = self._task.policy.dead_letter
        if failed and dead_letter is not None:
            letters = _write_letters(failed, dead_letter, tx, self._task.most_bytes)
        tx.advance(self._range.first, self._range.end)
        detail = f"{len(failed)} dead letters" if failed else ""
        return RangeStatus(*self._range.partition, "applied", rows, letters, detail)

    def _search(self, tx: PostgresTx, table: pa.Table, attempt: int, error: Exception) -> list[FailedRow]:
        """Call the handler with halves of the rows, each in a savepoint. Returns the rows that failed alone, or that
        the handler rejected or named."""
        failed: list[FailedRow] = []
        named = set(error.errors) if isinstance(error, BatchError) else set()
        pieces = [table] if not named else _without(table, named)
        if isinstance(error, BatchError):
            failed += [self._failed(table.slice(index, 1), each, attempt) for index, each in error.errors.items()]
        while pieces:
            piece = pieces.pop()
            try:
                with tx.connection.transaction():
                    batch = self._batch(attempt, piece)
                    self._call(piece, tx, batch)
            except (Fenced, StoreUnavailable, Conflict, TransactionMisused):
                raise
            except Exception as cause:
                if (fault := tx.fault(cause)) is not None:
                    raise fault from cause
                if piece.num_rows > 1:
                    middle = piece.num_rows // 2
                    pieces += [piece.slice(middle), piece.slice(0, middle)]
                else:
                    failed.append(self._failed(piece, cause, attempt))
            else:
                failed += self._rejected(batch, attempt)
        return sorted(failed, key=lambda each: each.letter.offset)

    def _rejected(self, batch: StreamBatch, attempt: int) -> list[FailedRow]:
        return [
            failed_row(row, why, group=self._task.group, scopes=self._task.scopes, attempts=attempt)
            for rejected, why in batch.rejected
            for row in rows_of(rejected)  # type: ignore[arg-type]
        ]

    def _failed(self, one: pa.Table, error: BaseException, attempt: int) -> FailedRow:
        (row,) = rows_of(one)
        return failed_row(row, error, group=self._task.group, scopes=self._task.scopes, attempts=attempt)

    def _call(self, table: pa.Table | None, tx: PostgresTx, batch: StreamBatch) -> None:
        call = self._task.call
        if call.form == "table":
            call(table, tx.connection, batch)
            return
        batches = self._rows.batches() if table is None else iter(table.to_batches())
        if call.form == "batches":
            call(batches, tx.connection, batch)
        else:
            scope = self._task.scopes[self._range.partition.topic]
            records = (record_of_row(row, scope, batch.attempt) for each in batches for row in each.to_pylist())
            call(records, tx.connection, batch)

    def _batch(self, attempt: int, table: pa.Table | None) -> RangeBatch:
        """The handler's batch. It has records only if the handler takes a table: an iterator is not read in advance."""
        task = self._task
        return RangeBatch(
            task.group,
            (self._range,),
            messages=TableMessages(table) if table is not None and task.call.form == "table" else None,
            scope=task.scopes[self._range.partition.topic],
            attempt=attempt,
            batch_id=task.batch_id,
            rejects=task.policy.dead_letter is not None,
        )

    def _transaction(self) -> AbstractContextManager[PostgresTx]:
        partition = self._range.partition
        return _transaction(self._store, self._task.group, partition, self._task.epochs[partition])


_ANY = RuntimeError()


def _is_misuse(error: Exception) -> bool:
    """True if the handler misused what it was given: no record is the cause, and each attempt raises the same error."""
    return isinstance(error, ConfigurationError)


@contextmanager
def _transaction(store: PostgresStore, group: str, partition: Partition, epoch: int) -> Iterator[PostgresTx]:
    """The store's transaction. An error that the store causes is raised as the store's error."""
    with store.transaction(group, partition, epoch) as tx:
        try:
            yield cast("PostgresTx", tx)
        except Exception as error:
            if (fault := tx.fault(error)) is not None:
                raise fault from error
            raise


def _without(table: pa.Table, left_out: set[int]) -> list[pa.Table]:
    import pyarrow as pa

    kept = [index for index in range(table.num_rows) if index not in left_out]
    return [table.take(pa.array(kept, pa.int64()))] if kept else []


def _write_letters(failed: list[FailedRow], dead_letter: DeadLetter, tx: PostgresTx, most: int) -> int:
    rows = write_letters(failed, dead_letter, tx, lambda _, outgoing: tx.post(outgoing), most)
    return sum(rows.values())


_stores: dict[tuple[int, Address], PostgresStore] = {}


def worker_store(address: Address) -> PostgresStore:
    """The store of this worker process, kept for its next task.

    The key has the process id, because Spark forks workers, and a connection must not be used in two processes.
    """
    from kconsume.backends.postgres.store import PostgresStore

    key = (os.getpid(), address)
    if key not in _stores:
        _stores[key] = PostgresStore.from_address(address)
    return _stores[key]

"""What runs in executors: a handler on the rows of one range, in a transaction of its own with the offset in it.

    rows ─► done already? ─► BEGIN under the epoch ─► handler ─► offset first → end ─► COMMIT ─► one row that says so

A task takes its partition from its first row (the number of a task is not that of a partition) and its bounds from the
driver's plan. The row of the offset store is the ledger: a twin, a task that died after its COMMIT or a whole job that
is run again find it moved, and skip. A range without rows has no partition to be known by: the driver finishes it.

A handler that fails is a status and not a failed task, which Spark would only run again: what is to be tried again is
said by `Retry`. What the store cannot do is raised: there another executor may have more luck.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from kconsume.backends.postgres_address import Address
from kconsume.errors import BatchError, ConfigurationError, Conflict, Fenced, StoreUnavailable, TransactionMisused
from kconsume.failures.dead_letter import DeadLetter
from kconsume.failures.letters import trace_of
from kconsume.failures.policy import Policy, Verdict
from kconsume.records import Partition
from kconsume.spark.batch import RangeBatch, StreamBatch
from kconsume.spark.calls import Call
from kconsume.spark.letters import Failed, TableMessages, failed_row, keep_letters, record_of_row, rows_of
from kconsume.spark.ranges import Decision, OffsetRange
from kconsume.tables import schema as embedded_schema

if TYPE_CHECKING:
    import pyarrow as pa

    from kconsume.backends.postgres import PostgresStore
    from kconsume.backends.postgres_tx import PostgresTx

STATUS = "topic string, partition int, outcome string, rows long, letters int, detail string"
_CONFLICTS = 20
"""How often a transaction that met another is run again."""


class Status(NamedTuple):
    """What became of a range."""

    topic: str
    partition: int
    outcome: str
    """`applied`, `skipped`, `fenced`, `misused` or `failed`."""
    rows: int
    letters: int
    """Rows that were left in the outbox."""
    detail: str

    def row(self) -> pa.RecordBatch:
        """As `STATUS` says."""
        import pyarrow as pa

        kinds = (pa.string(), pa.int32(), pa.string(), pa.int64(), pa.int32(), pa.string())
        arrays = [pa.array([value], kind) for value, kind in zip(self, cast(Any, kinds), strict=True)]
        return pa.RecordBatch.from_arrays(arrays, list(self._fields))


@dataclass(frozen=True, slots=True)
class Task:
    """What every task of a batch is sent: values only, and a handler that can be pickled."""

    address: Address = field(repr=False)
    group: str
    call: Call
    policy: Policy
    ranges: Mapping[Partition, OffsetRange]
    """Those that are to be applied, by partition."""
    epochs: Mapping[Partition, int]
    scopes: Mapping[str, str]
    most_bytes: int
    batch_id: int | None
    in_stream: bool = False
    """Whether the rows are whole records, as `stream` reads them: a handler then gets them in the columns that it gets
    embedded."""

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        status = self._run(batches)
        if status is not None:
            yield status.row()

    def _run(self, batches: Iterator[pa.RecordBatch]) -> Status | None:
        rows = _Rows(batches, embedded_schema() if self.in_stream else None)
        partition = rows.partition
        if partition is None:
            return None
        wanted = self.ranges.get(partition)
        if wanted is None:
            return Status(*partition, "skipped", 0, 0, "it was done before the batch began")
        rows.wanted = wanted
        try:
            return _Run(self, wanted, rows).status()
        except Fenced as error:
            return self._after_a_fence(wanted, error)
        except TransactionMisused as error:
            return Status(*partition, "misused", 0, 0, str(error))

    def _after_a_fence(self, wanted: OffsetRange, error: Fenced) -> Status:
        """A twin was faster, which is as good; or the partition is another's."""
        stored = store_at(self.address).load(self.group, [wanted.partition]).get(wanted.partition)
        ours = stored is not None and stored.epoch == self.epochs[wanted.partition]
        if stored is not None and ours and wanted.decide(stored.next_offset) is Decision.SKIP:
            return Status(*wanted.partition, "skipped", 0, 0, "another task of the same range was first")
        return Status(*wanted.partition, "fenced", 0, 0, str(error))


class _Run:
    """One range, until it is applied or cannot be."""

    def __init__(self, task: Task, wanted: OffsetRange, rows: _Rows) -> None:
        self._task = task
        self._range = wanted
        self._rows = rows
        self._store = store_at(task.address)
        policy = task.policy
        # What may have to be handed over a second time has to be kept; a table is all rows at once in any case.
        retries = policy.retry is not None or policy.dead_letter is not None or policy.verdict(_ANY) != Verdict.STOP
        self._keeps = retries or task.call.form == "table"

    def status(self) -> Status:
        partition = self._range.partition
        stored = self._store.load(self._task.group, [partition]).get(partition)
        if stored is not None and self._range.decide(stored.next_offset) is Decision.SKIP:
            return Status(*partition, "skipped", 0, 0, "it was done by an earlier attempt")
        began, attempt, conflicts = time.monotonic(), 1, 0
        while True:
            try:
                return self._apply(attempt)
            except Conflict:
                conflicts += 1
                if conflicts > _CONFLICTS or not self._again():
                    raise
            except (Fenced, StoreUnavailable, TransactionMisused):
                raise
            except Exception as error:  # noqa: BLE001  (whatever a handler raises)
                pause = None if _is_misuse(error) else self._task.policy.pause(attempt, error, time.monotonic() - began)
                if pause is not None:
                    time.sleep(pause)
                    attempt += 1
                    continue
                return self._given_up(error, attempt)

    def _again(self) -> bool:
        """Whether the rows can be had once more."""
        return self._keeps

    def _apply(self, attempt: int) -> Status:
        with self._transaction() as tx:
            table = self._rows.kept() if self._keeps else None
            batch = self._batch(attempt, table)
            count = self._rows.count
            self._call(table, tx, batch)
            self._rows.drain()
            failed = [
                failed_row(row, error, group=self._task.group, scopes=self._task.scopes, attempts=attempt)
                for table, error in batch.rejected
                for row in rows_of(table)  # type: ignore[arg-type]
            ]
            return self._finish(tx, max(count, self._rows.count), failed)

    def _given_up(self, error: Exception, attempt: int) -> Status:
        task = self._task
        verdict = task.policy.verdict(error)
        if verdict is Verdict.STOP or _is_misuse(error):
            said = f"{type(error).__module__}.{type(error).__qualname__}: {error}\n{trace_of(error)}"
            return Status(*self._range.partition, "failed", 0, 0, said)
        with self._transaction() as tx:
            failed = self._isolate(tx, self._rows.kept(), attempt, error)
            if verdict is Verdict.SKIP:
                failed = []
            return self._finish(tx, self._rows.count, failed)

    def _finish(self, tx: PostgresTx, rows: int, failed: list[Failed]) -> Status:
        letters = 0
        dead_letter = self._task.policy.dead_letter
        if failed and dead_letter is not None:
            letters = _kept(failed, dead_letter, tx, self._task.most_bytes)
        tx.advance(self._range.first, self._range.end)
        return Status(*self._range.partition, "applied", rows, letters, f"{len(failed)} dead letters" if failed else "")

    def _isolate(self, tx: PostgresTx, table: pa.Table, attempt: int, error: Exception) -> list[Failed]:
        """Hand the rows over in halves, each undone by itself, until those that fail are alone."""
        failed: list[Failed] = []
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
                failed += [
                    failed_row(row, why, group=self._task.group, scopes=self._task.scopes, attempts=attempt)
                    for rejected, why in batch.rejected
                    for row in rows_of(rejected)  # type: ignore[arg-type]
                ]
        return sorted(failed, key=lambda each: each.letter.offset)

    def _failed(self, one: pa.Table, error: BaseException, attempt: int) -> Failed:
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
        """An iterator is not read ahead for it, whether or not its rows are kept."""
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
    """Of what the handler was given: no record is to blame, and it is raised again at each attempt."""
    return isinstance(error, ConfigurationError)


@contextmanager
def _transaction(store: PostgresStore, group: str, partition: Partition, epoch: int) -> Iterator[PostgresTx]:
    """The store's, in which an error that the store is behind is said to be the store's."""
    with store.transaction(group, partition, epoch) as tx:
        try:
            yield cast("PostgresTx", tx)
        except Exception as error:
            if (fault := tx.fault(error)) is not None:
                raise fault from error
            raise


class _Rows:
    """The record batches of a task: those of one partition, in its range, or it is an error."""

    def __init__(self, batches: Iterator[pa.RecordBatch], schema: pa.Schema | None = None) -> None:
        """`schema`: in which they are handed over; None for as they came."""
        self._source = iter(batches)
        self._schema = schema
        self._first = next((batch for batch in self._source if batch.num_rows), None)
        self._kept: pa.Table | None = None
        self._left = False
        self._broken: BaseException | None = None
        self.count = 0
        self.wanted: OffsetRange | None = None
        self.partition: Partition | None = None
        if self._first is not None:
            self.partition = Partition(self._first["topic"][0].as_py(), self._first["partition"][0].as_py())

    @property
    def schema(self) -> pa.Schema:
        assert self._first is not None
        return self._schema or self._first.schema

    def batches(self) -> Iterator[pa.RecordBatch]:
        """Once; what a handler leaves of it is looked at by `drain`."""
        assert self._first is not None
        if not self._left:
            self._left = True
            yield self._checked(self._first)
        while (batch := self._next()) is not None:
            yield self._checked(batch)

    def _next(self) -> pa.RecordBatch | None:
        """What comes next. An error of the source is remembered: a handler may take it for the end, and return."""
        if self._broken is not None:
            raise self._broken
        try:
            return next(self._source, None)
        except BaseException as error:
            self._broken = error
            raise

    def kept(self) -> pa.Table:
        import pyarrow as pa

        if self._kept is None:
            self._kept = pa.Table.from_batches(self.batches(), self.schema)
        return self._kept

    def drain(self) -> None:
        for _ in self.batches():
            pass

    def _checked(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        assert self.wanted is not None
        self.count += batch.num_rows
        if batch.num_rows and not self._is_of(batch, self.wanted):
            self._broken = TransactionMisused(
                f"a task got rows that are not of {self.wanted} alone, so ranges cannot be told apart: hand "
                f"for_each_partition the frame as it came from Kafka, without repartition, coalesce, union or join"
            )
            raise self._broken
        return batch if self._schema is None else batch.cast(self._schema)

    def _is_of(self, batch: pa.RecordBatch, wanted: OffsetRange) -> bool:
        import pyarrow.compute

        # Both ends of each column: no longer than reading one of them.
        ends: Any = pyarrow.compute.min_max
        first, last = (ends(batch["offset"])[end].as_py() for end in ("min", "max"))
        number, topic = wanted.partition.number, wanted.partition.topic
        numbers = {ends(batch["partition"])[end].as_py() for end in ("min", "max")}
        topics = {ends(batch["topic"])[end].as_py() for end in ("min", "max")}
        return numbers == {number} and topics == {topic} and first >= wanted.first and last < wanted.end


def _without(table: pa.Table, left_out: set[int]) -> list[pa.Table]:
    import pyarrow as pa

    kept = [index for index in range(table.num_rows) if index not in left_out]
    return [table.take(pa.array(kept, pa.int64()))] if kept else []


def _kept(failed: list[Failed], dead_letter: DeadLetter, tx: PostgresTx, most: int) -> int:
    rows = keep_letters(failed, dead_letter, tx, lambda _, outgoing: tx.post(outgoing), most)
    return sum(rows.values())


_stores: dict[tuple[int, Address], PostgresStore] = {}


def store_at(address: Address) -> PostgresStore:
    """The worker's own, kept for its next task: workers are forked and used again, connections must not be."""
    from kconsume.backends.postgres import PostgresStore

    key = (os.getpid(), address)
    if key not in _stores:
        store = PostgresStore.__new__(PostgresStore)
        store._open(address)
        _stores[key] = store
    return _stores[key]

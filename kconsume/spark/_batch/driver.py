"""Runs a handler of DataFrames in the driver: retries, one transaction for a whole batch, the search for failures.

With a `DeadLetter` or `on_error="skip"`, a failing record does not fail its batch. The handler is called with parts of
the batch: one part for each partition, then halves of the offsets, until each failing record is in a part of its own.
If the handler takes the transaction, each part has a savepoint. The failing records become dead letters in the
transaction that moves the offsets, or are skipped.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, cast

from kconsume._event_log import EventLog
from kconsume.backends.base import Positions
from kconsume.errors import ConfigurationError, HandlerFailed, KconsumeError, OffsetError, StoreError, TooManyFailures
from kconsume.failures.dead_letter import DeadLetterLimit
from kconsume.failures.policy import Verdict
from kconsume.records import Partition
from kconsume.spark._batch.bisect import BatchPart
from kconsume.spark._batch.context import (
    BatchContext,
    QueryControl,
    raise_unless_handler_failed,
    record_id_scopes,
)
from kconsume.spark._batch.dead_letters import FailedRow, failed_row, require_offset_columns, write_letters
from kconsume.spark._batch.interrupts import QueryInterrupted, interrupted
from kconsume.spark._batch.ledger.base import RangesTx
from kconsume.spark._batch.log_check import start_records_check
from kconsume.spark._batch.ranges import OffsetRange, Plan
from kconsume.spark._batch.stream_batch import StreamBatch

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_log = EventLog("spark")

_MOST_PARTS = 1000
"""The largest number of handler calls in a search for the failing records of one batch. Each call is a Spark job."""


class _HandlerRaised(Exception):
    """Carries an exception of the handler, so that it differs from an exception of the code around the handler."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


class DriverRunner:
    """Runs one micro-batch in this process, in one transaction for all its ranges."""

    def __init__(
        self, context: BatchContext, positions: Positions, control: QueryControl, letter_limit: DeadLetterLimit | None
    ) -> None:
        self._context = context
        self._positions = positions
        self._control = control
        self._letter_limit = letter_limit

    def run(self, frame: DataFrame, ranges: tuple[OffsetRange, ...], number: int | None, batch_id: int | None) -> None:
        began, attempt = time.monotonic(), 1
        while True:
            batch = self._batch(ranges, attempt, number, batch_id)
            try:
                return self._attempt(frame, ranges, batch)
            except (KconsumeError, QueryInterrupted):
                raise  # not from the handler, whose exceptions come as `_HandlerRaised`
            except Exception as failure:  # noqa: BLE001  (COMMIT raises too: a deferred constraint)
                error = failure.error if isinstance(failure, _HandlerRaised) else failure
                raise_unless_handler_failed(error, self._control, ranges, self._context.group)
                pause = self._context.policy.pause(attempt, error, time.monotonic() - began)
                if pause is None:
                    return self._without_failing_records(frame, ranges, batch, error)
                _log.warning(
                    "handler failed and retries",
                    handler=self._context.call.name,
                    attempt=attempt,
                    again_in=pause,
                    ranges=ranges,
                    cause=_short(error),
                )
                if not self._control.pause(pause):
                    raise interrupted("the query ends during the pause before a retry") from None
                attempt += 1

    def _attempt(self, frame: DataFrame, ranges: Sequence[OffsetRange], batch: StreamBatch) -> None:
        if not self._context.call.wants_tx:
            # The transaction begins after the handler, so that no rows are locked while Spark works.
            self._call(frame, None, batch)
            failed, check_records = self._rejected(batch), self._start_records_check(ranges)
            with self._transaction(ranges) as tx:
                outbox_rows = self._finish(tx, ranges, failed, check_records)
        else:
            with self._transaction(ranges) as tx:
                self._call(frame, tx.connection, batch)
                outbox_rows = self._finish(tx, ranges, self._rejected(batch), self._start_records_check(ranges))
        self._context.outbox_rows_committed(outbox_rows)

    def _call(self, frame: DataFrame, connection: object, batch: StreamBatch) -> None:
        try:
            self._context.call(frame, connection, batch)
        except (StoreError, OffsetError, ConfigurationError):
            raise  # a `ConfigurationError` comes from the handler itself, never from a record of the batch
        except Exception as error:
            raise _HandlerRaised(error) from error

    def _start_records_check(self, ranges: Sequence[OffsetRange]) -> Callable[[], None]:
        """Ask the cluster, after the handler returned, whether the records still exist. The transaction can begin while
        the cluster answers. The returned function waits for the answer, and raises if records are gone."""
        return start_records_check(self._context.cluster, ranges, self._positions, self._context.group)

    def _finish(
        self,
        tx: RangesTx,
        ranges: Sequence[OffsetRange],
        failed: Sequence[FailedRow],
        check_records: Callable[[], None],
    ) -> Mapping[Partition, int]:
        """Write the dead letters and move the offsets. Returns the number of new outbox rows, by partition.

        Args:
            check_records: raises if records of the ranges are gone.
        """
        if not self._control.active:
            raise interrupted("the query was stopped while its handler ran") from None
        check_records()
        dead_letter, outbox_rows = self._context.policy.dead_letter, dict[Partition, int]()
        if failed and dead_letter is not None:
            if self._letter_limit is not None and self._letter_limit.exceeds(len(failed)):
                raise TooManyFailures(
                    f"{self._context.call.name}: {len(failed)} records of {Plan(tuple(ranges))} failed, which is more "
                    f"than the limit of its dead letters allows; no offset was moved"
                )
            outbox_rows = write_letters(failed, dead_letter, tx, tx.post, self._context.most_bytes)
        tx.finish(ranges, self._positions)
        if self._letter_limit is not None:
            self._letter_limit.note(sum(map(len, ranges)), len(failed))
        return outbox_rows

    # The search for failing records

    def _without_failing_records(
        self, frame: DataFrame, ranges: tuple[OffsetRange, ...], batch: StreamBatch, error: Exception
    ) -> None:
        """Find the records that fail, and apply the batch without them."""
        verdict = self._context.policy.verdict(error)
        if verdict is Verdict.STOP:
            raise HandlerFailed(self._context.call.name, str(Plan(ranges)), error)
        require_offset_columns(frame.columns, "the records that failed are found by their offsets")
        _log.warning("search for failing records", handler=self._context.call.name, ranges=ranges, cause=_short(error))
        number = self._context.ledger.reserve_numbers(_MOST_PARTS)
        cached = frame.persist()  # without it each part would read the whole batch from Kafka again
        try:
            if self._context.call.wants_tx:
                with self._transaction(ranges) as tx:
                    failed = self._search(cached, ranges, batch, tx, number)
                    letters = failed if verdict is Verdict.DEAD_LETTER else ()
                    outbox_rows = self._finish(tx, ranges, letters, self._start_records_check(ranges))
            else:
                failed = self._search(cached, ranges, batch, None, number)
                letters, check_records = (
                    failed if verdict is Verdict.DEAD_LETTER else (),
                    self._start_records_check(ranges),
                )
                with self._transaction(ranges) as tx:
                    outbox_rows = self._finish(tx, ranges, letters, check_records)
        finally:
            cached.unpersist()
        self._context.outbox_rows_committed(outbox_rows)
        _log.warning(
            "records failed for good",
            handler=self._context.call.name,
            records=len(failed),
            action=verdict.value,
            ranges=ranges,
        )

    def _search(
        self,
        frame: DataFrame,
        ranges: tuple[OffsetRange, ...],
        batch: StreamBatch,
        tx: RangesTx | None,
        number: int | None,
    ) -> list[FailedRow]:
        """Call the handler with parts of the batch. Returns the records that failed alone or that the handler rejected.

        Args:
            number: `StreamBatch.number` of the first part. Each part has another number, because a table that skips
                numbers that it has seen would skip all parts but the first.
        """
        failed: list[FailedRow] = []
        parts = [*reversed(BatchPart(frame, ranges).split())]
        calls = 0
        while parts:
            part = parts.pop()
            if not self._control.active:
                raise interrupted("the query was stopped during the search for failing records") from None
            if (calls := calls + 1) > _MOST_PARTS:
                raise TooManyFailures(
                    f"{self._context.call.name} failed on so many records of {Plan(ranges)} that they cannot be found "
                    f"one by one: correct the handler, or let the handler name the bad records with "
                    f"batch.reject(df, why); no offset was moved"
                )
            part_batch = self._batch(part.ranges, batch.attempt, number, batch.batch_id)
            number = None if number is None else number + 1
            part_frame = part.frame
            try:
                with tx.savepoint() if tx is not None else nullcontext():
                    self._call(part_frame, None if tx is None else tx.connection, part_batch)
            except _HandlerRaised as raised:
                error = raised.error
                if tx is not None and (fault := tx.fault(error)) is not None:
                    raise fault from error
                raise_unless_handler_failed(error, self._control, ranges, self._context.group)
                if part.is_single_record:
                    failed += self._failed(part.rows, error, batch.attempt)
                else:
                    parts += reversed(part.split())
            else:
                failed += self._rejected(part_batch)
        return failed

    def _rejected(self, batch: StreamBatch) -> list[FailedRow]:
        failed: list[FailedRow] = []
        for records, error in batch.rejected:
            frame = cast("DataFrame", records)
            require_offset_columns(frame.columns, "batch.reject() needs these columns to identify the records")
            failed += self._failed(frame.toArrow().to_pylist(), error, batch.attempt)
        return failed

    def _failed(self, rows: Iterable[Mapping[str, Any]], error: BaseException, attempts: int) -> list[FailedRow]:
        scopes = record_id_scopes(self._context.group, self._positions)
        return [failed_row(row, error, group=self._context.group, scopes=scopes, attempts=attempts) for row in rows]

    def _batch(
        self, ranges: tuple[OffsetRange, ...], attempt: int, number: int | None, batch_id: int | None
    ) -> StreamBatch:
        rejects = self._context.policy.dead_letter is not None
        return StreamBatch(
            self._context.group, ranges, attempt=attempt, number=number, batch_id=batch_id, rejects=rejects
        )

    @contextmanager
    def _transaction(self, ranges: Sequence[OffsetRange]) -> Iterator[RangesTx]:
        positions = {each.partition: self._positions[each.partition] for each in ranges}
        with self._context.ledger.transaction(positions) as tx:
            try:
                yield tx
            except KconsumeError:
                raise
            except Exception as error:
                if (fault := tx.fault(error)) is not None:
                    raise fault from error
                raise


def _short(error: Exception) -> str:
    """The beginning of the error's text, because errors of Spark can have thousands of lines."""
    return f"{type(error).__name__}: {str(error)[:500]}"

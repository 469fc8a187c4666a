"""A handler of frames, in the driver: one transaction for all ranges of a batch, retries, and bad records found.

A record that fails does not fail its batch: the batch is handed over in parts, each undone by itself, by partition and
then by halves of its offsets, until those that fail are alone. They become dead letters in the same transaction.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, cast

from kconsume.backends.abc import Positions
from kconsume.errors import ConfigurationError, HandlerFailed, KconsumeError, OffsetError, StoreError, TooManyFailures
from kconsume.failures.dead_letter import Gauge
from kconsume.failures.policy import Verdict
from kconsume.records import Partition
from kconsume.spark.batch import StreamBatch
from kconsume.spark.interrupts import Interrupted, interrupted
from kconsume.spark.job import Control, Job, raise_if_not_the_handlers, scopes_of
from kconsume.spark.ledger import RangesTx
from kconsume.spark.letters import Failed, failed_row, keep_letters, must_have_place
from kconsume.spark.pieces import Piece
from kconsume.spark.ranges import OffsetRange, Plan
from kconsume.spark.source_log import ask_whether_whole

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_log = logging.getLogger("kconsume.spark")

_MOST_PIECES = 1000
"""How often the handler is called to find bad records of one batch: each call is a job of Spark's."""


class _Raised(Exception):
    """What the handler raised, told apart from what was raised around it."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


class InDriver:
    """A handler of frames, in this process: one transaction for all ranges."""

    def __init__(self, job: Job, positions: Positions, control: Control, gauge: Gauge | None) -> None:
        self._job = job
        self._positions = positions
        self._control = control
        self._gauge = gauge

    def run(self, frame: DataFrame, ranges: tuple[OffsetRange, ...], number: int | None, batch_id: int | None) -> None:
        began, attempt = time.monotonic(), 1
        while True:
            batch = self._batch(ranges, attempt, number, batch_id)
            try:
                return self._once(frame, ranges, batch)
            except (KconsumeError, Interrupted):
                raise  # ours: what the handler raised comes as `_Raised`
            except Exception as failure:  # noqa: BLE001  (at COMMIT too: a constraint that was deferred)
                error = failure.error if isinstance(failure, _Raised) else failure
                raise_if_not_the_handlers(error, self._control, ranges, self._job.group)
                pause = self._job.policy.pause(attempt, error, time.monotonic() - began)
                if pause is None:
                    return self._without_the_bad(frame, ranges, batch, error)
                _log.warning("%s failed attempt=%d again_in=%.1fs batch=%s cause=%s: %s", self._job.call.name, attempt,
                             pause, Plan(ranges), type(error).__name__, str(error)[:500])  # fmt: skip
                if not self._control.pause(pause):
                    raise interrupted("it was to be tried again, and the query ends") from None
                attempt += 1

    def _once(self, frame: DataFrame, ranges: Sequence[OffsetRange], batch: StreamBatch) -> None:
        if not self._job.call.wants_tx:  # then nobody's rows are locked while Spark works
            self._call(frame, None, batch)
            failed, whole = self._rejected(batch), self._ask_whether_whole(ranges)
            with self._transaction(ranges) as tx:
                letters = self._finish(tx, ranges, failed, whole)
        else:
            with self._transaction(ranges) as tx:
                self._call(frame, tx.connection, batch)
                letters = self._finish(tx, ranges, self._rejected(batch), self._ask_whether_whole(ranges))
        self._job.posted(letters)

    def _call(self, frame: DataFrame, connection: object, batch: StreamBatch) -> None:
        try:
            self._job.call(frame, connection, batch)
        except (StoreError, OffsetError, ConfigurationError):
            raise  # of the last the handler is the cause, and no record of the batch
        except Exception as error:
            raise _Raised(error) from error

    def _ask_whether_whole(self, ranges: Sequence[OffsetRange]) -> Callable[[], None]:
        """The cluster, once the handler has returned; its answer is on its way while the transaction begins."""
        return ask_whether_whole(self._job.cluster, ranges, self._positions, self._job.group)

    def _finish(
        self, tx: RangesTx, ranges: Sequence[OffsetRange], failed: Sequence[Failed], whole: Callable[[], None]
    ) -> Mapping[Partition, int]:
        """Answers with how many rows were left in the outbox, by partition. `whole` raises if records are gone."""
        if not self._control.active:
            raise interrupted("the query was stopped while its handler ran") from None
        whole()
        dead_letter, rows = self._job.policy.dead_letter, dict[Partition, int]()
        if failed and dead_letter is not None:
            if self._gauge is not None and self._gauge.exceeds(len(failed)):
                raise TooManyFailures(
                    f"{self._job.call.name}: {len(failed)} records of {Plan(tuple(ranges))} failed, which is more than "
                    f"the limit of its dead letters allows; nothing was passed"
                )
            rows = keep_letters(failed, dead_letter, tx, tx.post, self._job.most_bytes)
        tx.finish(ranges, self._positions)
        if self._gauge is not None:
            self._gauge.note(sum(map(len, ranges)), len(failed))
        return rows

    # Bad records

    def _without_the_bad(
        self, frame: DataFrame, ranges: tuple[OffsetRange, ...], batch: StreamBatch, error: Exception
    ) -> None:
        """Hand the batch over in parts, by partition and then by halves of offsets, until those that fail are alone."""
        verdict = self._job.policy.verdict(error)
        if verdict is Verdict.STOP:
            raise HandlerFailed(self._job.call.name, str(Plan(ranges)), error)
        must_have_place(frame.columns, "the records that failed are to be found by their offsets")
        _log.warning("%s failed on a record of %s, which is looked for cause=%s: %s", self._job.call.name, Plan(ranges),
                     type(error).__name__, str(error)[:500])  # fmt: skip
        number = self._job.ledger.reserve(_MOST_PIECES)
        kept = frame.persist()  # each part would read all of it from Kafka again
        try:
            if self._job.call.wants_tx:
                with self._transaction(ranges) as tx:
                    failed = self._pieces(kept, ranges, batch, tx, number)
                    buried, whole = failed if verdict is Verdict.BURY else (), self._ask_whether_whole(ranges)
                    letters = self._finish(tx, ranges, buried, whole)
            else:
                failed = self._pieces(kept, ranges, batch, None, number)
                buried, whole = failed if verdict is Verdict.BURY else (), self._ask_whether_whole(ranges)
                with self._transaction(ranges) as tx:
                    letters = self._finish(tx, ranges, buried, whole)
        finally:
            kept.unpersist()
        self._job.posted(letters)
        _log.warning("%s: %d records failed for good action=%s batch=%s", self._job.call.name, len(failed),
                     verdict.value, Plan(ranges))  # fmt: skip

    def _pieces(
        self,
        frame: DataFrame,
        ranges: tuple[OffsetRange, ...],
        batch: StreamBatch,
        tx: RangesTx | None,
        number: int | None,
    ) -> list[Failed]:
        """`number`: that of the first piece. Each piece has its own, because a table that skips versions it has seen
        would skip all pieces but the first."""
        failed: list[Failed] = []
        todo = [*reversed(Piece(frame, ranges).smaller())]
        calls = 0
        while todo:
            piece = todo.pop()
            if not self._control.active:
                raise interrupted("the query was stopped while bad records were looked for") from None
            if (calls := calls + 1) > _MOST_PIECES:
                raise TooManyFailures(
                    f"{self._job.call.name} failed on so many records of {Plan(ranges)} that they cannot be found one "
                    f"by one: correct it, or let it name them with batch.reject(df, why); nothing was passed"
                )
            part = self._batch(piece.ranges, batch.attempt, number, batch.batch_id)
            number = None if number is None else number + 1
            handed = piece.frame
            try:
                with tx.piece() if tx is not None else nullcontext():
                    self._call(handed, None if tx is None else tx.connection, part)
            except _Raised as raised:
                error = raised.error
                if tx is not None and (fault := tx.fault(error)) is not None:
                    raise fault from error
                raise_if_not_the_handlers(error, self._control, ranges, self._job.group)
                if piece.is_one:
                    failed += self._failed(piece.rows, error, batch.attempt)
                else:
                    todo += reversed(piece.smaller())
            else:
                failed += self._rejected(part)
        return failed

    def _rejected(self, batch: StreamBatch) -> list[Failed]:
        failed: list[Failed] = []
        for records, error in batch.rejected:
            frame = cast("DataFrame", records)
            must_have_place(frame.columns, "it was given to reject")
            failed += self._failed(frame.toArrow().to_pylist(), error, batch.attempt)
        return failed

    def _failed(self, rows: Iterable[Mapping[str, Any]], error: BaseException, attempts: int) -> list[Failed]:
        scopes = scopes_of(self._job.group, self._positions)
        return [failed_row(row, error, group=self._job.group, scopes=scopes, attempts=attempts) for row in rows]

    def _batch(
        self, ranges: tuple[OffsetRange, ...], attempt: int, number: int | None, batch_id: int | None
    ) -> StreamBatch:
        rejects = self._job.policy.dead_letter is not None
        return StreamBatch(self._job.group, ranges, attempt=attempt, number=number, batch_id=batch_id, rejects=rejects)

    @contextmanager
    def _transaction(self, ranges: Sequence[OffsetRange]) -> Iterator[RangesTx]:
        positions = {each.partition: self._positions[each.partition] for each in ranges}
        with self._job.ledger.transaction(positions) as tx:
            try:
                yield tx
            except KconsumeError:
                raise
            except Exception as error:
                if (fault := tx.fault(error)) is not None:
                    raise fault from error
                raise

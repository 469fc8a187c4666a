"""The driver's part of a handler that runs in executors: a Spark job in which each task has its own transaction.

`kconsume.spark._batch.task` runs in the executors. This module checks the ranges before the job, and reads the statuses
of the tasks after the job. A range without a status had no rows, so the driver moves its offset.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kconsume._event_log import EventLog
from kconsume.backends.base import Positions
from kconsume.errors import Fenced, HandlerFailed, TaskFailed, TransactionMisused
from kconsume.records import Partition
from kconsume.spark._batch.context import BatchContext, QueryControl, raise_unless_handler_failed
from kconsume.spark._batch.dead_letters import require_offset_columns
from kconsume.spark._batch.frames import check_one_task_per_range
from kconsume.spark._batch.interrupts import interrupted
from kconsume.spark._batch.log_check import check_records_exist
from kconsume.spark._batch.ranges import OffsetRange, Plan
from kconsume.spark._batch.task import STATUS_SCHEMA, RangeStatus

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_log = EventLog("spark")


class ExecutorRunner:
    """Runs one micro-batch in the executors."""

    def __init__(self, context: BatchContext, positions: Positions, control: QueryControl) -> None:
        self._context = context
        self._positions = positions
        self._control = control

    def run(self, df: DataFrame, plan: Plan, ranges: tuple[OffsetRange, ...], batch_id: int | None) -> None:
        require_offset_columns(df.columns, "each task reads its partition from these columns")
        check_one_task_per_range(df, plan.filled)
        self._check_records_exist(ranges)
        assert self._context.task is not None
        task = self._context.task({each.partition: each for each in ranges}, batch_id)
        try:
            rows = df.mapInArrow(task, STATUS_SCHEMA).collect()
        except Exception as error:
            raise_unless_handler_failed(error, self._control, ranges, self._context.group)
            raise HandlerFailed(self._context.call.name, str(plan), error) from error
        statuses = [RangeStatus(*row) for row in rows]
        self._raise_failures(statuses, ranges)
        self._pass_empty_ranges(statuses, ranges)

    def _raise_failures(self, statuses: Sequence[RangeStatus], ranges: tuple[OffsetRange, ...]) -> None:
        by_partition = {Partition(status.topic, status.partition): status for status in statuses}
        rows = {p: status.letters for p, status in by_partition.items() if status.letters}
        if rows:
            self._context.outbox_rows_committed(rows)
        for status in statuses:
            if status.outcome == "fenced":
                raise Fenced(status.detail)
            if status.outcome == "misused":
                raise TransactionMisused(status.detail)
        for partition, status in by_partition.items():
            if status.outcome == "failed":
                at = next(each for each in ranges if each.partition == partition)
                raise HandlerFailed(self._context.call.name, str(at), TaskFailed(status.detail))
            if status.detail:
                _log.info(
                    "range done in executor",
                    handler=self._context.call.name,
                    partition=partition,
                    outcome=status.outcome,
                    detail=status.detail,
                )

    def _pass_empty_ranges(self, statuses: Sequence[RangeStatus], ranges: Sequence[OffsetRange]) -> None:
        """Move the offsets of ranges without rows, and finish the plan. The other ranges were committed by tasks."""
        with_rows = {Partition(status.topic, status.partition) for status in statuses}
        empty = [each for each in ranges if each.partition not in with_rows]
        if not self._control.active:
            raise interrupted("the query was stopped while its tasks ran") from None
        positions = {each.partition: self._positions[each.partition] for each in ranges}
        self._check_records_exist(ranges)
        with self._context.ledger.transaction(positions) as tx:
            tx.finish(empty, positions)

    def _check_records_exist(self, ranges: Sequence[OffsetRange]) -> None:
        check_records_exist(self._context.cluster, ranges, self._positions, self._context.group)

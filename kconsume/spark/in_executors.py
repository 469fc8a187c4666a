"""A handler of rows, in executors: a job of Spark's in which each task has its own transaction, seen from the driver.

What a task does is `tasks.py`'s. Here its ranges are checked before and its words read after; a range of which no task
spoke had no rows, and is passed in a transaction of the driver's.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

from kconsume.backends.abc import Positions
from kconsume.errors import Fenced, HandlerFailed, TaskFailed, TransactionMisused
from kconsume.records import Partition
from kconsume.spark.interrupts import interrupted
from kconsume.spark.job import Control, Job, raise_if_not_the_handlers
from kconsume.spark.letters import must_have_place
from kconsume.spark.query import must_be_one_to_one
from kconsume.spark.ranges import OffsetRange, Plan
from kconsume.spark.source_log import must_be_whole
from kconsume.spark.tasks import STATUS, Status

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_log = logging.getLogger("kconsume.spark")


class InExecutors:
    """A handler of rows: a job of Spark's, in which each task has its own transaction."""

    def __init__(self, job: Job, positions: Positions, control: Control) -> None:
        self._job = job
        self._positions = positions
        self._control = control

    def run(self, df: DataFrame, plan: Plan, ranges: tuple[OffsetRange, ...], batch_id: int | None) -> None:
        must_have_place(df.columns, "tasks know their partition by them")
        must_be_one_to_one(df, plan.filled)
        must_be_whole(self._job.cluster, ranges, self._positions, self._job.group)
        assert self._job.task is not None
        task = self._job.task({each.partition: each for each in ranges}, batch_id)
        try:
            rows = df.mapInArrow(task, STATUS).collect()
        except Exception as error:
            raise_if_not_the_handlers(error, self._control, ranges, self._job.group)
            raise HandlerFailed(self._job.call.name, str(plan), error) from error
        statuses = [Status(*row) for row in rows]
        self._look_at(statuses, ranges)
        self._finish(statuses, ranges)

    def _look_at(self, statuses: Sequence[Status], ranges: tuple[OffsetRange, ...]) -> None:
        said = {Partition(status.topic, status.partition): status for status in statuses}
        rows = {p: status.letters for p, status in said.items() if status.letters}
        if rows:
            self._job.posted(rows)
        for status in statuses:
            if status.outcome == "fenced":
                raise Fenced(status.detail)
            if status.outcome == "misused":
                raise TransactionMisused(status.detail)
        for partition, status in said.items():
            if status.outcome == "failed":
                at = next(each for each in ranges if each.partition == partition)
                raise HandlerFailed(self._job.call.name, str(at), TaskFailed(status.detail))
            if status.detail:
                _log.info("%s %s %s: %s", self._job.call.name, partition, status.outcome, status.detail)

    def _finish(self, statuses: Sequence[Status], ranges: tuple[OffsetRange, ...]) -> None:
        """What the tasks have done is done. A range of which no task spoke had no rows: it is passed here."""
        spoken = {Partition(status.topic, status.partition) for status in statuses}
        silent = [each for each in ranges if each.partition not in spoken]
        if not self._control.active:
            raise interrupted("the query was stopped while its tasks ran") from None
        positions = {each.partition: self._positions[each.partition] for each in ranges}
        must_be_whole(self._job.cluster, ranges, self._positions, self._job.group)
        with self._job.ledger.transaction(positions) as tx:
            tx.finish(silent, positions)

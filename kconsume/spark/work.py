"""The micro-batches of a query, from their plans to their commits.

    plan ─► against the store ─► plan persisted ─► handler, with retries ─► nothing gone meanwhile? ─► offsets pass

Each range is applied, skipped or refused by where the store stands (`ranges.py`). In the driver all ranges of a batch
move in one transaction, the handler's (`in_driver.py`); in executors each moves in its task's own (`in_executors.py`).
A batch is over only when the store shows its end: what Spark then writes into its commit log is true, whatever the
handler has swallowed. Which query it is, who claims and when to stop is not known here.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from kconsume.backends.abc import Position
from kconsume.errors import Conflict, Fenced, OffsetGap, StoreUnavailable
from kconsume.failures.dead_letter import Gauge
from kconsume.records import Partition
from kconsume.spark.in_driver import InDriver
from kconsume.spark.interrupts import interrupted
from kconsume.spark.job import Control, Job
from kconsume.spark.letters import must_have_place
from kconsume.spark.query import in_ranges
from kconsume.spark.ranges import Decision, OffsetRange, Plan

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_log = logging.getLogger("kconsume.spark")

_CONFLICTS = 20
_LONGEST_REST = 5.0
_STORE_PATIENCE = 300.0


class BatchWork:
    """The batches of one query, one after the other."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self.positions: dict[Partition, Position] = {}
        """Where the store stands, under which epochs: ours."""
        self.fresh = True
        """Whether nothing was applied since the partitions were claimed: until then a query may begin before the
        store, as one does with a new checkpoint folder."""
        limit = job.policy.dead_letter
        self._gauge = None if limit is None or limit.limit is None else Gauge(limit.limit, limit.window, time.monotonic)

    def run(self, df: DataFrame, plan: Plan, batch_id: int | None, control: Control) -> Sequence[OffsetRange]:
        """Apply what the store does not show yet; answers with those ranges."""
        conflicts, refused_at = 0, None
        while True:
            ranges = self._wanted(plan)
            if not ranges:
                return ()
            try:
                self._apply(df, plan, ranges, batch_id, control)
            except Conflict:
                conflicts += 1
                if conflicts > _CONFLICTS:
                    raise
                continue
            except StoreUnavailable as error:
                refused_at = refused_at or time.monotonic()
                self._reclaim(error, refused_at, control)
                continue
            for each in ranges:
                self.positions[each.partition] = replace(self.positions[each.partition], next_offset=each.end)
            self.fresh = False
            return ranges

    def _wanted(self, plan: Plan) -> tuple[OffsetRange, ...]:
        stored = {p: position.next_offset for p, position in self.positions.items()}
        wanted: list[OffsetRange] = []
        for each, decision in plan.decisions(stored).items():
            at = stored[each.partition]
            if decision is Decision.GAP:
                raise OffsetGap(
                    f"the batch begins at {each}, and group {self._job.group!r} stands at {at} in the store: "
                    f"{each.first - at} offsets would be lost. Nothing was passed. Begin where the store stands: "
                    f"delete the checkpoint folder and read with startingOffsets=kconsume.spark.starting_offsets(…)"
                )
            if decision is Decision.FENCED and not self.fresh:
                raise Fenced(
                    f"{each} of group {self._job.group!r} is half done: the store stands at {at}, and not by our doing"
                )
            if decision is not Decision.SKIP:
                wanted.append(each.since(at))
        return tuple(wanted)

    def _apply(
        self, df: DataFrame, plan: Plan, ranges: tuple[OffsetRange, ...], batch_id: int | None, control: Control
    ) -> None:
        if ranges != plan.filled:
            must_have_place(df.columns, "a part of the batch is done already")
            _log.info("a part of the batch is done already planned=%s left=%s", plan, Plan(ranges))
        number = self._job.ledger.begin(Plan(ranges))
        frame = df if ranges == plan.filled else in_ranges(df, ranges)
        if self._job.task is not None:
            from kconsume.spark.in_executors import InExecutors

            InExecutors(self._job, self.positions, control).run(frame, plan, ranges, batch_id)
        else:
            InDriver(self._job, self.positions, control, self._gauge).run(frame, ranges, number, batch_id)

    def _reclaim(self, error: StoreUnavailable, since: float, control: Control) -> None:
        """After an outcome that is not known: what was under way has ended, or can no longer commit, when the epochs
        are raised; then the store says what is done."""
        rest = 0.25
        while True:
            if time.monotonic() - since > _STORE_PATIENCE:
                raise error
            _log.warning("the store is away again_in=%.1fs cause=%s", rest, error)
            if not control.pause(rest) or not control.active:
                raise interrupted(f"the store is away: {error}") from None
            rest = min(2 * rest, _LONGEST_REST)
            try:
                epochs = {p: position.epoch for p, position in self.positions.items()}
                self.positions.update(self._job.reclaim(epochs))
                return
            except StoreUnavailable as again:
                error = again

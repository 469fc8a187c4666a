"""Runs micro-batches one after the other, from plan to commit.

    plan ─► compare with the store ─► persist the plan ─► handler, with retries ─► records still exist? ─► offsets move

The offset in the store decides for each range: apply, skip or refuse (`kconsume.spark._batch.ranges`). In the driver
all ranges of a batch commit in the one transaction that the handler uses (`driver`). In executors each range commits in
its task's own transaction (`executors`). A batch ends only when the store has the end offsets of the batch. So Spark's
commit log is correct even if the handler has swallowed an exception.

This module does not know which query it serves, who claims the partitions or when to stop.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from kconsume._event_log import EventLog
from kconsume.backends.base import Position
from kconsume.errors import Conflict, Fenced, OffsetGap, StoreUnavailable
from kconsume.failures.dead_letter import DeadLetterLimit
from kconsume.records import Partition
from kconsume.spark._batch.context import BatchContext, QueryControl
from kconsume.spark._batch.dead_letters import require_offset_columns
from kconsume.spark._batch.driver import DriverRunner
from kconsume.spark._batch.frames import rows_in_ranges
from kconsume.spark._batch.interrupts import interrupted
from kconsume.spark._batch.ranges import Decision, OffsetRange, Plan

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_log = EventLog("spark")

_MOST_CONFLICTS = 20
_LONGEST_PAUSE = 5.0
_STORE_PATIENCE = 300.0
"""Seconds to wait for a store that is not available."""


class MicroBatchRunner:
    """Runs the micro-batches of one query, one after the other."""

    def __init__(self, context: BatchContext, positions: dict[Partition, Position]) -> None:
        """positions: the stored offset and our epoch, by claimed partition. `run` updates the mapping."""
        self._context = context
        self._positions = positions
        self.nothing_applied = True
        """True until the first range is applied after the claim. Until then the query may begin before the stored
        offset, as a query with a new checkpoint folder does."""
        letters = context.policy.dead_letter
        self._letter_limit = (
            None
            if letters is None or letters.limit is None
            else DeadLetterLimit(letters.limit, letters.window, time.monotonic)
        )

    def run(self, df: DataFrame, plan: Plan, batch_id: int | None, control: QueryControl) -> Sequence[OffsetRange]:
        """Apply the ranges that the store does not have yet, and return them."""
        conflicts, unavailable_since = 0, None
        while True:
            ranges = self._ranges_to_apply(plan)
            if not ranges:
                return ()
            try:
                self._apply(df, plan, ranges, batch_id, control)
            except Conflict:
                conflicts += 1
                if conflicts > _MOST_CONFLICTS:
                    raise
                continue
            except StoreUnavailable as error:
                unavailable_since = unavailable_since or time.monotonic()
                self._reclaim(error, unavailable_since, control)
                continue
            for each in ranges:
                self._positions[each.partition] = replace(self._positions[each.partition], next_offset=each.end)
            self.nothing_applied = False
            return ranges

    def _ranges_to_apply(self, plan: Plan) -> tuple[OffsetRange, ...]:
        stored = {p: position.next_offset for p, position in self._positions.items()}
        ranges: list[OffsetRange] = []
        for each, decision in plan.decisions(stored).items():
            at = stored[each.partition]
            if decision is Decision.GAP:
                raise OffsetGap(
                    f"the batch begins at {each}, and group {self._context.group!r} stands at {at} in the store: "
                    f"{each.first - at} offsets would be lost. No offset was moved. Begin at the stored offsets: "
                    f"delete the checkpoint folder and read with startingOffsets=kconsume.spark.starting_offsets(…)"
                )
            if decision is Decision.FENCED and not self.nothing_applied:
                raise Fenced(
                    f"the store has offset {at} for group {self._context.group!r}, inside {each}, and this query did "
                    f"not move it there: another consumer of the group is running; stop one of the two"
                )
            if decision is not Decision.SKIP:
                ranges.append(each.since(at))
        return tuple(ranges)

    def _apply(
        self, df: DataFrame, plan: Plan, ranges: tuple[OffsetRange, ...], batch_id: int | None, control: QueryControl
    ) -> None:
        if ranges != plan.filled:
            require_offset_columns(df.columns, "a part of the batch was applied before and must be left out")
            _log.info("batch partly applied before", planned=plan.filled, remaining=ranges)
        number = self._context.ledger.begin_plan(Plan(ranges))
        frame = df if ranges == plan.filled else rows_in_ranges(df, ranges)
        if self._context.task is not None:
            from kconsume.spark._batch.executors import ExecutorRunner

            ExecutorRunner(self._context, self._positions, control).run(frame, plan, ranges, batch_id)
        else:
            runner = DriverRunner(self._context, self._positions, control, self._letter_limit)
            runner.run(frame, ranges, number, batch_id)

    def _reclaim(self, error: StoreUnavailable, since: float, control: QueryControl) -> None:
        """Wait for the store, raise the epochs, and read the positions again.

        After `StoreUnavailable` the outcome of the transaction is unknown. When the epochs are raised, the transaction
        has ended or can no longer commit. From then on the offsets in the store show the outcome.
        """
        pause = 0.25
        while True:
            if time.monotonic() - since > _STORE_PATIENCE:
                raise error
            _log.warning("store unavailable", again_in=pause, cause=error)
            if not control.pause(pause) or not control.active:
                raise interrupted(f"the store is unavailable: {error}") from None
            pause = min(2 * pause, _LONGEST_PAUSE)
            try:
                epochs = {p: position.epoch for p, position in self._positions.items()}
                self._positions.update(self._context.reclaim(epochs))
                return
            except StoreUnavailable as again:
                error = again

"""The log lines of a query's batches: one for each batch, and one with the lag every few seconds."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from kconsume._event_log import EventLog
from kconsume.records import Partition
from kconsume.spark._batch.ranges import OffsetRange, Plan

_log = EventLog("spark")
LOG_EVERY = 10.0
"""Seconds between two lines with the lag."""


class ProgressLog:
    """Logs one query.

    The thread of the batches calls `batch_done`, and the heartbeat thread `log_if_due`. Both replace `_counts` as a
    whole and without a lock: a batch that ends during a log line may be counted in no line, or twice.
    """

    def __init__(self, group: str, handler: str) -> None:
        self._group = group
        self._handler = handler
        self._counts = (0, 0)
        """Batches and offsets since the last line with the lag."""
        self._logged_at = time.monotonic()

    def batch_done(self, plan: Plan, applied: Sequence[OffsetRange], batch_id: int, seconds: float) -> None:
        """
        Args:
            applied: the ranges of the plan that were applied; empty if the store had the end of the batch already.
        """
        offsets = sum(map(len, applied))
        batches, before = self._counts
        self._counts = (batches + 1, before + offsets)
        if not applied and plan.filled:
            _log.info(
                "batch skipped",
                group=self._group,
                handler=self._handler,
                batch=batch_id,
                ranges=plan.filled,
                reason="the store has the end of the batch",
            )
        elif applied:
            _log.info(
                "batch done",
                group=self._group,
                handler=self._handler,
                batch=batch_id,
                offsets=offsets,
                per_second=round(offsets / max(seconds, 1e-9)),
                ranges=tuple(applied),
            )

    def log_if_due(self, lag: Callable[[], Mapping[Partition, int]]) -> None:
        seconds = time.monotonic() - self._logged_at
        if seconds > LOG_EVERY:
            self._log_progress(seconds, lag)
            self._logged_at = time.monotonic()

    def _log_progress(self, seconds: float, lag: Callable[[], Mapping[Partition, int]]) -> None:
        (batches, offsets), self._counts = self._counts, (0, 0)
        if batches:
            behind = lag()
            _log.info(
                "stream progress",
                group=self._group,
                handler=self._handler,
                batches=batches,
                per_second=round(offsets / seconds),
                lag=sum(behind.values()),
                worst=max(behind.values(), default=0),
            )

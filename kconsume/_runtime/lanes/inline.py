"""Runs lanes on the thread that submits: no worker threads.

This is the fastest way for handlers that never wait. A handler that waits delays polling, because the owner thread runs
it.
"""

from __future__ import annotations

from kconsume._runtime.lanes.lane import Chunk, Lane
from kconsume._runtime.lanes.reports import LaneReports


class InlineLanes:
    """Runs each chunk at once, inside `submit`."""

    def __init__(self, reports: LaneReports) -> None:
        self._report = reports.put

    def lane_opened(self) -> None:
        """Does nothing: there is nothing to prepare."""

    def lane_closed(self) -> None:
        """Does nothing: there is nothing to release."""

    def submit(self, lane: Lane, chunk: Chunk) -> None:
        if not lane.stop_reasons:
            lane.work(lane, chunk, self._report)

    def abandon(self, lane: Lane) -> None:
        """Never called, because the owner thread itself runs the handler."""

    def close(self) -> None:
        """Does nothing: there is nothing to release."""

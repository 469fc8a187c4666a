"""Runs lanes on worker threads: at most one worker for a lane at a time."""

from __future__ import annotations

import threading
from queue import SimpleQueue
from typing import cast

from kconsume._runtime.lanes.lane import Chunk, Lane
from kconsume._runtime.lanes.reports import Crashed, LaneReports, Suspended
from kconsume._runtime.lanes.timer import LaneTimer


class ThreadLanes:
    """Runs lanes on as many threads as there are open lanes, up to `max_workers`.

    `lane_opened`, `lane_closed`, `submit`, `abandon` and `close` are called by the owner thread.
    """

    def __init__(self, reports: LaneReports, name: str, max_workers: int) -> None:
        """
        Args:
            reports: takes the reports of the lanes.
            name: begins the names of the threads.
            max_workers: how many lanes run at once, at most.
        """
        self._report = reports.put
        self._name = name
        self._max_workers = max_workers
        self._ready: SimpleQueue[Lane | None] = SimpleQueue()
        """Lanes with something to do. None ends one worker."""
        self._timer = LaneTimer(name, self._ready.put)
        self._open = 0
        """How many lanes are open. Written and read only by the owner thread."""
        self._count = threading.Lock()
        self._started = 0
        """How many workers run. Written by the owner thread and by workers under `_count`."""
        self._abandoned = 0
        """How many workers were abandoned. Written under `_count`; workers first read it without the lock."""

    def lane_opened(self) -> None:
        self._open += 1
        self._start_workers()

    def lane_closed(self) -> None:
        self._open -= 1

    def submit(self, lane: Lane, chunk: Chunk) -> None:
        lane.count_queued(chunk)
        with lane.lock:
            if lane.stop_reasons:
                return
            lane.chunks.append(chunk)
            if lane.busy:
                return
            lane.busy = True
        self._ready.put(lane)

    def abandon(self, lane: Lane) -> None:  # noqa: ARG002  (any worker will do)
        with self._count:
            self._abandoned += 1
        self._start_workers()

    def close(self) -> None:
        for _ in range(self._started):
            self._ready.put(None)

    def _start_workers(self) -> None:
        with self._count:
            first = self._started + 1
            last = max(self._started, min(self._open, self._max_workers) + self._abandoned)
            self._started = last
        for number in range(first, last + 1):
            # Daemon threads, because a handler that hangs must not keep the process from ending.
            threading.Thread(target=self._run, name=f"{self._name}-{number}", daemon=True).start()

    def _ends_as_surplus(self) -> bool:
        """True if this worker must end: an abandoned worker was replaced and has returned later, so there is one worker
        too many."""
        if not self._abandoned:
            return False
        with self._count:
            if self._started <= self._max_workers:
                return False
            self._started -= 1
            self._abandoned -= 1
            return True

    def _run(self) -> None:
        while (lane := self._ready.get()) is not None:
            with lane.lock:
                chunk = lane.chunks.popleft() if lane.chunks and lane.suspended is None else None
            self._handle(lane, chunk)
            if self._ends_as_surplus():
                return

    def _handle(self, lane: Lane, chunk: Chunk | None) -> None:
        suspended, lane.suspended = lane.suspended, None
        try:
            if suspended is not None:
                suspended = cast("Suspended | None", suspended.resume())
            elif chunk is not None:
                suspended = cast("Suspended | None", lane.work(lane, chunk, self._report))
        except BaseException as error:  # noqa: BLE001  (reported, and the thread continues)
            suspended = None
            lane.request_stop("crashed")
            self._report(Crashed(lane, error))
        if suspended is not None:
            lane.suspended = suspended
            return self._timer.wake(lane, suspended.seconds)
        with lane.lock:
            lane.busy = again = bool(lane.chunks)
        return self._ready.put(lane) if again else None

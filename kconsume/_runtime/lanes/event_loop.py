"""Runs lanes on an event loop, for `async def` handlers: one task for each lane with something to do, up to a limit.

The owner thread submits; everything else happens on the loop. A lane has one task at a time, so its records keep their
order, and a handler that waits delays only its own lane.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Awaitable, Callable
from typing import cast

from kconsume._runtime.handler_loop import HandlerLoop
from kconsume._runtime.lanes.lane import Chunk, Lane
from kconsume._runtime.lanes.reports import Crashed, LaneReports, Suspended
from kconsume.errors import KconsumeError

_clock = time.monotonic
CANCELLED = "cancelled"
"""The stop reason of a lane whose task kconsume cancelled. Other code can also cancel a task."""

TURN = 0.25
"""Seconds after which a lane makes room for the next waiting lane."""


class AsyncLanes:
    """Runs lanes as tasks on an event loop, at most `max_tasks` at once.

    `submit` and `abandon` are called by the owner thread, `close` by the thread that ends the consumer.
    """

    def __init__(self, reports: LaneReports, name: str, max_tasks: int, handler_loop: HandlerLoop) -> None:
        """
        Args:
            reports: takes the reports of the lanes.
            name: begins the names of the tasks.
            max_tasks: how many lanes run at once, at most.
            handler_loop: the event loop.
        """
        self._report = reports.put
        self._name = name
        self._max_tasks = max_tasks
        self._handler_loop = handler_loop
        self._begun = False
        """True once a chunk was submitted. Written and read by the caller of `submit` and `close`."""

        # Written and read only on the loop.
        self._ready: deque[Lane] = deque()
        self._tasks: dict[asyncio.Task[None], Lane] = {}
        self._abandoned: dict[asyncio.Task[None], Lane] = {}
        """Tasks that were cancelled. No other lane waits for them."""

    def lane_opened(self) -> None:
        """Does nothing: a lane costs nothing before it has records."""

    def lane_closed(self) -> None:
        """Does nothing: there is nothing to release."""

    def submit(self, lane: Lane, chunk: Chunk) -> None:
        lane.count_queued(chunk)
        with lane.lock:
            if lane.stop_reasons:
                return
            lane.chunks.append(chunk)
            if lane.busy:
                return
            lane.busy = self._begun = True
        self._call_on_loop(self._enter, lane)

    def abandon(self, lane: Lane) -> None:
        self._call_on_loop(self._cancel, lane)

    def close(self) -> None:
        if self._begun:
            self._call_on_loop(self._cancel_all)

    def _call_on_loop(self, action: Callable[..., None], *arguments: object) -> None:
        # A closed loop accepts no calls, but its handlers have ended too.
        with contextlib.suppress(RuntimeError):
            self._handler_loop.loop.call_soon_threadsafe(action, *arguments)

    # On the loop

    def _enter(self, lane: Lane) -> None:
        self._ready.append(lane)
        self._start_tasks()

    def _start_tasks(self) -> None:
        while self._ready and len(self._tasks) < self._max_tasks:
            lane = self._ready.popleft()
            task = self._handler_loop.start(self._run(lane), f"{self._name} {lane.partition}")
            self._tasks[task] = lane
            task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        """Start the next lane after a task has ended. The next lane may be the same one. The task may have ended for
        any reason, even before it began."""
        lane = (self._tasks if task in self._tasks else self._abandoned).pop(task)
        if lane.suspended is not None:
            self._handler_loop.loop.call_later(lane.suspended.seconds, self._enter, lane)
            return self._start_tasks()
        with lane.lock:
            lane.busy = again = bool(lane.chunks)
        if again:
            self._ready.append(lane)
        return self._start_tasks()

    def _cancel(self, lane: Lane) -> None:
        """Cancel the lane's task and at once start others in its place, because the task may refuse to be cancelled."""
        for task in [task for task, of in self._tasks.items() if of is lane]:
            self._abandoned[task] = self._tasks.pop(task)
            lane.request_stop(CANCELLED)
            task.cancel()
        self._start_tasks()

    def _cancel_all(self) -> None:
        self._ready.clear()
        for lane in list(self._tasks.values()):
            self._cancel(lane)

    async def _run(self, lane: Lane) -> None:
        """Run the lane for one turn.

        A turn ends after a time, not after a number of chunks. A lane that seems slow, because its first call took
        long, gets small chunks. If a turn were a fixed number of chunks, this lane would handle fewer records than the
        others and fall behind.
        """
        ends = _clock() + TURN
        suspended, lane.suspended = lane.suspended, None
        try:
            if suspended is not None:
                lane.suspended = await cast("Awaitable[Suspended | None]", suspended.resume())
            while lane.suspended is None and (chunk := _next_chunk(lane)) is not None:
                lane.suspended = await cast("Awaitable[Suspended | None]", lane.work(lane, chunk, self._report))
                if _clock() >= ends:
                    break
        except asyncio.CancelledError:
            if CANCELLED not in lane.stop_reasons:
                self._crashed(lane, _cancelled_by_others(self._name, lane))
        except BaseException as error:  # noqa: BLE001  (reported, and the loop continues)
            self._crashed(lane, error)

    def _crashed(self, lane: Lane, error: BaseException) -> None:
        lane.request_stop("crashed")
        self._report(Crashed(lane, error))


def _next_chunk(lane: Lane) -> Chunk | None:
    """The lane's next chunk. A chunk that would take longer than a turn is divided, and the rest is the next chunk."""
    with lane.lock:
        if not lane.chunks:
            return None
        chunk = lane.chunks.popleft()
        each, count = lane.pace.seconds_each, len(chunk.messages)
        fitting = 1 if each is None else max(1, int(TURN / max(each, 1e-9)))
        if fitting >= count or lane.batch_buffer is not None:  # a batch is one call
            return chunk
        lane.chunks.appendleft(Chunk(chunk.messages[fitting:], chunk.first, chunk.last))
        return Chunk(chunk.messages[:fitting], chunk.first, chunk.last)


def _cancelled_by_others(name: str, lane: Lane) -> KconsumeError:
    return KconsumeError(
        f"the task '{name} {lane.partition}' was cancelled, and not by kconsume, so the offset did not pass its "
        f"record: do not cancel the tasks of handlers; let a handler that cannot go on raise an exception"
    )

"""Lanes on an event loop, for `async def` handlers: a task for each lane that has something to do, up to a bound.

The owner thread submits; everything else happens on the loop. A lane has one task at a time, so its records keep their
order, and a handler that waits holds nothing but its own lane.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Awaitable, Callable
from typing import cast

from kconsume.errors import KconsumeError
from kconsume.runtime.home import Home
from kconsume.runtime.lanes import Chunk, Crashed, Lane, Outcomes, Parked

_clock = time.monotonic
CANCELLED = "cancelled"
"""Why a lane stops whose task was cancelled by us. A task may be cancelled by others, too."""

TURN = 0.25
"""Seconds after which it is the turn of another lane, if one waits."""


class AsyncLanes:
    """Runs lanes as tasks on `home`, at most `most` at once."""

    def __init__(self, outcomes: Outcomes, name: str, most: int, home: Home) -> None:
        self._report = outcomes.put
        self._name = name
        self._most = most
        self._home = home
        self._begun = False
        self._ready: deque[Lane] = deque()
        self._tasks: dict[asyncio.Task[None], Lane] = {}
        self._given_up: dict[asyncio.Task[None], Lane] = {}
        """Cancelled, and not waited for. These three: only on the loop."""

    def open(self) -> None:
        """A lane costs nothing before it has records."""

    def shut(self) -> None:
        """As above."""

    def submit(self, lane: Lane, chunk: Chunk) -> None:
        if lane.busy or not lane.pace.swift:  # a swift one begins at once, and nothing waits
            lane.took_on(chunk)
        with lane.lock:
            if lane.stop:
                return
            lane.chunks.append(chunk)
            if lane.busy:
                return
            lane.busy = self._begun = True
        self._on_loop(self._enter, lane)

    def abandon(self, lane: Lane) -> None:
        self._on_loop(self._give_up, lane)

    def close(self) -> None:
        if self._begun:
            self._on_loop(self._give_up_all)

    def _on_loop(self, action: Callable[..., None], *arguments: object) -> None:
        if asyncio._get_running_loop() is self._home.loop:  # in a burst (`lending.py`)
            action(*arguments)
            return
        # A loop that was closed takes nothing: its handlers have ended with it.
        with contextlib.suppress(RuntimeError):
            self._home.loop.call_soon_threadsafe(action, *arguments)

    # On the loop

    def _enter(self, lane: Lane) -> None:
        self._ready.append(lane)
        self._start()

    def _start(self) -> None:
        while self._ready and len(self._tasks) < self._most:
            lane = self._ready.popleft()
            task = self._home.start(self._run(lane), f"{self._name} {lane.partition}")
            self._tasks[task] = lane
            task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        """Whatever ended it, also before it began; then it is the turn of the next lane, which may be the same."""
        lane = (self._tasks if task in self._tasks else self._given_up).pop(task)
        if lane.parked is not None:
            self._home.loop.call_later(lane.parked.seconds, self._enter, lane)
            return self._start()
        with lane.lock:
            lane.busy = again = bool(lane.chunks)
        if again:
            self._ready.append(lane)
        return self._start()

    def _give_up(self, lane: Lane) -> None:
        """Its place is for others now: it may refuse to be cancelled."""
        for task in [task for task, of in self._tasks.items() if of is lane]:
            self._given_up[task] = self._tasks.pop(task)
            lane.brake(CANCELLED)
            task.cancel()
        self._start()

    def _give_up_all(self) -> None:
        self._ready.clear()
        for lane in list(self._tasks.values()):
            self._give_up(lane)

    async def _run(self, lane: Lane) -> None:
        """A turn of the lane. By the clock: one that seems slow, for its first call took long, is given little at once,
        and would be left behind by the others."""
        ends = _clock() + TURN
        parked, lane.parked = lane.parked, None
        try:
            if parked is not None:
                lane.parked = await cast("Awaitable[Parked | None]", parked.resume())
            while lane.parked is None and (chunk := _next(lane)) is not None:
                lane.parked = await cast("Awaitable[Parked | None]", lane.work(lane, chunk, self._report))
                if _clock() >= ends:
                    break
        except asyncio.CancelledError:
            if CANCELLED not in lane.stop:
                self._crashed(lane, _not_ours(self._name, lane))
        except BaseException as error:  # noqa: BLE001  (reported, and the loop goes on)
            self._crashed(lane, error)

    def _crashed(self, lane: Lane, error: BaseException) -> None:
        lane.brake("crashed")
        self._report(Crashed(lane, error))


def _next(lane: Lane) -> Chunk | None:
    """The lane's next chunk. Of one that would take longer than a turn, so much as fits; the rest stays the next."""
    with lane.lock:
        if not lane.chunks:
            return None
        chunk = lane.chunks.popleft()
        each, count = lane.pace.seconds_each, len(chunk.messages)
        fitting = 1 if each is None else max(1, int(TURN / max(each, 1e-9)))
        if fitting >= count or lane.gathering is not None:  # a batch is one call
            return chunk
        lane.chunks.appendleft(Chunk(chunk.messages[fitting:], chunk.first, chunk.last))
        return Chunk(chunk.messages[:fitting], chunk.first, chunk.last)


def _not_ours(name: str, lane: Lane) -> KconsumeError:
    return KconsumeError(
        f"the task '{name} {lane.partition}' was cancelled, and not by kconsume, so its record was not passed: leave "
        f"the tasks of handlers alone, and let a handler that cannot go on raise"
    )

"""Lanes on an event loop, for `async def` handlers: a task for each lane that has something to do, up to a bound.

The owner thread submits; everything else happens on the loop. A lane has one task at a time, so its records keep their
order, and a handler that waits holds nothing but its own lane.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Awaitable, Callable
from typing import cast

from kconsume.runtime.home import Home
from kconsume.runtime.lanes import Chunk, Crashed, Lane, Outcomes


class AsyncLanes:
    """Runs lanes as tasks on `home`, at most `most` at once."""

    def __init__(self, outcomes: Outcomes, name: str, most: int, home: Home) -> None:
        self._report = outcomes.put
        self._name = name
        self._most = most
        self._home = home
        self._ready: deque[Lane] = deque()
        self._tasks: dict[asyncio.Task[None], Lane] = {}
        """This and `_ready`: only on the loop."""

    def open(self) -> None:
        """A lane costs nothing before it has records."""

    def shut(self) -> None:
        """As above."""

    def submit(self, lane: Lane, chunk: Chunk) -> None:
        lane.took_on(chunk)
        with lane.lock:
            if lane.stop:
                return
            lane.chunks.append(chunk)
            if lane.busy:
                return
            lane.busy = True
        self._on_loop(self._enter, lane)

    def abandon(self, lane: Lane) -> None:
        self._on_loop(self._give_up, lane)

    def close(self) -> None:
        self._on_loop(self._cancel)

    def _on_loop(self, action: Callable[..., None], *arguments: object) -> None:
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
            task = asyncio.get_running_loop().create_task(self._run(lane), name=f"{self._name} {lane.partition}")
            self._tasks[task] = lane
            task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        del self._tasks[task]
        self._start()

    def _give_up(self, lane: Lane) -> None:
        for task in [task for task, of in self._tasks.items() if of is lane]:
            task.cancel()

    def _cancel(self) -> None:
        self._ready.clear()
        for task in self._tasks:
            task.cancel()

    async def _run(self, lane: Lane) -> None:
        """One chunk of the lane; then it is the turn of the next lane that is ready, which may be the same."""
        with lane.lock:
            chunk = lane.chunks.popleft() if lane.chunks else None
        try:
            if chunk is not None:
                await cast(Awaitable[None], lane.work(lane, chunk, self._report))
        except asyncio.CancelledError:
            lane.brake("cancelled")
        except BaseException as error:  # noqa: BLE001  (reported, and the loop goes on)
            lane.brake("crashed")
            self._report(Crashed(lane, error))
        with lane.lock:
            lane.busy = again = bool(lane.chunks)
        if again:
            self._ready.append(lane)

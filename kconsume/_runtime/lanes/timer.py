"""Wakes suspended lanes at the time when they are due."""

from __future__ import annotations

import heapq
import itertools
import threading
import time
from collections.abc import Callable

from kconsume._runtime.lanes.lane import Lane


class LaneTimer:
    """Calls `wake` for each lane when the lane is due. Its one thread runs only while lanes wait.

    `_due` and `_runs` are written and read by any thread, under `_changed`.
    """

    IDLE_SECONDS = 5.0
    """How long the thread stays alive without a lane to wake. With a rate, a lane is suspended many times a second."""

    def __init__(self, name: str, wake: Callable[[Lane], None]) -> None:
        """
        Args:
            name: begins the name of the thread.
            wake: called with a lane that is due. Called under the timer's lock, so it must not wait.
        """
        self._name = name
        self._wake = wake
        self._changed = threading.Condition()
        self._due: list[tuple[float, int, Lane]] = []
        """A heap: the time, a number that keeps the order of equal times, the lane."""
        self._numbers = itertools.count()
        self._runs = False

    def wake(self, lane: Lane, seconds: float) -> None:
        """Wake a lane after this many seconds."""
        with self._changed:
            heapq.heappush(self._due, (time.monotonic() + seconds, next(self._numbers), lane))
            if not self._runs:
                self._runs = True
                threading.Thread(target=self._run, name=f"{self._name}-timer", daemon=True).start()
            self._changed.notify()

    def _run(self) -> None:
        with self._changed:
            # `wait_for` looks at the heap again when its time is over: `wake` may take the lock between the timeout of
            # a wait and its return. A lane that is overlooked then would wait until the next call of `wake`.
            while self._changed.wait_for(lambda: self._due, self.IDLE_SECONDS):
                if (left := self._due[0][0] - time.monotonic()) > 0:
                    self._changed.wait(left)
                else:
                    self._wake(heapq.heappop(self._due)[2])
            self._runs = False

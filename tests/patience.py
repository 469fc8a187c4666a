"""How long is too long, on a machine that others use as well.

A deadline in a test guards against hanging and nothing else. So it is not spent by the seconds that pass, but by the
CPU that whoever wants it is given in them: less where the machine's host gives it to others (steal in `/proc/stat`),
and less where more want to run than there are cores (`/proc/loadavg`).
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import NamedTuple

Clock = Callable[[], float]

LEAST = 0.05
"""Of what is asked for. A machine that gives less does not run tests."""


class Ticks(NamedTuple):
    """Of all cores since the machine was started."""

    used: int
    stolen: int


def read_ticks(path: Path = Path("/proc/stat")) -> Ticks:
    try:
        user, nice, system, _, _, irq, softirq, stolen = map(int, path.read_text().split()[1:9])
    except (OSError, ValueError):
        return Ticks(0, 0)  # not Linux
    return Ticks(user + nice + system + irq + softirq, stolen)


def read_runnable(path: Path = Path("/proc/loadavg")) -> int:
    """How many threads run or would like to, with the one that asks."""
    try:
        return int(path.read_text().split()[3].split("/")[0])
    except (OSError, ValueError, IndexError):
        return 1


class Patience:
    """So many seconds, as a machine would take that gives whoever wants it a core."""

    def __init__(
        self,
        seconds: float,
        clock: Clock = time.monotonic,
        ticks: Callable[[], Ticks] = read_ticks,
        runnable: Callable[[], int] = read_runnable,
        cores: int = os.cpu_count() or 1,
    ) -> None:
        self.left = seconds
        self._clock = clock
        self._read_ticks = ticks
        self._runnable = runnable
        self._cores = cores
        self._looked = clock()
        self._ticks = ticks()
        self._granted = 1.0

    def look(self) -> float:
        """What is left now. To be asked often: how many want to run is known for this moment only."""
        now, ticks = self._clock(), self._read_ticks()
        used, stolen = ticks.used - self._ticks.used, ticks.stolen - self._ticks.stolen
        if used + stolen > 0:
            self._granted = used / (used + stolen)
            self._ticks = ticks
        share = self._granted * min(1.0, self._cores / max(1, self._runnable()))
        self.left -= (now - self._looked) * max(LEAST, share)
        self._looked = now
        return self.left


class Alarm:
    """Calls when patience is at its end; on the main thread, wherever it is then."""

    LOOK_EVERY = 2.0

    def __init__(self, patience: Patience, call: Callable[[], None]) -> None:
        self._patience = patience
        self._call = call
        self._before = signal.signal(signal.SIGALRM, self._look)
        signal.setitimer(signal.ITIMER_REAL, self.LOOK_EVERY, self.LOOK_EVERY)

    def _look(self, signum: int, frame: FrameType | None) -> None:
        __tracebackhide__ = True
        if self._patience.look() <= 0:
            self.cancel()
            self._call()

    def cancel(self) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, self._before)

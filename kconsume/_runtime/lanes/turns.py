"""Decides whether the slices of one handler run concurrently or take turns.

A handler that waits, for a server or for another thread, should run for many partitions at once. A handler that keeps
the interpreter busy gains nothing from concurrency, and loses a third of its speed or more to contention for the
interpreter lock. While the slices of a handler run concurrently, the two kinds cannot be told apart. So turns are tried
if the handler may be busy. Turns are given up if the slices that run alone spend most of their time waiting, or if one
of them takes long, because a slow record must delay only its own lane.

A turn covers only the handler call. The transaction begins before the turn and commits after it, concurrently with
others, because a thread only waits in these two steps.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from kconsume._runtime.deadlines import Clock

# CPU time as a share of a slice's time. Turns are tried if the share is above `_MAYBE_BUSY` in a slice that may run
# beside others. Turns are kept if the share is `_BUSY` or more in slices that run alone.
_MAYBE_BUSY = 0.1
_BUSY = 0.35
_TRIAL = 0.5
"""Seconds of slices that run alone before a decision: the first slices are short and wait for new connections."""
_LONG = 0.5
"""Seconds after which other slices no longer wait for the end of a slice: ten times the usual length."""
_REST = 500
"""How many slices run before turns are tried again."""


class Turn:
    """The turn of one slice."""

    waited = 0.0
    """Seconds that the slice waited for its turn."""


class Turns:
    """The turns of all lanes of one handler. Any worker thread takes one.

    `_taken`, `_rest` and `_begun` are written and read by any worker without a lock, because an old value delays a
    decision only by one slice. `_beside` and `_begun_beside` are written under `_count`. `_alone` belongs to the worker
    that has `_turn`.
    """

    def __init__(self, clock: Clock = time.perf_counter, computed: Clock = time.thread_time) -> None:
        """
        Args:
            clock: measures time, waiting included.
            computed: measures how long the calling thread has computed.
        """
        self._clocks = clock, computed
        self._turn = threading.Lock()
        self._count = threading.Lock()
        self._taken = False
        """True while slices take turns."""
        self._begun = 0.0
        """The time at which the slice that has the turn began."""
        self._rest = 0
        """How many slices must run until turns may be tried again."""
        self._beside = self._begun_beside = 0
        """How many slices run without a turn now, and how many have ever begun without one."""
        self._alone = _Measure(*self._clocks)

    @contextmanager
    def take(self) -> Iterator[Turn]:
        """Run one slice, alone if slices take turns."""
        turn, asked = Turn(), time.perf_counter()
        has_turn = self._await_turn()
        turn.waited = time.perf_counter() - asked
        if not has_turn:
            with self._running_beside():
                yield turn
            return
        self._begun = time.perf_counter()
        try:
            # Another slice may run beside this one, because it began before turns were switched on or has not yet seen
            # the switch.
            others, begun, slice_ = self._beside, self._begun_beside, _Measure(*self._clocks)
            with slice_.running():
                yield turn
            if not others and begun == self._begun_beside:
                self._judge(slice_)
        finally:
            self._turn.release()

    def _await_turn(self) -> bool:
        while self._taken:
            if self._turn.acquire(timeout=_LONG):
                return True
            if time.perf_counter() - self._begun > _LONG:
                self._give_up()
        return False

    @contextmanager
    def _running_beside(self) -> Iterator[None]:
        slice_ = _Measure(*self._clocks)
        with self._count:
            self._beside += 1
            self._begun_beside += 1
        try:
            with slice_.running():
                yield
        finally:
            with self._count:
                self._beside -= 1
        if self._rest:
            self._rest -= 1
        elif slice_.share > _MAYBE_BUSY:
            self._taken = True

    def _judge(self, slice_: _Measure) -> None:
        self._alone.add(slice_)
        if self._alone.seconds >= _TRIAL:
            if self._alone.share < _BUSY:
                self._give_up()
            self._alone = _Measure(*self._clocks)

    def _give_up(self) -> None:
        self._taken, self._rest = False, _REST


class _Measure:
    """Measures which share of its time a thread computes."""

    def __init__(self, clock: Clock, computed: Clock) -> None:
        self.seconds = 0.0
        self._computed = 0.0
        self._clocks = clock, computed

    @property
    def share(self) -> float:
        return self._computed / max(self.seconds, 1e-9)

    def add(self, other: _Measure) -> None:
        self.seconds += other.seconds
        self._computed += other._computed

    @contextmanager
    def running(self) -> Iterator[None]:
        began, computed = (read() for read in self._clocks)
        try:
            yield
        finally:
            ended, computed_since = (read() for read in self._clocks)
            self.seconds += ended - began
            self._computed += computed_since - computed

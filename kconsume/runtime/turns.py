"""Whether the slices of one handler run side by side, or take turns.

A handler that waits, for a server or for somebody else, should run for many partitions at once. One that keeps the
interpreter busy gains nothing from that and loses a third of its speed, or more, to the threads' quarrel about it.
Which kind it is cannot be seen while they quarrel: so when it might be the busy kind turns are tried, and given up
again if the slices that have the interpreter to themselves spend most of their time waiting, or if one of them takes
long: a slow record must hold up nobody but its own lane.

A turn is for the handler alone. Its transaction is begun before and committed after, beside the others': there it only
waits.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from kconsume.runtime.budget import Clock

_MAYBE_BUSY = 0.1
_BUSY = 0.35
"""Shares of the time in which a handler computes: in a slice while others may be running, and alone."""
_TRIAL = 0.5
"""Seconds of slices alone before they are judged: the first ones are short, and wait for new connections."""
_LONG = 0.5
"""Seconds of one slice after which nobody waits for its end: ten times the usual."""
_REST = 500
"""Slices before turns are tried again."""


class Turn:
    """One slice's: how long it waited for it."""

    waited = 0.0


class Turns:
    """For all lanes of one handler."""

    def __init__(self, clock: Clock = time.perf_counter, computed: Clock = time.thread_time) -> None:
        """`computed`: how long this thread has computed; `clock`: how long that, and waiting, took."""
        self._clocks = clock, computed
        self._turn = threading.Lock()
        self._count = threading.Lock()
        self._taken = False
        self._begun = 0.0
        """When the slice began whose turn it is."""
        self._rest = 0
        self._beside = self._begun_beside = 0
        """Slices that run without a turn, and how many ever have."""
        self._alone = _Measure(*self._clocks)

    @contextmanager
    def take(self) -> Iterator[Turn]:
        turn, asked = Turn(), time.perf_counter()
        has_turn = self._await_turn()
        turn.waited = time.perf_counter() - asked
        if not has_turn:
            with self._running_beside():
                yield turn
            return
        self._begun = time.perf_counter()
        try:
            # Some may have begun before turns were taken, or begin because they have not seen it yet.
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
    """How much of its time a thread computes."""

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

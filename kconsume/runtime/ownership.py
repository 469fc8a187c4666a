"""Which thread owns the consumer now, and what happens when a handler holds it up.

A handler that takes a few microseconds is run by the owner itself: handing its records to another thread would cost
more than handling them (measured: a quarter of the speed, because they change cores). Should such a call take long
after all, the deputy takes the consumer over and polls on, so a slow handler still never costs the membership (P5).
The thread that was held up finishes its chunk, as a worker would, and ends. At any time one thread owns the consumer.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


class Deposed(BaseException):
    """Raised on a thread that comes back from a handler and is no longer the owner; it must touch nothing."""


class Ownership:
    """Starts the owner thread, and a deputy once the owner begins to run handlers."""

    HELD_UP = 0.05
    _LOOK_EVERY = 0.02

    def __init__(self, name: str, ended: Callable[[], None]) -> None:
        self._name = name
        self._tell = ended
        self._over = threading.Event()
        self._lock = threading.Lock()
        self._owner: threading.Thread | None = None
        self._since: float | None = None
        self._has_deputy = False
        self._go_on: Callable[[], None] = lambda: None

    def start(self, run: Callable[[], None], go_on: Callable[[], None]) -> None:
        """`run` is the owner's work from the start; `go_on` is what another thread does in its place."""
        self._go_on = go_on
        self._owner = threading.Thread(target=self._own, args=(run,), name=self._name, daemon=True)
        self._owner.start()

    def wait(self, seconds: float) -> bool:
        """Whether the work has ended, on whichever thread."""
        return self._over.wait(seconds)

    def enter_handler(self) -> None:
        self._since = time.monotonic()
        if not self._has_deputy:
            self._has_deputy = True
            threading.Thread(target=self._stand_by, name=f"{self._name}-deputy", daemon=True).start()

    def leave_handler(self) -> None:
        with self._lock:
            if self._owner is not threading.current_thread():
                raise Deposed
            self._since = None

    def _own(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Deposed:
            return
        self._over.set()
        self._tell()

    def _stand_by(self) -> None:
        while not self._over.wait(self._LOOK_EVERY):
            since = self._since
            if since is not None and time.monotonic() - since > self.HELD_UP and self._take_over(since):
                return self._own(self._go_on)
        return None

    def _take_over(self, since: float) -> bool:
        with self._lock:
            if self._since is not since:
                return False  # it has come back in the meantime
            self._owner, self._since, self._has_deputy = threading.current_thread(), None, False
            return True

"""Which thread owns the consumer, and how another thread takes over when a handler blocks the owner.

The owner thread itself runs handlers that take a few microseconds. Passing their records to another thread would cost
more than handling them (measured: a quarter of the speed, because the records change cores). If such a call takes long,
the deputy thread takes over the consumer and continues to poll, so that a slow handler never costs the membership
(P5). The blocked thread finishes its chunk like a worker and then ends. At any time exactly one thread owns
the consumer.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


class Deposed(BaseException):
    """Raised on a thread that returns from a handler and no longer owns the consumer. The thread must touch nothing."""


class Ownership:
    """Starts the owner thread, and a deputy as soon as the owner begins to run handlers.

    Fields: `_owner` is read and written under `_lock`. `_handler_since` is written by the owner without the lock when
    it enters a handler (the deputy may see the value late), and otherwise under `_lock`. The deputy reads
    `_handler_since` without the lock and compares it again under the lock before it takes over. `_has_deputy` is
    written by the owner, or by the deputy under `_lock` at the moment when it becomes the owner. `_over` is set once,
    by the last owner.
    """

    HELD_UP = 0.05
    """Seconds of one handler call after which the deputy takes over."""
    _LOOK_EVERY = 0.02

    def __init__(self, name: str, ended: Callable[[], None]) -> None:
        """ended: called on the last owner thread after its work has ended."""
        self._name = name
        self._ended = ended
        self._over = threading.Event()
        self._lock = threading.Lock()
        self._owner: threading.Thread | None = None
        self._handler_since: float | None = None
        self._has_deputy = False
        self._resume: Callable[[], None] = lambda: None

    def start(self, run: Callable[[], None], resume: Callable[[], None]) -> None:
        """Start the owner thread.

        Args:
            run: the owner's work from the start.
            resume: the work of a deputy that becomes the owner.
        """
        self._resume = resume
        self._owner = threading.Thread(target=self._own, args=(run,), name=self._name, daemon=True)
        self._owner.start()

    def wait(self, seconds: float) -> bool:
        """Wait until the work has ended, on whichever thread it runs. Returns whether it has ended."""
        return self._over.wait(seconds)

    def enter_handler(self) -> None:
        """Called on the owner thread before it runs a handler."""
        self._handler_since = time.monotonic()
        if not self._has_deputy:
            self._has_deputy = True
            threading.Thread(target=self._stand_by, name=f"{self._name}-deputy", daemon=True).start()

    def leave_handler(self) -> None:
        """Called on the thread that ran the handler. Raises `Deposed` if the deputy has taken over."""
        with self._lock:
            if self._owner is not threading.current_thread():
                raise Deposed
            self._handler_since = None

    def _own(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Deposed:
            return
        self._over.set()
        self._ended()

    def _stand_by(self) -> None:
        while not self._over.wait(self._LOOK_EVERY):
            since = self._handler_since
            if since is not None and time.monotonic() - since > self.HELD_UP and self._take_over(since):
                return self._own(self._resume)
        return None

    def _take_over(self, since: float) -> bool:
        with self._lock:
            if self._handler_since is not since:
                return False  # the handler has already returned
            self._owner, self._handler_since, self._has_deputy = threading.current_thread(), None, False
            return True

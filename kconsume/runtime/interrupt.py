"""A `with` block on the main thread that another thread can end.

A consumer that has failed must not stay unnoticed while the block around it sleeps or serves. The signal is
SIGURG, because its default is to be ignored: one that arrives a moment too late harms nobody. It is sent again
until it has hit the block itself: raised in the machinery that enters and leaves the block, the exception would
escape from it.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType

_AGAIN = 0.01
_MACHINERY = {contextlib.__name__, "kconsume.app", "kconsume.runtime.ending", "kconsume.runtime.running"}


class Interrupted(BaseException):
    """Ends the block; never leaves it."""


class Body:
    """The block. Entered elsewhere than on the main thread, it cannot be ended early, and is not."""

    def __init__(self) -> None:
        self._wanted = threading.Event()
        self._over = threading.Event()
        self._active = False
        self._previous: object = None

    @property
    def is_main(self) -> bool:
        return self._previous is not None

    @property
    def over(self) -> bool:
        return self._over.is_set()

    @property
    def heard(self) -> bool:
        return self.over

    @property
    def unheard(self) -> bool:
        return False  # it is raised on the thread that entered the block

    def call(self, function: Callable[[], object]) -> None:
        function()

    def __enter__(self) -> None:
        if threading.current_thread() is threading.main_thread():
            self._previous = signal.signal(signal.SIGURG, self._raise)
            self._active = True
            if self._wanted.is_set():
                self._send_until_over()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        self._active = False
        self._over.set()
        if self._previous is not None:
            signal.signal(signal.SIGURG, self._previous)  # type: ignore[arg-type]  # what signal() gave us
        return isinstance(error, Interrupted)

    def interrupt(self) -> None:
        """End the block, if it runs or is still to begin. From any thread."""
        if not self._wanted.is_set():
            self._wanted.set()
            if self._active:
                self._send_until_over()

    def _send_until_over(self) -> None:
        threading.Thread(target=self._send, name="kconsume-interrupt", daemon=True).start()

    def _send(self) -> None:
        while self._active:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGURG)
            self._over.wait(_AGAIN)

    def _raise(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002
        if not self._active:
            return
        self._active = False  # before anything else: another one may come while we look, and must find us done
        if not _is_entering_or_leaving(frame):
            raise Interrupted
        self._active = not self._over.is_set()


def _is_entering_or_leaving(frame: FrameType | None) -> bool:
    if frame is None or frame.f_globals.get("__name__") in _MACHINERY:
        return True
    while frame is not None:
        if frame.f_code in (Body.__enter__.__code__, Body.__exit__.__code__):
            return True
        frame = frame.f_back
    return False

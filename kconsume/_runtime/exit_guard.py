"""Passes the failure of a consumer to the program around its block, and ends the process if necessary.

If the block waits on the main thread, the block is interrupted and raises the exception, so that the user sees it. In
the lifespan of a web server the same exception ends a task that no code awaits, and the server continues to answer
without its consumer (measured with uvicorn and hypercorn). In that case the process ends:

1. If the program handles SIGTERM, as servers do, SIGTERM is sent. The server finishes its requests and leaves the
   block, and the block raises the failure. If nothing handles SIGTERM (the workers of hypercorn), the block is
   interrupted.
2. The exit code is that of the failure, not the 0 of a server that was asked to end.
3. `os._exit` ends a process that still runs when the deadline passes, even if the main thread has swallowed the
   interrupt and stays in its block.

If the program catches the failure (the block was left and its task continues), the process continues too.
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Protocol

from kconsume._event_log import EventLog
from kconsume._runtime.deadlines import Deadline
from kconsume.errors import HandlerFailed, KconsumeError

_log = EventLog()

_LOOK_EVERY = 0.05

OnFailure = Callable[[BaseException], object]
"""Called with the failure, instead of ending the process."""


class Block(Protocol):
    """The block around a consumer, as `Guard` sees it. All members may be used on any thread."""

    @property
    def is_main(self) -> bool:
        """Whether the block is on the main thread, where an interrupt is raised and the user notices it."""
        ...

    @property
    def over(self) -> bool:
        """Whether the block was left."""
        ...

    @property
    def heard(self) -> bool:
        """Whether the exception of the block has certainly reached the program."""
        ...

    @property
    def unheard(self) -> bool:
        """Whether the exception of the block has ended a task while the event loop still runs."""
        ...

    def interrupt(self) -> None:
        """End the block, now or as soon as it begins."""
        ...

    def call(self, function: Callable[[], object]) -> None:
        """Call `function` on the event loop of the block or, for a plain block, on this thread."""
        ...


class Guard:
    """Decides how a failure of the consumer ends the block or the process. Active once the block is entered.

    Fields: `_failure` and `_entered` are written by any thread under `_lock`. `_sent_sigterm` is written by the one
    thread whose failure counts, before SIGTERM is sent, and read afterwards.
    """

    def __init__(self, block: Block, seconds: float, stop: Callable[[], None], on_failure: OnFailure | None) -> None:
        """
        Args:
            block: the user's block.
            seconds: time within which the process ends.
            stop: stops all consumers of the app.
            on_failure: the user's callback, instead of the end of the process.
        """
        self._block = block
        self._seconds = seconds
        self._stop = stop
        self._on_failure = on_failure
        self._lock = threading.Lock()
        self._failure: BaseException | None = None
        self._entered = False
        self._sent_sigterm = False

    def failed(self, failure: BaseException) -> None:
        """Report a failure, from any thread. Only the first failure counts. A failure before the block waits until the
        block begins."""
        with self._lock:
            if self._failure is not None:
                return
            self._failure = failure
            if not self._entered:
                return
        self._act(failure)

    def enter(self) -> None:
        """Note that the block begins."""
        with self._lock:
            self._entered = True
            failure = self._failure
        if failure is not None:
            self._act(failure)

    def leave(self) -> None:
        """Note that the block was left. Called on the thread of the block. A server that SIGTERM has ended raises
        SIGTERM once more, so that its parent sees the signal. The second SIGTERM would end the process before its exit
        code is set, and systemd would see a clean end. So SIGTERM is blocked."""
        if self._sent_sigterm and threading.current_thread() is threading.main_thread():
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})

    def _act(self, failure: BaseException) -> None:
        if self._on_failure is not None:
            self._block.call(lambda: self._call_user(failure))
        elif self._block.is_main:
            self._watch(failure)
            self._block.interrupt()
        else:
            self._end(failure)

    def _call_user(self, failure: BaseException) -> None:
        assert self._on_failure is not None
        try:
            self._on_failure(raised(failure))
        except BaseException as error:  # noqa: BLE001  (nothing else would end the process)
            _log.error("on_failure failed", exc_info=error, effect="the process ends")
            self._end(failure)
        else:
            self._block.interrupt()

    def _end(self, failure: BaseException) -> None:
        _log.at(
            logging.CRITICAL,
            "consumer failed",
            exc_info=raised(failure),
            process_ends_within_seconds=self._seconds,
            exit_code=exit_code(failure),
            cause=failure,
            hint="to do something else, give app.running(on_failure=...)",
        )
        self._stop()
        self._sent_sigterm = callable(signal.getsignal(signal.SIGTERM))
        self._watch(failure)
        if self._sent_sigterm:
            atexit.register(_exit_last, exit_code(failure))
            os.kill(os.getpid(), signal.SIGTERM)
        else:
            self._block.interrupt()

    def _watch(self, failure: BaseException) -> None:
        code = exit_code(failure)
        threading.Thread(target=self._end_late, args=(code,), name="kconsume-ending", daemon=True).start()

    def _end_late(self, code: int) -> None:
        deadline = Deadline(self._seconds)
        while not deadline.passed:
            if self._block.heard and not self._sent_sigterm:
                return
            time.sleep(_LOOK_EVERY)
        if self._sent_sigterm or self._block.unheard or not self._block.over:
            _log.at(
                logging.CRITICAL, "process ended", exit_code=code, cause="the program kept running without its consumer"
            )
            _exit(code)


def raised(failure: BaseException) -> BaseException:
    """The exception that the block raises: the exception of the handler. A CancelledError of a handler is raised only
    as the cause of `HandlerFailed`. A bare CancelledError would look like a cancellation of the caller, and
    asyncio.TaskGroup would ignore it."""
    cause = failure.__cause__
    if isinstance(failure, HandlerFailed) and cause is not None and not isinstance(cause, asyncio.CancelledError):
        return cause
    return failure


def exit_code(failure: BaseException) -> int:
    return failure.exit_code if isinstance(failure, KconsumeError) else 1


def _exit_last(code: int) -> None:
    """Run the other exit functions, then end the process with this code. Registered last, so it runs first."""
    atexit.unregister(_exit_last)
    atexit._run_exitfuncs()
    _exit(code)


def _exit(code: int) -> None:
    """End the process now. The log and the standard streams are flushed first, because `os._exit` flushes nothing."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)

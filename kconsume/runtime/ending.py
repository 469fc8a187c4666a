"""How a failure of the consumer reaches the program around its block, and ends it.

A block that waits on the main thread is interrupted, and its exception leaves it: nobody can overlook that. In the
lifespan of a web server the same exception ends a task that nobody awaits, and the server goes on answering over a
consumer that is gone (measured with uvicorn and hypercorn). So there the process ends:

1. Where something listens to SIGTERM, as servers do, it is sent: the server finishes its requests and leaves the block,
   and the failure is raised out of it. Where nothing does (the workers of hypercorn), the block is interrupted.
2. The exit code is that of the failure, not the 0 of a server that was asked to end.
3. Whatever has not ended when the deadline passes is ended by `os._exit`; so is a main thread that does not leave its
   block, because it has swallowed the interrupt.

A failure that somebody has caught is theirs: if the block was left and its task goes on, the process goes on too.
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

from kconsume.errors import HandlerFailed, KconsumeError
from kconsume.runtime.budget import Deadline

_log = logging.getLogger("kconsume")

_LOOK_EVERY = 0.05

OnFailure = Callable[[BaseException], object]
"""Called with what the consumer failed with, in the place of the end of the process."""


class Block(Protocol):
    """A `with` block, as the failure of its consumer finds it."""

    @property
    def is_main(self) -> bool:
        """Whether an interrupt is raised in the program's main thread, where it is noticed."""
        ...

    @property
    def over(self) -> bool:
        """Whether the block was left."""
        ...

    @property
    def heard(self) -> bool:
        """Whether what was raised out of the block has certainly reached the program."""
        ...

    @property
    def unheard(self) -> bool:
        """Whether what was raised out of the block has ended a task, and the event loop goes on without it."""
        ...

    def interrupt(self) -> None: ...
    def call(self, function: Callable[[], object]) -> None:
        """Call it where the block runs: on its event loop, or, for a plain block, on this thread."""
        ...


class Guard:
    """What a failure of the consumer leads to, from the moment its block is entered."""

    def __init__(self, block: Block, seconds: float, stop: Callable[[], None], on_failure: OnFailure | None) -> None:
        """`seconds`: in which the process is gone. `stop`: stops what else consumes."""
        self._block = block
        self._seconds = seconds
        self._stop = stop
        self._on_failure = on_failure
        self._lock = threading.Lock()
        self._failure: BaseException | None = None
        self._entered = False
        self._asked = False

    def failed(self, failure: BaseException) -> None:
        """From any thread. The first failure counts; one that comes before the block is kept until it is entered."""
        with self._lock:
            if self._failure is not None:
                return
            self._failure = failure
            if not self._entered:
                return
        self._act(failure)

    def enter(self) -> None:
        """The block begins now."""
        with self._lock:
            self._entered = True
            failure = self._failure
        if failure is not None:
            self._act(failure)

    def leave(self) -> None:
        """The block is left, on its own thread. A server that SIGTERM has ended raises it once more, to be seen to end
        by it; that would be a clean end for systemd, and end the process ahead of its exit code."""
        if self._asked and threading.current_thread() is threading.main_thread():
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})

    def _act(self, failure: BaseException) -> None:
        if self._on_failure is not None:
            self._block.call(lambda: self._tell(failure))
        elif self._block.is_main:
            self._watch(failure)
            self._block.interrupt()
        else:
            self._end(failure)

    def _tell(self, failure: BaseException) -> None:
        assert self._on_failure is not None
        try:
            self._on_failure(raised(failure))
        except BaseException:  # noqa: BLE001  (nothing else would end the process)
            _log.exception("on_failure raised an exception itself, so the process ends")
            self._end(failure)
        else:
            self._block.interrupt()

    def _end(self, failure: BaseException) -> None:
        _log.critical(
            "consumer failed, the process ends within %.0fs exit_code=%d cause=%s. To do something else, say "
            "app.running(on_failure=...)",
            self._seconds, exit_code(failure), failure, exc_info=raised(failure),
        )  # fmt: skip
        self._stop()
        self._asked = callable(signal.getsignal(signal.SIGTERM))
        self._watch(failure)
        if self._asked:
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
            if self._block.heard and not self._asked:
                return
            time.sleep(_LOOK_EVERY)
        if self._asked or self._block.unheard or not self._block.over:
            _log.critical("the program goes on without its consumer: the process ends now exit_code=%d", code)
            _exit(code)


def raised(failure: BaseException) -> BaseException:
    """The failure as it leaves the block: what the handler raised. Its own CancelledError stays the cause: raised
    itself, it would look as if our caller were cancelled, and an asyncio.TaskGroup passes over it."""
    cause = failure.__cause__
    if isinstance(failure, HandlerFailed) and cause is not None and not isinstance(cause, asyncio.CancelledError):
        return cause
    return failure


def exit_code(failure: BaseException) -> int:
    return failure.exit_code if isinstance(failure, KconsumeError) else 1


def _exit_last(code: int) -> None:
    """At the end of the interpreter, after everything else that is to be done there."""
    atexit.unregister(_exit_last)
    atexit._run_exitfuncs()
    _exit(code)


def _exit(code: int) -> None:
    """A hard exit flushes nothing by itself."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)

"""The event loop of `async def` handlers and resources: a loop in a separate thread, or the caller's loop.

This module starts and ends the loop and keeps the tasks of kconsume that run on the loop. It does not know what the
tasks do.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Coroutine
from concurrent.futures import TimeoutError as FutureTimeout
from contextvars import Context, copy_context
from typing import Any, Protocol

from kconsume._event_log import EventLog
from kconsume._runtime.deadlines import LEAST_LOOP_END_SECONDS
from kconsume._runtime.thread_pool import ThreadPool

_log = EventLog("loop")


class HandlerLoop(Protocol):
    """A running event loop on another thread. Only `start` is called on the loop itself."""

    thread_pool: ThreadPool
    """Threads for work that may block."""

    @property
    def loop(self) -> asyncio.AbstractEventLoop: ...

    def start(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """Start a task that `rest` waits for and `close` cancels. Must be called on the loop."""
        ...

    def rest(self, seconds: float) -> None:
        """Wait at most this long until the tasks have ended. Cancelled tasks may have something to clean up."""
        ...

    def close(self, seconds: float) -> None:
        """Cancel the tasks that still run. No task is started afterwards."""
        ...


class _Tasks:
    """The tasks of kconsume on one loop. `_running` is used on the loop only."""

    def __init__(self, context: Context) -> None:
        """context: each task begins with a copy of it."""
        self._context = context
        self._running: set[asyncio.Task[None]] = set()

    def start(self, loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        task = loop.create_task(work, name=name, context=self._context.copy())
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return task

    def rest(self, loop: asyncio.AbstractEventLoop, seconds: float) -> None:
        waiting = self._wait(seconds)
        try:
            asyncio.run_coroutine_threadsafe(waiting, loop).result(seconds + 0.1)
        except FutureTimeout:
            return  # a handler blocks the loop
        except RuntimeError:
            waiting.close()  # the loop was closed, and the tasks ended with it

    def cancel(self) -> None:
        """Cancel the tasks. Called on the loop."""
        for task in self._running:
            task.cancel()

    async def _wait(self, seconds: float) -> None:
        if self._running:
            await asyncio.wait(self._running, timeout=seconds)


class EventLoopThread:
    """An event loop in a separate thread. The thread is started when `loop` is first read.

    Fields: `_loop` and `_thread` are written once, under `_lock`, by the first thread that reads `loop`. `rest` and
    `close` read them without the lock. `_closing` is written by `close`, before it stops the loop, and read on the
    loop's thread.
    """

    def __init__(self, name: str) -> None:
        self.thread_pool = ThreadPool(f"{name}-hand")
        self._name = name
        self._tasks = _Tasks(Context())
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._closing = False

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                # A daemon thread: a handler that blocks the loop must not keep the process alive.
                self._thread = threading.Thread(target=self._run, args=(self._loop,), name=self._name, daemon=True)
                self._thread.start()
            return self._loop

    def start(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        return self._tasks.start(self.loop, work, name)

    def rest(self, seconds: float) -> None:
        if self._loop is not None:
            self._tasks.rest(self._loop, seconds)

    def close(self, seconds: float) -> None:
        self.thread_pool.close()
        loop, thread = self._loop, self._thread
        if loop is None or thread is None:
            return
        self._closing = True
        with contextlib.suppress(RuntimeError):  # the loop is closed already: this is the second call
            loop.call_soon_threadsafe(loop.stop)
        thread.join(max(LEAST_LOOP_END_SECONDS, seconds))

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        asyncio.set_event_loop(loop)
        try:
            while not self._closing:
                self._run_until_stopped(loop)
            _cancel_all(loop)
            loop.run_until_complete(loop.shutdown_asyncgens())
            loop.run_until_complete(loop.shutdown_default_executor())
        finally:
            loop.close()

    def _run_until_stopped(self, loop: asyncio.AbstractEventLoop) -> None:
        """Run the loop until it is stopped. A task that calls sys.exit() also stops the loop. The exception reaches the
        code that awaits the task, and the loop is run again. Otherwise the records of all other handlers would stay
        unhandled, and no error would show this."""
        try:
            loop.run_forever()
        except (SystemExit, KeyboardInterrupt) as error:
            _log.error("task raised exit", cause=repr(error), hint="raise it in the handler to end the process")


class CallersLoop:
    """The loop of `async with app.running():`. The loop continues after the block. Handlers begin with the caller's
    context."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.thread_pool = ThreadPool("kconsume-hand")
        self._loop = loop
        self._tasks = _Tasks(copy_context())

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        return self._loop

    def start(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        return self._tasks.start(self._loop, work, name)

    def rest(self, seconds: float) -> None:
        self._tasks.rest(self._loop, seconds)

    def close(self, seconds: float) -> None:  # noqa: ARG002  (the loop is not ours to end)
        self.thread_pool.close()
        with contextlib.suppress(RuntimeError):  # the caller has closed the loop
            self._loop.call_soon_threadsafe(self._tasks.cancel)


def _cancel_all(loop: asyncio.AbstractEventLoop) -> None:
    tasks = asyncio.all_tasks(loop)
    for task in tasks:
        task.cancel()
    if tasks:
        # The wait has a limit, because a task may refuse its cancellation.
        loop.run_until_complete(asyncio.wait(tasks, timeout=LEAST_LOOP_END_SECONDS))

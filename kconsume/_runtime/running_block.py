"""The block in which an app runs, `with` or `async with`, and how a failure ends it.

This module knows nothing of the app: `Running` is given the context managers that start and stop it.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from contextvars import copy_context
from types import TracebackType
from typing import Generic, TypeVar

T = TypeVar("T")


class Running(Generic[T]):
    """The block `with app.running():` on this thread, or `async with app.running():` on this event loop."""

    def __init__(
        self, plain: Callable[[], AbstractContextManager[T]], on_loop: Callable[[], AbstractAsyncContextManager[T]]
    ) -> None:
        """plain: makes the context manager of `with`. on_loop: makes the context manager of `async with`."""
        self._make_plain = plain
        self._make_on_loop = on_loop

    def __enter__(self) -> T:
        self._plain = self._make_plain()
        return self._plain.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        return self._plain.__exit__(kind, error, trace)

    async def __aenter__(self) -> T:
        self._on_loop = self._make_on_loop()
        return await self._on_loop.__aenter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        return await self._on_loop.__aexit__(kind, error, trace)


class AsyncBlock:
    """A block of an asyncio task. To end the block, its task is cancelled; the cancellation does not leave the block.

    Implements `exit_guard.Block`. Fields: `_task`, `_loop`, `_wanted` and `_left` are written under `_lock`, by the
    task that enters and leaves the block or by the thread that interrupts it. The properties read `_left` without the
    lock, because it is written once. `_cancelled` is used on the event loop only.
    """

    def __init__(self) -> None:
        self._task: asyncio.Task[object] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._wanted = False
        self._cancelled = False
        self._left: asyncio.Task[object] | None = None
        """The task, once it has left the block."""
        self._lock = threading.Lock()

    def interrupt(self) -> None:
        """End the block, now or as soon as it begins. May be called on any thread."""
        with self._lock:
            self._wanted = True
            if self._loop is not None:
                self._loop.call_soon_threadsafe(self._cancel)

    def call(self, function: Callable[[], object]) -> None:
        """Call `function` on the event loop. May be called on any thread. Does nothing once the block was left."""
        with self._lock:
            if self._loop is not None:
                self._loop.call_soon_threadsafe(function)

    @property
    def is_main(self) -> bool:
        return False  # perhaps no code awaits the task

    @property
    def over(self) -> bool:
        return self._left is not None

    @property
    def heard(self) -> bool:
        """True once the loop has ended. Then the exception has left `asyncio.run`, or was caught before."""
        return self._left is not None and not self._left.get_loop().is_running()

    @property
    def unheard(self) -> bool:
        return self._left is not None and self._left.done() and self._left.get_loop().is_running()

    def __enter__(self) -> None:
        with self._lock:
            self._task = asyncio.current_task()
            self._loop = asyncio.get_running_loop()
            if self._wanted:
                self._loop.call_soon(self._cancel)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        with self._lock:
            # The loop may end before the app notices that the block was left.
            self._left, task, self._task, self._loop = self._task, self._task, None, None
        if not self._cancelled or task is None:
            return False
        # Take our cancellation back. If other code has cancelled the task too, the task stays cancelled.
        return task.uncancel() == 0 and isinstance(error, asyncio.CancelledError)

    def _cancel(self) -> None:
        if self._task is not None and not self._cancelled:
            self._cancelled = True
            self._task.cancel()


async def in_thread(
    work: Callable[[], T], hurry: Callable[[], None] | None = None
) -> tuple[T, asyncio.CancelledError | None]:
    """Run `work` off the event loop, to its end, in the caller's context.

    Returns the result of `work`, and the cancellation of the awaiting task if it was cancelled in this time. The
    work runs in a separate thread, because it may take long and the threads of the loop's executor belong to the user.

    Args:
        work: may block.
        hurry: called at each cancellation; it should make `work` end sooner.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def run() -> None:
        try:
            result = work()
        except BaseException as error:  # noqa: BLE001  (raised where it is awaited)
            loop.call_soon_threadsafe(done.set_exception, error)
        else:
            loop.call_soon_threadsafe(done.set_result, result)

    threading.Thread(target=copy_context().run, args=(run,), name="kconsume-running", daemon=True).start()
    cancelled: asyncio.CancelledError | None = None
    while not done.done():
        try:
            await asyncio.wait([done])
        except asyncio.CancelledError as error:
            cancelled = error
            if hurry is not None:
                hurry()
    return done.result(), cancelled

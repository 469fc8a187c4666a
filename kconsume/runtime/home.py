"""The event loop on which `async def` handlers and resources live: one in a thread of its own, or the caller's.

Starts and ends the loop, and keeps the tasks that run there for us; what they do is not its business.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Coroutine
from concurrent.futures import TimeoutError as FutureTimeout
from contextvars import Context, copy_context
from typing import Any, ClassVar, Protocol

from kconsume.runtime.hands import Hands

_log = logging.getLogger("kconsume.loop")

_PATIENCE = 1.0


class Home(Protocol):
    """An event loop that runs, on another thread than the one that asks."""

    hands: Hands
    """Threads for what may block."""

    lends: ClassVar[bool]
    """Whether the consumer may be lent to it for a moment: a rebalance then takes place there, and may take half a
    second."""

    @property
    def loop(self) -> asyncio.AbstractEventLoop: ...

    def start(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """A task for us. On the loop."""
        ...

    def rest(self, seconds: float) -> None:
        """Wait until our tasks have ended, at most so long. What was cancelled may have something to clean up."""
        ...

    def close(self, seconds: float) -> None:
        """Nothing more will be asked of it; what still runs there for us is cancelled."""
        ...


class _Tasks:
    """The tasks that run on a loop for us."""

    def __init__(self, context: Context) -> None:
        """`context`: what each of them begins with."""
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
            waiting.close()  # the loop was closed, and they ended with it

    def cancel(self) -> None:
        """On the loop."""
        for task in self._running:
            task.cancel()

    async def _wait(self, seconds: float) -> None:
        if self._running:
            await asyncio.wait(self._running, timeout=seconds)


class OwnLoop:
    """An event loop in a thread of its own, made when it is first asked for."""

    lends: ClassVar = True

    def __init__(self, name: str) -> None:
        self.hands = Hands(f"{name}-hand")
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
                # A daemon: a handler that blocks the loop must not keep the process from ending.
                self._thread = threading.Thread(target=self._run, args=(self._loop,), name=self._name, daemon=True)
                self._thread.start()
            return self._loop

    def start(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        return self._tasks.start(self.loop, work, name)

    def rest(self, seconds: float) -> None:
        if self._loop is not None:
            self._tasks.rest(self._loop, seconds)

    def close(self, seconds: float) -> None:
        self.hands.close()
        loop, thread = self._loop, self._thread
        if loop is None or thread is None:
            return
        self._closing = True
        with contextlib.suppress(RuntimeError):  # closed already: this is the second time
            loop.call_soon_threadsafe(loop.stop)
        thread.join(max(_PATIENCE, seconds))

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
        """A task that calls sys.exit() stops the loop. Whoever waits for it is told; the others' loop goes on: a loop
        that ends would leave their records unhandled, and nobody would notice."""
        try:
            loop.run_forever()
        except (SystemExit, KeyboardInterrupt) as error:
            _log.error("a task on the event loop raised %r, which ends nothing here: raise it in the handler", error)


class CallersLoop:
    """The loop of `async with app.running():`, which goes on afterwards. Handlers begin with the caller's context."""

    lends: ClassVar = False

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.hands = Hands("kconsume-hand")
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
        self.hands.close()
        with contextlib.suppress(RuntimeError):  # the caller has closed it
            self._loop.call_soon_threadsafe(self._tasks.cancel)


def _cancel_all(loop: asyncio.AbstractEventLoop) -> None:
    tasks = asyncio.all_tasks(loop)
    for task in tasks:
        task.cancel()
    if tasks:
        # Bounded: a task may refuse to be cancelled.
        loop.run_until_complete(asyncio.wait(tasks, timeout=_PATIENCE))

"""The event loop on which `async def` handlers and resources live: one in a thread of its own, or the caller's.

Starts and ends the loop; what runs on it is not its business.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, Protocol, TypeVar

T = TypeVar("T")

_PATIENCE = 1.0


class Home(Protocol):
    """An event loop that runs, on another thread than the one that asks."""

    @property
    def loop(self) -> asyncio.AbstractEventLoop: ...

    def close(self, seconds: float) -> None:
        """Nothing more will be asked of it; what still runs there for us is cancelled."""
        ...


class OwnLoop:
    """An event loop in a thread of its own, made when it is first asked for."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                # A daemon: a handler that blocks the loop must not keep the process from ending.
                self._thread = threading.Thread(target=self._run, args=(self._loop,), name=self._name, daemon=True)
                self._thread.start()
            return self._loop

    def close(self, seconds: float) -> None:
        loop, thread = self._loop, self._thread
        if loop is None or thread is None:
            return
        loop.call_soon_threadsafe(loop.stop)
        thread.join(max(_PATIENCE, seconds))

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        asyncio.set_event_loop(loop)
        try:
            loop.run_forever()
            _cancel_all(loop)
            loop.run_until_complete(loop.shutdown_asyncgens())
            loop.run_until_complete(loop.shutdown_default_executor())
        finally:
            loop.close()


class CallersLoop:
    """The loop of `async with app.running():`, which goes on afterwards."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        return self._loop

    def close(self, seconds: float) -> None:
        """It is not ours to end."""


def on_loop(home: Home, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
    """Have the coroutine run there. Not from the loop's own thread, if the future is waited for."""
    return asyncio.run_coroutine_threadsafe(coroutine, home.loop)


def _cancel_all(loop: asyncio.AbstractEventLoop) -> None:
    tasks = asyncio.all_tasks(loop)
    for task in tasks:
        task.cancel()
    if tasks:
        # Bounded: a task may refuse to be cancelled.
        loop.run_until_complete(asyncio.wait(tasks, timeout=_PATIENCE))

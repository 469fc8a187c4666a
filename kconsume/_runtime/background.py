"""A daemon thread that runs blocking calls one after the other: questions to the store and the cluster, and saves.

A store that hangs delays the calls behind it on the same thread. It never delays polling.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import TypeVar

T = TypeVar("T")


class BackgroundThread:
    """Runs calls in the order in which they are sent. `send` and `close` may be called on any thread."""

    def __init__(self, name: str) -> None:
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def send(self, call: Callable[[], T]) -> Future[T]:
        """Run `call` on the thread. The future carries its result or its exception."""
        future: Future[T] = Future()

        def run() -> None:
            try:
                future.set_result(call())
            except BaseException as error:  # noqa: BLE001  (raised where the future is read)
                future.set_exception(error)

        self._calls.put(run)
        return future

    def close(self, within: float) -> bool:
        """Finish the calls that were sent, then end. Returns whether the thread ended within that many seconds."""
        self._calls.put(None)
        self._thread.join(within)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (run := self._calls.get()) is not None:
            run()

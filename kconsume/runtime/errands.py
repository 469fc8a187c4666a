"""What may block, done off the owner thread: questions to the store and to the cluster, and saves.

One daemon thread each, in order; a store that hangs holds up errands, never polling.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import TypeVar

T = TypeVar("T")


class Errands:
    """Runs one errand after the other and hands back futures."""

    def __init__(self, name: str) -> None:
        self._waiting: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def send(self, errand: Callable[[], T]) -> Future[T]:
        future: Future[T] = Future()

        def run() -> None:
            try:
                future.set_result(errand())
            except BaseException as error:  # noqa: BLE001  (raised where the future is read)
                future.set_exception(error)

        self._waiting.put(run)
        return future

    def close(self, within: float) -> bool:
        """Finish what is waiting; whether that was done in time."""
        self._waiting.put(None)
        self._thread.join(within)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (run := self._waiting.get()) is not None:
            run()

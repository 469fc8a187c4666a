"""Drives the async transactions of a store from suites that are not async, so that the same tests examine both.

Each store object has an event loop in a thread of its own, as an app has. This module only forwards calls.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import contextmanager
from typing import cast

from kconsume._kafka.outgoing import Outgoing
from kconsume.backends.base import TransactionalStore
from kconsume.backends.capabilities import AsyncOutboxTx, AsyncTransactionalStore, AsyncTx
from kconsume.errors import StoreError
from kconsume.records import Partition
from kconsume.testing.conformance.forms import OtherForm


class _Awaited(OtherForm[AsyncTransactionalStore]):
    def __init__(self, store: AsyncTransactionalStore) -> None:
        super().__init__(store)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    @property
    def connection_types(self) -> tuple[type, ...]:
        return self.inner.async_connection_types

    @contextmanager
    def transaction(self, group: str, partition: Partition, epoch: int) -> Iterator[AwaitedTx]:
        """A transaction. The block runs on the caller's thread. The calls of the async transaction run on the event
        loop, in one task."""
        loop, steps = self._running_loop(), _Steps()

        async def whole() -> None:
            async with self.inner.async_transaction(group, partition, epoch) as tx:
                await steps.run_all(tx)

        running = asyncio.run_coroutine_threadsafe(whole(), loop)
        running.add_done_callback(steps.over)
        tx = steps.begun.result()
        try:
            yield AwaitedTx(tx, steps, loop)
        except BaseException as error:
            steps.put(_end_with(error))
            if _error_of(running) not in (None, error):
                running.result()
            raise
        steps.put(_end_with(None))
        running.result()

    def close(self) -> None:
        """Close the store while its loop runs, as an app does, and then the loop."""
        super().close()
        with self._lock:
            loop, thread = self._loop, self._thread
            self._loop = self._thread = None
        if loop is not None and thread is not None:
            loop.call_soon_threadsafe(loop.stop)
            thread.join()
            loop.close()

    def _running_loop(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(target=self._loop.run_forever, name="awaited", daemon=True)
                self._thread.start()
            return self._loop


class AwaitedTx:
    """An open `AsyncTx`, used from another thread."""

    def __init__(self, tx: AsyncTx, steps: _Steps, loop: asyncio.AbstractEventLoop) -> None:
        self.awaited = tx
        self._steps = steps
        self._loop = loop

    @property
    def connection(self) -> object:
        return self.awaited.connection

    def advance(self, old: int, new: int, leader_epoch: int | None = None) -> None:
        self.wait_for(lambda: self.awaited.advance(old, new, leader_epoch))

    def fault(self, error: BaseException) -> StoreError | None:
        return self.awaited.fault(error)

    def post(self, outgoing: Sequence[Outgoing]) -> None:
        self.wait_for(lambda: cast(AsyncOutboxTx, self.awaited).post(outgoing))

    def record_origins(self, origins: Sequence[str]) -> set[str]:
        return cast("set[str]", self.wait_for(lambda: cast(AsyncOutboxTx, self.awaited).record_origins(origins)))

    def wait_for(self, act: Callable[[], object]) -> object:
        """Run one action of the handler on the loop, and await its result if it is awaitable. After the transaction has
        ended, the action runs in another task, like a task that the handler started and left running."""
        done: Future[object] = Future()

        async def step() -> None:
            try:
                result = act()
                if inspect.isawaitable(result):
                    result = await result
            except BaseException as error:  # noqa: BLE001  (raised in the thread of the caller)
                done.set_exception(error)
            else:
                done.set_result(result)

        if not self._steps.put(step):
            asyncio.run_coroutine_threadsafe(step(), self._loop)
        return done.result()


_Step = Callable[[], Coroutine[object, object, None]]


class _Steps:
    """The actions that the thread of the caller runs in the task of the transaction, one after the other."""

    def __init__(self) -> None:
        self.begun: Future[AsyncTx] = Future()
        self._waiting: asyncio.Queue[_Step] = asyncio.Queue()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ended = False

    async def run_all(self, tx: AsyncTx) -> None:
        self._loop = asyncio.get_running_loop()
        self.begun.set_result(tx)
        while not self._ended:
            await (await self._waiting.get())()

    def put(self, step: _Step) -> bool:
        """Queue an action. Returns False, and queues nothing, after the transaction has ended."""
        if self._ended or self._loop is None:
            return False
        self._ended = step.__name__ == _LAST
        self._loop.call_soon_threadsafe(self._waiting.put_nowait, step)
        return True

    def over(self, running: Future[None]) -> None:
        """Called when the task is done. If the transaction never began, its error is raised in the caller, which waits
        for the begin."""
        self._ended = True
        if not self.begun.done():
            self.begun.set_exception(_error_of(running) or AssertionError("the store began no transaction"))


_LAST = "last"


def _end_with(error: BaseException | None) -> _Step:
    async def last() -> None:
        if isinstance(error, Exception):
            raise error
        if error is not None:  # not an Exception: a task on a loop sees it as a cancellation
            raise asyncio.CancelledError

    return last


def _error_of(running: Future[None]) -> BaseException | None:
    try:
        return running.exception()
    except CancelledError:
        return None


def awaited(store: AsyncTransactionalStore) -> TransactionalStore:
    """Wrap a store so that a suite examines its `async_transaction`: `open=lambda: awaited(MyStore(...))`.

    The `write` of the `Subject` then gets the asynchronous connection, and may return an awaitable.

    Args:
        store: the store to wrap.
    """
    return cast(TransactionalStore, _Awaited(store))

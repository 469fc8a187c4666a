"""Transactions of blocking stores, for `async def` handlers: another thread enters, advances and leaves them.

Only the statements of kconsume run on that thread. The handler uses the connection on the event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from functools import partial
from types import TracebackType
from typing import TypeAlias, TypeVar, cast

from kconsume._kafka.outgoing import Outgoing
from kconsume._runtime.background import BackgroundThread
from kconsume._runtime.thread_pool import ThreadPool, end
from kconsume.backends.base import TransactionalStore, Tx
from kconsume.backends.capabilities import AsyncTx, LetterTx, OutboxTx
from kconsume.errors import StoreError
from kconsume.failures.letter_headers import Letter
from kconsume.records import Partition

T = TypeVar("T")

AsyncBegin: TypeAlias = Callable[[str, Partition, int], AbstractAsyncContextManager[AsyncTx]]


def off_the_loop(store: TransactionalStore, thread_pool: ThreadPool | None = None) -> AsyncBegin:
    """The transactions of a store, for an event loop.

    Args:
        store: begins the transactions.
        thread_pool: lends a thread to each transaction; without a pool each transaction starts its own thread.
    """
    return lambda group, partition, epoch: _OnThread(store.transaction(group, partition, epoch), thread_pool)


class _ThreadTx:
    """A transaction that another thread has begun. It has the optional methods that the store declares."""

    def __init__(self, tx: Tx, thread: BackgroundThread) -> None:
        self._tx = tx
        self._thread = thread
        self.connection = tx.connection

    async def advance(self, old: int, new: int, leader_epoch: int | None = None) -> None:
        await _on_thread(self._thread, partial(self._tx.advance, old, new, leader_epoch))

    async def keep(self, table: str, letters: Sequence[Letter]) -> None:
        await _on_thread(self._thread, partial(cast(LetterTx, self._tx).keep, table, letters))

    async def post(self, outgoing: Sequence[Outgoing]) -> None:
        await _on_thread(self._thread, partial(cast(OutboxTx, self._tx).post, outgoing))

    async def record_origins(self, origins: Sequence[str]) -> set[str]:
        return await _on_thread(self._thread, partial(cast(OutboxTx, self._tx).record_origins, origins))

    def fault(self, error: BaseException) -> StoreError | None:
        return self._tx.fault(error)


class _OnThread(AbstractAsyncContextManager[AsyncTx]):
    """Enters and leaves a transaction on another thread than the event loop's, because it may have to wait for its
    turn.

    One thread runs all steps of the transaction, one after the other. So the transaction is left even if the task is
    cancelled or the loop is closed.
    """

    def __init__(self, transaction: AbstractContextManager[Tx], thread_pool: ThreadPool | None) -> None:
        self._transaction = transaction
        self._thread_pool = thread_pool

    async def __aenter__(self) -> AsyncTx:
        self._thread = BackgroundThread("kconsume-hand") if self._thread_pool is None else self._thread_pool.take()
        entering = self._thread.send(self._transaction.__enter__)
        try:
            return _ThreadTx(await asyncio.shield(asyncio.wrap_future(entering)), self._thread)
        except asyncio.CancelledError:
            # The thread still enters the transaction when its turn comes. Then it must leave at once, because the
            # transaction would hold its lock forever.
            self._thread.send(partial(self._leave, entering))
            end(self._thread)
            raise
        except BaseException:
            self._release_thread()
            raise

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        try:
            answer = await _on_thread(self._thread, partial(self._transaction.__exit__, kind, error, trace))
        except asyncio.CancelledError:
            end(self._thread)  # the thread is still leaving the transaction and must not go back to the pool
            raise
        except BaseException:
            self._release_thread()
            raise
        self._release_thread()
        return answer

    def _release_thread(self) -> None:
        if self._thread_pool is None:
            end(self._thread)
        else:
            self._thread_pool.give_back(self._thread)

    def _leave(self, entered: Future[Tx]) -> None:
        if entered.exception() is None:
            error = asyncio.CancelledError()
            self._transaction.__exit__(type(error), error, None)


async def _on_thread(thread: BackgroundThread, work: Callable[[], T]) -> T:
    """Run `work` on the thread. The work runs to its end even if the task that waits here is cancelled."""
    return await asyncio.shield(asyncio.wrap_future(thread.send(work)))

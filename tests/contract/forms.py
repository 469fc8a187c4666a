"""Other forms of a store that goes through the whole suite elsewhere: only what its transactions must be."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from typing import TypeVar

from kconsume._runtime.processing.blocking_tx import off_the_loop
from kconsume._runtime.thread_pool import ThreadPool
from kconsume.backends.base import TransactionalStore
from kconsume.backends.capabilities import AsyncTx
from kconsume.records import Partition
from kconsume.testing.conformance import FencedSuite, TransactionalSuite, awaited
from kconsume.testing.conformance.forms import OtherForm

S = TypeVar("S", bound=type[TransactionalSuite])


def only_transactions(suite: S) -> S:
    """Claims, saves and resets are the same code in every form of a store's transaction, and tested with the first."""
    for name in dir(FencedSuite):
        if name.startswith("test_"):
            setattr(suite, name, None)
    return suite


class _OffTheLoop(OtherForm[TransactionalStore]):
    """A store that blocks, as the runtime has it for `async def` handlers: begun and ended on another thread."""

    def __init__(self, store: TransactionalStore) -> None:
        super().__init__(store)
        self._thread_pool = ThreadPool("form")
        self._begin = off_the_loop(store, self._thread_pool)

    @property
    def async_connection_types(self) -> tuple[type, ...]:
        return self.inner.connection_types

    def transaction(self, group: str, partition: Partition, epoch: int) -> AbstractAsyncContextManager[AsyncTx]:
        raise NotImplementedError("that one is not asked for")

    def async_transaction(self, group: str, partition: Partition, epoch: int) -> AbstractAsyncContextManager[AsyncTx]:
        return self._begin(group, partition, epoch)

    def close(self) -> None:
        super().close()
        self._thread_pool.close()
        self._thread_pool = ThreadPool("form")
        self._begin = off_the_loop(self.inner, self._thread_pool)


def for_async_handlers(store: TransactionalStore) -> TransactionalStore:
    """The same store, with the transactions that an `async def` gets of it."""
    return awaited(_OffTheLoop(store))  # type: ignore[arg-type]

"""Other forms of a store that goes through the whole suite elsewhere: only what its transactions must be."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from typing import TypeVar

from kconsume.backends.abc import AsyncTx, TransactionalStore
from kconsume.records import Partition
from kconsume.runtime.hands import Hands
from kconsume.runtime.off_loop import off_the_loop
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
        self._hands = Hands("form")
        self._begin = off_the_loop(store, self._hands)

    @property
    def async_connection_types(self) -> tuple[type, ...]:
        return self._store.connection_types

    def transaction(self, group: str, partition: Partition, epoch: int) -> AbstractAsyncContextManager[AsyncTx]:
        raise NotImplementedError("that one is not asked for")

    def async_transaction(self, group: str, partition: Partition, epoch: int) -> AbstractAsyncContextManager[AsyncTx]:
        return self._begin(group, partition, epoch)

    def close(self) -> None:
        super().close()
        self._hands.close()
        self._hands = Hands("form")
        self._begin = off_the_loop(self._store, self._hands)


def for_async_handlers(store: TransactionalStore) -> TransactionalStore:
    """The same store, with the transactions that an `async def` gets of it."""
    return awaited(_OffTheLoop(store))  # type: ignore[arg-type]

"""Transactions of stores that block, for `async def` handlers: entered, advanced and left by another thread."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from functools import partial
from types import TracebackType
from typing import TypeAlias, TypeVar

from kconsume.backends.abc import AsyncTx, LetterTx, OutboxTx, TransactionalStore, Tx
from kconsume.errors import StoreError
from kconsume.failures.letters import Letter
from kconsume.output import Outgoing
from kconsume.records import Partition
from kconsume.runtime.errands import Errands
from kconsume.runtime.hands import Hands, end

T = TypeVar("T")

AsyncBegin: TypeAlias = Callable[[str, Partition, int], AbstractAsyncContextManager[AsyncTx]]


def off_the_loop(store: TransactionalStore, hands: Hands | None = None) -> AsyncBegin:
    """The transactions of a store, for an event loop. `hands`: threads that are kept for the next ones; without them,
    each has one of its own."""
    return lambda group, partition, epoch: _OffTheLoop(store.transaction(group, partition, epoch), hands)


class _Distant:
    """A transaction that another thread holds."""

    def __init__(self, tx: Tx, hand: Errands) -> None:
        self._tx = tx
        self._hand = hand
        self.connection = tx.connection

    async def advance(self, old: int, new: int, leader_epoch: int | None = None) -> None:
        await _there(self._hand, partial(self._tx.advance, old, new, leader_epoch))

    async def keep(self, table: str, letters: Sequence[Letter]) -> None:
        assert isinstance(self._tx, LetterTx)  # checked when the handler was decorated
        await _there(self._hand, partial(self._tx.keep, table, letters))

    async def post(self, outgoing: Sequence[Outgoing]) -> None:
        assert isinstance(self._tx, OutboxTx)
        await _there(self._hand, partial(self._tx.post, outgoing))

    async def take_in(self, origins: Sequence[str]) -> set[str]:
        assert isinstance(self._tx, OutboxTx)
        return await _there(self._hand, partial(self._tx.take_in, origins))

    def fault(self, error: BaseException) -> StoreError | None:
        return self._tx.fault(error)


class _OffTheLoop(AbstractAsyncContextManager[AsyncTx]):
    """A transaction that may have to wait for its turn, entered and left on another thread than the event loop's.

    One thread for all of it, which does one thing after the other: so it is left, whatever becomes of the task and of
    the loop.
    """

    def __init__(self, transaction: AbstractContextManager[Tx], hands: Hands | None) -> None:
        self._transaction = transaction
        self._hands = hands

    async def __aenter__(self) -> AsyncTx:
        self._hand = Errands("kconsume-hand") if self._hands is None else self._hands.take()
        entering = self._hand.send(self._transaction.__enter__)
        try:
            return _Distant(await asyncio.shield(asyncio.wrap_future(entering)), self._hand)
        except asyncio.CancelledError:
            # It is entered regardless, when its turn comes: left right after, or it would hold its lock forever.
            self._hand.send(partial(self._leave, entering))
            end(self._hand)
            raise
        except BaseException:
            self._let_go()
            raise

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        try:
            answer = await _there(self._hand, partial(self._transaction.__exit__, kind, error, trace))
        except asyncio.CancelledError:
            end(self._hand)  # it has not left yet: not for others
            raise
        except BaseException:
            self._let_go()
            raise
        self._let_go()
        return answer

    def _let_go(self) -> None:
        if self._hands is None:
            end(self._hand)
        else:
            self._hands.give_back(self._hand)

    def _leave(self, entered: Future[Tx]) -> None:
        if entered.exception() is None:
            error = asyncio.CancelledError()
            self._transaction.__exit__(type(error), error, None)


async def _there(hand: Errands, work: Callable[[], T]) -> T:
    """Done by that thread, to its end, also if the task that waits here is cancelled."""
    return await asyncio.shield(asyncio.wrap_future(hand.send(work)))

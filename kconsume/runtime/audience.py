"""Calls the listeners of rebalances: off the owner thread, one after the other, each wait inside a budget.

A listener that raises is reported, and so is one that does not end in time: then its thread is left to it, and a new
one calls the others. Neither harms the assignment.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout

from kconsume.rebalance.listeners import Event, Listener
from kconsume.rebalance.record import Rebalance
from kconsume.records import Partition
from kconsume.runtime.errands import Errands
from kconsume.runtime.home import Home

_log = logging.getLogger("kconsume.rebalance")


class Audience:
    """The listeners of one consumer."""

    def __init__(self, listeners: Sequence[Listener], home: Home, name: str) -> None:
        self._listeners = listeners
        self._home = home
        self._name = name
        self._errands: Errands | None = None
        self._calling = ""
        """The listener that is being called."""

    def tell(self, event: Event, partitions: Sequence[Partition], rebalance: Rebalance) -> Future[None] | None:
        """Have the listeners called, after those that were told before. None if nobody listens."""
        concerned = [listener for listener in self._listeners if listener.event == event]
        if not concerned or not partitions:
            return None
        self._errands = self._errands or Errands(self._name)
        return self._errands.send(lambda: self._call(concerned, tuple(partitions), rebalance))

    def wait(self, told: Future[None] | None, seconds: float) -> bool:
        """Whether they have all been called in time. If not, they are not waited for again."""
        if told is None:
            return True
        try:
            told.result(timeout=seconds)
        except FutureTimeout:
            self.give_up()
            return False
        return True

    def give_up(self) -> None:
        """The listener that is being called does not end: its thread is left to it."""
        _log.error("listener %s has not ended in its time: rebalancing goes on without it", self._calling)
        if self._errands is not None:
            self._errands.close(0.0)
            self._errands = None

    def close(self, seconds: float) -> None:
        if self._errands is not None:
            self._errands.close(seconds)

    def _call(self, listeners: Sequence[Listener], partitions: Sequence[Partition], rebalance: Rebalance) -> None:
        for listener in listeners:
            self._calling = listener.name
            arguments = (partitions, rebalance) if listener.takes_rebalance else (partitions,)
            try:
                answer = listener.function(*arguments)
                if listener.is_async:
                    asyncio.run_coroutine_threadsafe(answer, self._home.loop).result()
            except BaseException as error:  # noqa: BLE001  (reported; a listener's error is nobody else's)
                _log.error("listener %s failed event=%s", listener.name, listener.event, exc_info=error)

"""Calls rebalance listeners on a thread of their own, one after the other. Each wait has a budget.

A listener that raises is logged. A listener that does not return in time is logged too; it keeps its thread, and a new
thread calls the next listeners. Neither harms the assignment.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout

from kconsume._event_log import EventLog
from kconsume._runtime.background import BackgroundThread
from kconsume._runtime.handler_loop import HandlerLoop
from kconsume.rebalance.events import Rebalance
from kconsume.rebalance.listeners import Event, Listener
from kconsume.records import Partition

_log = EventLog("rebalance")


class ListenerCalls:
    """The listeners of one consumer.

    All methods are called on the owner thread, except `close`, which is called after that thread has ended. Fields:
    `_thread` is used by the caller only. `_calling` is written on the listener thread and read by the owner thread for
    a log line.
    """

    def __init__(self, listeners: Sequence[Listener], handler_loop: HandlerLoop, name: str) -> None:
        """
        Args:
            listeners: in the order in which they are called.
            handler_loop: where async listeners run.
            name: the name of the thread. The first call starts the thread.
        """
        self._listeners = listeners
        self._handler_loop = handler_loop
        self._name = name
        self._thread: BackgroundThread | None = None
        self._calling = ""
        """The name of the listener that is being called."""

    def call(self, event: Event, partitions: Sequence[Partition], rebalance: Rebalance) -> Future[None] | None:
        """Call the listeners of this event, after all earlier calls. Returns None if the event has no listener."""
        concerned = [listener for listener in self._listeners if listener.event == event]
        if not concerned or not partitions:
            return None
        self._thread = self._thread or BackgroundThread(self._name)
        return self._thread.send(lambda: self._call_each(concerned, tuple(partitions), rebalance))

    def wait(self, called: Future[None] | None, seconds: float) -> bool:
        """Wait for calls. Returns whether all have returned in time. Calls that have not are given up."""
        if called is None:
            return True
        try:
            called.result(timeout=seconds)
        except FutureTimeout:
            self.give_up()
            return False
        return True

    def give_up(self) -> None:
        """Abandon the listener that is being called, and its thread."""
        _log.error("listener timed out", listener=self._calling, effect="the rebalance continues without it")
        if self._thread is not None:
            self._thread.close(0.0)
            self._thread = None

    def close(self, seconds: float) -> None:
        """Wait at most this long for the calls that were sent."""
        if self._thread is not None:
            self._thread.close(seconds)

    def _call_each(self, listeners: Sequence[Listener], partitions: Sequence[Partition], rebalance: Rebalance) -> None:
        for listener in listeners:
            self._calling = listener.name
            arguments = (partitions, rebalance) if listener.takes_rebalance else (partitions,)
            try:
                answer = listener.function(*arguments)
                if listener.is_async:
                    asyncio.run_coroutine_threadsafe(answer, self._handler_loop.loop).result()
            except BaseException as error:  # noqa: BLE001  (logged; the other listeners are still called)
                _log.error("listener failed", listener=listener.name, called_for=listener.event, exc_info=error)

"""The event loop borrows the consumer for a short time, while the handlers are `async` and fast.

If one thread fetches records and another one awaits their handlers, the records move between CPU cores. An `async def`
that does almost nothing then loses a third of its speed (measured). So while every lane is idle and known to be fast,
the owner thread lends the consumer to the loop for a *burst*: the loop alternately fetches and handles records, in one
thread.

At any time one thread has the consumer: the loop uses the consumer under the lock of the lease, and the owner waits
during the burst. If a burst does not end in time, a handler blocks the loop. Then the owner takes the consumer back and
polls again (P5). The tasks on the loop continue as without a burst.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Protocol

from kconsume._runtime.handler_loop import HandlerLoop

BURST = 0.02
"""Seconds of a burst. It is short, because the owner thread and the loop both have other things to do."""
HELD_UP = 0.05
"""Seconds beyond `BURST` after which the owner takes the consumer back."""
REST = 1.0
"""Seconds without bursts after the owner has taken the consumer back."""
_TURNS = 4
"""Iterations of the loop until a fast lane with a new chunk is idle again: its task begins, ends, and the end is
noticed."""


class ConsumerOwner(Protocol):
    """What a burst needs from the loop that owns the consumer."""

    def fetch_now(self) -> bool:
        """Process the reports and dispatch fetched records. Returns whether any record came. Must not wait."""
        ...

    def at_rest(self) -> bool:
        """True if every partition has a lane that is fast, and none of the lanes is busy."""
        ...


class Lending:
    """Bursts on one event loop. Used by the owner thread."""

    def __init__(self, handler_loop: HandlerLoop, owner: ConsumerOwner) -> None:
        self._handler_loop = handler_loop
        self._owner = owner
        self._not_before = 0.0
        """The time at which the next burst may begin."""

    def burst(self) -> bool:
        """Lend the consumer if every lane is idle and fast. Returns whether any records came."""
        if not self._owner.at_rest() or time.monotonic() < self._not_before:
            return False
        lease = _Lease()
        work = self._burst(lease)
        try:
            asyncio.run_coroutine_threadsafe(work, self._handler_loop.loop)
        except RuntimeError:
            work.close()  # the loop was closed, and its handlers have ended with it
            return False
        if not lease.ended(BURST + HELD_UP):
            self._not_before = time.monotonic() + REST
        if lease.error is not None:
            raise lease.error
        return lease.fetched

    async def _burst(self, lease: _Lease) -> None:
        until = time.monotonic() + BURST
        try:
            while lease.use(self._owner.fetch_now) and time.monotonic() < until and await self._rests():
                pass
        finally:
            lease.over.set()

    async def _rests(self) -> bool:
        for _ in range(_TURNS):
            if self._owner.at_rest():
                return True
            await asyncio.sleep(0)
        return False


class _Lease:
    """The right to touch the consumer, for one burst.

    `fetched` and `error` are written on the loop under `_lock`, and read by the owner after `ended`. `_taken_back` is
    written by the owner and read on the loop, under `_lock`.
    """

    def __init__(self) -> None:
        self.over = threading.Event()
        self.fetched = False
        self.error: BaseException | None = None
        self._lock = threading.Lock()
        self._taken_back = False

    def use(self, fetch: Callable[[], bool]) -> bool:
        """Fetch once. Called on the loop. Returns whether to continue."""
        with self._lock:
            if self._taken_back:
                return False
            try:
                came = fetch()
            except BaseException as error:  # noqa: BLE001  (raised on the owner thread)
                self.error = error
                return False
            self.fetched = self.fetched or came
            return came

    def ended(self, seconds: float) -> bool:
        """Wait for the end of the burst. Called on the owner thread. Returns False if the burst took longer than
        `seconds`. Then the consumer is taken back, as soon as a running fetch on the loop has returned."""
        if self.over.wait(seconds):
            return True
        with self._lock:
            self._taken_back = True
        return False

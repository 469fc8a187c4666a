"""The consumer lent to the event loop, while its handlers are `async` and swift.

Records that are fetched by one thread and awaited on another change cores, which costs an `async def` that does next
to nothing a third of its speed (measured). So while every lane is at rest and known to be swift, the owner thread
lends the consumer to the loop for a *burst*: there it is fetched and handled by turns, in one thread.

At any time one thread has the consumer: the loop touches it under the lease's lock, and the owner waits meanwhile. A
burst that is not over in time means that a handler holds the loop up after all: the owner takes the consumer back and
polls on (P5), and what runs on the loop goes on as it would have without a burst.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Protocol

from kconsume.runtime.home import Home

BURST = 0.02
"""Seconds: the owner has other things to do, and so has the loop."""
HELD_UP = 0.05
REST = 1.0
"""Seconds without bursts after one that was held up."""
_TURNS = 4
"""Of the loop, until a lane that was given something swift is at rest: its task begins, ends, and is seen to have."""


class Fetches(Protocol):
    """The owner's part of a burst."""

    def fetch_now(self) -> bool:
        """Settle what is done, and hand over what has come; whether there was anything. Must not wait for records."""
        ...

    def at_rest(self) -> bool:
        """Whether every partition has a lane that is swift, and none of them is busy."""
        ...


class Lending:
    """Bursts on one event loop."""

    def __init__(self, home: Home, owner: Fetches) -> None:
        self._home = home
        self._owner = owner
        self._not_before = 0.0

    def burst(self) -> bool:
        """Lend the consumer, if this is the time for it; whether anything came. On the owner thread."""
        if not self._owner.at_rest() or time.monotonic() < self._not_before:
            return False
        lease = _Lease()
        work = self._burst(lease)
        try:
            asyncio.run_coroutine_threadsafe(work, self._home.loop)
        except RuntimeError:
            work.close()  # the loop was closed, and its handlers ended with it
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
    """One burst's right to touch the consumer."""

    def __init__(self) -> None:
        self.over = threading.Event()
        self.fetched = False
        self.error: BaseException | None = None
        self._lock = threading.Lock()
        self._taken_back = False

    def use(self, fetch: Callable[[], bool]) -> bool:
        """On the loop; whether to go on."""
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
        """On the owner thread: wait for the end. Past that the consumer is taken back, once the loop has let go."""
        if self.over.wait(seconds):
            return True
        with self._lock:
            self._taken_back = True
        return False

"""Threads for steps that must run on the same thread. One use is the transaction of an `async def` handler, which is
entered, advanced and left on one thread. The other use is a handler with a timeout, whose thread may be abandoned.

The event loop's default executor is not used. It has few threads, and they belong to the user: if all of them waited
for a database lock, nothing could leave the transaction that holds the lock.
"""

from __future__ import annotations

import threading

from kconsume._runtime.background import BackgroundThread


class ThreadPool:
    """A pool that starts a thread when none is idle. Threads that are given back are kept for the next use.

    Fields: `_idle` and `_closed` are read and written by any thread, under `_lock`.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._idle: list[BackgroundThread] = []
        self._closed = False

    def take(self) -> BackgroundThread:
        """Take an idle thread. No other caller gets the thread until `give_back` or `end`."""
        with self._lock:
            return self._idle.pop() if self._idle else BackgroundThread(self._name)

    def give_back(self, thread: BackgroundThread) -> None:
        """Keep the thread for the next `take`, or end it if the pool is closed."""
        with self._lock:
            if not self._closed:
                return self._idle.append(thread)
        return end(thread)

    def close(self) -> None:
        """End the idle threads. Threads in use end when they are given back."""
        with self._lock:
            self._closed, idle = True, self._idle
            self._idle = []
        for thread in idle:
            end(thread)


def end(thread: BackgroundThread) -> None:
    """Let the thread finish the calls that were sent, and then end. Does not wait for the thread."""
    thread.close(0.0)

"""Threads to hand something to: a transaction of an event loop, which is entered, advanced and left on one of them; or
the calls of a handler that may be given up.

Not the loop's own threads. Those are few, and the person's: if all of them waited for a lock, nobody could leave the
transaction that holds it. What they do is not known here.
"""

from __future__ import annotations

import threading

from kconsume.runtime.errands import Errands


class Hands:
    """As many threads as there is work for at once, kept for what comes next."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._idle: list[Errands] = []
        self._closed = False

    def take(self) -> Errands:
        """A thread with nothing to do, until it is given back or ended."""
        with self._lock:
            return self._idle.pop() if self._idle else Errands(self._name)

    def give_back(self, hand: Errands) -> None:
        with self._lock:
            if not self._closed:
                return self._idle.append(hand)
        return end(hand)

    def close(self) -> None:
        """End them; those that are out end when they are given back."""
        with self._lock:
            self._closed, idle = True, self._idle
            self._idle = []
        for hand in idle:
            end(hand)


def end(hand: Errands) -> None:
    """Let it finish what it was sent, which is not waited for, and then end."""
    hand.close(0.0)

"""Where each thread of a worker is, in a file that outlives it: so that a kill can be counted by where it hit.

One byte a thread in shared memory. Writing it is one assignment, and what was written last is there after `kill -9`.
"""

from __future__ import annotations

import enum
import itertools
import mmap
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_THREADS = 64


class Phase(enum.IntEnum):
    """The deeper, the higher. With a transactional store, a handler runs inside a transaction."""

    IDLE = 0
    HANDLER = 1
    TRANSACTION = 2
    COMMIT = 3
    RELAY = 4
    """What was sent is confirmed, and still in the outbox."""
    APART = 5
    """Of a control: of two things that belong together, one is done and the other is not."""


class Board:
    """The bytes of one worker, written by it and read by the test."""

    def __init__(self, path: Path) -> None:
        if not path.exists():
            path.write_bytes(bytes(_THREADS))
        with path.open("r+b") as file:
            self._bytes = mmap.mmap(file.fileno(), _THREADS)
        self._numbers = itertools.count()
        self._mine = threading.local()

    @property
    def deepest(self) -> Phase:
        return Phase(max(self._bytes[:]))

    def set(self, phase: Phase) -> None:
        """Of the thread that calls."""
        try:
            self._bytes[self._mine.number] = phase
        except AttributeError:
            self._mine.number = next(self._numbers) % _THREADS
            self._bytes[self._mine.number] = phase

    @contextmanager
    def during(self, phase: Phase, after: Phase) -> Iterator[None]:
        self.set(phase)
        try:
            yield
        finally:
            self.set(after)

    def close(self) -> None:
        self._bytes.close()

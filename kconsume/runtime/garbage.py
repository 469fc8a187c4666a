"""How often Python looks for garbage while records are under way.

Its collector looks whenever some hundred more objects are there than before: a quarter of the time that a handler of
PostgreSQL takes, spent on records that are simply not finished yet, and forty milliseconds of everybody's at a time.
Nothing of kconsume's needs it. So while an app has the process to itself (`run`, `catch_up`) it looks less often. Only
the first of Python's three limits is raised, and only where nobody has set it to another than Python's own.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

LIMIT = 20_000
"""Objects; at 5,000 a handler's statements still reach it. In cycles that nobody refers to, so many are some MB."""
_OF_PYTHON = 2_000
"""The most that a version of Python has by itself."""

_guard = threading.Lock()
_apps = 0
_before: tuple[int, int, int] | None = None


@contextmanager
def seldom_collected() -> Iterator[None]:
    """In the block, also where several apps are in theirs."""
    _enter()
    try:
        yield
    finally:
        _leave()


def _enter() -> None:
    global _apps, _before
    with _guard:
        _apps += 1
        first, *others = gc.get_threshold()
        if _apps == 1 and 0 < first <= _OF_PYTHON:
            _before = gc.get_threshold()
            gc.set_threshold(LIMIT, *others)


def _leave() -> None:
    global _apps, _before
    with _guard:
        _apps -= 1
        if _apps == 0 and _before is not None:
            if gc.get_threshold()[0] == LIMIT:  # else somebody has set another meanwhile
                gc.set_threshold(*_before)
            _before = None

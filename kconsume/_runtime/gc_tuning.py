"""Fewer garbage collections while an app is the only work of the process (`run`, `catch_up`).

Python starts a garbage collection each time the number of objects has grown by some hundreds. With a PostgreSQL
handler, collections take a quarter of the time (measured) and stop all threads for forty milliseconds at a time. They
examine records that are not finished yet and free nothing. No object of kconsume needs the collector. Only the first of
Python's three thresholds is raised, and only if it still has Python's default.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

LIMIT = 20_000
"""Limit in objects. At 5,000 the statements of a handler still reach the limit. 20,000 objects in unreferenced cycles
are some MB."""
_PYTHON_DEFAULT = 2_000
"""The highest default limit of any Python version."""

_guard = threading.Lock()
_apps = 0
_before: tuple[int, int, int] | None = None


@contextmanager
def seldom_collected() -> Iterator[None]:
    """Raise the limit inside the block. Several apps may be in such a block; the last to leave restores the limit."""
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
        if _apps == 1 and 0 < first <= _PYTHON_DEFAULT:
            _before = gc.get_threshold()
            gc.set_threshold(LIMIT, *others)


def _leave() -> None:
    global _apps, _before
    with _guard:
        _apps -= 1
        if _apps == 0 and _before is not None:
            if gc.get_threshold()[0] == LIMIT:  # else the user has set another limit in the block
                gc.set_threshold(*_before)
            _before = None

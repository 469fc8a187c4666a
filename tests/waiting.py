"""Wait for a condition with a deadline: the only way a test may wait."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

Seen = TypeVar("Seen")

_LOOK_EVERY_SECONDS = 0.02


def eventually(predicate: Callable[[], Seen], *, within: float = 20.0, what: str) -> Seen:
    """Return the first true answer of `predicate`; fail with `what` and the last answer after `within` s."""
    deadline = time.monotonic() + within
    while not (seen := predicate()):
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {within:g} s: {what}; last seen: {seen!r}")
        time.sleep(_LOOK_EVERY_SECONDS)
    return seen

"""Wait for a condition with a deadline: the only way a test may wait."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

Seen = TypeVar("Seen")

_LOOK_EVERY_SECONDS = 0.02
_SHARE = 5
"""A look that is dear, such as a new connection, is taken less often: what is waited for needs the cores too."""
_LONGEST_PAUSE = 0.5


def eventually(predicate: Callable[[], Seen], *, within: float = 45.0, what: str) -> Seen:
    """Return the first true answer of `predicate`; fail with `what` and the last answer after `within` s."""
    now = time.monotonic()
    deadline = now + within
    while not (seen := predicate()):
        began, now = now, time.monotonic()
        if now > deadline:
            raise AssertionError(f"not within {within:g} s: {what}; last seen: {seen!r}")
        time.sleep(min(max(_LOOK_EVERY_SECONDS, _SHARE * (now - began)), _LONGEST_PAUSE))
        now = time.monotonic()
    return seen

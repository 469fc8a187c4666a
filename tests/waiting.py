"""Wait for a condition with a deadline: the only way a test may wait."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from tests.patience import Patience

Seen = TypeVar("Seen")

_LOOK_EVERY_SECONDS = 0.02
_SHARE = 5
"""A look that is dear, such as a new connection, is taken less often: what is waited for needs the cores too."""
_LONGEST_PAUSE = 0.5


def eventually(predicate: Callable[[], Seen], *, within: float = 45.0, what: str) -> Seen:
    """Return the first true answer of `predicate`; fail with `what` and the last answer after `within` s, or more where
    the machine gives us less than a core."""
    patience, began = Patience(within), time.monotonic()
    while not (seen := predicate()):
        took = time.monotonic() - began
        if patience.look() < 0:
            raise AssertionError(f"not within {within:g} s: {what}; last seen: {seen!r}")
        time.sleep(min(max(_LOOK_EVERY_SECONDS, _SHARE * took), _LONGEST_PAUSE))
        began = time.monotonic()
    return seen

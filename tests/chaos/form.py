"""Short for `make test`, long for `make chaos`: the one place that reads KCONSUME_TEST_CHAOS."""

from __future__ import annotations

import os
import random
from typing import TypeVar

T = TypeVar("T")

LONG = os.environ.get("KCONSUME_TEST_CHAOS") == "long"


def form(*, short: T, long: T) -> T:
    return long if LONG else short


PATIENCE = form(short=100, long=1200)
"""Seconds that a fleet may take to finish its work; the tests' own timeouts are above it."""
TIMEOUT = PATIENCE + 60


def printed_seed() -> random.Random:
    """Chance that can be had again: KCONSUME_TEST_CHAOS_SEED=… repeats a run, as far as processes can be repeated."""
    seed = int(os.environ.get("KCONSUME_TEST_CHAOS_SEED") or random.randrange(2**32))
    print(f"seed={seed}")  # noqa: T201  (shown when the test fails)
    return random.Random(seed)

"""The clicks of one day. Pure: they depend only on the seed, so the generator and the checker get the same clicks."""

from __future__ import annotations

import random
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

from .clicks import Click

PAGES = {"/": 30, "/search": 22, "/article": 19, "/cart": 11, "/account": 8, "/checkout": 6, "/help": 4}
"""The share of each page in the clicks, in percent."""
HOURS = (3, 2, 1, 1, 1, 2, 4, 8, 12, 14, 15, 17, 20, 16, 14, 13, 13, 14, 17, 21, 22, 17, 10, 5)
"""The weight of each hour of the day."""
DAY = datetime(2026, 3, 2, tzinfo=UTC)
_VISITORS = 500
_MICROSECONDS = 3_600_000_000


def day(clicks: int, seed: int) -> Iterator[Click]:
    """Yield `clicks` clicks, numbered from 0 in the order of their time."""
    dice = random.Random(seed)
    hours = dice.choices(range(24), HOURS, k=clicks)
    moments = sorted(timedelta(hours=hour, microseconds=dice.randrange(_MICROSECONDS)) for hour in hours)
    pages = dice.choices(list(PAGES), list(PAGES.values()), k=clicks)
    for number, (moment, page) in enumerate(zip(moments, pages, strict=True)):
        visitor = f"visitor-{dice.randrange(_VISITORS)}"
        yield Click(number, visitor, page, DAY + moment, round(dice.lognormvariate(4.5, 0.6)))

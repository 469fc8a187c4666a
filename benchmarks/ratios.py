"""What the figures of paired rounds say: ratio or difference, range, and whether a bar is met.

Pure: numbers in, numbers and words out. Never averages the sides first: a machine that was slow for one round
was slow for both sides of it, so only what is compared inside a round is comparable with that of another.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import NamedTuple


class Bar(NamedTuple):
    """What the median ratio must reach, or must not exceed."""

    limit: float
    at_least: bool = True
    digits: int = 2
    """How exactly ratios are written; a bar next to 1 needs more."""
    unit: str = ""
    """Set where the bar is how much more ours may be than theirs, and not their ratio: what is added to nothing
    at all has no ratio worth a name."""

    def compare(self, ours: float, theirs: float) -> float:
        return ours - theirs if self.unit else ours / theirs

    def met_by(self, compared: float) -> bool:
        return compared >= self.limit if self.at_least else compared <= self.limit

    def text(self, compared: float) -> str:
        return f"{compared:+,.0f} {self.unit}" if self.unit else f"{compared:.{self.digits}f}"

    def range(self, low: float, high: float) -> str:
        return f"{low:+,.0f}–{high:+,.0f}" if self.unit else f"{self.text(low)}–{self.text(high)}"

    def __str__(self) -> str:
        limit = f"{self.limit:+g} {self.unit}" if self.unit else f"{self.limit:g}"
        return f"{'≥' if self.at_least else '≤'} {limit}"


class Spread(NamedTuple):
    """The ratios, or differences, of all rounds: their median, and the lowest and the highest."""

    median: float
    low: float
    high: float


def spread(pairs: Sequence[tuple[float, float]], bar: Bar) -> Spread:
    """Of (ours, theirs) in each round. At least one round, and no figure of zero: that was no measurement."""
    if not pairs or any(figure <= 0 for pair in pairs for figure in pair):
        raise ValueError(f"nothing to compare in {list(pairs)!r}: each round needs two figures above zero")
    each = [bar.compare(ours, theirs) for ours, theirs in pairs]
    return Spread(median(each), min(each), max(each))

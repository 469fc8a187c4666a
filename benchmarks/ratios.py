"""What the figures of paired rounds say: ratio, range, and whether a bar is met.

Pure: numbers in, numbers and words out. Never averages the sides first: a machine that was slow for one round
was slow for both sides of it, so only the ratio inside a round is comparable with that of another.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import NamedTuple


class Bar(NamedTuple):
    """What the median ratio must reach, or must not exceed."""

    limit: float
    at_least: bool = True

    def met_by(self, ratio: float) -> bool:
        return ratio >= self.limit if self.at_least else ratio <= self.limit

    def __str__(self) -> str:
        return f"{'≥' if self.at_least else '≤'} {self.limit:g}"


class Ratios(NamedTuple):
    """The ratios of all rounds: their median, and the lowest and the highest."""

    median: float
    low: float
    high: float


def ratios(pairs: Sequence[tuple[float, float]]) -> Ratios:
    """Of (ours, theirs) in each round. At least one round, and no figure of zero: that was no measurement."""
    if not pairs or any(figure <= 0 for pair in pairs for figure in pair):
        raise ValueError(f"no ratio of {list(pairs)!r}: each round needs two figures above zero")
    each = [ours / theirs for ours, theirs in pairs]
    return Ratios(median(each), min(each), max(each))

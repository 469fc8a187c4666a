"""The comparison of paired rounds: ratio or difference, range, and whether a bar is met.

Pure. The two sides are compared inside each round, and then the median of the rounds is taken. Averaging each side
first would be wrong, because the speed of the machine differs between rounds.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import NamedTuple


class Bar(NamedTuple):
    """The limit that the median ratio must reach, or must not exceed."""

    limit: float
    at_least: bool = True
    digits: int = 2
    """The decimal places of ratios. A bar close to 1 needs more decimal places."""
    unit: str = ""
    """The unit, if the bar is a difference. Used if the other side does nothing, because a ratio would mean nothing."""

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
    """The median, the lowest and the highest ratio (or difference) of all rounds."""

    median: float
    low: float
    high: float


def spread(pairs: Sequence[tuple[float, float]], bar: Bar) -> Spread:
    """Compare the two figures (ours, theirs) of each round. Raises if there is no round, or if a figure is zero."""
    if not pairs or any(figure <= 0 for pair in pairs for figure in pair):
        raise ValueError(f"nothing to compare in {list(pairs)!r}: each round needs two figures above zero")
    each = [bar.compare(ours, theirs) for ours, theirs in pairs]
    return Spread(median(each), min(each), max(each))

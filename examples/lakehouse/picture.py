"""Draws the clicks that both sides stored, as a PNG file. Does not check them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import UTC
from pathlib import Path
from typing import Literal

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, StrMethodFormatter

from .clicks import Click

COLOURS = ("#1f6f8b", "#e08e45")
_SHARE = 0.8
"""The width of the bars, as a share of the width of an hour (or of the height of a page)."""

Sides = Mapping[str, Sequence[Click]]
"""The clicks of each side, by its name in the legend."""


def draw(sides: Sides, title: str, file: Path) -> None:
    # `Figure` is used without pyplot, so that no window opens and no figure stays in memory.
    figure = Figure(figsize=(12, 5.2), layout="constrained")
    hours, pages = figure.subplots(1, 2, width_ratios=[3, 2])
    _draw_hours(hours, sides)
    _draw_pages(pages, sides)
    figure.suptitle(title, fontsize=14, fontweight="bold")
    figure.legend(*hours.get_legend_handles_labels(), loc="outside lower center", ncols=len(sides), frameon=False)
    figure.savefig(file, dpi=120)


def _draw_hours(axes: Axes, sides: Sides) -> None:
    width = _SHARE / len(sides)
    for place, (name, clicks) in enumerate(sides.items()):
        counts = Counter(click.at.astimezone(UTC).hour for click in clicks)
        at = [hour + 0.5 + (place - (len(sides) - 1) / 2) * width for hour in range(24)]
        axes.bar(at, [counts[hour] for hour in range(24)], width, label=name, color=COLOURS[place])
    axes.set(title="Clicks by hour", xlabel="hour of the day (UTC)", ylabel="clicks", xlim=(0, 24))
    axes.set_xticks(range(0, 25, 3), [f"{hour:02}:00" for hour in range(0, 25, 3)])
    _make_readable(axes, "y")


def _draw_pages(axes: Axes, sides: Sides) -> None:
    totals = [Counter(click.page for click in clicks) for clicks in sides.values()]
    pages = [page for page, _ in sum(totals, Counter[str]()).most_common()]
    height = _SHARE / len(sides)
    for place, counts in enumerate(totals):
        at = [row + (place - (len(sides) - 1) / 2) * height for row in range(len(pages))]
        bars = axes.barh(at, [counts[page] for page in pages], height, color=COLOURS[place])
        axes.bar_label(bars, fmt="{:,.0f}", padding=3, fontsize=8)
    axes.set(title="Clicks by page", xlabel="clicks")
    axes.set_yticks(range(len(pages)), pages)
    axes.invert_yaxis()  # the page with the most clicks on top
    axes.margins(x=0.14)  # space for the numbers beside the bars
    _make_readable(axes, "x")


def _make_readable(axes: Axes, counts: Literal["x", "y"]) -> None:
    """Show whole numbers on the axis of the counts, thin grid lines behind the bars, and no frame at the top."""
    axis = axes.xaxis if counts == "x" else axes.yaxis
    axis.set_major_locator(MaxNLocator(6, integer=True))
    axis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    axes.grid(axis=counts, color="#dddddd", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)

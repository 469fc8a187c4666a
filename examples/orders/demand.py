"""The orders, and the entries that they must cause. Pure: the load generator and the checker get the same values.

The content of an order follows from its number, so no list of the placed orders is needed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from .events import Placed

CATALOGUE = ("cup", "pot", "pan", "jug", "bowl", "lid", "tray", "mug")
UNKNOWN = "unicorn"


def order(number: int) -> Placed:
    """Return the content of an order. One order of twenty is for an unknown article."""
    sku = UNKNOWN if number % 20 == 7 else CATALOGUE[number * 7 % len(CATALOGUE)]
    return Placed(number, sku, 1 + number % 5)


def is_cancelled(number: int) -> bool:
    """True for one order of ten, which is cancelled right after it was placed."""
    return number % 10 == 3


def is_busy_for(number: int) -> bool:
    """True for one order of thirty: the office refuses the first request for its letter."""
    return number % 30 == 11


def numbers(orders: int) -> Iterable[int]:
    return range(1, orders + 1)


def unfilled(orders: int) -> Counter[int]:
    return Counter(number for number in numbers(orders) if order(number).sku == UNKNOWN)


def ledger(orders: int) -> Counter[tuple[int, int]]:
    """Count the lines (number, quantity). A reservation has one, and a cancellation one with a negative quantity."""
    lines: Counter[tuple[int, int]] = Counter()
    for number in numbers(orders):
        placed = order(number)
        if placed.sku != UNKNOWN:
            lines[number, placed.quantity] += 1
            if is_cancelled(number):
                lines[number, -placed.quantity] += 1
    return lines


def reserved(orders: int) -> Counter[str]:
    """Return the number of reserved pieces by article."""
    pieces: Counter[str] = Counter()
    for (number, quantity), times in ledger(orders).items():
        pieces[order(number).sku] += quantity * times
    return pieces


def events(orders: int) -> Counter[tuple[int, str]]:
    """Count the events (number, state): one for each line of the ledger."""
    return Counter((number, "reserved" if quantity > 0 else "released") for number, quantity in ledger(orders))

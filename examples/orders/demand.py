"""The orders, and the entries that they must cause. Pure: the load generator and the checker get the same values.

The content of order 1 to order N follows from its number, so no list of the placed orders is needed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from .events import Placed

CATALOGUE = ("cup", "pot", "pan", "jug", "bowl", "lid", "tray", "mug")
UNKNOWN = "unicorn"


def order(number: int) -> Placed:
    """The content of an order. One of twenty is for an unknown article."""
    sku = UNKNOWN if number % 20 == 7 else CATALOGUE[number * 7 % len(CATALOGUE)]
    return Placed(number, sku, 1 + number % 5)


def is_cancelled(number: int) -> bool:
    """One of ten orders is cancelled right after it was placed."""
    return number % 10 == 3


def is_busy_for(number: int) -> bool:
    """For one letter of thirty, the office refuses the first request."""
    return number % 30 == 11


def numbers(orders: int) -> Iterable[int]:
    return range(1, orders + 1)


def unfilled(orders: int) -> Counter[int]:
    return Counter(number for number in numbers(orders) if order(number).sku == UNKNOWN)


def ledger(orders: int) -> Counter[tuple[int, int]]:
    """(number, quantity): one line for a reservation, and one with a negative quantity for its cancellation."""
    lines: Counter[tuple[int, int]] = Counter()
    for number in numbers(orders):
        placed = order(number)
        if placed.sku != UNKNOWN:
            lines[number, placed.quantity] += 1
            if is_cancelled(number):
                lines[number, -placed.quantity] += 1
    return lines


def reserved(orders: int) -> Counter[str]:
    """Pieces by article."""
    pieces: Counter[str] = Counter()
    for (number, quantity), times in ledger(orders).items():
        pieces[order(number).sku] += quantity * times
    return pieces


def events(orders: int) -> Counter[tuple[int, str]]:
    """(number, state): one event for each line of the ledger."""
    return Counter((number, "reserved" if quantity > 0 else "released") for number, quantity in ledger(orders))

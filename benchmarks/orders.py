"""The records that are consumed: JSON orders of about 120 bytes, between two marks.

A partition holds, in this order:

    mark · orders · mark · 1000 orders that do not count

A *mark* is a record that a handler recognises with almost no work: an empty value for handlers of bytes, a quantity of
zero for typed ones. The first handled mark starts the clock, and the last one stops it (`marks.py`). The orders after
the last mark exist because `consume(1000, 0.1)` waits 0.1 s if fewer than 1000 records are left. Without these orders
the time of the bare loop would include that wait.

Pure: returns values, writes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import msgspec

PARTITIONS = 4
MARKS = 2 * PARTITIONS
LEAD_OUT = 1000

Form = Literal["bytes", "typed"]


class Order(msgspec.Struct):
    """The payload type of typed handlers. An order with a quantity of zero is a mark."""

    id: int
    sku: str
    quantity: int
    customer: str
    cents: int
    placed: str


_ORDER = (
    b'{"id":%d,"sku":"SKU-%05d","quantity":%d,"customer":"customer-%06d",'
    b'"cents":%d,"placed":"2026-01-05T10:%02d:%02dZ"}'
)


def counted(records: int) -> int:
    """Return the number of orders between the marks: `records`, rounded down to a multiple of the partitions."""
    return records // PARTITIONS * PARTITIONS


def total(records: int) -> int:
    """Return how many records the topic has, including the marks and the orders after the last mark."""
    return counted(records) + MARKS + PARTITIONS * LEAD_OUT


def values(partition: int, records: int, form: Form) -> Iterator[bytes]:
    """Yield all values of one partition. No two orders of a topic are equal."""
    mark = b"" if form == "bytes" else _order(0, quantity=0)
    here = records // PARTITIONS
    first = 1 + partition * (here + LEAD_OUT)
    yield mark
    yield from map(_order, range(first, first + here))
    yield mark
    yield from map(_order, range(first + here, first + here + LEAD_OUT))


def _order(number: int, quantity: int | None = None) -> bytes:
    wanted = 1 + number % 9 if quantity is None else quantity
    return _ORDER % (
        number, number % 50_000, wanted, number % 1_000_000, number % 90_000, number // 60 % 60, number % 60,
    )  # fmt: skip

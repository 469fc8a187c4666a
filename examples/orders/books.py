"""Compares the tables with the entries that the orders must have caused.

A book is the result for one table. It balances if no entry is missing and none is too much. This file only reads the
tables, and compares them entry by entry. No table has a key that would hide a duplicate entry.

    python -m examples.orders.books postgresql://localhost/shop 600
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg
from rich.console import Console
from rich.table import Table

from . import demand

SCHEMA = Path(__file__).with_name("schema.sql").read_text()


@dataclass(frozen=True)
class Book:
    """The result for one table: how many entries are expected, how many are missing, and how many are too much."""

    name: str
    expected: int
    missing: int
    too_much: int

    @property
    def balances(self) -> bool:
        return not self.missing and not self.too_much


@dataclass(frozen=True)
class Witness:
    """How often work was repeated. If these numbers are zero, the kills have tested nothing."""

    retried: int
    asked_again: int
    repeats: int


def prepare(database: str) -> None:
    """Create the tables of the shop, with every article of the catalogue."""
    with psycopg.connect(database) as shop:
        shop.execute(SCHEMA.encode())
        for sku in demand.CATALOGUE:
            shop.execute("insert into stock (sku) values (%s)", (sku,))


def open_books(shop: psycopg.Connection, orders: int) -> list[Book]:
    return [
        _compare("orders accepted", Counter(demand.numbers(orders)), shop, "select number from orders"),
        _compare("lines in the ledger", demand.ledger(orders), shop, "select number, quantity from ledger"),
        _compare("pieces reserved", demand.reserved(orders), shop, "select sku, reserved from stock", counts=True),
        _compare("orders for unknown articles", demand.unfilled(orders), shop, _UNFILLED),
        _compare("answers recorded", _answers(orders), shop, _ANSWERS, counts=True),
        _compare("letters", demand.events(orders), shop, _LETTERS),
        _compare("events not sent yet", Counter(), shop, "select id from kconsume_outbox"),
    ]


_ANSWERS = "select number, answers from orders where answers > 0"
_UNFILLED = "select (convert_from(value, 'UTF8')::json ->> 'number')::int from unfilled"
_LETTERS = "select number, case when text like '%cancelled%' then 'released' else 'reserved' end from letters"


def witness(shop: psycopg.Connection) -> Witness:
    row = shop.execute(
        "select (select count(*) from ledger where attempt > 1), (select sum(asked - 1) from letters),"
        " (select sum(next_offset) from kconsume_offsets where group_id like '%inventory')"
        " - (select count(*) from kconsume_seen where group_id like '%inventory')"
    ).fetchone()
    assert row is not None
    return Witness(*(int(number or 0) for number in row))


def show(books: Sequence[Book], console: Console) -> bool:
    """Print the table. Returns whether all books balance."""
    table = Table("book", "expected", "missing", "too much", "", title="The books")
    for column in table.columns[1:4]:
        column.justify = "right"
    for book in books:
        verdict = "[green]balances[/]" if book.balances else "[bold red]does not balance[/]"
        table.add_row(book.name, f"{book.expected:,}", f"{book.missing:,}", f"{book.too_much:,}", verdict)
    console.print(table)
    return all(book.balances for book in books)


def _answers(orders: int) -> Counter[int]:
    answers: Counter[int] = Counter()
    for (number, _), times in demand.events(orders).items():
        answers[number] += times
    return answers


def _compare(
    name: str, expected: Mapping[Any, int], shop: psycopg.Connection, query: str, *, counts: bool = False
) -> Book:
    """counts: the last column of the query is the number of times that the entry is there."""
    found: Counter[Hashable] = Counter()
    for row in _rows(shop, query):
        entry, times = (row[:-1], row[-1]) if counts else (row, 1)
        found[entry[0] if len(entry) == 1 else entry] += times
    wanted: Counter[Hashable] = Counter(expected)
    return Book(name, wanted.total(), (wanted - found).total(), (found - wanted).total())


def _rows(shop: psycopg.Connection, query: str) -> list[tuple[Any, ...]]:
    try:
        return shop.execute(query.encode()).fetchall()
    except psycopg.errors.UndefinedTable:
        return []  # kconsume creates its tables when they are first needed


def main(database: str, orders: str) -> int:
    with psycopg.connect(database, autocommit=True) as shop:
        return 0 if show(open_books(shop, int(orders)), Console()) else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

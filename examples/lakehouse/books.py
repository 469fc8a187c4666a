"""Compares the stored clicks with the sent clicks, one by one. A book balances if both are equal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from rich.console import Console
from rich.table import Table

from .clicks import Click

Kept = TypeVar("Kept", bound=Hashable)


@dataclass(frozen=True)
class Book:
    """How many clicks were sent, how many are stored, and by how many they differ."""

    name: str
    sent: int
    rows: int
    distinct: int | None
    """The number of different clicks. None for totals, which do not contain single clicks."""
    missing: int
    too_much: int

    @property
    def balances(self) -> bool:
        return not self.missing and not self.too_much


def of_clicks(name: str, sent: Sequence[Click], kept: Sequence[Click]) -> Book:
    return _compare(name, Counter(sent), Counter(kept), len(set(kept)))


def of_pages(name: str, sent: Sequence[Click], totals: Counter[str]) -> Book:
    return _compare(name, Counter(click.page for click in sent), totals, None)


def show(books: Sequence[Book], console: Console) -> bool:
    """Print the table. Returns whether all books balance."""
    table = Table("book", "sent", "rows", "distinct", "missing", "too much", "", title="The books")
    for column in table.columns[1:6]:
        column.justify = "right"
    for book in books:
        distinct = "–" if book.distinct is None else f"{book.distinct:,}"
        counts = f"{book.sent:,}", f"{book.rows:,}", distinct, f"{book.missing:,}", f"{book.too_much:,}"
        table.add_row(book.name, *counts, "[green]balances[/]" if book.balances else "[bold red]does not balance[/]")
    console.print(table)
    return all(book.balances for book in books)


def _compare(name: str, sent: Counter[Kept], kept: Counter[Kept], distinct: int | None) -> Book:
    return Book(name, sent.total(), kept.total(), distinct, (sent - kept).total(), (kept - sent).total())

"""How commands show records, bytes, times and tables on a terminal: one style for all of them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from datetime import datetime

import click

from kconsume._kafka.topic_reader import RecordPlace
from kconsume.records import Record

LONGEST = 2000
"""How many characters of a payload are printed."""


def show_record(place: RecordPlace, record: Record) -> None:
    """Print a record with its time, key, headers and value."""
    at = "no timestamp" if record.timestamp is None else record.timestamp.isoformat(" ", "milliseconds")
    click.echo(f"{place}  {at}")
    click.echo(f"  key      {plain(readable(record.key))}")
    for name, value in record.headers:
        click.echo(f"  header   {plain(name)} = {plain(readable(value))}")
    click.echo(f"  value    {plain(readable(record.value))}")


def readable(data: bytes | None) -> str:
    """Bytes as text if they are UTF-8, or else as their `repr`; cut after `LONGEST` characters."""
    if data is None:
        return "(null)"
    try:
        text = data.decode()
    except UnicodeDecodeError:
        text = repr(data[:LONGEST])
    text = text if text.isprintable() or not text.isascii() else repr(text)[1:-1]
    return text if len(text) <= LONGEST else f"{text[:LONGEST]} … ({len(data):,} bytes in all)"


def plain(text: str) -> str:
    """Escape control characters. In a text from a record, they could send commands to the terminal."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def moment(at: datetime | None) -> str:
    """A time in UTC, to the second; `?` if it is unknown."""
    return "?" if at is None else f"{at:%Y-%m-%d %H:%M:%S}"


def table(
    headings: Sequence[str], rows: Sequence[Sequence[str]], *, right: Collection[int] = (), indent: int = 0
) -> Iterator[str]:
    """The lines of a table: two spaces between columns, nothing cut, so that a script can read them.

    Args:
        headings: one for each column; a column whose text may be long comes last.
        right: the numbers of the columns that are aligned to the right, counted from 0.
        indent: how many spaces each line begins with.
    """
    widths = [max(map(len, column)) for column in zip(headings, *rows, strict=True)]
    for number, row in enumerate([headings, *rows]):
        cells = [
            cell.rjust(width) if at in right else cell.ljust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        line = (" " * indent + "  ".join(cells)).rstrip()
        yield click.style(line, dim=True) if number == 0 else line


def counted(number: int, noun: str) -> str:
    """`1 row`, `2 rows`: a number with its noun."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"

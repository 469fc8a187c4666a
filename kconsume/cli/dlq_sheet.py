"""What `kconsume dlq` says: the values that `--json` prints, and how they look on a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime
from typing import Literal

import click
import msgspec

from kconsume.failures.letters import Letter

_LONGEST = 2000
"""Characters that are printed of a payload; `--json` has all of it."""


class Cause(msgspec.Struct):
    """The dead letters of one topic that failed for one cause."""

    topic: str
    """Where the records came from."""
    cause: str
    count: int
    first: datetime | None
    last: datetime | None
    example: str
    """What `dlq show` takes for one of them."""


class Looked(msgspec.Struct):
    """A topic or a table of dead letters."""

    name: str
    kind: Literal["topic", "table"]
    store: str | None
    """The address of a table's store."""
    times: Literal["record", "failure"]
    """What `first` and `last` are the times of. A topic keeps the record's own, and not when it failed."""
    total: int
    causes: list[Cause]
    others: int = 0
    """Records of the topic that are no dead letters."""
    said: str | None = None
    """Why there are none, where that is known."""


class Listing(msgspec.Struct):
    """All that `dlq list` has to say; printed as it is with `--json`."""

    total: int
    places: list[Looked]


class Data(msgspec.Struct, omit_defaults=True):
    """Bytes: as text, if they are UTF-8, or else in hex."""

    text: str | None = None
    hex: str | None = None


class Shown(msgspec.Struct):
    """One dead letter; printed as it is with `--json`."""

    place: str
    record: str
    """Where it came from first, as in orders/3@1042."""
    origin: str
    """Its `Record.id`."""
    group: str
    attempts: int
    exception: str
    message: str
    trace: str
    key: Data | None
    value: Data | None
    headers: list[tuple[str, Data]]
    timestamp: datetime | None
    """Of the record."""
    failed_at: datetime | None
    """None in a topic, which does not say."""
    test: str | None = None
    """The file that was written."""


def shown_of(place: str, letter: Letter, failed_at: datetime | None) -> Shown:
    return Shown(
        place=place,
        record=f"{letter.partition}@{letter.offset}",
        origin=letter.origin,
        group=letter.group,
        attempts=letter.attempts,
        exception=letter.exception,
        message=letter.message,
        trace=letter.trace,
        key=_data(letter.key),
        value=_data(letter.value),
        headers=[(name, _data(value) or Data()) for name, value in letter.headers],
        timestamp=letter.timestamp,
        failed_at=failed_at,
    )


def _data(data: bytes | None) -> Data | None:
    if data is None:
        return None
    try:
        return Data(text=data.decode())
    except UnicodeDecodeError:
        return Data(hex=data.hex())


def print_list(listing: Listing) -> None:
    for looked in listing.places:
        where = looked.kind if looked.store is None else f"{looked.kind} in {looked.store}"
        click.echo(f"{click.style(looked.name, bold=True)}  {where}; times in UTC, of the {looked.times}")
        for line in _columns(looked.causes):
            click.echo(f"  {line}")
        if looked.said:
            click.echo(f"  {looked.said}")
        if looked.others:
            click.echo(f"  without a header kconsume-origin, and so no dead letters: {looked.others} more")
        click.echo()
    click.echo(f"total {listing.total} dead letter{'' if listing.total == 1 else 's'}")


def _columns(causes: Sequence[Cause]) -> Iterator[str]:
    """The cause comes last: it may be longer than any terminal is wide, and a person copies the example."""
    if not causes:
        return
    rows = [("count", "from", "first", "last", "for example", "cause")]
    rows += [(str(c.count), _plain(c.topic), _time(c.first), _time(c.last), c.example, _plain(c.cause)) for c in causes]
    count, *widths = (max(map(len, column)) for column in zip(*rows, strict=True))
    for first, *others in rows:
        padded = (cell.ljust(width) for cell, width in zip(others, widths, strict=True))
        yield "  ".join((first.rjust(count), *padded)).rstrip()


def _time(at: datetime | None) -> str:
    return "?" if at is None else f"{at:%Y-%m-%d %H:%M:%S}"


def print_letter(shown: Shown) -> None:
    at = "" if shown.failed_at is None else f", at {_time(shown.failed_at)} UTC"
    click.echo(f"{shown.place}  from {shown.record}, failed in group {shown.group} (attempts: {shown.attempts}){at}")
    click.echo(f"  error    {_plain(shown.exception)}: {_cut(_plain(shown.message))}")
    click.echo(f"  time     {_time(shown.timestamp)}")
    click.echo(f"  key      {_readable(shown.key)}")
    for name, value in shown.headers:
        click.echo(f"  header   {_plain(name)} = {_readable(value)}")
    click.echo(f"  value    {_readable(shown.value)}")
    for line in shown.trace.rstrip().splitlines():
        click.echo(f"  {_plain(line)}")
    if shown.test is not None:
        click.echo(f"written to {shown.test}: it fails until the handler takes this record")


def _readable(data: Data | None) -> str:
    if data is None:
        return "(null)"
    return _cut(_plain(data.text)) if data.text is not None else f"(hex) {_cut(data.hex or '')}"


def _cut(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]} … ({len(text):,} characters in all; --json has them)"


def _plain(text: str) -> str:
    """Without what would do something to a terminal: anybody may have written it."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)

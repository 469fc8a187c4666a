"""What `kconsume dlq` prints: the values that `--json` prints, and how they look on a terminal."""

from __future__ import annotations

from datetime import datetime
from typing import Literal

import click
import msgspec

from kconsume.cli.render import LONGEST, counted, moment, plain, table
from kconsume.failures.letter_headers import Letter


class CauseRow(msgspec.Struct):
    """The dead letters of one topic that failed for one cause."""

    topic: str
    """The topic of the records."""
    cause: str
    count: int
    first: datetime | None
    last: datetime | None
    example: str
    """The place of one such letter, for `dlq show`."""
    sent_back: int = 0
    """How many of these letters were sent back, and have not failed since."""


class LookedAt(msgspec.Struct):
    """A topic or a table of dead letters."""

    name: str
    kind: Literal["topic", "table"]
    store: str | None
    """The address of a table's store."""
    times: Literal["record", "failure"]
    """Whether `first` and `last` are times of the record (in a topic) or of the failure (in a table)."""
    total: int
    causes: list[CauseRow]
    others: int = 0
    """The number of records of the topic that are not dead letters."""
    said: str | None = None
    """Why there are no letters, if that is known."""


class LetterListing(msgspec.Struct):
    """The result of `dlq list`, which `--json` prints."""

    total: int
    places: list[LookedAt]


class Data(msgspec.Struct, omit_defaults=True):
    """Bytes as text if they are UTF-8, or else in hex."""

    text: str | None = None
    hex: str | None = None


class ShownLetter(msgspec.Struct):
    """The result of `dlq show`, which `--json` prints."""

    place: str
    record: str
    """The place of the original record, as in orders/3@1042."""
    origin: str
    """The `Record.id` of the original record."""
    group: str
    attempts: int
    exception: str
    message: str
    trace: str
    key: Data | None
    value: Data | None
    headers: list[tuple[str, Data]]
    timestamp: datetime | None
    """The time of the record."""
    failed_at: datetime | None
    """The time of the failure. None for a letter in a topic, which does not keep this time."""
    test: str | None = None
    """The file that was written with `--as-test`."""
    sent_back: bool = False
    """True if the letter was sent back, and the record has not failed since."""


class PurgedPlace(msgspec.Struct):
    """A topic or a table whose dead letters are deleted."""

    name: str
    kind: Literal["topic", "table"]
    store: str | None
    """The address of a table's store."""
    letters: int = 0
    """The number of all dead letters of the place."""
    selected: int = 0
    """The number of dead letters that are deleted, or would be."""
    behind: int = 0
    """In a topic: letters that match the options but stay, because they are behind a record that stays."""
    deleted: int | None = None
    """How many letters were deleted; None in a dry run."""
    said: str | None = None
    """Why there are no letters, if that is known."""


class Purges(msgspec.Struct):
    """The result of `dlq purge`, which `--json` prints."""

    deleted: bool
    """False in a dry run."""
    selected: int
    places: list[PurgedPlace]


def shown_of(place: str, letter: Letter, failed_at: datetime | None, *, sent_back: bool) -> ShownLetter:
    return ShownLetter(
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
        sent_back=sent_back,
    )


def _data(data: bytes | None) -> Data | None:
    if data is None:
        return None
    try:
        return Data(text=data.decode())
    except UnicodeDecodeError:
        return Data(hex=data.hex())


def print_list(listing: LetterListing) -> None:
    for looked in listing.places:
        click.echo(f"{place_title(looked)}; times in UTC, of the {looked.times}")
        if looked.causes:
            _print_causes(looked)
        if looked.said:
            click.echo(f"  {looked.said}")
        if looked.others:
            click.echo(f"  other records, without the header kconsume-origin of a dead letter: {looked.others}")
        click.echo()
    sent = sum(cause.sent_back for looked in listing.places for cause in looked.causes)
    total = f"total {counted(listing.total, 'dead letter')}"
    click.echo(f"{total}, {sent} of them sent back" if sent else total)


def _print_causes(looked: LookedAt) -> None:
    headings = ("count", "sent back", "from", "first", "last", "for example", "cause")
    rows = [
        (
            str(cause.count),
            str(cause.sent_back),
            plain(cause.topic),
            moment(cause.first),
            moment(cause.last),
            cause.example,
            plain(cause.cause),
        )
        for cause in looked.causes
    ]
    for line in table(headings, rows, right={0, 1}, indent=2):
        click.echo(line)


def place_title(place: LookedAt | PurgedPlace) -> str:
    where = place.kind if place.store is None else f"{place.kind} in {place.store}"
    return f"{click.style(place.name, bold=True)}  {where}"


def print_letter(shown: ShownLetter) -> None:
    at = "" if shown.failed_at is None else f", at {moment(shown.failed_at)} UTC"
    click.echo(f"{shown.place}  from {shown.record}, failed in group {shown.group} (attempts: {shown.attempts}){at}")
    if shown.sent_back:
        click.echo(f"  it was sent back to group {shown.group}, and has not failed since")
    click.echo(f"  error    {plain(shown.exception)}: {_cut(plain(shown.message))}")
    click.echo(f"  time     {moment(shown.timestamp)}")
    click.echo(f"  key      {_readable(shown.key)}")
    for name, value in shown.headers:
        click.echo(f"  header   {plain(name)} = {_readable(value)}")
    click.echo(f"  value    {_readable(shown.value)}")
    for line in shown.trace.rstrip().splitlines():
        click.echo(f"  {plain(line)}")
    if shown.test is not None:
        click.echo(f"test written to {shown.test}: it fails until the handler handles this record")


def _readable(data: Data | None) -> str:
    if data is None:
        return "(null)"
    return _cut(plain(data.text)) if data.text is not None else f"(hex) {_cut(data.hex or '')}"


def _cut(text: str) -> str:
    return text if len(text) <= LONGEST else f"{text[:LONGEST]} … ({len(text):,} characters in all; --json prints them)"


def print_purges(purges: Purges) -> None:
    for place in purges.places:
        click.echo(place_title(place))
        if place.said:
            click.echo(f"  {place.said}")
        elif place.deleted is None:
            click.echo(f"  would delete {place.selected} of {counted(place.letters, 'letter')}")
        else:
            click.echo(f"  deleted {place.deleted} of {counted(place.letters, 'letter')}")
        if place.behind:
            click.echo(
                f"  {place.behind} more stay: they are behind a record that stays, and Kafka deletes from the "
                f"beginning of a partition only; the topic's retention deletes them later"
            )
        click.echo()
    if purges.deleted:
        deleted = sum(place.deleted or 0 for place in purges.places)
        click.echo(f"total {counted(deleted, 'dead letter')} deleted")
    elif purges.selected:
        click.echo(f"nothing was deleted: add --yes to delete {purges.selected}")
    else:
        click.echo("nothing to delete")

"""`kconsume outbox`: shows the rows that wait in the outbox and what blocks them, and removes rows.

`cli/outbox/rows.py` finds the rows, and why the cluster would refuse them. A row is removed from the table at once. A
running app reads a refused row again before each attempt, so it neither sends a removed row nor waits for it.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from datetime import UTC, datetime

import click
import msgspec

from kconsume.backends.outbox.reader import WaitingRow
from kconsume.cli.command_group import CommandGroup
from kconsume.cli.options import json_option, optional_app_argument, source_options, yes_option
from kconsume.cli.outbox.rows import Reasons, numbers_in, source_of, write_letters
from kconsume.cli.render import counted
from kconsume.errors import ConfigurationError

_FIRST = 5
"""How many rows of a topic are shown without `--all`."""
_RUNNING = "a running app may be sending the row, and its record may still arrive"


class OutboxRow(msgspec.Struct):
    """A row that waits, as `--json` prints it."""

    row: int
    group: str
    """Empty for a row of `Outbox.send`."""
    partition: str | None
    """The partition of the record whose handler wrote the row, as in orders/3."""
    topic: str
    """The topic that the row is sent to."""
    origin: str | None
    bytes: int
    at: datetime
    """When the row was written."""
    age: float
    """Seconds since the row was written."""
    blocked: str | None
    """Why the cluster would refuse the row, if this is known without sending the row."""


class OutboxListing(msgspec.Struct):
    """The result of `outbox list`, which `--json` prints."""

    store: str
    total: int
    rows: list[OutboxRow]
    unknown: str | None
    """Why the reasons are not known; None if they are known."""


class OutboxDecision(msgspec.Struct):
    """What was done about a row, or would be done."""

    row: OutboxRow
    action: str
    done: bool
    place: str | None = None
    """The place of the row's dead letter."""


@click.group(cls=CommandGroup, short_help="Rows that have not been sent: show, drop, dead-letter.")
def outbox() -> None:
    """Rows of the outbox that have not been sent yet. Only stores in PostgreSQL and SQLite have an outbox.

    \b
      kconsume outbox list shop:app                   show the rows that wait, and the reason
      kconsume outbox drop shop:app 812 --yes         never send row 812
      kconsume outbox dead-letter shop:app 812 --to orders.dlq --yes
                                                      write row 812 to that topic instead
      kconsume outbox list --offsets postgresql://localhost/shop --group shop --brokers localhost:9092

    A row that the cluster refuses blocks later rows of its partition to the same topic. The app sends the row and later
    rows by itself when the topic is created, or its max.message.bytes is raised.
    """


@outbox.command("list", short_help="Show the rows that wait, and the reason.")
@optional_app_argument
@source_options("the outbox")
@json_option
@click.option("--all", "everything", is_flag=True, help=f"Show every row, not only the first {_FIRST} of each topic.")
def list_rows(
    app: str | None, brokers: str | None, group: str | None, offsets: str | None, everything: bool, as_json: bool
) -> None:
    """Show the rows that wait in the outbox, by group, partition and topic, and why they wait.

    Changes nothing. Asks the cluster why it would refuse a row: the topic does not exist, or the row is larger than the
    topic allows. A running app logs the cause with the code outbox_blocked.

    \b
      kconsume outbox list shop:app

    With --json all rows are listed. Exit code 0, also if nothing waits.
    """
    source = source_of(app, brokers, group, offsets)
    rows = source.rows()
    reasons = Reasons(source, (row.target for row in rows))
    listing = OutboxListing(source.store, len(rows), _shown(rows, reasons), reasons.trouble if rows else None)
    if as_json:
        click.echo(msgspec.json.encode(listing))
    else:
        _print_list(listing, everything)


@outbox.command(short_help="Delete these rows. They are never sent.")
@click.argument("words", nargs=-1, metavar="[APP] ROW...")
@source_options("the outbox")
@json_option
@yes_option("Remove the rows.")
def drop(
    words: tuple[str, ...], brokers: str | None, group: str | None, offsets: str | None, yes: bool, as_json: bool
) -> None:
    """Remove rows from the outbox: they are never sent, and their content is lost.

    ROW is the number that `kconsume outbox list` shows. Without --yes, nothing is changed.

    \b
      kconsume outbox drop shop:app 812 --yes

    Exit code 0 if the rows were removed, or would be with --yes; 2 if there is no such row.
    """
    name, numbers = numbers_in(words, "drop")
    source = source_of(name, brokers, group, offsets)
    rows = source.named(numbers)
    shown = _shown(rows, Reasons(source, (row.target for row in rows)))
    gone = source.reader.delete(rows) if yes else set()
    _print_done([OutboxDecision(row, "drop", row.row in gone) for row in shown], yes, as_json)


@outbox.command("dead-letter", short_help="Write these rows to another topic instead.")
@click.argument("words", nargs=-1, metavar="[APP] ROW...")
@source_options("the outbox")
@json_option
@click.option("--to", "topic", metavar="TOPIC", show_default="none, required", help="The topic for the dead letters.")
@yes_option("Write the dead letters, and remove the rows.")
def dead_letter(
    words: tuple[str, ...], brokers: str | None, group: str | None, offsets: str | None, topic: str | None, yes: bool,
    as_json: bool,
) -> None:  # fmt: skip
    """Write rows to a topic of dead letters, and then remove them from the outbox.

    A row is removed when the broker has confirmed its dead letter. ROW is the number that `kconsume outbox list` shows.
    Without --yes, nothing is changed.

    \b
      kconsume outbox dead-letter shop:app 812 --to orders.dlq --yes

    Exit code 0 if the rows were written, or would be with --yes; 1 if a dead letter was not confirmed; 2 if there is no
    such row or topic.
    """
    name, numbers = numbers_in(words, "dead-letter")
    if topic is None:
        raise ConfigurationError(
            "no topic was named for the dead letters: add --to, as in kconsume outbox dead-letter 812 --to orders.dlq"
        )
    source = source_of(name, brokers, group, offsets)
    if source.cluster is None:
        raise ConfigurationError("no cluster was named: give --brokers ADDRESS, or write MODULE:APP")
    source.cluster.topics([topic])
    rows = source.named(numbers)
    shown = _shown(rows, Reasons(source, (row.target for row in rows)))
    places: dict[int, str] = {}
    if yes:
        causes = [row.blocked or "removed from the outbox by hand" for row in shown]
        written = write_letters(source, zip(rows, causes, strict=True), topic)
        places = {row.number: place for row, place in written}
    _print_done(
        [OutboxDecision(row, "dead-letter", row.row in places, places.get(row.row)) for row in shown], yes, as_json
    )


def _shown(rows: Sequence[WaitingRow], reasons: Reasons) -> list[OutboxRow]:
    now = datetime.now(UTC)
    return [
        OutboxRow(
            row=row.number,
            group=row.group,
            partition=str(row.partition) if row.group else None,
            topic=row.target,
            origin=row.origin,
            bytes=row.size,
            at=row.posted_at,
            age=(now - row.posted_at).total_seconds(),
            blocked=reasons.of(row),
        )
        for row in rows
    ]


def _print_list(listing: OutboxListing, everything: bool) -> None:
    ordered = sorted(listing.rows, key=lambda row: (_place(row), row.topic, row.row))
    for (place, topic), group in itertools.groupby(ordered, key=lambda row: (_place(row), row.topic)):
        rows = list(group)
        first = rows if everything else rows[:_FIRST]
        click.echo(f"{click.style(place, bold=True)} → {topic}  {counted(len(rows), 'row')}")
        for row in first:
            click.echo(f"  {row.row}  {row.bytes:,} bytes  {_age(row.age)}  {row.origin or 'no origin'}")
            if row.blocked:
                click.echo(f"      blocked: {row.blocked}")
        if len(rows) > len(first):
            click.echo(f"  … {len(rows) - len(first)} more, with --all")
        click.echo()
    if listing.unknown:
        click.echo(f"it is not known what blocks the rows: {listing.unknown}")
    click.echo(f"total {counted(listing.total, 'row')} in {listing.store}")
    if any(row.blocked for row in listing.rows):
        click.echo("to decide: kconsume outbox drop ROW --yes, or kconsume outbox dead-letter ROW --to TOPIC --yes")


def _place(row: OutboxRow) -> str:
    return f"{row.partition}  group {row.group}" if row.partition else "Outbox.send"


def _age(seconds: float) -> str:
    for unit, size in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"


def _print_done(outcomes: Sequence[OutboxDecision], yes: bool, as_json: bool) -> None:
    if as_json:
        click.echo(msgspec.json.encode(list(outcomes)))
        return
    verbs = {"drop": ("dropped", "would drop"), "dead-letter": ("wrote", "would write")}
    for outcome in outcomes:
        row, (did, would) = outcome.row, verbs[outcome.action]
        what = f"row {row.row} of {_place(row)}, to {row.topic}"
        if not yes:
            click.echo(f"{would} {what}; add --yes to do it")
        elif not outcome.done:
            click.echo(f"row {row.row} is gone: it was sent meanwhile, or removed by another process")
            continue
        else:
            click.echo(f"{did} {what}" + (f", to {outcome.place}" if outcome.place else ""))
        if row.blocked is None:
            click.echo(f"  no reason is known why the cluster would refuse it: {_RUNNING}")

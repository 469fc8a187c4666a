"""`kconsume outbox`: what waits in the outbox, what blocks it, and the decision about rows that cannot be sent.

Which rows are meant and why they are refused is `outbox_rows.py`'s. A decision is carried out at once, on the table. An
app that runs reads a row that is refused anew before it tries again, so it neither sends a row that was taken out nor
waits for it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import TypeVar

import click
import msgspec

from kconsume.backends.outbox_reading import WaitingRow
from kconsume.cli.outbox_rows import Reasons, numbers_in, source_of, write_letters
from kconsume.errors import ConfigurationError

Command = TypeVar("Command", bound=Callable[..., object])

_FIRST = 5
"""So many rows are shown of a topic, unless all are asked for."""
_RUNNING = "an app that runs may be sending it now; what it has handed to the client may still arrive"


class Row(msgspec.Struct):
    """A row that waits; printed as it is with `--json`."""

    row: int
    group: str
    """Empty for a row of `Outbox.send`."""
    partition: str | None
    """Whose record it came from, as in orders/3."""
    topic: str
    """Where it goes."""
    origin: str | None
    bytes: int
    at: datetime
    """When it was written."""
    age: float
    """In seconds."""
    blocked: str | None
    """Why the cluster would refuse it, as far as that can be known from outside."""


class Listing(msgspec.Struct):
    """What waits; printed as it is with `--json`."""

    store: str
    total: int
    rows: list[Row]
    unknown: str | None
    """Why it is not known what blocks."""


class Done(msgspec.Struct):
    """What became of a row, or would."""

    row: Row
    action: str
    done: bool
    place: str | None = None
    """Of its dead letter."""


@click.group(short_help="What has not been sent yet: look, and decide.")
def outbox() -> None:
    """Rows of the outbox that have not been sent yet, with offsets in PostgreSQL or SQLite.

    \b
      kconsume outbox list shop:app                   what waits, and what blocks it?
      kconsume outbox drop shop:app 812 --yes         never send row 812
      kconsume outbox dead-letter shop:app 812 --to orders.dlq --yes
                                                      write row 812 to that topic instead
      kconsume outbox list --offsets postgresql://localhost/shop --group shop --brokers localhost:9092

    A row that is refused holds later rows of its partition to the same topic. It goes on by itself when the topic is
    made, or its max.message.bytes is raised.
    """


def _shared(command: Command) -> Command:
    """What all of them take beside an app."""
    for option in (
        click.option("--json", "as_json", is_flag=True, help="Print one JSON document."),
        click.option("--offsets", metavar="ADDRESS", help="The store of the outbox, where no APP is named."),
        click.option("--group", metavar="NAME", help="Only rows of this group."),
        click.option("--brokers", metavar="ADDRESS", help="The cluster, where no APP is named."),
    ):
        command = option(command)
    return command


@outbox.command("list", short_help="What waits, and what blocks it?")
@click.argument("app", required=False, metavar="[APP]")
@_shared
@click.option("--all", "everything", is_flag=True, help=f"Every row, and not only the first {_FIRST} of each topic.")
def list_rows(
    app: str | None, brokers: str | None, group: str | None, offsets: str | None, everything: bool, as_json: bool
) -> None:
    """What waits in the outbox, by group, partition and topic, and what blocks it?

    Changes nothing. What blocks is asked of the cluster: a topic that does not exist, a row larger than its topic
    takes. An app that runs tells the cause in its log, as outbox_blocked.

    With --json all rows are listed. Exit code 0 if it was looked, also if nothing waits.
    """
    source = source_of(app, brokers, group, offsets)
    rows = source.rows()
    reasons = Reasons(source, (row.target for row in rows))
    listing = Listing(source.store, len(rows), _told(rows, reasons), reasons.trouble if rows else None)
    if as_json:
        click.echo(msgspec.json.encode(listing))
    else:
        _print_list(listing, everything)


@outbox.command(short_help="Never send these rows.")
@click.argument("words", nargs=-1, metavar="[APP] ROW...")
@_shared
@click.option("--yes", is_flag=True, help="Really take them out, and not only say what would be done.")
def drop(
    words: tuple[str, ...], brokers: str | None, group: str | None, offsets: str | None, yes: bool, as_json: bool
) -> None:
    """Take rows out of the outbox: they are never sent, and nothing is kept of them.

    ROW is the number that `kconsume outbox list` shows. Without --yes nothing is changed.

    Exit code 0 if it was done or shown, 2 if there is no such row.
    """
    name, numbers = numbers_in(words, "drop")
    source = source_of(name, brokers, group, offsets)
    rows = source.named(numbers)
    told = _told(rows, Reasons(source, (row.target for row in rows)))
    gone = source.reader.delete(rows) if yes else set()
    _print_done([Done(row, "drop", row.row in gone) for row in told], yes, as_json)


@outbox.command("dead-letter", short_help="Write these rows to another topic instead.")
@click.argument("words", nargs=-1, metavar="[APP] ROW...")
@_shared
@click.option("--to", "topic", metavar="TOPIC", help="The topic for the dead letters.")
@click.option("--yes", is_flag=True, help="Really write them, and not only say what would be done.")
def dead_letter(
    words: tuple[str, ...], brokers: str | None, group: str | None, offsets: str | None, topic: str | None, yes: bool,
    as_json: bool,
) -> None:  # fmt: skip
    """Write rows to a topic of dead letters, and then take them out of the outbox.

    Each row is confirmed there before it is taken out, with the headers of a dead letter. ROW is the number that
    `kconsume outbox list` shows. Without --yes nothing is changed.

    Exit code 0 if it was done or shown, 1 if a dead letter was not confirmed, 2 if there is no such row or topic.
    """
    name, numbers = numbers_in(words, "dead-letter")
    if topic is None:
        raise ConfigurationError("to which topic? Add --to, as in kconsume outbox dead-letter 812 --to orders.dlq")
    source = source_of(name, brokers, group, offsets)
    if source.cluster is None:
        raise ConfigurationError("on which cluster? Give --brokers ADDRESS, or write MODULE:APP")
    source.cluster.topics([topic])
    rows = source.named(numbers)
    told = _told(rows, Reasons(source, (row.target for row in rows)))
    places: dict[int, str] = {}
    if yes:
        causes = [shown.blocked or "taken out of the outbox by hand" for shown in told]
        written = write_letters(source, zip(rows, causes, strict=True), topic)
        places = {row.number: place for row, place in written}
    _print_done([Done(row, "dead-letter", row.row in places, places.get(row.row)) for row in told], yes, as_json)


def _told(rows: Sequence[WaitingRow], reasons: Reasons) -> list[Row]:
    now = datetime.now(UTC)
    return [
        Row(
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


def _print_list(listing: Listing, everything: bool) -> None:
    ordered = sorted(listing.rows, key=lambda row: (_place(row), row.topic, row.row))
    for (place, topic), group in itertools.groupby(ordered, key=lambda row: (_place(row), row.topic)):
        rows = list(group)
        shown = rows if everything else rows[:_FIRST]
        click.echo(f"{click.style(place, bold=True)} → {topic}  {len(rows)} row{'' if len(rows) == 1 else 's'}")
        for row in shown:
            click.echo(f"  {row.row}  {row.bytes:,} bytes  {_age(row.age)}  {row.origin or 'no origin'}")
            if row.blocked:
                click.echo(f"      blocked: {row.blocked}")
        if len(rows) > len(shown):
            click.echo(f"  … {len(rows) - len(shown)} more, with --all")
        click.echo()
    if listing.unknown:
        click.echo(f"what blocks is not known: {listing.unknown}")
    click.echo(f"total {listing.total} row{'' if listing.total == 1 else 's'} in {listing.store}")
    if any(row.blocked for row in listing.rows):
        click.echo("to decide: kconsume outbox drop ROW --yes, or kconsume outbox dead-letter ROW --to TOPIC --yes")


def _place(row: Row) -> str:
    return f"{row.partition}  group {row.group}" if row.partition else "of Outbox.send"


def _age(seconds: float) -> str:
    for unit, size in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"


def _print_done(outcomes: Sequence[Done], yes: bool, as_json: bool) -> None:
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
            click.echo(f"row {row.row} was gone: it was sent meanwhile, or taken out by somebody else")
            continue
        else:
            click.echo(f"{did} {what}" + (f", to {outcome.place}" if outcome.place else ""))
        if row.blocked is None:
            click.echo(f"  nothing is known that blocks it: {_RUNNING}")

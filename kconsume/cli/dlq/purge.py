"""`kconsume dlq purge`: deletes dead letters for good."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

import click
import msgspec

from kconsume.backends.dead_letters.reader import PurgeSelection
from kconsume.backends.dead_letters.sender import sender_in
from kconsume.cli.dlq.places import Place, PlaceChoice, TablePlace
from kconsume.cli.dlq.render import PurgedPlace, Purges, print_purges
from kconsume.cli.options import (
    json_option,
    optional_app_argument,
    parse_time,
    source_options,
    table_option,
    topic_option,
    yes_option,
)
from kconsume.errors import ConfigurationError, TopicNotFound


@click.command(short_help="Delete letters that were sent back, or are old.")
@optional_app_argument
@click.option("--sent-back", is_flag=True, help="Only letters that were sent back, and have not failed since.")
@click.option(
    "--before",
    metavar="TIME",
    callback=parse_time,
    show_default="any time",
    help="Only letters from before TIME: a time in ISO 8601 (UTC), or an age, as in 30d.",
)
@topic_option
@table_option
@source_options("the dead-letter table")
@yes_option("Delete the letters for good.")
@json_option
def purge(
    app: str | None, sent_back: bool, before: datetime | None, topic: str | None, table: str | None,
    brokers: str | None, group: str | None, offsets: str | None, yes: bool, as_json: bool,
) -> None:  # fmt: skip
    """Delete dead letters that were sent back, or are old. Without --yes, nothing is deleted.

    At least one of --sent-back and --before is needed. With both, only letters that meet both are deleted.

    \b
      kconsume dlq purge shop:app --sent-back         how many would be deleted?
      kconsume dlq purge shop:app --sent-back --yes
      kconsume dlq purge shop:app --before 30d --yes
      kconsume dlq purge --offsets postgresql://localhost/shop --table failed_orders --before 30d

    In a table, rows are deleted, and --before compares the time of the failure. Deleting a letter that was sent back
    also deletes its count for redrive --cap: if the record fails again, the count begins at 0.

    In a topic, Kafka deletes records from the beginning of a partition only. A letter behind a record that stays is not
    deleted; the topic's retention deletes it later. --before compares the time of the record, or the time when the
    letter was written if the topic has LogAppendTime.

    Exit code 0 if letters were deleted, or counted without --yes; 2 if there is no such topic or table.
    """
    if not sent_back and before is None:
        raise ConfigurationError("no letters were chosen: add --sent-back, or --before TIME, as in --before 30d")
    asked = PlaceChoice(app, brokers, group, offsets, topic, table)
    selection = PurgeSelection(sent_back, before, group)
    places = [_purged(place, selection, yes) for place in asked.places(asked.load())]
    purges = Purges(yes, _total(places), places)
    if as_json:
        click.echo(msgspec.json.encode(purges))
    else:
        print_purges(purges)


def _total(places: Sequence[PurgedPlace]) -> int:
    return sum(place.selected for place in places)


def _purged(place: Place, selection: PurgeSelection, yes: bool) -> PurgedPlace:
    if isinstance(place, TablePlace):
        purged = PurgedPlace(place.name, "table", place.store)
        if not place.letters.exists():
            purged.said = place.missing()
            return purged
        purged.selected, purged.letters = place.letters.purgeable(selection)
        if yes:
            purged.deleted = sender_in(place.kept_in, place.name).purge(selection) if purged.selected else 0
        return purged
    purged = PurgedPlace(place.name, "topic", None)
    try:
        found = place.topics.purgeable(place.name, selection)
    except TopicNotFound as error:
        if place.named:
            raise
        purged.said = str(error)
        return purged
    purged.letters, purged.selected, purged.behind = found.letters, found.deleted, found.behind
    if yes:
        place.topics.purge(found.ends)
        purged.deleted = found.deleted
    return purged

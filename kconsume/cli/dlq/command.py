"""`kconsume dlq`: shows dead letters, by cause and one by one. Changes nothing.

The commands that change something are in other modules: `purge` in `cli/dlq/purge.py`, `redrive` in `cli/redrive/`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

import click
import msgspec

from kconsume._kafka.topic_reader import RecordPlace
from kconsume.app import App
from kconsume.backends.dead_letters.reader import CauseSummary
from kconsume.cli.app_loader import VARIABLE
from kconsume.cli.command_group import CommandGroup
from kconsume.cli.dlq.places import Place, PlaceChoice, TablePlace
from kconsume.cli.dlq.purge import purge
from kconsume.cli.dlq.render import CauseRow, LetterListing, LookedAt, print_letter, print_list, shown_of
from kconsume.cli.letter_topics import failing_of
from kconsume.cli.options import (
    json_option,
    optional_app_argument,
    parse_time,
    source_options,
    table_option,
    topic_option,
)
from kconsume.cli.redrive.command import redrive
from kconsume.errors import ConfigurationError, TopicNotFound
from kconsume.failures.letter_headers import Letter

_DEFAULT_FILE = "."
"""The value of `--as-test` without a file."""


@click.group(cls=CommandGroup, short_help="Dead letters: count, show, send back, delete.")
def dlq() -> None:
    """Dead letters: records that failed for good, and were written to a topic or a table (on_error=DeadLetter).

    \b
      kconsume dlq list shop:app                      count dead letters by topic and cause
      kconsume dlq show shop:app orders.dlq/0@17      show one dead letter, with its trace
      kconsume dlq show shop:app orders.dlq/0@17 --as-test
                                                      write a test that passes once the handler is corrected
      kconsume dlq redrive shop:app                   which dead letters would pass today? Sends nothing
      kconsume dlq redrive shop:app --yes             send dead letters back to the group that failed on them
      kconsume dlq purge shop:app --sent-back --yes   delete dead letters that were sent back
    """


@dlq.command("list", short_help="Count dead letters by topic and cause.")
@optional_app_argument
@topic_option
@table_option
@click.option(
    "--since",
    metavar="TIME",
    callback=parse_time,
    show_default="any time",
    help="Only letters from TIME or later: a time in ISO 8601 (UTC), or an age, as in 1h.",
)
@click.option(
    "--cause",
    metavar="NAME",
    show_default="every cause",
    help="Only this class of error: KeyError, or its full dotted name.",
)
@source_options("the dead-letter table")
@json_option
def list_letters(
    app: str | None, topic: str | None, table: str | None, since: datetime | None, cause: str | None,
    brokers: str | None, group: str | None, offsets: str | None, as_json: bool,
) -> None:  # fmt: skip
    """Count dead letters by the topic of the record and by cause. Also count those that were sent back.

    Reads the topics and tables to which the handlers of APP write dead letters. Joins no group and changes nothing.

    \b
      kconsume dlq list shop:app
      kconsume dlq list shop:app --since 1h --cause KeyError
      kconsume dlq list --brokers localhost:9092 --topic orders.dlq
      kconsume dlq list --offsets postgresql://localhost/shop --table failed_orders

    --since compares the time of the dead letter. In a table this is the time of the last failure. In a topic it is the
    time of the record, or the time when the letter was written if the topic has LogAppendTime.

    Exit code 0, also if there are no dead letters; 2 if there is no such topic or table.
    """
    asked = PlaceChoice(app, brokers, group, offsets, topic, table)
    looked = [_look(place, since, group, cause) for place in asked.places(asked.load())]
    listing = LetterListing(sum(each.total for each in looked), looked)
    if as_json:
        click.echo(msgspec.json.encode(listing))
    else:
        print_list(listing)


@dlq.command(short_help="Show one dead letter: the record, its failure, its trace.")
@click.argument("words", nargs=-1, metavar="[APP] PLACE")
@table_option
@click.option(
    "--as-test",
    "file",
    is_flag=False,
    flag_value=_DEFAULT_FILE,
    metavar="[FILE]",
    show_default="no test; without FILE, a file named after the record",
    help="Write a test that feeds this record to APP's handler.",
)
@source_options("the dead-letter table")
@json_option
def show(
    words: tuple[str, ...], table: str | None, file: str | None, brokers: str | None, group: str | None,
    offsets: str | None, as_json: bool,
) -> None:  # fmt: skip
    """Show one dead letter: the record, where it came from, why it failed, and whether it was sent back.

    PLACE is where the letter is: TOPIC/PARTITION@OFFSET, or the id of its row in a table.

    \b
      kconsume dlq show shop:app orders.dlq/0@17
      kconsume dlq show shop:app 42 --table failed_orders
      kconsume dlq show --brokers localhost:9092 orders.dlq/0@17
      kconsume dlq show shop:app orders.dlq/0@17 --as-test tests/test_order_1042.py

    The test of --as-test fails as long as the handler fails, and passes once the handler is corrected. A file that
    exists is never overwritten.

    Exit code 0 if the letter was shown, 2 if there is no such letter.
    """
    if file not in (None, _DEFAULT_FILE) and not str(file).endswith(".py"):
        raise ConfigurationError(f"--as-test {file} does not name a Python file: write FILE.py, or put --as-test last")
    name, place = _app_and_place(words)
    asked = PlaceChoice(name, brokers, group, offsets, None, table)
    app = asked.load()
    letter, failed_at, sent_back = _letter(asked, app, place)
    if group is not None and letter.group != group:
        raise ConfigurationError(f"{place} failed in group {letter.group!r}, not {group!r}: correct --group")
    shown = shown_of(place, letter, failed_at, sent_back=sent_back)
    if file is not None:
        shown.test = _write_test(app, letter, _spelled(place, table), file)
    if as_json:
        click.echo(msgspec.json.encode(shown))
    else:
        print_letter(shown)


dlq.add_command(redrive)
dlq.add_command(purge)


# What is there


def _look(place: Place, since: datetime | None, group: str | None, cause: str | None) -> LookedAt:
    filtered = since is not None or group is not None or cause is not None
    nothing = "the options select none of its dead letters" if filtered else None
    if isinstance(place, TablePlace):
        looked = LookedAt(place.name, "table", place.store, "failure", 0, [])
        if not place.letters.exists():
            looked.said = place.missing()
            return looked
        causes = place.letters.summaries(since, group)
        nothing = nothing or "the table is empty: no record failed for good"
    else:
        looked = LookedAt(place.name, "topic", None, "record", 0, [])
        try:
            records, causes, looked.others = place.topics.summary(place.name, since, group)
        except TopicNotFound as error:
            if place.named:
                raise
            looked.said = str(error)
            return looked
        if not records:
            nothing = "the topic is empty: no record failed for good, or the topic's retention has deleted the letters"
    looked.causes = [_row(each) for each in causes if _is_of(each, cause)]
    looked.total = sum(each.count for each in looked.causes)
    looked.said = None if looked.causes else nothing
    return looked


def _is_of(summary: CauseSummary, cause: str | None) -> bool:
    return cause is None or summary.cause == cause or summary.cause.endswith(f".{cause}")


def _row(each: CauseSummary) -> CauseRow:
    return CauseRow(each.topic, each.cause, each.count, each.first, each.last, each.example, each.sent_back)


# One of them


def _app_and_place(words: Sequence[str]) -> tuple[str | None, str]:
    """Split the arguments into the app, which may be missing, and the place."""
    if not 1 <= len(words) <= 2:
        raise ConfigurationError(
            "no dead letter was named: write kconsume dlq show APP PLACE, as in orders.dlq/0@17, or the id of a row"
        )
    place = words[-1]
    if "@" not in place and not (place.isdecimal() and place.isascii()):
        raise ConfigurationError(
            f"{place!r} is not the place of a dead letter: write TOPIC/PARTITION@OFFSET, as in orders.dlq/0@17, or the "
            f"id of its row in a table"
        )
    return (words[0] if len(words) == 2 else None), place


def _letter(asked: PlaceChoice, app: App | None, place: str) -> tuple[Letter, datetime | None, bool]:
    """The letter at a place, the time of the failure if it is known, and whether the letter was sent back."""
    if "@" in place:
        if asked.table:
            raise ConfigurationError(f"{place} is a place in a topic: leave --table out, or write the id of a row")
        topics = asked.topics(app)
        letter = topics.letter(RecordPlace.parse(place))
        return letter, None, failing_of(letter) in topics.sent_back([letter.group])
    where = asked.table_place(app)
    if not where.letters.exists():
        raise ConfigurationError(f"{where.store} has no table {where.name} yet: the first dead letter creates it")
    kept = where.letters.letter(int(place))
    if kept is None:
        raise ConfigurationError(
            f"{where.name} in {where.store} has no row {place}: choose one that `kconsume dlq list` shows"
        )
    return kept.letter, kept.failed_at, kept.is_sent


def _spelled(place: str, table: str | None) -> str:
    return place if table is None else f"{place} --table {table}"


def _write_test(app: App | None, letter: Letter, written: str, file: str) -> str:
    from kconsume.cli.dlq.as_test import file_name, source_of

    if app is None:
        raise ConfigurationError(
            "--as-test needs the app whose handler is tested: write kconsume dlq show MODULE:APP PLACE --as-test"
        )
    path = Path(file_name(letter) if file == _DEFAULT_FILE else file)
    source = source_of(app, os.environ[VARIABLE], letter, written)
    try:
        with path.open("x", encoding="utf-8") as opened:
            opened.write(source)
    except FileExistsError:
        raise ConfigurationError(f"{path} exists already, and is not overwritten: name another file") from None
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be written ({error.strerror}): name another file") from error
    return str(path)

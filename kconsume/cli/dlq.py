"""`kconsume dlq`: the records that failed for good, by cause and one by one.

Looks and changes nothing. Where they are is found by `dlq_places.py`; how a topic is read is in `dlq_topic.py`, how a
table is, in `backends/letter_reading.py`; what is shown of them, in `dlq_sheet.py`, and the test, in `dlq_pytest.py`.
Sending them back is `redrive.py`'s.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from typing import TypeVar

import click
import msgspec

from kconsume.app import App
from kconsume.backends.letter_reading import Heap
from kconsume.cli.dlq_moments import moment_said
from kconsume.cli.dlq_places import Asked, TablePlace, TopicPlace
from kconsume.cli.dlq_sheet import Cause, Listing, Looked, print_letter, print_list, shown_of
from kconsume.cli.redrive import redrive
from kconsume.cli.rehearse import Place
from kconsume.cli.target import VARIABLE
from kconsume.errors import ConfigurationError, TopicNotFound
from kconsume.failures.letters import Letter

Command = TypeVar("Command", bound=Callable[..., object])

_HERE = "."
"""What `--as-test` without a file says."""


@click.group(short_help="Records that failed for good: by cause, and one by one.")
def dlq() -> None:
    """Records that failed for good, and were written to a topic or a table: on_error=DeadLetter(...).

    \b
      kconsume dlq list shop:app                      how many, from where, for what cause?
      kconsume dlq show shop:app orders.dlq/0@17      one of them, with its trace
      kconsume dlq show shop:app orders.dlq/0@17 --as-test
                                                      a test that passes once the handler is mended
      kconsume dlq redrive shop:app                   which would pass today? Nothing is sent
      kconsume dlq redrive shop:app --yes             send them back to the group that failed on them
    """


dlq.add_command(redrive)


def _shared(command: Command) -> Command:
    """What both take beside an app."""
    for option in (
        click.option("--json", "as_json", is_flag=True, help="Print one JSON document."),
        click.option("--table", metavar="NAME", help="Look into this table only."),
        click.option("--offsets", metavar="ADDRESS", help="The store of the table, where no APP is named."),
        click.option("--group", metavar="NAME", help="Only what failed in this group."),
        click.option("--brokers", metavar="ADDRESS", help="The cluster of the topic, where no APP is named."),
    ):
        command = option(command)
    return command


@dlq.command("list", short_help="How many, from where, for what cause?")
@click.argument("app", required=False, metavar="[APP]")
@_shared
@click.option("--topic", metavar="NAME", help="Look into this topic only.")
@click.option(
    "--since", metavar="TIME", callback=moment_said, help="Only from then on: a time in ISO 8601 (UTC), or 1h."
)
@click.option("--cause", metavar="NAME", help="Only this class of error: KeyError, or its full dotted name.")
def list_letters(
    app: str | None, brokers: str | None, group: str | None, offsets: str | None, topic: str | None, table: str | None,
    since: datetime | None, cause: str | None, as_json: bool,
) -> None:  # fmt: skip
    """How many records failed for good, from where, and for what cause?

    Looks where the handlers of APP write them, joins no group and changes nothing.

    \b
      kconsume dlq list shop:app
      kconsume dlq list shop:app --since 1h --cause KeyError
      kconsume dlq list --brokers localhost:9092 --topic orders.dlq
      kconsume dlq list --offsets postgresql://localhost/shop --table failed_orders

    A dead letter in a topic has the time of its record, and not of its failure, unless the topic has
    LogAppendTime: --since goes by that. In a table it has the time when it failed (last).

    Exit code 0 if it was looked, also if there are none; 2 if there is no such topic or table.
    """
    asked = Asked(app, brokers, group, offsets, topic, table)
    places = asked.places(asked.load())
    looked = [_look(place, since, group, cause) for place in places]
    listing = Listing(sum(each.total for each in looked), looked)
    if as_json:
        click.echo(msgspec.json.encode(listing))
    else:
        print_list(listing)


@dlq.command(short_help="One dead letter: the record, its failure, its trace.")
@click.argument("words", nargs=-1, metavar="[APP] PLACE")
@_shared
@click.option(
    "--as-test",
    "file",
    is_flag=False,
    flag_value=_HERE,
    metavar="[FILE]",
    help="Write a test that feeds this record to APP's handler, into FILE or one named after it.",
)
def show(
    words: tuple[str, ...], brokers: str | None, group: str | None, offsets: str | None, table: str | None,
    file: str | None, as_json: bool,
) -> None:  # fmt: skip
    """One dead letter: the record, where it came from, why it failed.

    PLACE is where the letter is: TOPIC/PARTITION@OFFSET, or the id of its row in a table.

    \b
      kconsume dlq show shop:app orders.dlq/0@17
      kconsume dlq show shop:app 42 --table failed_orders
      kconsume dlq show --brokers localhost:9092 orders.dlq/0@17
      kconsume dlq show shop:app orders.dlq/0@17 --as-test tests/test_order_1042.py

    The test fails as long as the handler does, and passes once it is mended. It is never written over a file.

    Exit code 0 if it was shown, 2 if there is no such letter.
    """
    if file not in (None, _HERE) and not str(file).endswith(".py"):
        raise ConfigurationError(f"--as-test {file} names no file of Python: write FILE.py, or put --as-test last")
    name, place = _sorted_out(words)
    asked = Asked(name, brokers, group, offsets, None, table)
    app = asked.load()
    letter, failed_at = _letter(asked, app, place)
    if group is not None and letter.group != group:
        raise ConfigurationError(f"{place} failed in group {letter.group!r}, not {group!r}: correct --group")
    shown = shown_of(place, letter, failed_at)
    if file is not None:
        shown.test = _write_test(app, letter, _spelled(place, table), file)
    if as_json:
        click.echo(msgspec.json.encode(shown))
    else:
        print_letter(shown)


# What is there


def _look(place: TopicPlace | TablePlace, since: datetime | None, group: str | None, cause: str | None) -> Looked:
    filtered = since is not None or group is not None or cause is not None
    nothing = "none of its dead letters is meant by the options" if filtered else None
    if isinstance(place, TablePlace):
        looked = Looked(place.name, "table", place.store, "failure", 0, [])
        if not place.letters.is_there():
            looked.said = place.missing()
            return looked
        heaps = place.letters.heaps(since, group)
        nothing = nothing or "it is empty: nothing failed for good"
    else:
        looked = Looked(place.name, "topic", None, "record", 0, [])
        try:
            records, heaps, looked.others = place.topics.heaps(place.name, since, group)
        except TopicNotFound as error:
            if place.named:
                raise
            looked.said = str(error)
            return looked
        if not records:
            nothing = "it is empty: nothing failed for good, or the topic's retention has deleted it"
    looked.causes = [_cause(heap) for heap in heaps if _is_of(heap, cause)]
    looked.total = sum(each.count for each in looked.causes)
    looked.said = None if looked.causes else nothing
    return looked


def _is_of(heap: Heap, cause: str | None) -> bool:
    return cause is None or heap.cause == cause or heap.cause.endswith(f".{cause}")


def _cause(heap: Heap) -> Cause:
    return Cause(heap.topic, heap.cause, heap.count, heap.first, heap.last, heap.example)


# One of them


def _sorted_out(words: Sequence[str]) -> tuple[str | None, str]:
    """The app, which may be missing, and the place."""
    if not 1 <= len(words) <= 2:
        raise ConfigurationError(
            "which dead letter? Write kconsume dlq show APP PLACE, as in orders.dlq/0@17, or the id of a row"
        )
    place = words[-1]
    if "@" not in place and not (place.isdecimal() and place.isascii()):
        raise ConfigurationError(
            f"{place!r} is no place of a dead letter: write TOPIC/PARTITION@OFFSET, as in orders.dlq/0@17, or the id "
            f"of its row in a table"
        )
    return (words[0] if len(words) == 2 else None), place


def _letter(asked: Asked, app: App | None, place: str) -> tuple[Letter, datetime | None]:
    if "@" in place:
        if asked.table:
            raise ConfigurationError(f"{place} is a place in a topic: leave --table out, or write the id of a row")
        return asked.topics(app).letter(Place.parse(place)), None
    where = asked.table_place(app)
    if not where.letters.is_there():
        raise ConfigurationError(f"{where.store} has no table {where.name} yet: it is made with the first dead letter")
    kept = where.letters.letter(int(place))
    if kept is None:
        raise ConfigurationError(
            f"{where.name} in {where.store} has no row {place}: choose one that `kconsume dlq list` shows"
        )
    return kept.letter, kept.failed_at


def _spelled(place: str, table: str | None) -> str:
    return place if table is None else f"{place} --table {table}"


def _write_test(app: App | None, letter: Letter, written: str, file: str) -> str:
    from kconsume.cli.dlq_pytest import file_name, source_of

    if app is None:
        raise ConfigurationError(
            "--as-test needs the app whose handler is tested: kconsume dlq show MODULE:APP PLACE --as-test"
        )
    path = Path(file_name(letter) if file == _HERE else file)
    source = source_of(app, os.environ[VARIABLE], letter, written)
    try:
        with path.open("x", encoding="utf-8") as opened:
            opened.write(source)
    except FileExistsError:
        raise ConfigurationError(f"{path} is there already, and is not written over: name another file") from None
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be written ({error.strerror}): name another file") from error
    return str(path)

"""`kconsume dlq redrive`: tries dead letters with today's handler, and with `--yes` sends them back to their group.

This module holds the command and the order of its steps: select (`selection`), try (`preflight`), make topics
(`topics`), send (`send_topic`, `send_table`), print (`render`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import datetime
from typing import TypeAlias

import click
import msgspec

from kconsume._runtime.plan import ConsumerPlan
from kconsume.app import App
from kconsume.cli.app_loader import load
from kconsume.cli.broker_address import check_running
from kconsume.cli.dlq.places import Place, PlaceChoice, TablePlace, TopicPlace
from kconsume.cli.letter_topics import Failing, failing_of
from kconsume.cli.options import app_argument, json_option, parse_time, table_option, topic_option
from kconsume.cli.redrive import send_table, send_topic, topics
from kconsume.cli.redrive.preflight import Preflight, tried
from kconsume.cli.redrive.render import Redrive, RedriveProgress, Redrives, print_end, print_redrive, progress
from kconsume.cli.redrive.selection import Chosen, FoundLetter, Route, SelectedLetters, Selection, routes_of
from kconsume.errors import ConfigurationError, TopicNotFound

_CHUNK = 200
"""The highest number of letters that are sent in one transaction."""

Letters: TypeAlias = Callable[[], Iterator[FoundLetter]]
"""Reads all letters of a place; each call reads them again."""


@dataclass(frozen=True)
class RedriveMode:
    """What is done with the selected letters, and how."""

    yes: bool
    only_passing: bool
    with_effects: bool
    rate: float | None
    quiet: bool


@click.command(short_help="Try dead letters again. With --yes, send them back.")
@app_argument
@click.option(
    "--yes", is_flag=True, help="Send the letters back. Without --yes, the command only tries them and rolls back."
)
@click.option("--only-passing", is_flag=True, help="Try the letters first, and send back only those that pass.")
@click.option(
    "--cause",
    metavar="NAME",
    show_default="every cause",
    help="Only this class of error: KeyError, or its full dotted name.",
)
@click.option(
    "--since",
    metavar="TIME",
    callback=parse_time,
    show_default="any time",
    help="Only letters from TIME or later: a time in ISO 8601 (UTC), or an age, as in 1h.",
)
@click.option(
    "--until",
    metavar="TIME",
    callback=parse_time,
    show_default="any time",
    help="Only letters from before TIME.",
)
@click.option("--key", metavar="TEXT", show_default="every key", help="Only records with this key.")
@click.option(
    "--from", "source", metavar="TOPIC", show_default="every topic", help="Only records that came from this topic."
)
@click.option(
    "--origin",
    metavar="ID",
    show_default="every record",
    help="Only this record: its Record.id, or TOPIC/PARTITION@OFFSET.",
)
@topic_option
@table_option
@click.option(
    "--group", metavar="NAME", show_default="every group of the app", help="Only letters that failed in this group."
)
@click.option(
    "--cap",
    default=3,
    show_default=True,
    type=click.IntRange(1),
    help="Skip letters that were sent back N times or more.",
    metavar="N",
)
@click.option(
    "--rate",
    type=click.FloatRange(0, min_open=True),
    metavar="N",
    show_default="no limit",
    help="Send at most N letters a second.",
)
@click.option(
    "--with-effects", is_flag=True, help="Also try handlers whose effects cannot be rolled back. Their effects stay."
)
@json_option
@click.pass_context
def redrive(
    context: click.Context, app: str | None, yes: bool, only_passing: bool, cause: str | None, since: datetime | None,
    until: datetime | None, key: str | None, source: str | None, origin: str | None, topic: str | None,
    table: str | None, group: str | None, cap: int, rate: float | None, with_effects: bool, as_json: bool,
) -> None:  # fmt: skip
    """Try dead letters with today's handler. With --yes, send them back to the group that failed on them.

    Without --yes, today's handler of APP runs on each letter, in a transaction that is rolled back. What the handler
    does elsewhere is real: a call, a file, a message. A handler without a transaction is refused, unless --with-effects
    is given.

    \b
      kconsume dlq redrive shop:app                               what would pass, and what still fails?
      kconsume dlq redrive shop:app --yes --only-passing          send back what passes
      kconsume dlq redrive shop:app --yes --cause KeyError        send back what failed for that cause, untried
      kconsume dlq redrive shop:app --yes --since 1d --rate 50    send back at most 50 letters a second

    With --yes, the letters go to the topic TOPIC.GROUP.redrive, which is created if it is missing. Only the handler of
    this group reads that topic. The handler must name its topics (no pattern=, no partitions=) and have
    on_error=DeadLetter(...). A letter is sent back once, also if this command is killed and run again. If the record
    fails again, it becomes a new letter, which can be sent back, up to --cap.

    Exit code 0 if all letters would pass or were sent, 1 if some letters still fail, 2 if the command cannot run.
    """
    loaded, mode = load(app), RedriveMode(yes, only_passing, with_effects, rate, as_json)
    selection = Selection(cause, since, until, key, source, origin, cap)
    places = PlaceChoice(app, None, group, None, topic, table).places(loaded)
    check_running(loaded.brokers)
    plans, done = loaded.plans(), Redrives(yes, 0, [])
    try:
        for place in places:
            for name in _groups(plans, place, group):
                part = _one(loaded, place, SelectedLetters(name, _routes(plans, name), selection), mode)
                done.places.append(part)
                done.selected += part.selected
                if not as_json:
                    print_redrive(part, cap)
    except KeyboardInterrupt:
        click.echo("stopped: nothing is sent twice; run the command again to send the rest", err=True)
        context.exit(130)
    finally:
        for plan in plans:
            plan.store.close()
    if as_json:
        click.echo(msgspec.json.encode(done))
    else:
        print_end(done, only_passing=only_passing)
    context.exit(1 if any(part.preflight and part.preflight.still_fail for part in done.places) else 0)


def _groups(plans: Sequence[ConsumerPlan], place: Place, wanted: str | None) -> list[str]:
    """The groups that write to this place. If none does, all groups that write dead letters."""
    having = [(plan.group, h.policy.dead_letter) for plan in plans for h in plan.handlers if h.policy.dead_letter]
    writing = {group for group, dead in having if place.name in (dead.topic, dead.table)}
    found = writing or {group for group, _ in having}
    if not found:
        raise ConfigurationError(
            "no handler of the app has on_error=DeadLetter(...), so none reads letters that are sent back: add it"
        )
    return sorted(group for group in found if wanted in (None, group))


def _routes(plans: Sequence[ConsumerPlan], group: str) -> list[Route]:
    if routes := routes_of(plans, group):
        return routes
    raise ConfigurationError(
        f"no handler of group {group!r} can take letters back: give it on_error=DeadLetter(...) and the names of its "
        f"topics, without pattern= and partitions="
    )


# One place, for one group


def _one(app: App, place: Place, choice: SelectedLetters, mode: RedriveMode) -> Redrive:
    if isinstance(place, TablePlace):
        redrive = Redrive(place.name, "table", place.store, choice.group)
        if not place.letters.exists():
            redrive.said = place.missing()
            return redrive
        letters: Letters = lambda: send_table.letters_of(place.letters)  # noqa: E731
    else:
        redrive = Redrive(place.name, "topic", None, choice.group)
        sent = place.topics.sent_to(topics.existing(app, choice.routes))
        letters = lambda: send_topic.letters_of(place.topics, place.name, sent)  # noqa: E731
    redrive.sent = 0 if mode.yes else None
    try:
        needed = _needed(redrive, choice, letters)
    except TopicNotFound as error:
        if place.named:
            raise
        redrive.said = str(error)
        return redrive
    redrive.left = choice.left
    if not mode.yes or mode.only_passing:
        passing = _try(app, redrive, choice.of(letters()), mode)
    if mode.yes and mode.only_passing:
        choice.passing, redrive.selected = passing, 0
        needed = _needed(redrive, choice, letters)
        redrive.left = choice.left
    if mode.yes and isinstance(place, TablePlace):
        _send_rows(app, place, redrive, choice, needed, mode)
    elif mode.yes and isinstance(place, TopicPlace) and redrive.selected:
        _send_records(app, place, redrive, choice, needed, mode)
    if not redrive.selected and redrive.said is None:
        redrive.said = "none of its dead letters was selected to be sent back"
    return redrive


def _needed(redrive: Redrive, choice: SelectedLetters, letters: Letters) -> list[Route]:
    """The routes of the selected letters, each once. Adds the number of letters to `redrive.selected`."""
    return list({each.route.topic: each.route for each in _counted(redrive, choice.of(letters()))}.values())


def _counted(redrive: Redrive, chosen: Iterable[Chosen]) -> Iterator[Chosen]:
    for each in chosen:
        redrive.selected += 1
        yield each


def _try(app: App, redrive: Redrive, chosen: Iterable[Chosen], mode: RedriveMode) -> set[Failing]:
    """Run the preflight. Returns the letters that pass."""
    handlers: dict[str, bool] = {}
    passing: set[Failing] = set()
    preflight = Preflight()
    with progress("tried", redrive.selected, quiet=mode.quiet) as report:
        for count, each in enumerate(tried(app, chosen, with_effects=mode.with_effects), 1):
            binding = each.chosen.route.part.handler.binding
            handlers[binding.name] = binding.transaction is not None
            preflight.note(each)
            if each.error is None:
                passing.add(failing_of(each.chosen.found.letter))
            report(count)
    redrive.preflight = preflight if handlers or not mode.yes else None
    redrive.tried, redrive.rolled_back = sorted(handlers), all(handlers.values())
    return passing


def _send_records(
    app: App, place: TopicPlace, redrive: Redrive, choice: SelectedLetters, needed: Sequence[Route], mode: RedriveMode
) -> None:
    partitions = topics.made(app, needed)
    sender = send_topic.TopicSender(app, place.name, choice.group, partitions)
    sent = place.topics.sent_to(partitions)  # read again, because other senders were not fenced before

    def send(chunk: Sequence[Chosen]) -> int:
        sender.send(chunk)
        return len(chunk)

    known = (c for c in choice.of(send_topic.letters_of(place.topics, place.name, sent)) if c.route.topic in partitions)
    with progress("sent", redrive.selected, quiet=mode.quiet) as report:
        redrive.sent = _in_chunks(known, send, mode.rate, report)
    redrive.selected, redrive.left, redrive.to = redrive.sent, choice.left, sorted(partitions)


def _send_rows(
    app: App, place: TablePlace, redrive: Redrive, choice: SelectedLetters, needed: Sequence[Route], mode: RedriveMode
) -> None:
    sender = send_table.TableSender(place, {route.topic for route in choice.routes})
    before = sender.waiting
    redrive.to = sorted(topics.made(app, needed))
    known = (c for c in choice.of(send_table.letters_of(place.letters)) if c.route.topic in redrive.to)
    with sender.relayed(app) if needed or before else nullcontext():
        with progress("sent", redrive.selected, quiet=mode.quiet) as report:
            redrive.sent = _in_chunks(known, sender.send, mode.rate, report)
    redrive.selected, redrive.left = redrive.sent, choice.left
    if before:
        redrive.said = f"also sent: {before} that an earlier run left in the outbox when it was stopped"


def _in_chunks(
    chosen: Iterable[Chosen], send: Callable[[Sequence[Chosen]], int], rate: float | None, report: RedriveProgress
) -> int:
    """Send the letters in chunks. Returns how many were sent.

    Args:
        rate: the highest number of letters a second. Chunks after a slow chunk are not sent faster to catch up.
    """
    size = _CHUNK if rate is None else max(1, min(_CHUNK, int(rate)))
    due, sent, chunk = time.monotonic(), 0, list[Chosen]()

    def flush() -> int:
        nonlocal due
        if rate is not None:
            time.sleep(max(0.0, due - time.monotonic()))
            due = max(due, time.monotonic()) + len(chunk) / rate
        done = send(chunk)
        report(sent + done)
        chunk.clear()
        return done

    for each in chosen:
        chunk.append(each)
        if len(chunk) == size:
            sent += flush()
    return sent + (flush() if chunk else 0)

"""`kconsume dlq redrive`: dead letters are tried with today's handler, and, with `--yes`, sent back to their group.

Which are meant is `redrive_choice.py`'s. The preflight is in `redrive_trial.py`; sending is in `redrive_topic.py` and
`redrive_table.py`, by the topics that `redrive_home.py` makes; what is said, in `redrive_sheet.py`. Here are the
command, and the order in which these are asked.
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

from kconsume.app import App
from kconsume.cli import redrive_home, redrive_table, redrive_topic
from kconsume.cli.dlq_moments import moment_said
from kconsume.cli.dlq_places import Asked, TablePlace, TopicPlace
from kconsume.cli.redrive_choice import Choice, Chosen, Found, Route, Wish, routes_of
from kconsume.cli.redrive_sheet import Progress, Redrive, Redrives, print_end, print_redrive, progress
from kconsume.cli.redrive_trial import Preflight, tried
from kconsume.cli.rehearse import _must_be_reachable
from kconsume.cli.target import app_argument, load
from kconsume.errors import ConfigurationError, TopicNotFound
from kconsume.runtime.plans import ConsumerPlan

_CHUNK = 200
"""Letters that are sent in one transaction."""

Letters: TypeAlias = Callable[[], Iterator[Found]]
"""All that are there, read anew by each call."""


@dataclass(frozen=True)
class Manner:
    """How it is done."""

    yes: bool
    with_effects: bool
    rate: float | None
    quiet: bool


@click.command(short_help="Which would pass today? With --yes they are sent back.")
@app_argument
@click.option("--yes", is_flag=True, help="Send them back. Without it they are only tried, and rolled back.")
@click.option("--cause", metavar="NAME", help="Only this class of error: KeyError, or its full dotted name.")
@click.option("--since", metavar="TIME", callback=moment_said, help="Only from then on: ISO 8601 (UTC), or 1h.")
@click.option("--until", metavar="TIME", callback=moment_said, help="Only before then.")
@click.option("--key", metavar="TEXT", help="Only records with this key.")
@click.option("--from", "source", metavar="TOPIC", help="Only records that came from this topic.")
@click.option("--origin", metavar="ID", help="Only this record: its Record.id, or TOPIC/PARTITION@OFFSET.")
@click.option("--topic", metavar="NAME", help="Only the dead letters in this topic.")
@click.option("--table", metavar="NAME", help="Only the dead letters in this table.")
@click.option("--group", metavar="NAME", help="Only what failed in this group.")
@click.option("--cap", default=3, show_default=True, type=click.IntRange(1), help="Leave what came back so often.")
@click.option(
    "--rate", type=click.FloatRange(0, min_open=True), metavar="N", help="Send at most N in a second; else all at once."
)
@click.option("--with-effects", is_flag=True, help="Try also handlers whose effects cannot be undone: they are real.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@click.pass_context
def redrive(
    context: click.Context, app: str | None, yes: bool, cause: str | None, since: datetime | None,
    until: datetime | None, key: str | None, source: str | None, origin: str | None, topic: str | None,
    table: str | None, group: str | None, cap: int, rate: float | None, with_effects: bool, as_json: bool,
) -> None:  # fmt: skip
    """Which dead letters would pass today? With --yes, send them back to the group that failed on them.

    Without --yes, today's handler of APP is run on each, in a transaction that is rolled back. What it does elsewhere
    is real: a call, a file, a message. A handler that takes no transaction is refused, unless --with-effects says so.

    \b
      kconsume dlq redrive shop:app                               what would pass, and what still fails?
      kconsume dlq redrive shop:app --yes --cause KeyError        send back what failed for that cause
      kconsume dlq redrive shop:app --yes --since 1d --rate 50    slowly

    They go to a topic of their own, TOPIC.GROUP.redrive, that only the handler of this group reads. So the handler
    must name its topics (no pattern=, no partitions=) and have on_error=DeadLetter(...). It is made if it is missing.
    A letter is sent back once, also if this is killed and run again; if it fails anew it is a new letter, up to --cap.

    Exit code 0 if they would pass or were sent, 1 if some still fail, 2 if it cannot be done.
    """
    loaded, manner = load(app), Manner(yes, with_effects, rate, as_json)
    wish = Wish(cause, since, until, key, source, origin, cap)
    asked = Asked(app, None, group, None, topic, table)
    places = asked.places(loaded)
    _must_be_reachable(loaded.brokers)
    plans, done = loaded.plans(), Redrives(yes, 0, [])
    try:
        for place in places:
            for name in _groups(plans, place, group):
                part = _one(loaded, place, Choice(name, _routes(plans, name), wish), manner)
                done.places.append(part)
                done.selected += part.selected
                if not as_json:
                    print_redrive(part, cap)
    except KeyboardInterrupt:
        click.echo("stopped: nothing is sent twice; run it again to go on with the rest", err=True)
        context.exit(130)
    finally:
        for plan in plans:
            plan.store.close()
    if as_json:
        click.echo(msgspec.json.encode(done))
    else:
        print_end(done)
    context.exit(1 if any(part.preflight and part.preflight.still_fail for part in done.places) else 0)


def _groups(plans: Sequence[ConsumerPlan], place: TopicPlace | TablePlace, wanted: str | None) -> list[str]:
    """Those that write to this place; of a topic that nobody writes to any more, all."""
    having = [(plan.group, h.policy.dead_letter) for plan in plans for h in plan.handlers if h.policy.dead_letter]
    writing = {group for group, dead in having if place.name in (dead.topic, dead.table)}
    found = writing or {group for group, _ in having}
    if not found:
        raise ConfigurationError(
            "no handler of the app has on_error=DeadLetter(...), so none reads what is sent back: add it"
        )
    return sorted(group for group in found if wanted in (None, group))


def _routes(plans: Sequence[ConsumerPlan], group: str) -> list[Route]:
    if routes := routes_of(plans, group):
        return routes
    raise ConfigurationError(
        f"no handler of group {group!r} can take letters back: one with on_error=DeadLetter(...) can that names its "
        f"topics, without pattern= and partitions="
    )


# One place, for one group


def _one(app: App, place: TopicPlace | TablePlace, choice: Choice, manner: Manner) -> Redrive:
    if isinstance(place, TablePlace):
        redrive = Redrive(place.name, "table", place.store, choice.group)
        if not place.letters.is_there():
            redrive.said = place.missing()
            return redrive
        letters: Letters = lambda: redrive_table.letters_of(place.letters)  # noqa: E731
    else:
        redrive = Redrive(place.name, "topic", None, choice.group)
        sent = redrive_topic.sent_to(place.topics, redrive_home.those_there(app, choice.routes))
        letters = lambda: redrive_topic.letters_of(place.topics, place.name, sent)  # noqa: E731
    redrive.sent = 0 if manner.yes else None
    try:
        needed = {each.route.topic: each.route for each in _counted(redrive, choice.of(letters()))}
    except TopicNotFound as error:
        if place.named:
            raise
        redrive.said = str(error)
        return redrive
    redrive.left = choice.left
    if not manner.yes:
        _try(app, redrive, choice.of(letters()), manner)
    elif isinstance(place, TablePlace):
        _send_rows(app, place, redrive, choice, list(needed.values()), manner)
    elif redrive.selected:
        _send_records(app, place, redrive, choice, list(needed.values()), manner)
    if not redrive.selected and redrive.said is None:
        redrive.said = "none of its dead letters is to be sent back"
    return redrive


def _counted(redrive: Redrive, chosen: Iterable[Chosen]) -> Iterator[Chosen]:
    for each in chosen:
        redrive.selected += 1
        yield each


def _try(app: App, redrive: Redrive, chosen: Iterable[Chosen], manner: Manner) -> None:
    handlers: dict[str, bool] = {}

    def noted() -> Iterator[Chosen]:
        for each in chosen:
            binding = each.route.part.handler.binding
            handlers[binding.name] = binding.transaction is not None
            yield each

    redrive.preflight = Preflight()
    with progress("tried", redrive.selected, quiet=manner.quiet) as report:
        for count, preflight in enumerate(tried(app, noted(), with_effects=manner.with_effects), 1):
            redrive.preflight = preflight
            report(count)
    redrive.tried, redrive.rolled_back = sorted(handlers), all(handlers.values())


def _send_records(
    app: App, place: TopicPlace, redrive: Redrive, choice: Choice, needed: Sequence[Route], manner: Manner
) -> None:
    partitions = redrive_home.made(app, needed)
    sending = redrive_topic.Sending(app, place.name, choice.group, partitions)
    sent = redrive_topic.sent_to(place.topics, partitions)  # again, now that nobody else writes there

    def send(chunk: Sequence[Chosen]) -> int:
        sending.send(chunk)
        return len(chunk)

    known = (
        c for c in choice.of(redrive_topic.letters_of(place.topics, place.name, sent)) if c.route.topic in partitions
    )
    with progress("sent", redrive.selected, quiet=manner.quiet) as report:
        redrive.sent = _in_chunks(known, send, manner.rate, report)
    redrive.selected, redrive.left, redrive.to = redrive.sent, choice.left, sorted(partitions)


def _send_rows(
    app: App, place: TablePlace, redrive: Redrive, choice: Choice, needed: Sequence[Route], manner: Manner
) -> None:
    posting = redrive_table.Posting(place, {route.topic for route in choice.routes})
    before = posting.waiting
    redrive.to = sorted(redrive_home.made(app, needed))
    known = (c for c in choice.of(redrive_table.letters_of(place.letters)) if c.route.topic in redrive.to)
    with posting.relayed(app) if needed or before else nullcontext():
        with progress("sent", redrive.selected, quiet=manner.quiet) as report:
            redrive.sent = _in_chunks(known, posting.send, manner.rate, report)
    redrive.selected, redrive.left = redrive.sent, choice.left
    if before:
        redrive.said = f"{before} that were in the outbox already, since an earlier run was stopped, are sent as well"


def _in_chunks(
    chosen: Iterable[Chosen], send: Callable[[Sequence[Chosen]], int], rate: float | None, report: Progress
) -> int:
    """How many were sent. What was slow is not caught up with: that would be more in a second than was asked for."""
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

"""What `kconsume dlq redrive` prints: the values that `--json` prints, how they look, and the progress."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, Protocol

import click
import msgspec

from kconsume.cli.redrive.preflight import Preflight
from kconsume.cli.redrive.selection import Left
from kconsume.cli.render import plain

_EVERY = 2.0
"""Seconds between two lines of progress."""


class Redrive(msgspec.Struct):
    """The dead letters of one place that one group failed on."""

    name: str
    kind: Literal["topic", "table"]
    store: str | None
    """The address of a table's store."""
    group: str
    selected: int = 0
    """The number of letters that are sent back, or would be."""
    preflight: Preflight | None = None
    sent: int | None = None
    """How many letters were sent; None in a dry run."""
    to: list[str] = []
    """The topics to which letters were sent."""
    left: Left = msgspec.field(default_factory=Left)
    tried: list[str] = []
    """The handlers that the letters were tried with."""
    rolled_back: bool = True
    """True if every handler took the store's transaction, which was rolled back."""
    said: str | None = None
    """Why no letters were selected, or what else was sent."""


class Redrives(msgspec.Struct):
    """The result of `dlq redrive`, which `--json` prints."""

    sent: bool
    """False if letters were only tried."""
    selected: int
    places: list[Redrive]


def print_redrive(redrive: Redrive, cap: int) -> None:
    where = redrive.kind if redrive.store is None else f"{redrive.kind} in {redrive.store}"
    click.echo(f"{click.style(redrive.name, bold=True)}  {where}; letters that failed in group {redrive.group}")
    if redrive.said:
        click.echo(f"  {redrive.said}")
    if redrive.preflight is not None and (redrive.preflight.would_pass or redrive.preflight.failing):
        _print_preflight(redrive, redrive.preflight)
    if redrive.sent is not None and redrive.to:
        click.echo(f"  sent back {redrive.sent}, to {', '.join(redrive.to)}")
    for count, why in (
        (redrive.left.sent, "sent back before, and not failed since"),
        (redrive.left.capped, f"sent back {cap} time{'s' * (cap > 1)} or more: correct the handler, or raise --cap"),
        (redrive.left.homeless, "no handler of the group takes them back: see kconsume dlq redrive --help"),
        (redrive.left.others, "failed in another group: send them back with the app of that group"),
        (redrive.left.failing, "still fail with today's handler, and --only-passing was given"),
    ):
        if count:
            click.echo(f"  not sent  {count:>6}  {why}")
    click.echo()


def _print_preflight(redrive: Redrive, preflight: Preflight) -> None:
    undone = "rolled back" if redrive.rolled_back else "with real effects (--with-effects)"
    click.echo(f"  tried with {', '.join(redrive.tried)} as it is now, {undone}")
    click.echo(f"  would pass  {preflight.would_pass:>4}")
    click.echo(f"  still fails {preflight.failing:>4}")
    for cause in sorted(preflight.still_fail, key=lambda cause: -cause.count):
        message = plain(cause.message)
        short = message if len(message) <= 100 else f"{message[:100]} …"
        click.echo(f"    {cause.count:>6}  {plain(cause.cause)}: {short}, for example {cause.example}")


def print_end(redrives: Redrives, *, only_passing: bool) -> None:
    if redrives.sent:
        sent = sum(each.sent or 0 for each in redrives.places)
        click.echo(f"total {sent} sent back; a running group begins to read them within a minute")
    elif only_passing and redrives.selected:
        passing = sum(each.preflight.would_pass for each in redrives.places if each.preflight)
        click.echo(f"nothing was sent: add --yes to send back the {passing} that would pass")
    elif redrives.selected:
        click.echo(f"nothing was sent: add --yes to send back {redrives.selected}")
    else:
        click.echo("nothing to send back")


class RedriveProgress(Protocol):
    def __call__(self, done: int) -> None:
        """Show that `done` letters are finished so far."""
        ...


@contextmanager
def progress(verb: str, total: int, *, quiet: bool) -> Iterator[RedriveProgress]:
    """Show progress on standard error: a bar on a terminal, or else a line every two seconds."""
    if quiet or not total:
        yield lambda done: None  # noqa: ARG005
    elif sys.stderr.isatty():
        with click.progressbar(length=total, label=verb, file=sys.stderr, show_pos=True) as bar:
            yield lambda done: bar.update(done - bar.pos)
    else:
        yield _ProgressLines(verb, total)


class _ProgressLines:
    def __init__(self, verb: str, total: int) -> None:
        self._verb, self._total = verb, total
        self._next = time.monotonic() + _EVERY

    def __call__(self, done: int) -> None:
        if done == self._total or time.monotonic() >= self._next:
            self._next = time.monotonic() + _EVERY
            click.echo(f"{self._verb} {done} of {self._total}", err=True)

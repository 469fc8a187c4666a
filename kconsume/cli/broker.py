"""`kconsume broker`: shows, starts and stops the named embedded brokers of this machine.

`_embedded/named_broker.py` says what such a broker is, and how long it lives.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import click
import msgspec
from rich.console import Console, Group
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from kconsume._embedded.named_broker import NamedBroker, attach, find, names
from kconsume.cli.options import json_option
from kconsume.cli.render import table
from kconsume.errors import EmbeddedBrokerError

_LIMITS = (
    "The broker keeps everything in memory, and ends after eight hours without a client.",
    "It keeps about the last 5 MB of each partition, and does not answer admin requests.",
    "A rebalance takes session.timeout.ms minus one second in a classic group, a moment in a KIP-848 group.",
    "Test transactions, static members and timestamps on a real Kafka.",
)


class Seen(msgspec.Struct):
    """The state of a broker. `topics` is None if the broker does not answer; `trouble` then says why."""

    name: str
    bootstrap: str | None = None
    pid: int | None = None
    uptime: float | None = None
    topics: dict[str, int] | None = None
    trouble: str | None = None
    started_now: bool = False


class _Listing(msgspec.Struct):
    brokers: list[Seen]


class _Stopped(msgspec.Struct):
    name: str
    stopped: bool


def _parse_topics(_: click.Context, option: click.Parameter, values: tuple[str, ...]) -> list[tuple[str, int]]:
    topics = []
    for value in values:
        topic, _colon, partitions = value.partition(":")
        if not topic or not (partitions or "4").isdecimal():
            raise click.BadParameter(f"{value!r} is not NAME or NAME:PARTITIONS, as in orders:4", param=option)
        topics.append((topic, int(partitions or 4)))
    return topics


@click.command(short_help="Start a Kafka in memory for development, with nothing to install.")
@click.argument("name", required=False)
@click.option(
    "--topic",
    "topics",
    multiple=True,
    metavar="NAME[:PARTITIONS]",
    callback=_parse_topics,
    show_default="no topic; 4 PARTITIONS",
    help="Create this topic, if it does not exist. May be repeated.",
)
@click.option("--stop", is_flag=True, help="Stop the broker. Its topics and records are lost.")
@json_option
def broker(name: str | None, topics: list[tuple[str, int]], stop: bool, as_json: bool) -> None:
    """Start a Kafka in memory for development, with nothing to install.

    The broker is a process of its own. All programs that use its NAME share it. This command starts the broker if it is
    not running, creates the topics you ask for, and shows the broker's address. Without NAME, it lists the running
    brokers.

    \b
      kconsume broker shop --topic orders:4     start it, with a topic
      App("embedded://shop", group="…")         use it, in as many processes as you like
      kconsume broker                           list the running brokers
      kconsume broker shop --stop               stop it
    """
    if name is None:
        if stop or topics:
            raise click.UsageError("no broker was named: give its NAME, as in: kconsume broker shop --stop")
        _print(_Listing([seen for each in names() if (seen := _look(each))]), as_json)
    elif stop:
        if topics:
            raise click.UsageError("--topic creates a topic, and --stop deletes all topics: give one of the two")
        _print(_stop(name), as_json)
    else:
        _print(_show(name, topics), as_json)


def _show(name: str, topics: list[tuple[str, int]]) -> Seen:
    found = find(name)
    running = found or attach(name)
    for topic, partitions in topics:
        running.create_topic(topic, partitions, exist_ok=True)
    seen = _look_at(running)
    seen.started_now = found is None
    return seen


def _stop(name: str) -> _Stopped:
    running = find(name)
    if running is not None:
        running.stop()
    return _Stopped(name, running is not None)


def _look(name: str) -> Seen | None:
    try:
        running = find(name)
    except EmbeddedBrokerError as error:
        return Seen(name, trouble=str(error))
    return _look_at(running) if running else None


def _look_at(running: NamedBroker) -> Seen:
    about = running.about
    seen = Seen(about.name, about.bootstrap, about.pid, round(time.time() - about.started, 3))
    try:
        seen.topics = running.topics()
    except EmbeddedBrokerError as error:
        seen.trouble = str(error)
    return seen


def _print(what: Seen | _Listing | _Stopped, as_json: bool) -> None:
    if as_json:
        click.echo(msgspec.json.encode(what))
        return
    console = Console(highlight=False)
    match what:
        case Seen():
            console.print(_details(what))
        case _Listing(brokers=[]):
            console.print("No embedded broker is running. Start one: [bold]kconsume broker shop[/]")
        case _Listing():
            for line in _table(what.brokers):
                click.echo(line)
        case _Stopped(stopped=True):
            console.print(f"Stopped [bold]{what.name}[/]. Its topics and records are lost.")
        case _Stopped():
            console.print(f"[bold]{what.name}[/] was not running.")


def _details(seen: Seen) -> Group:
    facts = Table.grid(padding=(0, 2))
    facts.add_row("address", seen.bootstrap)
    facts.add_row("process", str(seen.pid))
    facts.add_row("topics", _topics(seen))
    facts.add_row("use it", Text(f'App("embedded://{seen.name}", group="…")', "bold"))
    facts.add_row("stop it", f"kconsume broker {seen.name} --stop")
    state = "started" if seen.started_now else f"running for {_ago(seen.uptime)}"
    return Group(
        Text.assemble(("● ", "green"), (seen.name, "bold"), f"  {state}"),
        Padding(facts, (0, 0, 1, 2)),
        *(Text(line, "dim") for line in _LIMITS),
    )


def _table(brokers: list[Seen]) -> Iterator[str]:
    rows = [
        (seen.name, seen.bootstrap or "-", str(seen.pid or "-"), _ago(seen.uptime), _topics(seen).plain)
        for seen in brokers
    ]
    return table(("name", "address", "process", "running for", "topics"), rows)


def _topics(seen: Seen) -> Text:
    if seen.topics is None:
        return Text(seen.trouble or "unknown", "red")
    return Text(", ".join(f"{topic}:{count}" for topic, count in sorted(seen.topics.items())) or "none yet")


def _ago(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    minutes, hours = int(seconds // 60), int(seconds // 3600)
    if hours:
        return f"{hours} h {minutes % 60} min"
    return f"{minutes} min" if minutes else f"{int(seconds)} s"

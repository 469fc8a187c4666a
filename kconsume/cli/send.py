"""`kconsume send`: writes records to a topic by hand, and prints their places.

Checks first that the topic exists, so that a misspelt name is an error and not a new topic.
"""

from __future__ import annotations

import os
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import BinaryIO, NamedTuple

import click
import msgspec

from kconsume._config import environment
from kconsume._config.client_settings import ClientValue
from kconsume._kafka.cluster import Cluster
from kconsume._kafka.outgoing import Outgoing, encoded
from kconsume._kafka.producer import Producer, producer_settings
from kconsume._kafka.topic_reader import RecordPlace
from kconsume.cli.app_loader import VARIABLE, load
from kconsume.cli.options import json_option
from kconsume.errors import ConfigurationError, SendFailed
from kconsume.records import Partition

_PATIENCE = 10.0
_AHEAD = 1000
"""The highest number of unconfirmed records. With more, the command waits for the oldest one."""
_EMBEDDED = "embedded://"


class _Target(NamedTuple):
    """The cluster to write to, and the app that named it."""

    brokers: str
    kafka: Mapping[str, ClientValue]
    app: str | None = None
    handled: frozenset[str] = frozenset()


class _Written(msgspec.Struct):
    partition: int
    offset: int
    place: str


class _Sent(msgspec.Struct):
    topic: str
    records: list[_Written]


def _parse_headers(_: click.Context, option: click.Parameter, values: tuple[str, ...]) -> list[tuple[str, str]]:
    headers = []
    for value in values:
        name, equals, text = value.partition("=")
        if not name or not equals:
            raise click.BadParameter(f"{value!r} is not NAME=VALUE, as in trace=42", param=option)
        headers.append((name, text))
    return headers


@click.command(short_help="Write a record to a topic by hand.")
@click.argument("topic")
@click.argument("value", required=False)
@click.option(
    "--key", show_default="none", help="The record's key. Records with one key stay in one partition, in order."
)
@click.option(
    "--header",
    "headers",
    multiple=True,
    metavar="NAME=VALUE",
    callback=_parse_headers,
    show_default="none",
    help="A header. May be repeated.",
)
@click.option("--partition", type=click.IntRange(min=0), show_default="chosen by the key", help="The partition.")
@click.option("--lines", is_flag=True, help="Send one record for each line of standard input.")
@click.option("--null", is_flag=True, help="Send a record without a value: a tombstone.")
@click.option("--app", metavar="APP", show_default=VARIABLE, help="Write to the cluster of this app.")
@click.option(
    "--brokers",
    metavar="ADDRESS",
    show_default="KCONSUME_BROKERS",
    help="Write to this cluster: host:port,... or embedded://NAME.",
)
@json_option
def send(
    topic: str,
    value: str | None,
    key: str | None,
    headers: list[tuple[str, str]],
    partition: int | None,
    lines: bool,
    null: bool,
    app: str | None,
    brokers: str | None,
    as_json: bool,
) -> None:
    """Write a record with this VALUE to TOPIC, and print its place.

    VALUE is the text itself, - for all of standard input, or @FILE for the content of a file.

    \b
      kconsume send orders '{"id": 1}' --app shop:app
      kconsume send orders @order.json --key 1 --header trace=42
      kconsume send orders --lines < orders.jsonl     a record a line
      kconsume send orders --null --key 1             a tombstone
      kconsume send orders hello --brokers embedded://shop

    --app or --brokers names the cluster. With --brokers, other client properties come from variables such as
    KCONSUME_KAFKA_SECURITY_PROTOCOL. An embedded broker creates a missing topic.

    Exit code 0 if every record was confirmed, 1 if not, 2 if there is no such topic.
    """
    values = _values(value, lines, null)
    target = _target(app, brokers)
    bootstrap = _reach(target, topic, partition)
    producer = Producer(producer_settings(bootstrap, {**target.kafka, "message.timeout.ms": _PATIENCE * 1000}), "send")
    outgoing = (encoded(Outgoing(each, key, headers, topic), None, producer.max_message_bytes) for each in values)
    places = _written(producer, outgoing, partition)
    try:
        if as_json:
            _print_document(topic, places)
        else:
            _print_places(places, target)
    finally:
        producer.close(_PATIENCE)


# What to send


def _values(value: str | None, lines: bool, null: bool) -> Iterable[bytes | None]:
    if [value is not None, lines, null].count(True) != 1:
        raise click.UsageError("give one of VALUE, --lines and --null, as in: kconsume send orders '{\"id\": 1}'")
    if null:
        return [None]
    if lines:
        return _lines(sys.stdin.buffer)
    if value == "-":
        return [sys.stdin.buffer.read()]
    if value and value.startswith("@"):
        return [_content(Path(value[1:]))]
    return [os.fsencode(value or "")]  # the bytes as they were typed, also if they are not UTF-8


def _lines(stream: BinaryIO) -> Iterator[bytes]:
    for line in stream:
        yield line.removesuffix(b"\n").removesuffix(b"\r")


def _content(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise ConfigurationError(
            f"{str(file)!r} cannot be read ({error.strerror}): name a file after the @; for a value that starts with "
            f"an @, write - and give it on standard input"
        ) from error


# Where to


def _target(app: str | None, brokers: str | None) -> _Target:
    """The cluster of the command line, or else of KCONSUME_APP, or else of KCONSUME_BROKERS."""
    if app and brokers:
        raise click.UsageError("--app and --brokers both name the cluster: give one of the two")
    app = app or (None if brokers else os.environ.get(VARIABLE))
    if app:
        found = load(app)
        handled = frozenset(topic for registration in found.registrations for topic in registration.topics)
        return _Target(found.brokers, found.kafka, os.environ[VARIABLE], handled)
    variables = environment.read(os.environ)
    address = brokers or variables.brokers
    if not address:
        raise ConfigurationError(
            f"no cluster was named: add --app shop:app or --brokers localhost:9092, or set {VARIABLE} "
            f"or KCONSUME_BROKERS"
        )
    return _Target(address, variables.kafka)


def _reach(target: _Target, topic: str, partition: int | None) -> str:
    """The address of the cluster. Raises an error if the cluster does not have the topic."""
    bootstrap = _started(target.brokers, topic) if target.brokers.startswith(_EMBEDDED) else target.brokers
    count = Cluster(bootstrap, target.kafka, patience=_PATIENCE).topics([topic])[topic]
    if partition is not None and partition >= count:
        raise ConfigurationError(
            f"topic {topic!r} has {count} partitions, numbered from 0: there is no {Partition(topic, partition)}"
        )
    return bootstrap


def _started(address: str, topic: str) -> str:
    if address == _EMBEDDED:
        raise ConfigurationError(
            "embedded:// is a broker inside the process that uses it, and no other process can write to it: name the "
            "broker to share it, as in embedded://shop"
        )
    from kconsume._embedded.address import resolve

    return resolve(address, [topic])


# The result


def _written(producer: Producer, outgoing: Iterable[Outgoing], partition: int | None) -> Iterator[RecordPlace]:
    """Yield the place of each record, in order. A failure is raised after the places of written records."""
    unconfirmed: deque[Future[tuple[Partition, int]]] = deque()
    written, failure = 0, None
    try:
        for each in outgoing:
            unconfirmed.append(producer.write(each, partition))
            while unconfirmed and (unconfirmed[0].done() or len(unconfirmed) > _AHEAD):
                yield RecordPlace(*unconfirmed.popleft().result())
                written += 1
    except SendFailed as error:
        failure = error
    for future in unconfirmed:  # after a failure too: later records may have been written
        try:
            yield RecordPlace(*future.result())
            written += 1
        except SendFailed as error:
            failure = failure or error
    if failure is not None:
        if written:
            failure.add_note(f"records that were written: {written:,}")
        raise failure


def _print_places(places: Iterable[RecordPlace], target: _Target) -> None:
    last: RecordPlace | None = None
    for last in places:
        click.echo(str(last))
    if last is not None and sys.stdout.isatty() and (target.app is None or last.partition.topic in target.handled):
        click.echo(f"what does my handler do with it?  kconsume try {target.app or 'MODULE:APP'} {last}", err=True)


def _print_document(topic: str, places: Iterable[RecordPlace]) -> None:
    sent = _Sent(topic, [])
    try:
        sent.records.extend(_Written(place.partition.number, place.offset, str(place)) for place in places)
    finally:
        click.echo(msgspec.json.encode(sent))

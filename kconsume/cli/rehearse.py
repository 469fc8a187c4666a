"""`kconsume try`: today's handler on one record of the real topic, rolled back.

Reads the record with a consumer of its own that joins no group and commits nothing; the call itself is
`kconsume.trial`'s, which is made of the parts of a run. Where the handler takes the store's transaction, it gets one
that is always undone (`rehearsal` of the store); what it sends is shown, and does not leave.
"""

from __future__ import annotations

import dataclasses
import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple, cast

import click
import msgspec
from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition

from kconsume import console
from kconsume.app import App
from kconsume.cli.target import VARIABLE, app_argument, load
from kconsume.decoding import text_of
from kconsume.errors import BrokerUnavailable, ConfigurationError, DecodeError
from kconsume.failures.policy import Policy
from kconsume.output import Outgoing
from kconsume.records import Headers, Message, Partition, Record, record_of
from kconsume.runtime.budget import Deadline
from kconsume.runtime.plans import ConsumerPlan, HandlerPlan
from kconsume.trial import Furniture, Trial, Tried, rehearsal

_PATIENCE = 10.0
_EMBEDDED = "embedded://"
_LONGEST = 2000


class Place(NamedTuple):
    """One record, written `orders/3@1042`."""

    partition: Partition
    offset: int

    def __str__(self) -> str:
        return f"{self.partition}@{self.offset}"

    @classmethod
    def parse(cls, text: str) -> Place:
        where, at, offset = text.rpartition("@")
        if not at or not offset.isdecimal():
            raise ConfigurationError(f"{text!r} is not a record: write TOPIC/PARTITION@OFFSET, as in orders/3@1042")
        return cls(Partition.parse(where), int(offset))


class Sent(msgspec.Struct):
    """A record that would be sent."""

    topic: str
    key: str | None
    value: str | None
    headers: list[tuple[str, str]]


class Outcome(msgspec.Struct):
    """What came of it; printed as it is with `--json`."""

    record: str
    handler: str
    passes: bool
    rolled_back: bool
    """Whether the handler wrote through a transaction, which was undone."""
    error: str | None = None
    trace: str | None = None
    sent: list[Sent] = []
    """What it would send."""


class _Part(NamedTuple):
    """The handler of a topic, and the consumer that it would be part of."""

    consumer: ConsumerPlan
    handler: HandlerPlan


@click.command("try", short_help="What does my handler do with that record?")
@app_argument
@click.argument("place", required=False, metavar="TOPIC/PARTITION@OFFSET")
@click.option("--handler", metavar="NAME", help="Which handler, where the topic has several in different groups.")
@click.option("--pdb", "debug", is_flag=True, help="If it fails, look around at the failure in Python's debugger.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@click.pass_context
def rehearse(
    context: click.Context, app: str | None, place: str | None, handler: str | None, debug: bool, as_json: bool
) -> None:
    """What does my handler do with that record?

    Fetches exactly that record and runs today's handler of APP on it. No offset moves, and what the handler
    writes through the store's transaction is rolled back. What it sends through kconsume is shown, and not sent.
    What it does elsewhere is real: a call, a file, a message. Its resources are built for it, and closed.

    \b
      kconsume try shop:app orders/3@1042
      kconsume try shop:app orders/3@1042 --pdb      and look around where it fails

    Exit code 0 if the handler passes, 1 if it fails, 2 if there is no such record.
    """
    app, place = _sorted_out(app, place)
    wanted, found = Place.parse(place), load(app)
    part = _part(found, wanted, handler)
    message = _fetch(part.consumer, wanted)
    scope = _scope(part.consumer, wanted.partition.topic)
    if not as_json:
        _show_record(wanted, record_of(message, scope))
        _show_handler(part)
    tried = _trial(found, part, scope).run([message])
    outcome = _outcome(part, wanted, tried)
    if as_json:
        click.echo(msgspec.json.encode(outcome))
    else:
        _show_outcome(outcome, part)
    if tried.error is not None and debug:
        _look_around(tried.error)
    context.exit(0 if outcome.passes else 1)


def _sorted_out(app: str | None, place: str | None) -> tuple[str | None, str]:
    """With the app in KCONSUME_APP, the only argument is the record."""
    if place is not None:
        return app, place
    if app is None or "@" not in app:
        raise ConfigurationError("which record? Write kconsume try APP TOPIC/PARTITION@OFFSET, as in orders/3@1042")
    return os.environ.get(VARIABLE), app


# Which handler


def _part(app: App, place: Place, name: str | None) -> _Part:
    _must_be_reachable(app.brokers)
    topic = place.partition.topic
    parts = [
        _Part(consumer, handler)
        for consumer in app.plans()
        for handler in consumer.handlers
        if handler.wanted.takes(topic) and name in (None, handler.binding.name)
    ]
    if len(parts) == 1:
        return parts[0]
    if parts:
        names = " or ".join(part.handler.binding.name for part in parts)
        raise ConfigurationError(f"topic {topic!r} has {len(parts)} handlers: say which, with --handler {names}")
    handled = sorted({t for registration in app.registrations for t in registration.topics})
    which = "no handler" if name is None else f"no handler {name!r}"
    raise ConfigurationError(f"the app has {which} for topic {topic!r}: it handles {', '.join(handled)}")


def _must_be_reachable(brokers: str) -> None:
    if not brokers.startswith(_EMBEDDED):
        return
    from kconsume.testing.broker import find

    name = brokers.removeprefix(_EMBEDDED)
    if not name:
        raise ConfigurationError(
            "the app uses embedded://, a broker inside the process that ran it, and its records are gone with that: "
            "name it to share it, as in App('embedded://shop', ...)"
        )
    if find(name) is None:
        raise ConfigurationError(
            f"the embedded broker {name!r} is not running, and its records are gone: start it with "
            f"`kconsume broker {name}`, and produce them again"
        )


def _scope(consumer: ConsumerPlan, topic: str) -> str:
    """The same beginning of `Record.id` as in a run."""
    return f"{consumer.group}:{consumer.cluster.topic_ids([topic])[topic] or topic}"


# The record


def _fetch(plan: ConsumerPlan, place: Place) -> Message:
    deadline = Deadline(_PATIENCE)
    with _reading(plan, place, deadline) as consumer:
        return _read(consumer, place, deadline)


@contextmanager
def _reading(plan: ConsumerPlan, place: Place, deadline: Deadline) -> Iterator[Consumer]:
    """A consumer of its own that reads from this place on, which must be in the log."""
    partition = place.partition
    count = plan.cluster.topics([partition.topic])[partition.topic]
    if partition.number >= count:
        raise ConfigurationError(f"topic {partition.topic!r} has {count} partitions, numbered from 0: no {partition}")
    consumer = Consumer(
        {
            **plan.settings,
            "group.id": f"kconsume-try-{uuid.uuid4().hex}",  # never joined, and nothing is committed
            "enable.partition.eof": True,
            "log_level": 0,
        }
    )
    try:
        _must_hold(consumer, place, deadline)
        consumer.assign([TopicPartition(*partition, place.offset)])
        yield consumer
    except KafkaException as error:
        raise BrokerUnavailable(f"{place} cannot be read: {error.args[0].str()}; is the broker well?") from error
    finally:
        consumer.close()


def _must_hold(consumer: Consumer, place: Place, deadline: Deadline) -> None:
    first, end = consumer.get_watermark_offsets(TopicPartition(*place.partition), timeout=deadline.left)
    if first <= place.offset < end:
        return
    holds = f"holds {first} to {end - 1}" if first < end else "is empty"
    gone = "deleted by retention" if place.offset < first else "not written yet"
    raise ConfigurationError(f"there is no record {place}: {place.partition} {holds}; that offset is {gone}")


def _read(consumer: Consumer, place: Place, deadline: Deadline) -> Message:
    trouble = "no answer"
    while not deadline.passed:
        message = consumer.poll(min(0.2, deadline.left))
        error = None if message is None else message.error()
        if message is not None and error is None:
            if message.offset() == place.offset:
                return cast(Message, message)  # the client's stubs allow for messages that are errors
            raise _gap(place, f"the next record is {place.partition}@{message.offset()}")
        if error is not None and error.code() == KafkaError._PARTITION_EOF:
            raise _gap(place, "no record follows it")
        trouble = trouble if error is None else error.str()
    raise BrokerUnavailable(
        f"{place} did not come within {_PATIENCE:g} s ({trouble}): if it belongs to a transaction that is still open, "
        f"it can be read when that has ended"
    )


def _gap(place: Place, then: str) -> ConfigurationError:
    return ConfigurationError(
        f"there is no record {place}: the offset is a gap (compacted, aborted, or the mark of a transaction); {then}"
    )


# The call


def _trial(app: App, part: _Part, scope: str) -> Trial:
    furniture = Furniture(app._resources, app._given, app.shutdown)
    # Whatever would become of the record in a run, here its failure is what a person wants to see.
    handler = dataclasses.replace(part.handler, policy=Policy("stop"))
    return Trial(handler, scope, furniture, rehearsal(part.consumer.store, part.handler.binding), app._most_bytes)


def _outcome(part: _Part, place: Place, tried: Tried) -> Outcome:
    binding, error = part.handler.binding, tried.error
    return Outcome(
        record=str(place),
        handler=binding.name,
        passes=error is None,
        rolled_back=binding.transaction is not None,
        error=None if error is None else f"{type(error).__name__}: {error}",
        trace=None if error is None or isinstance(error, DecodeError) else console.handlers_trace(error),
        sent=[_sent(outgoing) for outgoing in tried.sent],
    )


def _sent(outgoing: Outgoing) -> Sent:
    key, value = cast("bytes | None", outgoing.key), cast("bytes | None", outgoing.value)  # it is encoded
    return Sent(
        topic=cast(str, outgoing.topic),
        key=None if key is None else _readable(key),
        value=None if value is None else _readable(value),
        headers=[(name, _readable(each)) for name, each in cast(Headers, outgoing.headers)],
    )


def _look_around(error: BaseException) -> None:
    import pdb

    if error.__traceback__ is None:
        click.echo("There is nothing to look around in: the handler was not reached.", err=True)
    else:
        pdb.post_mortem(error.__traceback__)


# What is shown


def _show_record(place: Place, record: Record) -> None:
    at = "no timestamp" if record.timestamp is None else record.timestamp.isoformat(" ", "milliseconds")
    click.echo(f"{place}  {at}")
    click.echo(f"  key      {_readable(record.key)}")
    for name, value in record.headers:
        click.echo(f"  header   {name} = {_readable(value)}")
    click.echo(f"  value    {_readable(record.value)}")


def _readable(data: bytes | None) -> str:
    if data is None:
        return "(null)"
    try:
        text = data.decode()
    except UnicodeDecodeError:
        text = repr(data[:_LONGEST])
    text = text if text.isprintable() or not text.isascii() else repr(text)[1:-1]
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]} … ({len(data):,} bytes in all)"


def _show_handler(part: _Part) -> None:
    binding = part.handler.binding
    click.echo(f"{binding.name} gets {binding.payload}")
    if binding.transaction is None:
        click.echo("  it takes no transaction: everything it does is real")
    else:
        click.echo("  what it writes through the transaction is rolled back")
        click.echo("  what it does elsewhere (a call, a file, a message) is real")
    if binding.sends:
        click.echo("  what it sends through kconsume is shown here, and not sent")
    if binding.resources:
        click.echo(f"  built for it: {', '.join(map(text_of, binding.resources.values()))}")


def _show_outcome(outcome: Outcome, part: _Part) -> None:
    for sent in outcome.sent:
        _show_sent(sent)
    undone = "; its writes were rolled back" if outcome.rolled_back else ""
    if outcome.passes:
        click.echo(f"passes{undone}")
        return
    if outcome.trace is not None:
        click.echo(outcome.trace)
    click.echo(f"fails{undone}: {outcome.error}")
    click.echo(f"in a run: {part.handler.policy}")


def _show_sent(sent: Sent) -> None:
    click.echo(f"would send to {sent.topic}")
    click.echo(f"  key      {'(null)' if sent.key is None else sent.key}")
    for name, value in sent.headers:
        click.echo(f"  header   {name} = {value}")
    click.echo(f"  value    {'(null)' if sent.value is None else sent.value}")

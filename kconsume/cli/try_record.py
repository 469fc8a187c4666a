"""`kconsume try`: runs today's handler on one record of the real topic, and rolls back.

Reads the record with `TopicReader`, which joins no group and commits nothing. The call is a `DryRun`: a handler that
takes the store's transaction gets a transaction that is always rolled back. What the handler sends is shown, and not
sent.
"""

from __future__ import annotations

import os
from typing import cast

import click
import msgspec

from kconsume import _console
from kconsume._handlers.annotations import text_of
from kconsume._kafka.outgoing import Outgoing
from kconsume._kafka.topic_reader import RecordPlace, TopicReader
from kconsume._runtime.dry_run import DryRunResult
from kconsume.cli.app_loader import VARIABLE, load
from kconsume.cli.app_parts import HandlerInApp, dry_run, handler_of, record_scope
from kconsume.cli.broker_address import check_running
from kconsume.cli.options import app_argument, json_option
from kconsume.cli.render import readable, show_record
from kconsume.errors import ConfigurationError, DecodeError
from kconsume.records import Headers, record_of


class TrySent(msgspec.Struct):
    """A record that the handler would send."""

    topic: str
    key: str | None
    value: str | None
    headers: list[tuple[str, str]]


class TryOutcome(msgspec.Struct):
    """The result of `try`, which `--json` prints."""

    record: str
    handler: str
    passes: bool
    rolled_back: bool
    """True if the handler takes the store's transaction, which was rolled back."""
    error: str | None = None
    trace: str | None = None
    sent: list[TrySent] = []
    """The records that the handler would send."""


@click.command("try", short_help="Run a handler on one record, and roll back.")
@app_argument
@click.argument("place", required=False, metavar="TOPIC/PARTITION@OFFSET")
@click.option(
    "--handler",
    metavar="NAME",
    show_default="the only handler of the topic",
    help="The handler, if handlers of several groups take the topic.",
)
@click.option("--pdb", "debug", is_flag=True, help="If it fails, open Python's debugger at the failure.")
@json_option
@click.pass_context
def try_record(
    context: click.Context, app: str | None, place: str | None, handler: str | None, debug: bool, as_json: bool
) -> None:
    """Run today's handler of APP on one record, and roll back.

    Reads only that record, and moves no offset. What the handler writes through the store's transaction is rolled back.
    What it sends through kconsume is shown, and not sent. Everything else that it does is real: a call, a file, a
    message. The handler's resources are built before the call, and closed after it.

    \b
      kconsume try shop:app orders/3@1042
      kconsume try shop:app orders/3@1042 --pdb      open the debugger where it fails

    Exit code 0 if the handler passes, 1 if it fails, 2 if there is no such record.
    """
    app, place = _app_and_place(app, place)
    wanted, found = RecordPlace.parse(place), load(app)
    check_running(found.brokers)
    part = handler_of(found, wanted.partition.topic, handler)
    message = TopicReader(part.consumer.cluster, part.consumer.settings).record(wanted)
    scope = record_scope(part.consumer, wanted.partition.topic)
    if not as_json:
        show_record(wanted, record_of(message, scope))
        _show_handler(part)
    tried = dry_run(found, part, scope).run([message])
    outcome = _outcome(part, wanted, tried)
    if as_json:
        click.echo(msgspec.json.encode(outcome))
    else:
        _show_outcome(outcome, part)
    if tried.error is not None and debug:
        _open_debugger(tried.error)
    context.exit(0 if outcome.passes else 1)


def _app_and_place(app: str | None, place: str | None) -> tuple[str | None, str]:
    """The app and the record. If `KCONSUME_APP` is set, the record may be the only argument."""
    if place is not None:
        return app, place
    if app is None or "@" not in app:
        raise ConfigurationError(
            "no record was named: write kconsume try APP TOPIC/PARTITION@OFFSET, as in orders/3@1042"
        )
    return os.environ.get(VARIABLE), app


def _outcome(part: HandlerInApp, place: RecordPlace, tried: DryRunResult) -> TryOutcome:
    binding, error = part.handler.binding, tried.error
    return TryOutcome(
        record=str(place),
        handler=binding.name,
        passes=error is None,
        rolled_back=binding.transaction is not None,
        error=None if error is None else f"{type(error).__name__}: {error}",
        trace=None if error is None or isinstance(error, DecodeError) else _console.handlers_trace(error),
        sent=[_sent(outgoing) for outgoing in tried.sent],
    )


def _sent(outgoing: Outgoing) -> TrySent:
    key, value = cast("bytes | None", outgoing.key), cast("bytes | None", outgoing.value)  # a dry run has encoded both
    return TrySent(
        topic=cast(str, outgoing.topic),
        key=None if key is None else readable(key),
        value=None if value is None else readable(value),
        headers=[(name, readable(each)) for name, each in cast(Headers, outgoing.headers)],
    )


def _open_debugger(error: BaseException) -> None:
    import pdb

    if error.__traceback__ is None:
        click.echo("The debugger is not opened: the handler was not reached.", err=True)
    else:
        pdb.post_mortem(error.__traceback__)


# What is shown


def _show_handler(part: HandlerInApp) -> None:
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


def _show_outcome(outcome: TryOutcome, part: HandlerInApp) -> None:
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


def _show_sent(sent: TrySent) -> None:
    click.echo(f"would send to {sent.topic}")
    click.echo(f"  key      {'(null)' if sent.key is None else sent.key}")
    for name, value in sent.headers:
        click.echo(f"  header   {name} = {value}")
    click.echo(f"  value    {'(null)' if sent.value is None else sent.value}")

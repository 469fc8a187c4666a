"""`kconsume failed`: shows records that a store applied in part, and carries out the user's decision about them.

The store says which records these are, and what a decision does to an offset (`failures` and `decide` of
`RedisStore`). `cli/failed/records.py` reads the records themselves.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import click
import msgspec

from kconsume._config import environment
from kconsume._config.client_settings import ClientValue, check_group, client_settings
from kconsume._kafka.cluster import Cluster
from kconsume._kafka.topic_reader import RecordPlace
from kconsume._runtime.plan import ConsumerPlan
from kconsume.backends import open_store
from kconsume.backends.capabilities import capabilities_of
from kconsume.cli.app_loader import VARIABLE, load
from kconsume.cli.broker_address import check_running, connect_address
from kconsume.cli.command_group import CommandGroup
from kconsume.cli.failed.records import dead_letter, records_of
from kconsume.cli.options import json_option, optional_app_argument, source_options, yes_option
from kconsume.cli.render import readable, show_record
from kconsume.errors import ConfigurationError
from kconsume.records import Partition, Record

if TYPE_CHECKING:
    from kconsume.backends.redis.rows import FailedRecord
    from kconsume.backends.redis.store import Decision


class WaitingFailure(msgspec.Struct):
    """A record that waits for a decision, as `--json` prints it."""

    record: str
    group: str
    store: str
    end: int
    """The offset after the record, or after the last record of a batch."""
    command: str | None
    index: int | None
    """The number of the command that failed, counted from 1."""
    of: int | None
    error: str | None
    at: str | None


class ShownFailure(msgspec.Struct):
    """A record as it is in Kafka."""

    record: str
    key: str | None
    value: str | None
    headers: list[tuple[str, str]]


class DecisionOutcome(msgspec.Struct):
    """What was done about one failed record, or would be done, as `--json` prints it."""

    failed: WaitingFailure
    action: str
    done: bool
    """False if nothing was changed, because `--yes` was not given."""
    records: list[ShownFailure] = []
    dead_letters: list[str] = []
    """The places of the dead letters, as in orders.dlq/0@17."""


class _FailureInGroup(NamedTuple):
    """A failed record, with the consumer that stopped at it."""

    plan: ConsumerPlan
    kafka: Mapping[str, ClientValue]
    failed: FailedRecord

    def described(self) -> WaitingFailure:
        failed = self.failed
        return WaitingFailure(
            record=str(RecordPlace(failed.partition, failed.offset)),
            group=self.plan.group,
            store=self.plan.store.address,
            end=failed.end,
            command=failed.command,
            index=failed.index,
            of=failed.of,
            error=failed.error,
            at=None if failed.at is None else failed.at.isoformat(),
        )

    def decide(self, what: Decision) -> None:
        """Carry out a decision. The store refuses it if another record of the partition has failed meanwhile."""
        store = capabilities_of(self.plan.store).deciding
        assert store is not None
        store.decide(self.plan.group, self.failed.partition, what, offset=self.failed.offset)


class _FailedCommands(CommandGroup):
    """The commands of `kconsume failed`. The word order of earlier versions also works: `kconsume failed APP list`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        action = next((word for word in args if word in self.commands), None)
        if action is not None and args[0] != action:
            args.remove(action)
            args.insert(0, action)
            click.echo(f"hint: the command comes first: kconsume failed {' '.join(args)}", err=True)
        return super().parse_args(ctx, args)


@click.group(cls=_FailedCommands, short_help="Records that Redis applied in part: show, decide.")
def failed() -> None:
    """Records that Redis applied in part: look at them, and decide.

    Redis has no rollback. If one command of a record fails, the commands before it stay applied. The partition then
    stops, also after a restart, until you decide about the record.

    \b
      kconsume failed list shop:app
      kconsume failed show shop:app orders/3          show the record, and the command that failed
      kconsume failed retry shop:app orders/3         handle the record again, with all of its commands
      kconsume failed skip shop:app orders/3 --yes    keep what was applied, and skip the record
      kconsume failed dead-letter shop:app orders/3 --to orders.dlq
                                                      write the record to that topic, then skip it
      kconsume failed list --brokers localhost:9092 --group shop --offsets redis://localhost:6379/0

    The consumer in which the record failed has ended: start it again. A consumer that was started after the failure
    waits at the partition, and continues after your decision.

    If the failure was in a batch, or in a script that stopped half-way, all of its records are one failure. They are
    shown, skipped and written together.
    """


_accepted_yes = click.option("--yes", is_flag=True, hidden=True, expose_value=False)
"""An option without an effect: earlier versions took `--yes` with these commands, too."""
_partition_argument = click.argument("words", nargs=-1, metavar="[APP] TOPIC/PARTITION")
_source_options = source_options("the offsets")


@failed.command("list", short_help="List the records that wait for a decision.")
@optional_app_argument
@_source_options
@json_option
def list_failures(app: str | None, brokers: str | None, group: str | None, offsets: str | None, as_json: bool) -> None:
    """List the records that wait for a decision.

    \b
      kconsume failed list shop:app

    Exit code 0, also if no record waits; 2 if the store never applies a record in part.
    """
    failures = _failures(_plans(app, brokers, group, offsets))
    if as_json:
        click.echo(msgspec.json.encode([failure.described() for failure in failures]))
        return
    for failure in failures:
        click.echo(f"{failure.failed}  (group {failure.plan.group})")
    if not failures:
        click.echo("none: no partition is stopped by a record that was applied in part", err=True)


@failed.command(short_help="Show one failed record and its failed command.")
@_partition_argument
@_source_options
@json_option
def show(words: tuple[str, ...], brokers: str | None, group: str | None, offsets: str | None, as_json: bool) -> None:
    """Show the failed record of a partition: the record itself, the command that failed, and what to do.

    \b
      kconsume failed show shop:app orders/3

    Exit code 0 if the record was shown, 2 if the partition has no failed record.
    """
    failure = _failure_at(words, "show", brokers, group, offsets)
    records = records_of(failure.plan, failure.failed)
    if as_json:
        shown = [_shown(record) for record in records]
        click.echo(msgspec.json.encode(DecisionOutcome(failure.described(), "show", done=True, records=shown)))
    else:
        _print_show(failure, records)


@failed.command(short_help="Run all commands of the record again.")
@_partition_argument
@_source_options
@_accepted_yes
@json_option
def retry(words: tuple[str, ...], brokers: str | None, group: str | None, offsets: str | None, as_json: bool) -> None:
    """Let the group handle the failed record of a partition again. All of its commands run, also those that Redis has
    applied.

    \b
      kconsume failed retry shop:app orders/3

    Exit code 0 if the group will handle the record again, 2 if the partition has no failed record.
    """
    failure = _failure_at(words, "retry", brokers, group, offsets)
    failure.decide("retry")
    if as_json:
        click.echo(msgspec.json.encode(DecisionOutcome(failure.described(), "retry", done=True)))
    else:
        click.echo(f"{failure.described().record} will be handled again by group {failure.plan.group}")


@failed.command(short_help="Keep what was applied, and skip the record.")
@_partition_argument
@_source_options
@yes_option("Skip the record.")
@json_option
def skip(
    words: tuple[str, ...], brokers: str | None, group: str | None, offsets: str | None, yes: bool, as_json: bool
) -> None:
    """Skip the failed record of a partition. The commands that Redis has applied stay applied.

    \b
      kconsume failed skip shop:app orders/3 --yes

    Exit code 0 if the record was skipped, or would be with --yes; 2 if the partition has no failed record.
    """
    failure = _failure_at(words, "skip", brokers, group, offsets)
    if yes:
        failure.decide("skip")
    _print_skipped(failure, DecisionOutcome(failure.described(), "skip", done=yes), as_json)


@failed.command("dead-letter", short_help="Write the record to a dead-letter topic, then skip it.")
@_partition_argument
@_source_options
@click.option("--to", "topic", metavar="TOPIC", show_default="none, required", help="The topic for the dead letter.")
@_accepted_yes
@json_option
def write_dead_letter(
    words: tuple[str, ...], brokers: str | None, group: str | None, offsets: str | None, topic: str | None,
    as_json: bool,
) -> None:  # fmt: skip
    """Write the failed record of a partition to a topic of dead letters, and skip it once the broker has confirmed.

    \b
      kconsume failed dead-letter shop:app orders/3 --to orders.dlq

    Exit code 0 if the record was written and skipped, 1 if the dead letter was not confirmed, 2 if there is no such
    record or topic.
    """
    failure = _failure_at(words, "dead-letter", brokers, group, offsets)
    if topic is None:
        raise ConfigurationError(
            "no topic was named for the dead letter: add --to, as in kconsume failed dead-letter orders/3 --to "
            "orders.dlq"
        )
    letters = dead_letter(failure.plan, failure.kafka, failure.failed, topic)
    failure.decide("skip")
    outcome = DecisionOutcome(failure.described(), "dead-letter", done=True, dead_letters=letters)
    _print_skipped(failure, outcome, as_json)


# Choosing the failure


def _app_and_partition(words: Sequence[str], action: str) -> tuple[str | None, Partition]:
    """Split the arguments into the app, which may be missing, and the partition."""
    places = [word for word in words if "/" in word]
    apps = [word for word in words if "/" not in word]
    if len(places) > 1 or len(apps) > 1:
        raise ConfigurationError(
            f"{' '.join(words)!r} names more than one app or partition: write kconsume failed {action} APP orders/3"
        )
    if not places:
        raise ConfigurationError(
            f"no partition was named: write kconsume failed {action} APP TOPIC/PARTITION, as in orders/3"
        )
    return apps[0] if apps else None, Partition.parse(places[0])


def _failure_at(
    words: Sequence[str], action: str, brokers: str | None, group: str | None, offsets: str | None
) -> _FailureInGroup:
    app, partition = _app_and_partition(words, action)
    failures = _failures(_plans(app, brokers, group, offsets))
    found = [failure for failure in failures if failure.failed.partition == partition]
    if len(found) == 1:
        return found[0]
    if found:
        groups = " or ".join(failure.plan.group for failure in found)
        raise ConfigurationError(f"{partition} has a failed record in several groups: choose one with --group {groups}")
    others = ", ".join(str(failure.failed.partition) for failure in failures) or "none"
    raise ConfigurationError(f"{partition} has no failed record: partitions that have one are: {others}")


def _plans(
    app: str | None, brokers: str | None, group: str | None, offsets: str | None
) -> list[tuple[ConsumerPlan, Mapping[str, ClientValue]]]:
    if app is None and (brokers or offsets):
        return [_plan_of(brokers, group, offsets)]
    if brokers or offsets:
        raise click.UsageError("APP, and --brokers or --offsets, both say where to look: give one of the two")
    found = load(app or os.environ.get(VARIABLE))
    check_running(found.brokers)
    plans = [plan for plan in found.plans() if group in (None, plan.group)]
    if not plans:
        raise ConfigurationError(f"the app has no group {group!r}: correct --group, or leave it out")
    return [(plan, found.kafka) for plan in plans]


def _plan_of(
    brokers: str | None, group: str | None, offsets: str | None
) -> tuple[ConsumerPlan, Mapping[str, ClientValue]]:
    variables = environment.read(os.environ)
    brokers, group, offsets = brokers or variables.brokers, group or variables.group, offsets or variables.offsets
    if not brokers or not group or not offsets:
        raise ConfigurationError(
            "without an APP, all of --brokers, --group and --offsets are needed (or KCONSUME_BROKERS and so on)"
        )
    check_group(group)
    address = connect_address(brokers)
    cluster = Cluster(address, variables.kafka)
    settings = client_settings(address, group, variables.kafka, embedded=address != brokers)
    store = open_store(offsets, brokers=address, kafka=variables.kafka)
    return ConsumerPlan(group, store, (), None, settings, cluster, 0.0, 0), variables.kafka


def _failures(plans: Sequence[tuple[ConsumerPlan, Mapping[str, ClientValue]]]) -> list[_FailureInGroup]:
    """The failed records of all groups, each once. Raises `ConfigurationError` if no store of these groups can apply a
    record only in part: then there is nothing to decide."""
    failures: dict[tuple[str, int], list[_FailureInGroup]] = {}
    for plan, kafka in plans:
        store = capabilities_of(plan.store).deciding
        if store is not None and (plan.group, id(store)) not in failures:
            records = store.failures(plan.group).values()
            failures[plan.group, id(store)] = [_FailureInGroup(plan, kafka, record) for record in records]
    if not failures:
        addresses = ", ".join(sorted({plan.store.address for plan, _ in plans}))
        raise ConfigurationError(f"{addresses} never applies a record in part: there is nothing to decide")
    return [failure for each in failures.values() for failure in each]


# Output


def _shown(record: Record) -> ShownFailure:
    return ShownFailure(
        record=f"{record.topic}/{record.partition}@{record.offset}",
        key=None if record.key is None else readable(record.key),
        value=None if record.value is None else readable(record.value),
        headers=[(name, readable(value)) for name, value in record.headers],
    )


def _print_show(failure: _FailureInGroup, records: Sequence[Record]) -> None:
    for record in records:
        show_record(RecordPlace(Partition(record.topic, record.partition), record.offset), record)
    failed = failure.failed
    if not records:
        click.echo(f"{failed}")
        click.echo("Kafka does not have the record any more: it was compacted or deleted")
    if failed.index is None:
        click.echo("Redis stopped while it applied the record; how much was applied is not known")
    else:
        click.echo(f"command {failed.index} of {failed.of} failed: {failed.command}")
        click.echo(f"  {failed.error}")
        click.echo(f"  commands before it, which are applied: {failed.index - 1}")
    click.echo("remove the cause of the failure, or correct what was applied; then choose:")
    app = f" {name}" if (name := os.environ.get(VARIABLE)) else ""
    where = failed.partition
    click.echo(
        f"  kconsume failed retry{app} {where}         handle it again: all of its commands, the applied ones too"
    )
    click.echo(f"  kconsume failed skip{app} {where} --yes    keep what was applied, and skip the record")
    click.echo(f"  kconsume failed dead-letter{app} {where} --to TOPIC")


def _print_skipped(failure: _FailureInGroup, outcome: DecisionOutcome, as_json: bool) -> None:
    if as_json:
        click.echo(msgspec.json.encode(outcome))
        return
    for letter in outcome.dead_letters:
        click.echo(f"written to {letter}")
    next_place = RecordPlace(failure.failed.partition, failure.failed.end)
    goes_on = f"group {failure.plan.group} continues at {next_place}"
    if outcome.done:
        click.echo(f"skipped {outcome.failed.record}: {goes_on}")
    else:
        click.echo(f"would skip {outcome.failed.record}: {goes_on}; add --yes to do it")

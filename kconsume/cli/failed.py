"""`kconsume failed`: records that were applied in part by a store that cannot undo, and what is to become of them.

Shows them and carries out what a person decides; which they are, and what deciding does to an offset, is the store's
business (`failures` and `decide` of `RedisStore`). The records themselves are fetched by `failed_records.py`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol, runtime_checkable

import click
import msgspec

from kconsume import environment
from kconsume.backends import open_store
from kconsume.cli.failed_records import dead_letter, records_of
from kconsume.cli.rehearse import Place, _must_be_reachable, _readable, _show_record
from kconsume.cli.target import VARIABLE, load
from kconsume.cluster import Cluster
from kconsume.errors import ConfigurationError
from kconsume.records import Partition, Record
from kconsume.runtime.plans import ConsumerPlan
from kconsume.settings import ClientValue, check_group, client_settings

if TYPE_CHECKING:
    from kconsume.backends.redis import Decision
    from kconsume.backends.redis_rows import FailedRecord

_ACTIONS = ("list", "show", "retry", "skip", "dead-letter")


@runtime_checkable
class Deciding(Protocol):
    """A store in which a record can be applied in part."""

    def failures(self, group: str) -> dict[Partition, FailedRecord]: ...

    def decide(self, group: str, partition: Partition, what: Decision, *, offset: int | None = None) -> None: ...


class Failed(msgspec.Struct):
    """A record that waits for a decision; printed as it is with `--json`."""

    record: str
    group: str
    store: str
    end: int
    """The offset behind it, or behind the last record of a batch."""
    command: str | None
    index: int | None
    """Which of its commands failed, counted from 1."""
    of: int | None
    error: str | None
    at: str | None


class Shown(msgspec.Struct):
    """A record as it stands in Kafka."""

    record: str
    key: str | None
    value: str | None
    headers: list[tuple[str, str]]


class Outcome(msgspec.Struct):
    """What was done, or would be; printed as it is with `--json`."""

    failed: Failed
    action: str
    done: bool
    """Whether it was done, and not only said what would be."""
    records: list[Shown] = []
    dead_letters: list[str] = []
    """Where the record was written to, as in orders.dlq/0@17."""


class _Part(NamedTuple):
    """A failed record, with the consumer that stopped at it."""

    plan: ConsumerPlan
    kafka: Mapping[str, ClientValue]
    failed: FailedRecord

    def told(self) -> Failed:
        failed = self.failed
        return Failed(
            record=str(Place(failed.partition, failed.offset)),
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
        """About this record and no other that may have failed meanwhile."""
        store = self.plan.store
        assert isinstance(store, Deciding)
        store.decide(self.plan.group, self.failed.partition, what, offset=self.failed.offset)


@click.command(short_help="Records that were applied in part: look, and decide.")
@click.argument("words", nargs=-1, metavar="[APP] list|show|retry|skip|dead-letter [TOPIC/PARTITION]")
@click.option("--brokers", metavar="ADDRESS", help="The cluster, where no APP is named.")
@click.option("--group", metavar="NAME", help="The group; with an APP, which of its groups.")
@click.option("--offsets", metavar="ADDRESS", help="The store, where no APP is named.")
@click.option("--to", "topic", metavar="TOPIC", help="The topic for the dead letter.")
@click.option("--yes", is_flag=True, help="Really skip, and not only say what would be done.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def failed(
    words: tuple[str, ...],
    brokers: str | None,
    group: str | None,
    offsets: str | None,
    topic: str | None,
    yes: bool,
    as_json: bool,
) -> None:
    """Records that were applied in part: look, and decide.

    Redis cannot undo. When a command of a record fails there, those before it are applied, and the partition stays
    stopped, also across restarts, until somebody has looked.

    \b
      kconsume failed shop:app list
      kconsume failed shop:app show orders/3          the record itself, and what failed
      kconsume failed shop:app retry orders/3         handle it again: all of its commands
      kconsume failed shop:app skip orders/3 --yes    go on behind it, and leave it as it is
      kconsume failed shop:app dead-letter orders/3 --to orders.dlq
                                                      write it to that topic, then skip it
      kconsume failed list --brokers localhost:9092 --group shop --offsets redis://localhost:6379/0

    The consumer in which the record failed has ended: start it again. One that was started since, and waits at the
    partition, takes it up by itself.

    A batch is shown, skipped and written as a whole, and so are the records of a script that broke off.

    Exit code 0 if it was done or shown, 1 if the dead letter was not confirmed, 2 if there is no such record.
    """
    app, action, partition = _sorted_out(words)
    parts = _parts(_plans(app, brokers, group, offsets))
    if action == "list":
        _print_list(parts, as_json)
        return
    if partition is None:
        raise ConfigurationError(f"which partition? Write kconsume failed {action} TOPIC/PARTITION, as in orders/3")
    part = _part(parts, partition)
    outcome = Outcome(part.told(), action, done=True)
    if action == "show":
        records = records_of(part.plan, part.failed)
        outcome.records = [_shown(record) for record in records]
        if not as_json:
            _print_show(part, records)
    elif action == "retry":
        part.decide("retry")
    elif action == "skip":
        outcome.done = yes
        if yes:
            part.decide("skip")
    else:
        if topic is None:
            raise ConfigurationError(
                "to which topic? Add --to, as in kconsume failed dead-letter orders/3 --to orders.dlq"
            )
        outcome.dead_letters = dead_letter(part.plan, part.kafka, part.failed, topic)
        part.decide("skip")
    _print_outcome(outcome, part, as_json)


def _sorted_out(words: Sequence[str]) -> tuple[str | None, str, Partition | None]:
    """The app, what to do, and with which partition: in this order, the first and the last may be missing."""
    action = next((word for word in words if word in _ACTIONS), None)
    if action is None:
        raise ConfigurationError(f"what is to be done? Write one of {', '.join(_ACTIONS)}, as in kconsume failed list")
    others = [word for word in words if word != action]
    places = [word for word in others if "/" in word]
    apps = [word for word in others if "/" not in word]
    if len(places) > 1 or len(apps) > 1:
        raise ConfigurationError(
            f"{' '.join(words)!r} names more than one app or partition: write kconsume failed APP {action} orders/3"
        )
    return apps[0] if apps else None, action, Partition.parse(places[0]) if places else None


# Which consumer


def _plans(
    app: str | None, brokers: str | None, group: str | None, offsets: str | None
) -> list[tuple[ConsumerPlan, Mapping[str, ClientValue]]]:
    if app is None and (brokers or offsets):
        return [_plan_of(brokers, group, offsets)]
    if brokers or offsets:
        raise click.UsageError("an APP, and --brokers or --offsets, both name where to look: give one of the two")
    found = load(app or os.environ.get(VARIABLE))
    _must_be_reachable(found.brokers)
    plans = [plan for plan in found.plans() if group in (None, plan.group)]
    if not plans:
        raise ConfigurationError(f"the app has no group {group!r}: correct --group, or leave it out")
    return [(plan, found.kafka) for plan in plans]


def _plan_of(
    brokers: str | None, group: str | None, offsets: str | None
) -> tuple[ConsumerPlan, Mapping[str, ClientValue]]:
    said = environment.read(os.environ)
    brokers, group, offsets = brokers or said.brokers, group or said.group, offsets or said.offsets
    if not brokers or not group or not offsets:
        raise ConfigurationError(
            "without an APP, all of --brokers, --group and --offsets are needed (or KCONSUME_BROKERS and so on)"
        )
    check_group(group)
    _must_be_reachable(brokers)
    address = _bootstrap(brokers)
    cluster = Cluster(address, said.kafka)
    settings = client_settings(address, group, said.kafka, embedded=address != brokers)
    store = open_store(offsets, brokers=address, kafka=said.kafka)
    return ConsumerPlan(group, store, (), None, settings, cluster, 0.0, 0), said.kafka


def _bootstrap(brokers: str) -> str:
    if not brokers.startswith("embedded://"):
        return brokers
    from kconsume.testing.addresses import resolve

    return resolve(brokers, [])


def _parts(plans: Sequence[tuple[ConsumerPlan, Mapping[str, ClientValue]]]) -> list[_Part]:
    parts: dict[tuple[str, int], list[_Part]] = {}
    for plan, kafka in plans:
        store = plan.store
        if isinstance(store, Deciding) and (plan.group, id(store)) not in parts:
            records = store.failures(plan.group).values()
            parts[plan.group, id(store)] = [_Part(plan, kafka, record) for record in records]
    if not parts:
        addresses = ", ".join(sorted({plan.store.address for plan, _ in plans}))
        raise ConfigurationError(
            f"{addresses} undoes what fails, so that no record is ever left half applied: there is nothing to decide"
        )
    return [part for each in parts.values() for part in each]


def _part(parts: Sequence[_Part], partition: Partition) -> _Part:
    found = [part for part in parts if part.failed.partition == partition]
    if len(found) == 1:
        return found[0]
    if found:
        groups = " or ".join(part.plan.group for part in found)
        raise ConfigurationError(f"{partition} has a failed record in several groups: say which, with --group {groups}")
    others = ", ".join(str(part.failed.partition) for part in parts) or "no other has one either"
    raise ConfigurationError(f"{partition} has no failed record: those that have one are: {others}")


# What is shown


def _shown(record: Record) -> Shown:
    return Shown(
        record=f"{record.topic}/{record.partition}@{record.offset}",
        key=None if record.key is None else _readable(record.key),
        value=None if record.value is None else _readable(record.value),
        headers=[(name, _readable(value)) for name, value in record.headers],
    )


def _print_list(parts: Sequence[_Part], as_json: bool) -> None:
    if as_json:
        click.echo(msgspec.json.encode([part.told() for part in parts]))
        return
    for part in parts:
        click.echo(f"{part.failed}  (group {part.plan.group})")
    if not parts:
        click.echo("none: no partition is stopped by a record that was applied in part", err=True)


def _print_show(part: _Part, records: Sequence[Record]) -> None:
    for record in records:
        _show_record(Place(Partition(record.topic, record.partition), record.offset), record)
    failed = part.failed
    if not records:
        click.echo(f"{failed}")
        click.echo("Kafka has no record of it any more: compacted, or deleted")
    if failed.index is None:
        click.echo("Redis broke off while it was applied: how much of it, is not known")
    else:
        click.echo(f"command {failed.index} of {failed.of} failed: {failed.command}")
        click.echo(f"  {failed.error}")
        click.echo(f"  commands before it, which are applied: {failed.index - 1}")
    click.echo("then, once its cause is gone, or what was applied is put right:")
    for line in _choices(part):
        click.echo(f"  {line}")


def _choices(part: _Part) -> list[str]:
    where = part.failed.partition
    command = f"kconsume failed {os.environ.get(VARIABLE, '')}".rstrip()
    return [
        f"{command} retry {where}         handles it again: all of its commands, also those that are applied",
        f"{command} skip {where} --yes    leaves it as it is, and goes on behind it",
        f"{command} dead-letter {where} --to TOPIC",
    ]


def _print_outcome(outcome: Outcome, part: _Part, as_json: bool) -> None:
    if as_json:
        click.echo(msgspec.json.encode(outcome))
        return
    place, group = outcome.failed.record, part.plan.group
    for letter in outcome.dead_letters:
        click.echo(f"written to {letter}")
    if outcome.action == "retry":
        click.echo(f"{place} will be handled again by group {group}")
    elif outcome.action in ("skip", "dead-letter"):
        goes_on = f"group {group} goes on at {Place(part.failed.partition, part.failed.end)}"
        click.echo(
            f"skipped {place}: {goes_on}" if outcome.done else f"would skip {place}: {goes_on}; add --yes to do it"
        )

"""`kconsume plan`: shows what a change would do, without making it.

`plan assignment` asks the cluster for the members of a group and their partitions, calls an assignor of
`kconsume.rebalance` for the group after the change, and shows the difference. It joins no group and commits nothing.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import TypeAlias

import click
import msgspec

from kconsume._config import environment
from kconsume._config.client_settings import ClientValue, side_client
from kconsume._kafka.cluster import Cluster, Group, GroupMember
from kconsume._kafka.outgoing import is_topic_name
from kconsume.app import App
from kconsume.cli.app_loader import VARIABLE, load
from kconsume.cli.command_group import CommandGroup
from kconsume.cli.options import json_option, optional_app_argument
from kconsume.cli.render import table
from kconsume.errors import ConfigurationError
from kconsume.failures.letter_headers import is_side_topic
from kconsume.rebalance import ASSIGNORS, Assignor, Member, assignor_named, moved, skew
from kconsume.records import Partition

_PATIENCE = 10.0
_WITHOUT_BROKER = "kconsume plan assignment --members 3 --partitions orders=12 --join 1"
_BROKERS_OWN = {"uniform": "sticky"}
"""Server-side assignors of KIP-848 that have another name in kconsume. `range` has the same name in both."""


class Change(msgspec.Struct):
    """A member before and after the change."""

    member: str
    now: list[str] | None
    """The partitions before the change; None if the member joins."""
    then: list[str] | None
    """The partitions after the change; None if the member leaves."""
    gains: list[str]
    loses: list[str]


class Planned(msgspec.Struct):
    """The effect of the change with one assignor."""

    assignor: str
    partitions: int
    """The number of partitions, without those of side topics (retry and redrive topics), which are counted apart."""
    moves: int
    """How many of the `partitions` would move from one member to another."""
    skew_now: float
    skew_then: float
    members: list[Change]
    side_partitions: int
    side_moves: int
    side_members: list[Change]


class Plans(msgspec.Struct):
    """The result of `plan assignment`, which `--json` prints."""

    group: str | None
    """None for an invented group."""
    brokers: str | None
    plans: list[Planned]


_Shares: TypeAlias = Mapping[str, Sequence[Partition]]
"""The partitions of each member."""


@dataclass(frozen=True)
class _GroupBefore:
    """The group before the change."""

    members: Sequence[Member]
    partitions: Sequence[Partition]
    names: Mapping[str, Collection[str]]
    """For each member, by its id: all names by which `--leave` finds the member."""
    group: str | None = None
    brokers: str | None = None
    assignor: str | None = None
    """The assignor that the group uses, if kconsume has it."""
    side: frozenset[str] = frozenset()
    """The topics of `partitions` that are side topics."""
    side_member_of: Mapping[str, str] = field(default_factory=dict)
    """For each process with two members: the id of the side member, by the id of the main member."""

    @property
    def topics(self) -> frozenset[str]:
        return frozenset(p.topic for p in self.partitions)

    def joining(self, count: int) -> Iterator[Member]:
        """The members of `count` more processes: two for each process if the present processes have two."""
        is_split = bool(self.side_member_of)
        for new in _numbered("~new", count):
            yield Member(new, self.topics - self.side if is_split else self.topics)
            if is_split:
                yield Member(side_client(new), self.side)

    def under(self, assignor: Assignor) -> Sequence[Member]:
        """The members with their partitions. In an invented group, this assignor gives them their partitions first."""
        if self.group is not None:
            return self.members
        given = assignor(self.members, self.partitions)
        return [replace(member, owned=tuple(given[member.id])) for member in self.members]


@click.group(cls=CommandGroup, short_help="Show the effect of a change, without making it.")
def plan() -> None:
    """Show what a change would do, without making it.

    \b
      kconsume plan assignment shop:app --join 1      which partitions move if a member joins?
    """


def _parse_partitions(_: click.Context, option: click.Parameter, values: tuple[str, ...]) -> dict[str, int]:
    counts = {}
    for value in values:
        topic, _equals, count = value.partition("=")
        if not is_topic_name(topic) or not count.isdecimal() or int(count) == 0:
            raise click.BadParameter(f"{value!r} is not TOPIC=N, as in orders=12", param=option)
        counts[topic] = int(count)
    return counts


@plan.command(short_help="Show which partitions move if a member joins or leaves.")
@optional_app_argument
@click.option("--brokers", metavar="ADDRESS", show_default="KCONSUME_BROKERS", help="The cluster, if no APP is named.")
@click.option(
    "--group", metavar="NAME", show_default="the only group of APP, or KCONSUME_GROUP", help="The consumer group."
)
@click.option(
    "--assignor",
    "assignors",
    multiple=True,
    metavar="NAME",
    show_default="the group's own, or all if that is not known",
    help=f"One of {', '.join(ASSIGNORS)}. May be repeated.",
)
@click.option("--join", "joining", type=click.IntRange(min=0), default=0, metavar="N", help="N members join.")
@click.option(
    "--leave",
    "leaving",
    multiple=True,
    metavar="MEMBER|N",
    show_default="none",
    help="This member leaves. With a number: the last N members leave. May be repeated.",
)
@click.option(
    "--members",
    type=click.IntRange(min=1),
    metavar="N",
    show_default="a real group",
    help="Plan for an invented group with N members.",
)
@click.option(
    "--partitions",
    "counts",
    multiple=True,
    metavar="TOPIC=N",
    callback=_parse_partitions,
    show_default="a real group",
    help="Plan for an invented topic with N partitions. May be repeated.",
)
@json_option
def assignment(
    app: str | None,
    brokers: str | None,
    group: str | None,
    assignors: tuple[str, ...],
    joining: int,
    leaving: tuple[str, ...],
    members: int | None,
    counts: dict[str, int],
    as_json: bool,
) -> None:
    """Show which partitions would move if members joined or left. Asks the cluster, and changes nothing.

    \b
      kconsume plan assignment shop:app --join 1
      kconsume plan assignment shop:app --leave 2        the last two, in the order of their ids
      kconsume plan assignment shop:app --assignor range
                                                         as if the group used another assignor
      kconsume plan assignment --brokers localhost:9092 --group shop --leave rdkafka-4f2a
      kconsume plan assignment --members 3 --partitions orders=12 --join 1
                                                         without a broker: an invented group

    Name a MEMBER by its id, client.id or group.instance.id, or by the beginning of one of them. A new member has the id
    ~new-1, which is the last in the order of ids. The assignors range and roundrobin depend on this order.

    The cluster does not report which member subscribes to which topic. So each member is assumed to subscribe to all
    topics of the group. But a process with retry or redrive topics has two members, and the second one has only these
    topics. Both members join and leave together. Retry and redrive topics carry almost no load, so their partitions are
    shown in a table of their own.

    Exit code 0 if the plan was shown, 2 if there is no such group, member or assignor.
    """
    for name in assignors:
        assignor_named(name)
    group_before = _group_before(app, brokers, group, members, counts)
    chosen = assignors or ((group_before.assignor,) if group_before.assignor else tuple(ASSIGNORS))
    gone = _leaving(leaving, group_before)
    if len(gone) == len(group_before.names) and not joining:
        raise ConfigurationError(
            f"all {len(group_before.names)} members would leave the group: let fewer leave, or add --join"
        )
    gone |= {group_before.side_member_of[member] for member in gone if member in group_before.side_member_of}
    plans = Plans(
        group_before.group, group_before.brokers, [_planned(group_before, name, joining, gone) for name in chosen]
    )
    if as_json:
        click.echo(msgspec.json.encode(plans))
    else:
        _show(plans)


def _planned(group_before: _GroupBefore, name: str, joining: int, gone: Collection[str]) -> Planned:
    assignor = assignor_named(name)
    before = group_before.under(assignor)
    after = [*(member for member in before if member.id not in gone), *group_before.joining(joining)]
    answer = assignor(after, group_before.partitions)
    moving = moved(before, answer)

    def part(topics: frozenset[str]) -> tuple[_Shares, _Shares]:
        """The partitions of these topics by member, before and after the change."""
        now = {m.id: sorted(p for p in m.owned if p.topic in topics) for m in before if m.topics & topics}
        then = {m.id: sorted(p for p in answer[m.id] if p.topic in topics) for m in after if m.topics & topics}
        return now, then

    now, then = part(group_before.topics - group_before.side)
    side_moves = sum(partition.topic in group_before.side for partition in moving)
    return Planned(
        assignor=name,
        partitions=sum(partition.topic not in group_before.side for partition in group_before.partitions),
        moves=len(moving) - side_moves,
        skew_now=round(skew(now), 4),
        skew_then=round(skew(then), 4),
        members=_changes(now, then),
        side_partitions=sum(partition.topic in group_before.side for partition in group_before.partitions),
        side_moves=side_moves,
        side_members=_changes(*part(group_before.side)),
    )


def _changes(now: _Shares, then: _Shares) -> list[Change]:
    return [_change(member, now.get(member), then.get(member)) for member in sorted({*now, *then})]


def _change(member: str, now: Sequence[Partition] | None, then: Sequence[Partition] | None) -> Change:
    had, gets = set(now or ()), set(then or ())
    return Change(
        member=member,
        now=None if now is None else _written(now),
        then=None if then is None else _written(then),
        gains=_written(gets - had),
        loses=_written(had - gets),
    )


def _written(partitions: Collection[Partition]) -> list[str]:
    return [str(partition) for partition in sorted(partitions)]


# Which group


def _group_before(
    app: str | None, brokers: str | None, group: str | None, members: int | None, counts: Mapping[str, int]
) -> _GroupBefore:
    if members is not None or counts:
        if app or brokers or group:
            raise click.UsageError(
                "--members and --partitions describe an invented group, and APP, --brokers and --group name a real "
                "one: give one of the two"
            )
        if members is None or not counts:
            raise click.UsageError(f"--members and --partitions belong together, as in: {_WITHOUT_BROKER}")
        return _invented(members, counts)
    if brokers and app:
        raise click.UsageError("APP and --brokers both name the cluster: give one of the two")
    app = app or (None if brokers else os.environ.get(VARIABLE))
    if app:
        found = load(app)
        name, topics = _group_of(found, group)
        return _real(found.brokers, found.kafka, name, topics)
    variables = environment.read(os.environ)
    brokers, group = brokers or variables.brokers, group or variables.group
    if not brokers or not group:
        raise ConfigurationError(
            f"no group was named: write MODULE:APP or set {VARIABLE}, or give --brokers and --group; without a broker: "
            f"{_WITHOUT_BROKER}"
        )
    return _real(brokers, variables.kafka, group, frozenset())


def _invented(members: int, counts: Mapping[str, int]) -> _GroupBefore:
    partitions = [Partition(topic, number) for topic, count in counts.items() for number in range(count)]
    ids = _numbered("member", members)
    return _GroupBefore([Member(id, frozenset(counts)) for id in ids], partitions, {id: [id] for id in ids})


def _numbered(word: str, count: int) -> list[str]:
    """`member-01` to `member-12`: padded with zeros, so that the ids sort by number."""
    return [f"{word}-{number:0{len(str(count))}}" for number in range(1, count + 1)]


def _group_of(app: App, wanted: str | None) -> tuple[str, frozenset[str]]:
    """The app's group, and its topics. Handlers with `partitions=` are left out, because they join no group."""
    groups: dict[str, set[str]] = {}
    for registration in app.registrations:
        if registration.partitions is None:
            groups.setdefault(registration.group, set()).update(registration.topics)
    if wanted is None and len(groups) == 1:
        (wanted,) = groups
    if wanted is None and groups:
        raise ConfigurationError(f"the app has several groups: choose one with --group {' or '.join(sorted(groups))}")
    if wanted is None or wanted not in groups:
        raise ConfigurationError(
            f"the app has no handler that joins {'a group' if wanted is None else f'group {wanted!r}'}"
            f"{': it has ' + ', '.join(sorted(groups)) if groups else ''}"
        )
    return wanted, frozenset(groups[wanted])


def _real(brokers: str, kafka: Mapping[str, ClientValue], name: str, topics: frozenset[str]) -> _GroupBefore:
    if brokers.startswith("embedded://"):
        raise ConfigurationError(
            f"{brokers} is an embedded broker, which cannot list the members of a group: name a real broker, or "
            f"plan for an invented group: {_WITHOUT_BROKER}"
        )
    cluster = Cluster(brokers, kafka, patience=_PATIENCE)
    found = cluster.group(name)
    if found is None:
        raise _no_group(name, cluster)
    _check_stable(name, found)
    topics |= {partition.topic for member in found.members for partition in member.owned}
    side = frozenset(topic for topic in topics if is_side_topic(topic, name))
    pairs = _pairs(found.members, side)
    side_members = set(pairs.values())
    own = _BROKERS_OWN.get(found.assignor, found.assignor)
    return _GroupBefore(
        members=[
            Member(_id(member), _wanted(member, topics, side, pairs), {}, member.owned) for member in found.members
        ],
        partitions=[
            Partition(topic, n) for topic, count in cluster.topics(sorted(topics)).items() for n in range(count)
        ],
        names={
            _id(member): {_id(member), member.id, member.client}
            for member in found.members
            if _id(member) not in side_members
        },
        group=name,
        brokers=brokers,
        assignor=own if own in ASSIGNORS else None,
        side=side,
        side_member_of=pairs,
    )


def _pairs(members: Sequence[GroupMember], side: frozenset[str]) -> dict[str, str]:
    """For each process with two members (`_kafka/two_member_consumer.py`): the id of the side member, by the
    id of the main member.

    The cluster does not report subscriptions. But the client.id of a side member is made from the client.id of the main
    member. Processes with the same client.id are interchangeable: their members are paired in the order of their ids.
    """
    free: dict[str, list[str]] = {}
    for member in sorted(members, key=_id, reverse=True):
        if side.issuperset(partition.topic for partition in member.owned):
            free.setdefault(member.client, []).append(_id(member))
    return {
        _id(member): free[side_client(member.client)].pop()
        for member in sorted(members, key=_id)
        if free.get(side_client(member.client))
    }


def _wanted(
    member: GroupMember, topics: frozenset[str], side: frozenset[str], pairs: Mapping[str, str]
) -> frozenset[str]:
    if _id(member) in pairs:
        return topics - side
    return side if _id(member) in pairs.values() else topics


def _id(member: GroupMember) -> str:
    # Clients sort static members by group.instance.id, which stays the same after a restart (KIP-345).
    return member.instance or member.id


def _no_group(name: str, cluster: Cluster) -> ConfigurationError:
    known = cluster.groups()
    close = difflib.get_close_matches(name, known, n=1)
    fix = f"did you mean {close[0]!r}?" if close else "start a member of it, or correct the name"
    return ConfigurationError(f"there is no group {name!r} on the cluster at {cluster.brokers}: {fix}")


def _check_stable(name: str, group: Group) -> None:
    if not group.members:
        raise ConfigurationError(
            f"group {name!r} has no members now, so nothing can move: start some, or plan for an invented group: "
            f"{_WITHOUT_BROKER}"
        )
    if group.state != "stable":
        raise ConfigurationError(
            f"group {name!r} is in the middle of a rebalance ({group.state.replace('_', ' ')}), and its partitions "
            f"are not assigned yet: run this command again in a moment"
        )


def _leaving(said: Sequence[str], group_before: _GroupBefore) -> set[str]:
    gone: set[str] = set()
    for word in said:
        if word.isdecimal():
            staying = sorted(group_before.names.keys() - gone)
            if int(word) > len(staying):
                raise ConfigurationError(f"--leave {word}: the group has only {len(staying)} members that can leave")
            gone.update(staying[len(staying) - int(word) :])
        else:
            gone.add(_member(word, group_before))
    return gone


def _member(word: str, group_before: _GroupBefore) -> str:
    exact = [member for member, names in group_before.names.items() if word in names]
    found = exact or [m for m, names in group_before.names.items() if any(name.startswith(word) for name in names)]
    if len(found) == 1:
        return found[0]
    if found:
        raise ConfigurationError(f"{word!r} matches several members, {', '.join(sorted(found))}: write more of the id")
    raise ConfigurationError(
        f"there is no member {word!r} in the group: it has {', '.join(sorted(group_before.names))}"
    )


# What is shown


def _show(plans: Plans) -> None:
    if plans.group is not None:
        click.echo(f"group {click.style(plans.group, bold=True)}  brokers {plans.brokers}")
    for each in plans.plans:
        click.echo(click.style(each.assignor, bold=True))
        _print_table(each.members)
        click.echo(
            f"moves {each.moves} of {each.partitions} partitions; "
            f"skew {each.skew_now:.2f} now, {each.skew_then:.2f} then\n"
        )
        if each.side_partitions:
            click.echo(click.style(f"{each.assignor}, retry and redrive topics (no load, not in the skew)", bold=True))
            _print_table(each.side_members)
            click.echo(f"moves {each.side_moves} of {each.side_partitions} partitions\n")


def _print_table(changes: Sequence[Change]) -> None:
    rows = [_cells(change) for change in changes]
    for line in table(("member", "now", "then", "gains", "loses"), rows, right={1, 2}):
        click.echo(line)


def _cells(change: Change) -> list[str]:
    return [
        change.member,
        "joins" if change.now is None else str(len(change.now)),
        "leaves" if change.then is None else str(len(change.then)),
        _ranges(change.gains),
        _ranges(change.loses),
    ]


def _ranges(written: Sequence[str]) -> str:
    """Partitions as ranges, as in `orders/0-3,7 payments/2`, because a table has no room for hundreds of names."""
    topics = groupby(map(Partition.parse, written), key=lambda p: p.topic)
    return " ".join(f"{topic}/{_spans([p.number for p in same])}" for topic, same in topics)


def _spans(numbers: Sequence[int]) -> str:
    # In a run of consecutive numbers, number minus index is constant.
    spans = [[n for _, n in same] for _, same in groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0])]
    return ",".join(str(span[0]) if len(span) == 1 else f"{span[0]}-{span[-1]}" for span in spans)

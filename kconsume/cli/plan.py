"""`kconsume plan`: what would be, without touching anything.

`plan assignment` asks the cluster who the members of a group are and what each has, lets an assignor of
`kconsume.rebalance` answer for the group as it would be, and shows the difference. It joins no group and commits
nothing.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import TYPE_CHECKING, TypeAlias

import click
import msgspec

from kconsume import environment
from kconsume.app import App
from kconsume.cli.target import VARIABLE, load
from kconsume.cluster import Cluster, Group, GroupMember
from kconsume.errors import ConfigurationError
from kconsume.failures.letters import is_side_topic
from kconsume.output import is_topic_name
from kconsume.rebalance import ASSIGNORS, Assignor, Member, assignor_named, moved, skew
from kconsume.records import Partition
from kconsume.settings import ClientValue, side_client

if TYPE_CHECKING:
    from rich.table import Table

_PATIENCE = 10.0
_WITHOUT_BROKER = "kconsume plan assignment --members 3 --partitions orders=12 --join 1"
_BROKERS_OWN = {"uniform": "sticky"}
"""Assignors of KIP-848 brokers under other names than ours; their `range` is ours."""


class Change(msgspec.Struct):
    """A member before and after."""

    member: str
    now: list[str] | None
    """None if it is only about to join."""
    then: list[str] | None
    """None if it leaves."""
    gains: list[str]
    loses: list[str]


class Planned(msgspec.Struct):
    """What one assignor would do."""

    assignor: str
    partitions: int
    """Those that carry the load. Side topics (retry and re-drive topics) are counted apart."""
    moves: int
    """Of these partitions, those that somebody has now and somebody else would get."""
    skew_now: float
    skew_then: float
    members: list[Change]
    side_partitions: int
    side_moves: int
    side_members: list[Change]


class Plans(msgspec.Struct):
    """All that `plan assignment` has to say; printed as it is with `--json`."""

    group: str | None
    """None for a group that is only thought of."""
    brokers: str | None
    plans: list[Planned]


_Shares: TypeAlias = Mapping[str, Sequence[Partition]]
"""Partitions by the member that has them."""


@dataclass(frozen=True)
class _Scene:
    """The group that is planned for."""

    members: Sequence[Member]
    partitions: Sequence[Partition]
    names: Mapping[str, Collection[str]]
    """By which words a person may mean a member."""
    group: str | None = None
    brokers: str | None = None
    assignor: str | None = None
    """The group's own, where it is one of ours."""
    side: frozenset[str] = frozenset()
    """The side topics among those of the partitions."""
    side_member_of: Mapping[str, str] = field(default_factory=dict)
    """Of a process that is two members: by the one with the load, the one with the side topics."""

    @property
    def topics(self) -> frozenset[str]:
        return frozenset(p.topic for p in self.partitions)

    def joining(self, count: int) -> Iterator[Member]:
        """So many processes more, like those that are there."""
        is_split = bool(self.side_member_of)
        for new in _numbered("~new", count):
            yield Member(new, self.topics - self.side if is_split else self.topics)
            if is_split:
                yield Member(side_client(new), self.side)

    def under(self, assignor: Assignor) -> Sequence[Member]:
        """The members with what they have; in a group that is only thought of, what this assignor gave them."""
        if self.group is not None:
            return self.members
        given = assignor(self.members, self.partitions)
        return [replace(member, owned=tuple(given[member.id])) for member in self.members]


@click.group(short_help="What would be, without touching anything.")
def plan() -> None:
    """What would be, without touching anything.

    \b
      kconsume plan assignment shop:app --join 1      what moves if a member joins?
    """


def _parse_partitions(_: click.Context, option: click.Parameter, values: tuple[str, ...]) -> dict[str, int]:
    counts = {}
    for value in values:
        topic, _equals, count = value.partition("=")
        if not is_topic_name(topic) or not count.isdecimal() or int(count) == 0:
            raise click.BadParameter(f"{value!r} is not written like orders=12", param=option)
        counts[topic] = int(count)
    return counts


@plan.command(short_help="What would move if a member joined or left?")
@click.argument("app", required=False, metavar="[APP]")
@click.option("--brokers", metavar="ADDRESS", help="The cluster, where no APP is named.")
@click.option("--group", metavar="NAME", help="The group; with an APP, which of its groups.")
@click.option(
    "--assignor", "assignors", multiple=True, metavar="NAME", help=f"{', '.join(ASSIGNORS)}. May be repeated."
)
@click.option("--join", "joining", type=click.IntRange(min=0), default=0, metavar="N", help="So many members join.")
@click.option(
    "--leave", "leaving", multiple=True, metavar="MEMBER", help="This member leaves, or so many. May be repeated."
)
@click.option("--members", type=click.IntRange(min=1), metavar="N", help="Think of a group with so many members.")
@click.option(
    "--partitions",
    "counts",
    multiple=True,
    metavar="TOPIC=N",
    callback=_parse_partitions,
    help="Think of a topic with so many partitions. May be repeated.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
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
    """What would move if a member joined or left? Asks the cluster, and changes nothing.

    \b
      kconsume plan assignment shop:app --join 1
      kconsume plan assignment shop:app --leave 2        the last two, in the order of their ids
      kconsume plan assignment shop:app --assignor range
                                                         what if the group used another assignor?
      kconsume plan assignment --brokers localhost:9092 --group shop --leave rdkafka-4f2a
      kconsume plan assignment --members 3 --partitions orders=12 --join 1
                                                         without a broker: a group that is only thought of

    Without --assignor it is the group's own, or all of them where that is not known. A member is named by its id, the
    beginning of it, its client.id or its group.instance.id. The cluster does not tell who subscribes to what: each
    member is taken to want all topics of the group; but a process with retry or re-drive topics is two members, one of
    which has only those. They join and leave together, and partitions of those topics are shown apart: they carry
    next to no load. One that joins is named ~new-1, which comes last in the order of
    ids; with range and roundrobin the answer depends on that order.

    Exit code 0 if there is an answer, 2 if there is no such group, member or assignor.
    """
    for name in assignors:
        assignor_named(name)
    scene = _scene(app, brokers, group, members, counts)
    chosen = assignors or ((scene.assignor,) if scene.assignor else tuple(ASSIGNORS))
    gone = _leaving(leaving, scene)
    if len(gone) == len(scene.names) and not joining:
        raise ConfigurationError(f"nobody would be left of the {len(scene.names)} members: leave one, or add --join")
    gone |= {scene.side_member_of[member] for member in gone if member in scene.side_member_of}
    plans = Plans(scene.group, scene.brokers, [_planned(scene, name, joining, gone) for name in chosen])
    if as_json:
        click.echo(msgspec.json.encode(plans))
    else:
        _show(plans)


def _planned(scene: _Scene, name: str, joining: int, gone: Collection[str]) -> Planned:
    """The answer of one assignor."""
    assignor = assignor_named(name)
    before = scene.under(assignor)
    after = [*(member for member in before if member.id not in gone), *scene.joining(joining)]
    answer = assignor(after, scene.partitions)
    moving = moved(before, answer)

    def part(topics: frozenset[str]) -> tuple[_Shares, _Shares]:
        """Who has what of these topics, now and then."""
        now = {m.id: sorted(p for p in m.owned if p.topic in topics) for m in before if m.topics & topics}
        then = {m.id: sorted(p for p in answer[m.id] if p.topic in topics) for m in after if m.topics & topics}
        return now, then

    now, then = part(scene.topics - scene.side)
    side_moves = sum(partition.topic in scene.side for partition in moving)
    return Planned(
        assignor=name,
        partitions=sum(partition.topic not in scene.side for partition in scene.partitions),
        moves=len(moving) - side_moves,
        skew_now=round(skew(now), 4),
        skew_then=round(skew(then), 4),
        members=_changes(now, then),
        side_partitions=sum(partition.topic in scene.side for partition in scene.partitions),
        side_moves=side_moves,
        side_members=_changes(*part(scene.side)),
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


def _scene(
    app: str | None, brokers: str | None, group: str | None, members: int | None, counts: Mapping[str, int]
) -> _Scene:
    if members is not None or counts:
        if app or brokers or group:
            raise click.UsageError(
                "--members and --partitions are for a group that is only thought of, and APP, --brokers and --group "
                "name a real one: give one of the two"
            )
        if members is None or not counts:
            raise click.UsageError(f"--members and --partitions belong together, as in: {_WITHOUT_BROKER}")
        return _thought(members, counts)
    if brokers and app:
        raise click.UsageError("an APP and --brokers both name the cluster: give one of the two")
    app = app or (None if brokers else os.environ.get(VARIABLE))
    if app:
        found = load(app)
        name, topics = _group_of(found, group)
        return _live(found.brokers, found.kafka, name, topics)
    said = environment.read(os.environ)
    brokers, group = brokers or said.brokers, group or said.group
    if not brokers or not group:
        raise ConfigurationError(
            f"which group? Write MODULE:APP or set {VARIABLE}, or give --brokers and --group; without a broker: "
            f"{_WITHOUT_BROKER}"
        )
    return _live(brokers, said.kafka, group, frozenset())


def _thought(members: int, counts: Mapping[str, int]) -> _Scene:
    partitions = [Partition(topic, number) for topic, count in counts.items() for number in range(count)]
    ids = _numbered("member", members)
    return _Scene([Member(id, frozenset(counts)) for id in ids], partitions, {id: [id] for id in ids})


def _numbered(word: str, count: int) -> list[str]:
    """`member-01` to `member-12`: with zeros, so that the order of ids is that of the numbers."""
    return [f"{word}-{number:0{len(str(count))}}" for number in range(1, count + 1)]


def _group_of(app: App, wanted: str | None) -> tuple[str, frozenset[str]]:
    """The app's group, and what it subscribes to there. Handlers with `partitions=` are no members of it."""
    groups: dict[str, set[str]] = {}
    for registration in app.registrations:
        if registration.partitions is None:
            groups.setdefault(registration.group, set()).update(registration.topics)
    if wanted is None and len(groups) == 1:
        (wanted,) = groups
    if wanted is None and groups:
        raise ConfigurationError(f"the app has several groups: say which, with --group {' or '.join(sorted(groups))}")
    if wanted is None or wanted not in groups:
        raise ConfigurationError(
            f"the app has no handler that shares partitions in {'a group' if wanted is None else f'group {wanted!r}'}"
            f"{': it has ' + ', '.join(sorted(groups)) if groups else ''}"
        )
    return wanted, frozenset(groups[wanted])


def _live(brokers: str, kafka: Mapping[str, ClientValue], name: str, topics: frozenset[str]) -> _Scene:
    if brokers.startswith("embedded://"):
        raise ConfigurationError(
            f"{brokers} is an embedded broker, which cannot tell who the members of a group are: ask a real one, or "
            f"think of a group: {_WITHOUT_BROKER}"
        )
    cluster = Cluster(brokers, kafka, patience=_PATIENCE)
    found = cluster.group(name)
    if found is None:
        raise _no_group(name, cluster)
    _must_be_settled(name, found)
    topics |= {partition.topic for member in found.members for partition in member.owned}
    side = frozenset(topic for topic in topics if is_side_topic(topic, name))
    pairs = _pairs(found.members, side)
    side_members = set(pairs.values())
    own = _BROKERS_OWN.get(found.assignor, found.assignor)
    return _Scene(
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
    """By member, the one of the same process that has its side topics (`runtime/split_source.py`). The cluster does not
    tell who subscribes to what, but a side member's client.id is made from the other's. Several processes may have the
    same: which of them is whose does not matter then."""
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
    # Clients order static members by the name that outlives a restart (KIP-345).
    return member.instance or member.id


def _no_group(name: str, cluster: Cluster) -> ConfigurationError:
    known = cluster.groups()
    close = difflib.get_close_matches(name, known, n=1)
    fix = f"did you mean {close[0]!r}?" if close else "start a member of it, or correct the name"
    return ConfigurationError(f"there is no group {name!r} on the cluster at {cluster.brokers}: {fix}")


def _must_be_settled(name: str, group: Group) -> None:
    if not group.members:
        raise ConfigurationError(
            f"group {name!r} has no members now, so that nothing can move: start them, or think of some: "
            f"{_WITHOUT_BROKER}"
        )
    if group.state != "stable":
        raise ConfigurationError(
            f"group {name!r} is in the middle of a rebalance ({group.state.replace('_', ' ')}), and nobody knows yet "
            f"who has what: ask again in a moment"
        )


def _leaving(said: Sequence[str], scene: _Scene) -> set[str]:
    gone: set[str] = set()
    for word in said:
        if word.isdecimal():
            staying = sorted(scene.names.keys() - gone)
            if int(word) > len(staying):
                raise ConfigurationError(f"--leave {word}: the group has only {len(staying)} members to leave")
            gone.update(staying[len(staying) - int(word) :])
        else:
            gone.add(_member(word, scene))
    return gone


def _member(word: str, scene: _Scene) -> str:
    exact = [member for member, names in scene.names.items() if word in names]
    found = exact or [m for m, names in scene.names.items() if any(name.startswith(word) for name in names)]
    if len(found) == 1:
        return found[0]
    if found:
        raise ConfigurationError(f"{word!r} may be any of {', '.join(sorted(found))}: write more of the id")
    raise ConfigurationError(f"there is no member {word!r} in the group: it has {', '.join(sorted(scene.names))}")


# What is shown


def _show(plans: Plans) -> None:
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False)
    if plans.group is not None:
        console.print(Text.assemble("group ", (plans.group, "bold"), f"  brokers {plans.brokers}"))
    for each in plans.plans:
        console.print(Text(each.assignor, "bold"))
        console.print(_table(each.members))
        console.print(
            f"moves {each.moves} of {each.partitions} partitions; "
            f"skew {each.skew_now:.2f} now, {each.skew_then:.2f} then\n"
        )
        if each.side_partitions:
            console.print(Text(f"{each.assignor}, retry and re-drive topics (no load, not in the skew)", "bold"))
            console.print(_table(each.side_members))
            console.print(f"moves {each.side_moves} of {each.side_partitions} partitions\n")


def _table(changes: Sequence[Change]) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("member", no_wrap=True)
    table.add_column("now", justify="right")
    table.add_column("then", justify="right")
    table.add_column("gains", overflow="fold")
    table.add_column("loses", overflow="fold")
    for change in changes:
        table.add_row(*map(Text, _cells(change)))
    return table


def _cells(change: Change) -> list[str]:
    return [
        change.member,
        "joins" if change.now is None else str(len(change.now)),
        "leaves" if change.then is None else str(len(change.then)),
        _ranges(change.gains),
        _ranges(change.loses),
    ]


def _ranges(written: Sequence[str]) -> str:
    """`orders/0-3,7 payments/2`: a table has no room for hundreds of names."""
    topics = groupby(map(Partition.parse, written), key=lambda p: p.topic)
    return " ".join(f"{topic}/{_spans([p.number for p in same])}" for topic, same in topics)


def _spans(numbers: Sequence[int]) -> str:
    # Numbers that follow one another are all as far from their places in the list.
    spans = [[n for _, n in same] for _, same in groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0])]
    return ",".join(str(span[0]) if len(span) == 1 else f"{span[0]}-{span[-1]}" for span in spans)

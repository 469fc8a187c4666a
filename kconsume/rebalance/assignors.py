"""Who gets which partition: pure functions over members and partitions, with the same answer on every member.

    range                 each topic by itself, in consecutive ranges
    roundrobin            all partitions of all topics, one after the other
    sticky                as even as can be, and everybody keeps what can be kept
    cooperative-sticky    the same answer, reached in two steps: what moves is given up first (`step_towards`)

Members subscribe to topics of their own; a partition of a topic that nobody wants is in no answer. No clock, no I/O and
no group: who the members are, and what becomes of the answer, is the caller's business.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby, pairwise
from typing import TypeAlias

from kconsume.errors import ConfigurationError
from kconsume.records import Partition


@dataclass(frozen=True, slots=True)
class Member:
    """One consumer of a group, as an assignor sees it."""

    id: str
    topics: frozenset[str] = frozenset()
    metadata: Mapping[str, str] = field(default_factory=dict)
    """What the person said of it: `App(member={"region": "eu"})`."""
    owned: tuple[Partition, ...] = ()
    """What it has now."""


Assignment: TypeAlias = Mapping[str, Sequence[Partition]]
Assignor: TypeAlias = Callable[[Sequence[Member], Sequence[Partition]], Assignment]


def assign_ranges(members: Sequence[Member], partitions: Sequence[Partition]) -> Assignment:
    """Each topic's partitions in ranges, in the order of the members' ids; the first ones get one more."""
    given: dict[str, list[Partition]] = {member.id: [] for member in members}
    for topic, same in groupby(sorted(set(partitions)), key=lambda p: p.topic):
        chosen = list(same)
        wanting = sorted(member.id for member in members if topic in member.topics)
        if not wanting:
            continue
        each, more = divmod(len(chosen), len(wanting))
        at = 0
        for place, member in enumerate(wanting):
            size = each + (place < more)
            given[member].extend(chosen[at : at + size])
            at += size
    return given


def assign_in_turn(members: Sequence[Member], partitions: Sequence[Partition]) -> Assignment:
    """Partition after partition to the next member that wants its topic."""
    ordered = sorted(members, key=lambda member: member.id)
    given: dict[str, list[Partition]] = {member.id: [] for member in members}
    turn = 0
    for partition in sorted(set(partitions)):
        for step in range(len(ordered)):
            member = ordered[(turn + step) % len(ordered)]
            if partition.topic in member.topics:
                given[member.id].append(partition)
                turn += step + 1
                break
    return given


def assign_stickily(members: Sequence[Member], partitions: Sequence[Partition]) -> Assignment:
    """As even as the subscriptions allow; what a member has it keeps, unless that would be more than its share.

    What has to move is dealt out last, over what everybody has by then. A cooperative group does so really, in its
    second round, and must come to the same answer there.
    """
    target = _Shares(members, partitions).even()
    settled = step_towards(target, members)
    while True:
        target = _Shares([replace(m, owned=tuple(settled[m.id])) for m in members], partitions).even()
        # What is settled stays, so that it can only grow: this ends.
        if (further := step_towards(target, members)) == settled:
            return target
        settled = further


class _Shares:
    """What each member has while an even assignment is looked for.

    A partition may have to go a long way round: from one with three to one with two, who gives another, which the first
    does not want, to one with a single one. Where no such path is left from a member to one with at least two
    partitions fewer, no assignment is more even (Harvey et al., "Semi-matchings for bipartite graphs and load
    balancing").
    """

    def __init__(self, members: Sequence[Member], partitions: Sequence[Partition]) -> None:
        ordered = sorted(members, key=lambda member: member.id)
        self._topics = {member.id: member.topics for member in ordered}
        self._has: dict[str, set[Partition]] = {}
        self._free = set(partitions)
        for member in ordered:
            # Of two who say that they have it, one has not heard yet that it lost it. Which one cannot be told here.
            self._has[member.id] = {p for p in member.owned if p in self._free and p.topic in member.topics}
            self._free -= self._has[member.id]
        self._kept = {member: set(has) for member, has in self._has.items()}

    def even(self) -> Assignment:
        self._place_free()
        # What nobody had is moved about first: then nothing moves that need not.
        for also_kept in (False, True):
            while (path := self._path(also_kept)) is not None:
                self._pass_on(path, also_kept)
        return {member: sorted(has) for member, has in self._has.items()}

    def _place_free(self) -> None:
        takers = {
            topic: [member for member, topics in self._topics.items() if topic in topics]
            for topic in {p.topic for p in self._free}
        }
        # Those that fewest can take first, or their only takers would be full by then.
        for partition in sorted(self._free, key=lambda p: (len(takers[p.topic]), p)):
            if takers[partition.topic]:
                self._has[min(takers[partition.topic], key=self._load)].add(partition)

    def _path(self, also_kept: bool) -> list[str] | None:
        """Members of whom each can give one to the next, from one to another that has at least two fewer."""
        lightest_first = sorted(self._topics, key=self._load)
        for giver in sorted(self._topics, key=self._load, reverse=True):
            if self._load(giver) - self._load(lightest_first[0]) < 2:
                return None
            path = self._path_from(giver, lightest_first, also_kept)
            if path is not None:
                return path
        return None

    def _path_from(self, giver: str, lightest_first: Sequence[str], also_kept: bool) -> list[str] | None:
        """The shortest: the fewest partitions move."""
        before: dict[str, str | None] = {giver: None}
        reached = deque([giver])
        while reached:
            member = reached.popleft()
            topics = {p.topic for p in self._movable(member, also_kept)}
            for taker in lightest_first:
                if taker in before or topics.isdisjoint(self._topics[taker]):
                    continue
                before[taker] = member
                if self._load(giver) - self._load(taker) >= 2:
                    return _way_to(taker, before)
                reached.append(taker)
        return None

    def _pass_on(self, path: Sequence[str], also_kept: bool) -> None:
        """From the end, so that nobody passes on what it has just got."""
        for giver, taker in reversed(list(pairwise(path))):
            wanted = (p for p in self._movable(giver, also_kept) if p.topic in self._topics[taker])
            partition = min(wanted, key=lambda p: (p in self._kept[giver], p))
            self._has[giver].remove(partition)
            self._kept[giver].discard(partition)
            self._has[taker].add(partition)

    def _movable(self, member: str, also_kept: bool) -> set[Partition]:
        return self._has[member] if also_kept else self._has[member] - self._kept[member]

    def _load(self, member: str) -> int:
        return len(self._has[member])


def _way_to(last: str, before: Mapping[str, str | None]) -> list[str]:
    way, at = [last], before[last]
    while at is not None:
        way.append(at)
        at = before[at]
    return way[::-1]


def step_towards(target: Assignment, members: Iterable[Member]) -> Assignment:
    """What may be assigned at once on the way to `target`: not what another member still has. That one gives it up when
    it sees this, and the next round gives it away."""
    owners = _owners(members)
    return {member: [p for p in given if owners.get(p, {member}) == {member}] for member, given in target.items()}


def moved(members: Iterable[Member], target: Assignment) -> set[Partition]:
    """The partitions that somebody has now and somebody else gets."""
    owners = _owners(members)
    return {p for member, given in target.items() for p in given if member not in owners.get(p, {member})}


def skew(assignment: Assignment) -> float:
    """By how much the largest share is above an even one: 0.5 for three partitions where two would be even."""
    shares = [len(given) for given in assignment.values()]
    even = math.ceil(sum(shares) / len(shares)) if shares else 0
    return max(shares) / even - 1 if even else 0.0


def _owners(members: Iterable[Member]) -> dict[Partition, set[str]]:
    """All who say that they have it: one of them may not have heard yet that it lost it."""
    owners: dict[Partition, set[str]] = {}
    for member in members:
        for partition in member.owned:
            owners.setdefault(partition, set()).add(member.id)
    return owners


ASSIGNORS: Mapping[str, Assignor] = {
    "range": assign_ranges,
    "roundrobin": assign_in_turn,
    "sticky": assign_stickily,
    "cooperative-sticky": assign_stickily,
}


def assignor_named(name: str) -> Assignor:
    try:
        return ASSIGNORS[name]
    except KeyError:
        raise ConfigurationError(f"there is no assignor {name!r}: write one of {', '.join(ASSIGNORS)}") from None

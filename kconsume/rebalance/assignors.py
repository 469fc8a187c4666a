"""Assigns partitions to members: pure functions of members and partitions, with the same result on every member.

    range                 each topic separately, in consecutive ranges
    roundrobin            all partitions of all topics, one after the other
    sticky                as even as possible; each member keeps as many of its partitions as possible
    cooperative-sticky    the same result in two steps: partitions that move are given up first (`step_towards`)

Each member subscribes to its own topics. A partition whose topic no member subscribes to is not assigned. No clock, no
I/O and no group: the caller passes the members, and applies the result.
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
    """One consumer of a group, as an assignor sees it.

    Args:
        id: the member id of Kafka.
        topics: the topics that it subscribes to.
        metadata: values for an assignor of the user, such as `{"region": "eu"}`.
        owned: the partitions that it owns now.
    """

    id: str
    topics: frozenset[str] = frozenset()
    metadata: Mapping[str, str] = field(default_factory=dict)
    owned: tuple[Partition, ...] = ()


Assignment: TypeAlias = Mapping[str, Sequence[Partition]]
"""The partitions of each member, by member id."""
Assignor: TypeAlias = Callable[[Sequence[Member], Sequence[Partition]], Assignment]
"""Called with all members of the group and all partitions of their topics. Must be pure: every member must compute the
same result."""


def assign_ranges(members: Sequence[Member], partitions: Sequence[Partition]) -> Assignment:
    """Assign each topic in consecutive ranges, in the order of the member ids. If the shares are uneven, the first
    members get one partition more."""
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
    """Assign each partition to the next member that subscribes to its topic."""
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
    """Assign as evenly as the subscriptions allow. A member keeps its partitions, unless it has more than its share.

    Partitions that must move are assigned last, when the load of every member is known. A cooperative group assigns
    them in its second round, and must compute the same result there.
    """
    target = _Shares(members, partitions).even()
    settled = step_towards(target, members)
    while True:
        target = _Shares([replace(m, owned=tuple(settled[m.id])) for m in members], partitions).even()
        # A settled partition stays settled, so the set only grows and the loop ends.
        if (further := step_towards(target, members)) == settled:
            return target
        settled = further


class _Shares:
    """The partitions of each member while an even assignment is computed.

    A move may need a path of several members. For example, member A has three partitions, B has two and C has one. A
    gives a partition to B, and B gives C a partition of a topic that A does not subscribe to. If no path leads from a
    member to a member with at least two partitions fewer, no assignment is more even (Harvey et al., "Semi-matchings
    for bipartite graphs and load balancing").
    """

    def __init__(self, members: Sequence[Member], partitions: Sequence[Partition]) -> None:
        ordered = sorted(members, key=lambda member: member.id)
        self._topics = {member.id: member.topics for member in ordered}
        self._has: dict[str, set[Partition]] = {}
        self._free = set(partitions)
        for member in ordered:
            # If two members report the same partition, one of them does not know yet that it lost the partition. This
            # code cannot know which of the two.
            self._has[member.id] = {p for p in member.owned if p in self._free and p.topic in member.topics}
            self._free -= self._has[member.id]
        self._kept = {member: set(has) for member, has in self._has.items()}

    def even(self) -> Assignment:
        self._place_free()
        # Partitions that had no owner are moved first, so that no owned partition moves without need.
        for also_kept in (False, True):
            while (path := self._path(also_kept)) is not None:
                self._pass_on(path, also_kept)
        return {member: sorted(has) for member, has in self._has.items()}

    def _place_free(self) -> None:
        takers = {
            topic: [member for member, topics in self._topics.items() if topic in topics]
            for topic in {p.topic for p in self._free}
        }
        # The partitions with the fewest possible takers come first: later, these takers would have their full share.
        for partition in sorted(self._free, key=lambda p: (len(takers[p.topic]), p)):
            if takers[partition.topic]:
                self._has[min(takers[partition.topic], key=self._load)].add(partition)

    def _path(self, also_kept: bool) -> list[str] | None:
        """A path of members, on which each member can give a partition to the next. The last member has at least two
        partitions fewer than the first."""
        lightest_first = sorted(self._topics, key=self._load)
        for giver in sorted(self._topics, key=self._load, reverse=True):
            if self._load(giver) - self._load(lightest_first[0]) < 2:
                return None
            path = self._path_from(giver, lightest_first, also_kept)
            if path is not None:
                return path
        return None

    def _path_from(self, giver: str, lightest_first: Sequence[str], also_kept: bool) -> list[str] | None:
        """The shortest path, so that the fewest partitions move."""
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
        """Move one partition along each step of the path. Begins at the end, so that no member passes on a partition
        that it has just received."""
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
    """The part of `target` that may be assigned at once, without the partitions that another member still owns.

    The other member gives up these partitions when it sees this assignment. The next round assigns them.

    Args:
        target: the partitions that each member should have in the end.
        members: all members, with the partitions that they own now.
    """
    owners = _owners(members)
    return {member: [p for p in given if owners.get(p, {member}) == {member}] for member, given in target.items()}


def moved(members: Iterable[Member], target: Assignment) -> set[Partition]:
    """The partitions that one member owns now and another member gets.

    Args:
        members: all members, with the partitions that they own now.
        target: the new assignment.
    """
    owners = _owners(members)
    return {p for member, given in target.items() for p in given if member not in owners.get(p, {member})}


def skew(assignment: Assignment) -> float:
    """The excess of the largest share over an even share: 0.5 for three partitions if two would be even."""
    shares = [len(given) for given in assignment.values()]
    even = math.ceil(sum(shares) / len(shares)) if shares else 0
    return max(shares) / even - 1 if even else 0.0


def _owners(members: Iterable[Member]) -> dict[Partition, set[str]]:
    """All members that report each partition. A member may not know yet that it lost a partition."""
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
    """The built-in assignor of this name. Raises `ConfigurationError` for another name."""
    try:
        return ASSIGNORS[name]
    except KeyError:
        raise ConfigurationError(f"there is no assignor {name!r}: write one of {', '.join(ASSIGNORS)}") from None

"""One consumer that may be two members of its group: one for the topics of its handlers, one for their side topics.

*Side topics* carry what failed: retry topics and re-drive topics. They are empty most of the time. Assignors that
balance how many partitions a member has in total (cooperative-sticky, and `uniform` of KIP-848 brokers) count an empty
partition like any other. Measured: after one re-drive of `orders`, a second process got all partitions of `orders`,
and the first kept those of `orders.inventory.redrive`. So the side topics have a member of their own. It subscribes to
nothing else, and so each kind of topic is balanced without the other. Assignors that spread each topic by itself
(range, roundrobin) need no second member.

Both members belong to one loop: its thread serves both clients, and holdings, lanes, commits and limits are counted
once. A topic does not say which member has its partitions: a handler's pattern may match a side topic, and a member
of an earlier version subscribes to all. So the member to whom a partition was assigned is noted.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TypeAlias, TypeVar

from confluent_kafka import KafkaError

from kconsume.errors import KconsumeError
from kconsume.protocols import balances_the_total
from kconsume.records import Partition
from kconsume.runtime.arrivals import Runs
from kconsume.runtime.budget import Deadline
from kconsume.runtime.source import LEAVE_WITHIN, CommitResult, Place, Source, Tenant
from kconsume.settings import ClientValue, side_settings

V = TypeVar("V")


class SplitSource:
    """The clients of one consumer. The second one is made when there is a side topic to subscribe to."""

    def __init__(self, settings: Mapping[str, ClientValue], tenant: Tenant, *, batch: int = 1000) -> None:
        self.batch = batch
        self._settings = settings
        self._tenant = tenant
        self._splits = balances_the_total(settings)
        self._holders: dict[Partition, Source] = {}
        """The member that each of our partitions was assigned to."""
        self._calling: list[Source] = []
        """The member whose callback runs."""
        self._main = self._member(settings)
        self._side: Source | None = None
        self._subscribed: dict[Source, list[str]] = {}
        self.commit_results: list[CommitResult] = self._main.commit_results

    def _member(self, settings: Mapping[str, ClientValue]) -> Source:
        tenant = _Resident(self._tenant, self._holders, self._calling)
        tenant.member = Source(settings, tenant, batch=self.batch)
        return tenant.member

    @property
    def _members(self) -> Sequence[Source]:
        return [self._main] if self._side is None else [self._main, self._side]

    def generations(self, partitions: Iterable[Partition]) -> dict[Partition, int]:
        """Of the member whose callback runs: its generation, for those of these partitions that are its. Of the other
        one it could be a later generation than that in which it was given its partitions."""
        if not self._calling:
            return {}
        member = self._calling[-1]
        return dict.fromkeys((p for p in partitions if self._holders.get(p) is member), member.generation())

    @property
    def joined(self) -> bool:
        """Whether each member has been told what it has."""
        return all(member.joined for member in self._members)

    @property
    def is_member(self) -> bool:
        """Whether the broker has admitted each member."""
        return all(member.is_member for member in self._members)

    @property
    def joins(self) -> int:
        """How many assignments have come."""
        return sum(member.joins for member in self._members)

    def admitted(self) -> None:
        """Each is a member to whom nothing is assigned (KIP-848 has no callback that says so)."""
        for member in self._members:
            member.admitted()

    # Reading

    def subscribe(self, topics: list[str], side_topics: Sequence[str] = ()) -> None:
        """Also while it runs."""
        if not self._splits:
            return self._subscribe(self._main, [*topics, *side_topics])
        self._subscribe(self._main, topics)
        if side_topics and self._side is None:
            self._side = self._member(side_settings(self._settings))
            self._side.commit_results = self.commit_results
        if self._side is not None:
            self._subscribe(self._side, list(side_topics))
        return None

    def _subscribe(self, member: Source, topics: list[str]) -> None:
        if self._subscribed.get(member) != topics:  # to say the same again is a rebalance
            self._subscribed[member] = topics
            member.subscribe(topics)

    def fetch(self, timeout: float, most: int | None = None) -> Runs:
        """Records that are there; waits for the first one of the handlers' topics up to `timeout`. Those of side topics
        can wait until then."""
        if self._side is None:
            return self._main.fetch(timeout, most)
        runs = self._side.fetch(0, most)
        return self._held(self._side, runs) + self._held(self._main, self._main.fetch(0 if runs else timeout, most))

    def poll(self) -> Runs:
        """Serve the callbacks of both clients and take at most one record of each."""
        return [run for member in self._members for run in self._held(member, member.poll())]

    def _held(self, member: Source, runs: Runs) -> Runs:
        """Without records of a partition that the other member has by now, while this one has not heard of it."""
        return [run for run in runs if self._holders.get(run[0]) is member]

    @property
    def ends(self) -> set[Partition]:
        """Partitions whose end was reached, and of which nothing came since."""
        if self._side is None:
            return self._main.ends
        return {p for member in self._members for p in member.ends if self._holders.get(p) is member}

    def end_of(self, partition: Partition) -> int:
        """Where a partition ends that is in `ends`."""
        return self._holders[partition].end_of(partition)

    def take_trouble(self) -> list[KafkaError]:
        """What the clients said of their connections since this was last asked."""
        return [trouble for member in self._members for trouble in member.take_trouble()]

    @property
    def has_faults(self) -> bool:
        return any(member.has_faults for member in self._members)

    def take_faults(self) -> tuple[dict[Partition, KconsumeError], dict[str, KconsumeError]]:
        """What went wrong with single partitions and with whole topics, as `Source.take_faults`."""
        partitions, topics = dict[Partition, KconsumeError](), dict[str, KconsumeError]()
        for member in self._members:
            of_partitions, of_topics = member.take_faults()
            partitions.update({p: fault for p, fault in of_partitions.items() if self._holders.get(p) is member})
            topics.update(of_topics)
        return partitions, topics

    # Partitions

    def take(self, places: Mapping[Partition, Place]) -> None:
        """Assign partitions without a group's coordination."""
        self._holders.update(dict.fromkeys(places, self._main))
        self._main.take(places)

    def place(self, places: Mapping[Partition, Place]) -> None:
        """Start (or restart) assigned partitions at these places."""
        for member, part in self.parts(places):
            member.place(part)

    def pause(self, partitions: Iterable[Partition]) -> None:
        for member, part in self.parts(dict.fromkeys(partitions)):
            member.pause(part)

    def resume(self, partitions: Iterable[Partition]) -> None:
        for member, part in self.parts(dict.fromkeys(partitions)):
            member.resume(part)

    def parts(self, wanted: Mapping[Partition, V]) -> list[tuple[Source, Mapping[Partition, V]]]:
        """The same, by the member that has the partitions."""
        if self._side is None:
            return [(self._main, wanted)]
        of_side = {p: value for p, value in wanted.items() if self._holders.get(p) is self._side}
        of_main = {p: value for p, value in wanted.items() if p not in of_side}
        return [(member, part) for member, part in ((self._main, of_main), (self._side, of_side)) if part]

    def close(self, patience: float = LEAVE_WITHIN) -> None:
        """Leave the group. May hang, as `Source.close`."""
        deadline = Deadline(patience)
        try:
            self._main.close(deadline.left)
        finally:
            if self._side is not None:
                self._side.close(deadline.left)


AnySource: TypeAlias = Source | SplitSource


class _Resident:
    """The tenant as one member knows it: notes what the member was given."""

    member: Source

    def __init__(self, tenant: Tenant, holders: dict[Partition, Source], calling: list[Source]) -> None:
        self._tenant = tenant
        self._holders = holders
        self._calling = calling

    @contextmanager
    def _callback(self) -> Iterator[None]:
        self._calling.append(self.member)
        try:
            yield
        finally:
            self._calling.pop()

    def assigned(self, partitions: list[Partition]) -> Mapping[Partition, Place]:
        with self._callback():
            return self._assigned(partitions)

    def _assigned(self, partitions: list[Partition]) -> Mapping[Partition, Place]:
        if taken := [p for p in partitions if self._holders.get(p, self.member) is not self.member]:
            self._tenant.lost(taken)  # the broker has put our other member out, which has not heard of it yet
        self._holders.update(dict.fromkeys(partitions, self.member))
        return self._tenant.assigned(partitions)

    def revoked(self, partitions: list[Partition]) -> None:
        mine = self._mine(partitions)
        try:
            with self._callback():
                self._tenant.revoked(mine)
        finally:
            self._let_go(mine)

    def lost(self, partitions: list[Partition]) -> None:
        mine = self._mine(partitions)
        try:
            with self._callback():
                self._tenant.lost(mine)
        finally:
            self._let_go(mine)

    def _mine(self, partitions: list[Partition]) -> list[Partition]:
        return [p for p in partitions if self._holders.get(p) is self.member]

    def _let_go(self, partitions: list[Partition]) -> None:
        for partition in partitions:
            del self._holders[partition]

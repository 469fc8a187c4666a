"""What the Kafka client and the broker assign, next to what our functions answer for the same members.

Bare consumers, without kconsume: they are the reality that the functions are measured by.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import pytest
from confluent_kafka import Consumer, TopicPartition

from kconsume._kafka.cluster import Cluster
from kconsume.rebalance import ASSIGNORS, Assignment, Assignor, Member, assign_stickily, moved
from kconsume.records import Partition
from kconsume.testing.services import KafkaService
from tests.fix_kafka import MakeTopic
from tests.waiting import eventually

Settings = Mapping[str, str | int]

CLASSIC: Settings = {"group.protocol": "classic", "session.timeout.ms": 6000, "heartbeat.interval.ms": 300}
KIP_848: Settings = {"group.protocol": "consumer"}


@dataclass
class Client:
    """A bare consumer that remembers what was taken from it."""

    consumer: Consumer
    revoked: set[Partition] = field(default_factory=set)

    def has(self) -> tuple[Partition, ...]:
        self.consumer.poll(0.01)
        return _sorted(self.consumer.assignment())

    def id(self) -> str:
        return str(self.consumer.memberid())

    def subscribe(self, topics: Sequence[str]) -> None:
        self.consumer.subscribe(list(topics), on_revoke=lambda _, lost: self.revoked.update(_sorted(lost)))


class RealGroup:
    """A group of bare consumers on the broker, over a topic of 5 partitions and one of 7."""

    def __init__(self, bootstrap: str, name: str, topics: Sequence[str]) -> None:
        self.topics = topics
        self.clients: list[Client] = []
        self._bootstrap = bootstrap
        self._name = name
        self._cluster = Cluster(bootstrap)
        counts = self._cluster.topics(topics)
        self.partitions = sorted(Partition(topic, n) for topic, count in counts.items() for n in range(count))

    def join(self, settings: Settings) -> Client:
        client = Client(Consumer({"bootstrap.servers": self._bootstrap, "group.id": self._name, **settings}))
        client.subscribe(self.topics)
        for other in self.clients:
            other.revoked.clear()
        self.clients.append(client)
        return client

    def leave(self, client: Client) -> None:
        self.clients.remove(client)
        client.consumer.close()

    def settle(self) -> Assignment:
        """What each has, once the broker calls the group stable and says the same of each as the client itself."""
        return eventually(self._settled, within=40, what=f"a stable group of {len(self.clients)}")

    def _settled(self) -> Assignment:
        has = {client.id(): client.has() for client in self.clients}
        if sorted(p for owned in has.values() for p in owned) != self.partitions:
            return {}
        said = self._cluster.group(self._name)
        assert said is not None
        return has if said.state == "stable" and {m.id: m.owned for m in said.members} == has else {}

    def members(self, has: Assignment) -> list[Member]:
        return [Member(id, frozenset(self.topics), {}, tuple(owned)) for id, owned in has.items()]

    def close(self) -> None:
        for client in self.clients:
            client.consumer.close()


@pytest.fixture
def real(kafka: KafkaService, topic: MakeTopic, group: str) -> Iterator[RealGroup]:
    opened = RealGroup(kafka.bootstrap, group, [topic(partitions=5), topic(partitions=7)])
    yield opened
    opened.close()


def _sorted(partitions: Sequence[TopicPartition]) -> tuple[Partition, ...]:
    return tuple(sorted(Partition(p.topic, p.partition) for p in partitions))


def answer(assignor: Assignor, real: RealGroup, members: Sequence[Member]) -> dict[str, tuple[Partition, ...]]:
    return {id: tuple(sorted(given)) for id, given in assignor(members, real.partitions).items()}


def loads(assignment: Assignment) -> list[int]:
    return sorted(len(given) for given in assignment.values())


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("range", {**CLASSIC, "partition.assignment.strategy": "range"}),
        ("roundrobin", {**CLASSIC, "partition.assignment.strategy": "roundrobin"}),
        ("range", {**KIP_848, "group.remote.assignor": "range"}),
    ],
    ids=["range", "roundrobin", "range-848"],
)
def test_range_and_round_robin_give_exactly_what_is_assigned(real: RealGroup, name: str, settings: Settings) -> None:
    real.join(settings)
    real.join(settings)
    two = real.settle()
    assert two == answer(ASSIGNORS[name], real, real.members(two))

    real.join(settings)
    three = real.settle()
    assert three == answer(ASSIGNORS[name], real, real.members(three))

    real.leave(real.clients[0])
    left = real.settle()
    assert left == answer(ASSIGNORS[name], real, real.members(left))


@pytest.mark.parametrize(
    "settings",
    [
        {**CLASSIC, "partition.assignment.strategy": "cooperative-sticky"},
        {**KIP_848, "group.remote.assignor": "uniform"},
    ],
    ids=["cooperative-sticky", "uniform-848"],
)
def test_sticky_is_as_even_as_what_is_assigned_and_moves_no_more(real: RealGroup, settings: Settings) -> None:
    # Not compared partition by partition: of several that could move, the client, the broker and we each choose by
    # an order of our own. What must be the same is how many each gets, and no more may move.
    real.join(settings)
    real.join(settings)
    two = real.settle()
    assert loads(two) == loads(assign_stickily(_empty_handed(real.members(two)), real.partitions))

    joined = real.join(settings)
    three = real.settle()
    before = [*real.members(two), Member(joined.id(), frozenset(real.topics))]
    _must_be_as_good(real, before, three)

    leaver = real.clients[0].id()
    real.leave(real.clients[0])
    _must_be_as_good(real, [m for m in real.members(three) if m.id != leaver], real.settle())


def _must_be_as_good(real: RealGroup, before: Sequence[Member], assigned: Assignment) -> None:
    ours = assign_stickily(before, real.partitions)
    assert ours.keys() == assigned.keys()
    assert sorted(p for given in ours.values() for p in given) == real.partitions
    assert loads(ours) == loads(assigned)
    assert len(moved(before, ours)) <= len(moved(before, assigned))


def _empty_handed(members: Sequence[Member]) -> list[Member]:
    return [Member(member.id, member.topics) for member in members]


@pytest.mark.parametrize("name", ["range", "roundrobin", "cooperative-sticky"])
def test_an_eager_join_takes_everything_away_and_a_cooperative_one_what_moves(real: RealGroup, name: str) -> None:
    settings = {**CLASSIC, "partition.assignment.strategy": name}
    first, second = real.join(settings), real.join(settings)
    two = real.settle()
    real.join(settings)
    three = real.settle()
    taken = first.revoked | second.revoked
    assert taken == (moved(real.members(two), three) if name == "cooperative-sticky" else set(real.partitions))

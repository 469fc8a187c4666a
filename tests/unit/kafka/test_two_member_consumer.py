"""Two members of a group in one consumer: what goes to which, without a broker."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, cast

import pytest

from kconsume._config.client_settings import SIDE, ClientValue, client_settings, side_settings
from kconsume._config.group_protocol import balances_the_total
from kconsume._kafka import two_member_consumer as split_source
from kconsume._kafka.consumer import PAUSED_AT_ZERO, AssignmentListener, StartAt
from kconsume._kafka.fetched import Runs
from kconsume._kafka.two_member_consumer import SplitConsumer
from kconsume.records import Message, Partition
from tests.unit.fakes import FakeMessage

ORDERS = [Partition("orders", n) for n in range(2)]
BACK = [Partition("orders.shop.redrive", n) for n in range(2)]
TOPICS, SIDE_TOPICS = ["orders"], ["^(orders[.]shop[.]redrive)$"]


class Member:
    """A client, as far as it is split."""

    made: list[Member]

    def __init__(self, settings: Mapping[str, ClientValue], tenant: AssignmentListener, *, batch: int) -> None:
        self.settings, self.tenant = settings, tenant
        self.commit_results: list[object] = []
        self.joined = False
        self.ends: set[Partition] = set()
        self.topics: list[list[str]] = []
        self.did: list[tuple[str, list[Partition]]] = []
        self.records: Runs = []
        self.waited: list[float] = []
        self.closed = False
        self.made.append(self)

    def subscribe(self, topics: list[str]) -> None:
        self.topics.append(topics)

    def fetch(self, timeout: float, most: int | None = None) -> Runs:
        self.waited.append(timeout)
        runs, self.records = self.records, []
        return runs

    def poll(self) -> Runs:
        return self.fetch(0)

    def end_of(self, partition: Partition) -> int:
        return 7 if "side" in str(self.settings["client.id"]) else 3

    def start_at(self, places: Iterable[Partition]) -> None:
        self.did.append(("place", list(places)))

    def pause(self, partitions: Iterable[Partition]) -> None:
        self.did.append(("pause", list(partitions)))

    def close(self, patience: float) -> None:
        self.closed = True


class Lodger:
    """A tenant that writes down what it is told."""

    def __init__(self) -> None:
        self.told: list[tuple[str, list[Partition]]] = []

    def assigned(self, partitions: list[Partition]) -> Mapping[Partition, StartAt]:
        self.told.append(("assigned", partitions))
        return {}

    def revoked(self, partitions: list[Partition]) -> None:
        self.told.append(("revoked", partitions))

    def lost(self, partitions: list[Partition]) -> None:
        self.told.append(("lost", partitions))


@pytest.fixture(autouse=True)
def clients(monkeypatch: pytest.MonkeyPatch) -> None:
    Member.made = []
    monkeypatch.setattr(split_source, "KafkaConsumer", Member)


def split(kafka: Mapping[str, ClientValue] | None = None) -> tuple[SplitConsumer, Lodger]:
    lodger = Lodger()
    return SplitConsumer(client_settings("localhost:1", "shop", kafka or {}), lodger), lodger


def both() -> tuple[SplitConsumer, Member, Member, Lodger]:
    source, lodger = split()
    source.subscribe(TOPICS, SIDE_TOPICS)
    main, side = Member.made
    return source, main, side, lodger


def runs(*partitions: Partition) -> Runs:
    return [(p, [cast(Message, FakeMessage(topic=p.topic, partition=p.number))]) for p in partitions]


@pytest.mark.parametrize(
    ("kafka", "is_split"),
    [
        ({}, True),
        ({"partition.assignment.strategy": "range"}, False),
        ({"partition.assignment.strategy": "roundrobin,range"}, False),
        ({"group.protocol": "consumer"}, True),
        ({"group.protocol": "consumer", "group.remote.assignor": "uniform"}, True),
        ({"group.protocol": "consumer", "group.remote.assignor": "range"}, False),
    ],
)
def test_only_an_assignor_that_balances_totals_needs_a_second_member(
    kafka: Mapping[str, ClientValue], is_split: bool
) -> None:
    assert balances_the_total(client_settings("localhost:1", "shop", kafka)) is is_split
    source, _ = split(kafka)
    source.subscribe(TOPICS, SIDE_TOPICS)
    expected = [[TOPICS], [SIDE_TOPICS]] if is_split else [[[*TOPICS, *SIDE_TOPICS]]]
    assert [member.topics for member in Member.made] == expected


def test_the_second_client_is_made_when_there_is_a_side_topic_and_the_first_hears_nothing_of_it() -> None:
    source, _ = split()
    source.subscribe(TOPICS)
    assert len(Member.made) == 1
    source.subscribe(TOPICS, SIDE_TOPICS)
    main, side = Member.made
    assert (main.topics, side.topics) == ([TOPICS], [SIDE_TOPICS]), "to subscribe again is a rebalance"
    joined = [(source.joined, source.main_joined)]
    for member in (side, main):
        member.joined = True
        joined.append((source.joined, source.main_joined))
    assert joined == [(False, False), (False, False), (True, True)], "both know what they have"
    assert source.commit_results is main.commit_results is side.commit_results


def test_what_is_done_to_partitions_goes_to_the_member_that_they_were_assigned_to() -> None:
    source, main, side, lodger = both()
    # A pattern of the handler may match a side topic: not the name decides.
    main.tenant.assigned([*ORDERS, BACK[0]])
    side.tenant.assigned([BACK[1]])
    source.pause([*BACK, *ORDERS])
    source.start_at(dict.fromkeys([BACK[1]], PAUSED_AT_ZERO))
    assert main.did == [("pause", [BACK[0], *ORDERS])]
    assert side.did == [("pause", [BACK[1]]), ("place", [BACK[1]])]
    parts = {cast(Member, member): [*part] for member, part in source.by_member(dict.fromkeys([*ORDERS, *BACK], 0))}
    assert parts == {main: [*ORDERS, BACK[0]], side: [BACK[1]]}
    main.ends, side.ends = {ORDERS[0]}, {BACK[1]}
    assert {p: source.end_of(p) for p in source.ends} == {ORDERS[0]: 3, BACK[1]: 7}
    assert lodger.told == [("assigned", [*ORDERS, BACK[0]]), ("assigned", [BACK[1]])]


def test_the_handlers_topics_are_waited_for_and_side_topics_are_not() -> None:
    source, main, side, _ = both()
    main.tenant.assigned(ORDERS)
    side.tenant.assigned(BACK)
    assert source.fetch(0.1) == []
    assert (main.waited, side.waited) == ([0.1], [0])
    main.records, side.records = runs(ORDERS[0]), runs(BACK[0])
    assert [partition for partition, _ in source.fetch(0.1)] == [BACK[0], ORDERS[0]]
    assert main.waited == [0.1, 0], "there is something to do"


def test_a_partition_that_the_other_member_has_by_now_is_lost_to_the_first_once() -> None:
    """The broker has put one member out, and it has not heard of it when the other is given its partitions."""
    source, main, side, lodger = both()
    main.tenant.assigned(BACK)
    side.tenant.assigned([BACK[0]])
    assert lodger.told[1:] == [("lost", [BACK[0]]), ("assigned", [BACK[0]])]
    main.records, main.ends = runs(*BACK), set(BACK)
    assert [partition for partition, _ in source.fetch(0)] == [BACK[1]], "records of the earlier assignment are not his"
    assert source.ends == {BACK[1]}
    main.tenant.lost(BACK)
    assert lodger.told[-1] == ("lost", [BACK[1]]), "the new one is not touched"
    side.tenant.revoked([BACK[0]])
    assert lodger.told[-1] == ("revoked", [BACK[0]])


def test_both_are_closed_also_when_one_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    source, main, side, _ = both()

    def fails(patience: float) -> None:
        raise OSError("gone")

    monkeypatch.setattr(main, "close", fails)
    with pytest.raises(OSError, match="gone"):
        source.close(1.0)
    assert side.closed


def test_the_second_client_has_names_of_its_own_and_prefetches_little() -> None:
    settings: dict[str, Any] = client_settings("localhost:1", "shop", {"client.id": "pod"}, instance="pod-1")
    side = side_settings(settings)
    assert (side["client.id"], side["group.instance.id"]) == ("pod-side", "pod-1.side")
    assert {name: side[name] for name in SIDE} == SIDE
    assert {name for name in side if side[name] != settings[name]} == {"client.id", "group.instance.id", *SIDE}
    less = client_settings("localhost:1", "shop", {"queued.max.messages.kbytes": "100"})
    assert side_settings(less)["queued.max.messages.kbytes"] == 100
    assert "group.instance.id" not in side_settings(less)

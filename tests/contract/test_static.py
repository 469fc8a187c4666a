"""Static members (KIP-345) on the real broker: a restart is no rebalance, and a name has one process."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack

import pytest

from kconsume import App
from kconsume._config.client_settings import ClientValue
from kconsume._kafka.cluster import Cluster, GroupMember
from kconsume.errors import InstanceTaken
from tests.contract.test_rebalance import assigned
from tests.fix_arena import PROTOCOLS, Arena
from tests.waiting import eventually

Kafka = Mapping[str, ClientValue]

pytestmark = pytest.mark.parametrize("arena", ["real"], indirect=True)

both = pytest.mark.parametrize("protocol", ["cooperative", "consumer"], indirect=True)
"""The classic membership, and the broker's own."""

SESSION: Kafka = {"session.timeout.ms": 6000, "heartbeat.interval.ms": 500}
"""Of a classic group; a KIP-848 group has the same from the broker."""


def pod(arena: Arena, group: str, topic: str, instance: str, protocol: Kafka, seen: list[str]) -> App:
    kafka = protocol if protocol == PROTOCOLS["consumer"] else {**SESSION, **protocol}
    app = App(arena.bootstrap, group=group, kafka=kafka, instance=instance)

    @app.consume(topic)
    def handle(value: str) -> None:
        seen.append(value)

    return app


def members(arena: Arena, group: str) -> dict[str | None, GroupMember]:
    """By instance, as the coordinator knows them."""
    known = Cluster(arena.bootstrap).group(group)
    return {} if known is None else {member.instance: member for member in known.members}


@both
def test_a_restart_inside_the_session_is_no_rebalance_and_later_it_is_one(
    arena: Arena, group: str, protocol: Kafka
) -> None:
    topic = arena.topic(4)
    seen: list[str] = []
    other = pod(arena, group, topic, "pod-0", protocol, seen)
    restarted = pod(arena, group, topic, "pod-1", protocol, seen)
    with other.running():
        with restarted.running():
            eventually(lambda: len(assigned(other)) == len(assigned(restarted)) == 2, what="two each")
            # A cooperative group needs one more round to hand over what was given up, and each member hears of its end
            # for itself: the one that gave up may hear of it after the one that gained.
            rounds = 2 if protocol == PROTOCOLS["consumer"] else 3
            eventually(lambda: len(other.rebalances()) == rounds, what="the last round of the join is over")
            theirs, before = assigned(restarted), other.rebalances()
        assert set(members(arena, group)) == {"pod-0", "pod-1"}, "it has left, and keeps its place"
        written = arena.fill(topic, 5)
        with restarted.running():
            eventually(lambda: assigned(restarted) == theirs, what="it has what it had")
            eventually(lambda: set(seen) == written, what="what came meanwhile is handled")
            assert other.rebalances() == before, "nobody else noticed"
        assert {p.number for p in members(arena, group)["pod-1"].owned} == theirs
        # Now it does not come back.
        eventually(lambda: len(assigned(other)) == 4, what="the session is over")
        assert set(members(arena, group)) == {"pod-0"}
        assert len(other.rebalances()) == len(before) + 1
    assert sorted(seen) == sorted(written), "each once"


@both
def test_of_two_processes_under_one_name_one_ends_with_an_error_that_names_it_and_the_other_goes_on(
    arena: Arena, group: str, protocol: Kafka
) -> None:
    topic = arena.topic(2)
    seen: list[str] = []
    first, second = (pod(arena, group, topic, "pod-1", protocol, seen) for _ in range(2))
    # A classic group lets the new one in and puts the old one out; under KIP-848 the new one is refused.
    refused, kept = (second, first) if protocol == PROTOCOLS["consumer"] else (first, second)
    with ExitStack() as stack:

        def run() -> None:
            if kept is first:
                stack.enter_context(kept.running())
                eventually(lambda: assigned(kept) == {0, 1}, what="the first has joined")
            with refused.running():
                if kept is second:
                    eventually(lambda: assigned(refused) == {0, 1}, what="the first has joined")
                    stack.enter_context(kept.running())
                eventually(lambda: False, what="one of them ends")

        with pytest.raises(InstanceTaken, match=r"'pod-1'.*give each process an instance= of its own") as error:
            run()
        written = arena.fill(topic, 5, partitions=2)
        eventually(lambda: set(seen) == written, what="the other goes on")
    assert error.value.exit_code == 2

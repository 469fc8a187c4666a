"""Records that the client gives a second time: they are taken once.

It does so when a rebalance meets a record that is between it and us, which takes a thread that is put to sleep at one
place in its code; here it is sent back by hand.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import closing

import pytest
from confluent_kafka import TopicPartition

from kconsume import Partition
from kconsume._config.client_settings import ClientValue, client_settings
from kconsume._embedded.controls import KafkaControls
from kconsume._kafka.consumer import KafkaConsumer, StartAt
from kconsume._runtime.deadlines import Deadline
from tests.fix_arena import Arena

RECORDS, BACK_TO = 30, 20
CameAfter = Callable[[Callable[[KafkaConsumer, str], None]], list[int]]
"""Reads some records, has the client go back, and answers which offsets come then: there is more to read."""


class AtTheBeginning:
    def assigned(self, partitions: list[Partition]) -> Mapping[Partition, StartAt]:
        return dict.fromkeys(partitions, StartAt(0))

    def revoked(self, partitions: list[Partition]) -> None: ...

    def lost(self, partitions: list[Partition]) -> None: ...


def sent_back(source: KafkaConsumer, topic: str) -> None:
    """The client's own doing, of which `source` is told nothing."""
    source._consumer.seek(TopicPartition(topic, 0, BACK_TO))


def placed_back(source: KafkaConsumer, topic: str) -> None:
    source.start_at({Partition(topic, 0): StartAt(BACK_TO)})


def offsets_of(source: KafkaConsumer, upto: int) -> list[int]:
    """What comes until the record before `upto` does."""
    came: list[int] = []
    deadline = Deadline(30.0)
    while came[-1:] != [upto - 1]:
        assert not deadline.passed, came
        came += [message.offset() for _, run in source.fetch(0.05) for message in run]
    return came


@pytest.fixture
def arena(embedded: KafkaControls) -> Arena:
    return Arena("embedded", embedded.bootstrap, embedded)


@pytest.fixture
def came_after(arena: Arena, group: str, protocol: Mapping[str, ClientValue]) -> CameAfter:
    def came_after(back: Callable[[KafkaConsumer, str], None]) -> list[int]:
        topic = arena.topic(1)
        arena.produce(topic, ["x"] * RECORDS, 0)
        source = KafkaConsumer(client_settings(arena.bootstrap, group, arena.quick(protocol)), AtTheBeginning())
        with closing(source):
            source.subscribe([topic])
            assert offsets_of(source, RECORDS) == [*range(RECORDS)]
            back(source, topic)
            arena.produce(topic, ["x"] * RECORDS, 0)
            return offsets_of(source, 2 * RECORDS)

    return came_after


def test_what_the_client_gives_again_is_not_taken_again(came_after: CameAfter) -> None:
    assert came_after(sent_back) == [*range(RECORDS, 2 * RECORDS)]


def test_who_is_placed_further_back_is_given_everything_from_there(came_after: CameAfter) -> None:
    assert came_after(placed_back) == [*range(BACK_TO, 2 * RECORDS)]


def test_control_what_the_client_gives_again_comes_twice_without_the_guard(
    came_after: CameAfter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(KafkaConsumer, "_without_repeats", lambda source, runs: runs)
    assert came_after(sent_back) == [*range(BACK_TO, 2 * RECORDS)]

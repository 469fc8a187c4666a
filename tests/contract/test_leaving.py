"""A member that is closed while it joins is heard to leave: else its group would wait for its session to end.

The broker is frozen at the one moment that matters, of which only the client's own log tells.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager

import pytest

from kconsume import Partition
from kconsume._config.client_settings import ClientValue, client_settings
from kconsume._kafka.consumer import LEAVE_WITHIN, KafkaConsumer, StartAt
from kconsume._runtime.deadlines import Deadline
from kconsume.testing.services import LocalKafka
from tests.fix_arena import PROTOCOLS, Arena
from tests.waiting import eventually

JOINING = ("-> wait-sync", "ConsumerGroupHeartbeat of member id")
"""In the client's words: its last request leaves, and the broker has not answered."""


class Log:
    """What the client says, told while it is polled."""

    def __init__(self) -> None:
        self.text = ""

    def log(self, _: int, text: str, *arguments: object) -> None:
        self.text += text % arguments + "\n"


class Nobody:
    """Must not hear of anything: it was never a member."""

    def assigned(self, partitions: list[Partition]) -> Mapping[Partition, StartAt]:
        raise AssertionError(partitions)

    def revoked(self, partitions: list[Partition]) -> None:
        assert partitions == []

    def lost(self, partitions: list[Partition]) -> None:
        assert partitions == []


@pytest.fixture(scope="module")
def broker() -> Iterator[LocalKafka]:
    with LocalKafka() as broker:
        yield broker


@pytest.fixture
def arena(broker: LocalKafka) -> Arena:
    return Arena("real", broker.bootstrap, None)


def members(arena: Arena, group: str) -> int:
    (described,) = arena.admin.describe_consumer_groups([group]).values()
    return len(described.result(timeout=20).members)


@contextmanager
def thawed_soon(broker: LocalKafka) -> Iterator[Callable[[], None]]:
    """What freezes it, for less time than a member waits; at the end it is thawed."""
    thaw = threading.Timer(LEAVE_WITHIN / 4, broker.thaw)

    def freeze() -> None:
        broker.freeze()
        thaw.start()

    yield freeze
    thaw.join()


def joined_and_closed(
    broker: LocalKafka,
    arena: Arena,
    group: str,
    protocol: Mapping[str, ClientValue],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    log, topic = Log(), arena.topic(1)
    monkeypatch.setattr("kconsume._kafka.consumer.client_log", lambda: log)
    kafka: dict[str, ClientValue] = {**protocol, "debug": "cgrp"}
    source = KafkaConsumer(client_settings(arena.bootstrap, group, kafka), Nobody())
    with thawed_soon(broker) as freeze, closing(source):
        source.subscribe([topic])
        deadline = Deadline(30.0)
        while not any(sign in log.text for sign in JOINING):
            assert not deadline.passed, log.text
            source.fetch(0.001)
        freeze()


def test_a_member_that_is_closed_while_it_joins_is_no_member_afterwards(
    broker: LocalKafka,
    arena: Arena,
    group: str,
    protocol: Mapping[str, ClientValue],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    joined_and_closed(broker, arena, group, protocol, monkeypatch)
    assert members(arena, group) == 0


@pytest.mark.parametrize("name", ["cooperative", "consumer"])
def test_control_one_that_does_not_wait_for_the_end_of_it_stays_behind(
    broker: LocalKafka, arena: Arena, group: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(KafkaConsumer, "_poll_until", lambda *_: None)
    joined_and_closed(broker, arena, group, PROTOCOLS[name], monkeypatch)
    eventually(lambda: members(arena, group) == 1, what="the broker takes it for a member")


def test_one_that_is_never_closed_says_so_when_it_is_collected(group: str) -> None:
    """The client may hang then, and nobody would know where it came from."""
    source = KafkaConsumer(client_settings("127.0.0.1:1", group, {"log_level": 0}), Nobody())
    source.subscribe(["orders"])
    with pytest.warns(ResourceWarning, match=r"unclosed consumer of \['orders'\]"):
        source.__del__()
    source.close()
    source.__del__()  # or it would be a warning, which is an error here

"""The arena: a broker to run an app against, the embedded and the real one by turns, with the same few verbs."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import ClassVar

import pytest
from confluent_kafka import KafkaError, TopicPartition
from confluent_kafka.admin import AdminClient

from kconsume import App
from kconsume._config.client_settings import ClientValue
from kconsume._config.group_protocol import GroupProtocol, protocol_of
from kconsume._embedded.controls import KafkaControls
from kconsume._embedded.named_broker import attach
from tests.fix_kafka import LASTING, Payload, create_topic, delete_topics, produce, unique

QUICK: Mapping[str, ClientValue] = {"session.timeout.ms": 2000, "heartbeat.interval.ms": 250}
"""For the embedded broker, which ends a rebalance only when the session nearly has, and for tests that wait for the end
of a session. Elsewhere sessions are not this short: on a machine that is starved of CPU they end again and again,
although everybody is alive."""
STEADY: Mapping[str, ClientValue] = {"session.timeout.ms": 20_000, "heartbeat.interval.ms": 250}
"""For a real broker, whose rebalances end when all have joined: they are as quick as with `QUICK`, and the session is
longer than any pause of a starved machine. It is shorter than a test's deadline, because a member whose leaving is not
heard stays in its group until its session ends."""
POLL_INTERVAL = 6.0
"""Seconds of the poll interval of `IMPATIENT`."""
IMPATIENT: Mapping[str, ClientValue] = {
    "session.timeout.ms": int(POLL_INTERVAL * 1000),  # the client takes none that is longer than the poll interval
    "max.poll.interval.ms": int(POLL_INTERVAL * 1000),
}
"""For tests whose handlers take longer than the poll interval."""


class Arena:
    """One broker and what tests do on it. Topics are its own, so that tests do not meet."""

    with_gaps: ClassVar[bool] = True
    """Whether transaction markers take offsets between the records. On the embedded broker there are none."""

    def __init__(self, kind: str, bootstrap: str, embedded: KafkaControls | None) -> None:
        self.kind = kind
        self.bootstrap = bootstrap
        self.embedded = embedded
        self.admin = AdminClient({"bootstrap.servers": bootstrap, "log_level": 0})
        self._made: set[str] = set()

    def topic(self, partitions: int = 4, name: str | None = None) -> str:
        name = name or unique("topic")
        if self.embedded is not None:
            self.embedded.create_topic(name, partitions)
        else:
            create_topic(self.admin, name, partitions)
        self._made.add(name)
        return name

    def delete_topic(self, name: str) -> None:
        if self.embedded is not None:
            self.embedded.delete_topic(name)
        else:
            delete_topics(self.admin, [name])

    def delete_records(self, topic: str, partition: int, before: int) -> None:
        """What retention does."""
        if self.embedded is not None:
            self.embedded.delete_records(topic, partition, before)
        else:
            (done,) = self.admin.delete_records([TopicPartition(topic, partition, before)]).values()
            done.result(timeout=20)

    def produce(self, topic: str, values: Iterable[Payload], partition: int | None = None) -> int:
        return produce(
            self.bootstrap, topic, values, partition=partition, gaps=self.with_gaps and self.embedded is None
        )

    def fill(self, topic: str, each: int, partitions: int = 4) -> set[str]:
        """`each` numbered records in every partition, written `partition:number`."""
        for partition in range(partitions):
            self.produce(topic, [f"{partition}:{n}" for n in range(each)], partition)
        return {f"{partition}:{n}" for partition in range(partitions) for n in range(each)}

    def app(self, group: str, offsets: str = "kafka://", kafka: Mapping[str, ClientValue] | None = None) -> App:
        return App(self.bootstrap, group=group, offsets=offsets, kafka=self.quick(kafka or {}))

    def quick(self, kafka: Mapping[str, ClientValue]) -> dict[str, ClientValue]:
        """These properties with quick rebalances. Under KIP-848 that is the broker's to say, and said there."""
        session = STEADY if self.embedded is None else QUICK
        return {**kafka} if protocol_of(kafka) is GroupProtocol.CONSUMER else {**session, **kafka}

    def put_out(self, group: str, protocol: Mapping[str, ClientValue]) -> None:
        """The broker ends the membership of all members of a group; each learns at its next heartbeat that it has lost
        its partitions. The embedded broker tells so the next one that sends a heartbeat; in the name of a member of a
        real group, its leaving is sent."""
        consumer = protocol_of(protocol) is GroupProtocol.CONSUMER
        if self.embedded is not None:
            api = "ConsumerGroupHeartbeat" if consumer else "Heartbeat"
            return self.embedded.fail_next(api, KafkaError.UNKNOWN_MEMBER_ID)
        (described,) = self.admin.describe_consumer_groups([group]).values()
        for member in described.result(timeout=20).members:
            leave(self.bootstrap, group, member.member_id, consumer=consumer)
        return None

    def clean_up(self) -> None:
        if self.embedded is None:
            delete_topics(self.admin, self._made)


@pytest.fixture(autouse=True)
def _dense(request: pytest.FixtureRequest) -> None:
    """For tests that name offsets."""
    if request.node.get_closest_marker("dense") is not None:
        request.getfixturevalue("monkeypatch").setattr(Arena, "with_gaps", False)


def leave(bootstrap: str, group: str, member: str, *, consumer: bool) -> None:
    """Send the request by which a member leaves its group; no client offers it for the members of others.

    LeaveGroup in version 0 for a classic group, ConsumerGroupHeartbeat in version 0 with epoch -1 for one of KIP-848.
    """
    name, who = group.encode(), member.encode()
    if consumer:
        # Header version 2: correlation id, client id, no tags. Body: compact strings, then nothing of what is optional.
        header = struct.pack(">hhih", 68, 0, 1, -1) + b"\0"
        body = bytes([len(name) + 1]) + name + bytes([len(who) + 1]) + who + struct.pack(">i", -1) + b"\0\0"
        body += struct.pack(">i", -1) + b"\0\0\0\0"
        error_at = 4 + 1 + 4  # correlation id, no tags, throttle time
    else:
        header = struct.pack(">hhih", 13, 0, 1, -1)
        body = struct.pack(">h", len(name)) + name + struct.pack(">h", len(who)) + who
        error_at = 4
    host, _, port = bootstrap.split(",")[0].rpartition(":")
    with socket.create_connection((host, int(port)), timeout=20) as connection, connection.makefile("rb") as answers:
        connection.sendall(struct.pack(">i", len(header) + len(body)) + header + body)
        (size,) = struct.unpack(">i", answers.read(4))
        (error,) = struct.unpack_from(">h", answers.read(size), error_at)
    assert error == 0, KafkaError(error)


def told_to_stop(app: App) -> bool:
    """Whether all its lanes have been: what has not begun by now is left."""
    supervisor = app._supervisor
    consumers = supervisor.consumers if supervisor is not None else ()
    lanes = [owned.lane for consumer in consumers for owned in list(consumer.assignment.partitions.values())]
    return bool(lanes) and all(lane is not None and lane.stop_reasons for lane in lanes)


@pytest.fixture(scope="session")
def embedded() -> Iterator[KafkaControls]:
    """In a process of its own: at the end of a run of several minutes the client's library once crashed while it
    destroyed such a cluster, and took the whole run with it."""
    broker = attach(unique("arena"), until_exit=True)
    LASTING.add(broker.bootstrap)
    yield broker
    broker.stop()


@pytest.fixture(params=["embedded", "real"])
def arena(request: pytest.FixtureRequest) -> Iterator[Arena]:
    """Every test that asks for it runs on both brokers."""
    if request.param == "embedded":
        broker: KafkaControls = request.getfixturevalue("embedded")
        yield Arena("embedded", broker.bootstrap, broker)
        return
    arena = Arena("real", request.getfixturevalue("kafka").bootstrap, None)
    yield arena
    arena.clean_up()


PROTOCOLS: Mapping[str, Mapping[str, ClientValue]] = {
    "cooperative": {},
    "eager": {"partition.assignment.strategy": "range"},
    "consumer": {"group.protocol": "consumer"},
}


@pytest.fixture(params=PROTOCOLS)
def protocol(request: pytest.FixtureRequest) -> Mapping[str, ClientValue]:
    """The properties that choose a group protocol: every test that asks for it runs under all three."""
    return PROTOCOLS[request.param]


@pytest.fixture
def sqlite_url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path / 'shop.db'}"

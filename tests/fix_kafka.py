"""Fixtures for tests that need a real Kafka: one broker a run, and for each test its own topics and group."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import cache
from typing import Protocol

import pytest
from confluent_kafka import KafkaError, KafkaException, Message, Producer
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from kconsume.testing.services import KafkaService, kafka_service
from tests.waiting import eventually

Payload = bytes | str | None


_Pairs = list[tuple[Payload, Payload]]
"""Values and keys."""


class MakeTopic(Protocol):
    def __call__(self, partitions: int = 4, name: str | None = None, config: Mapping[str, str] | None = None) -> str:
        """Create a topic, wait until all its partitions have leaders, return its name."""


@pytest.fixture(scope="session")
def kafka() -> Iterator[KafkaService]:
    """The run's one broker, started by the first test that asks. A test that breaks brokers makes its own."""
    with kafka_service(lasting=False) as service:  # half of the CPU: what would make it faster takes more than it saves
        LASTING.add(service.bootstrap)
        yield service


@pytest.fixture(scope="session")
def kafka_admin(kafka: KafkaService) -> AdminClient:
    # Silent: it is still there when the broker goes at the end of the run.
    return AdminClient({"bootstrap.servers": kafka.bootstrap, "log_level": 0})


@pytest.fixture
def topic(kafka_admin: AdminClient) -> Iterator[MakeTopic]:
    made: list[str] = []

    def make(partitions: int = 4, name: str | None = None, config: Mapping[str, str] | None = None) -> str:
        made.append(name or unique("topic"))
        create_topic(kafka_admin, made[-1], partitions, config)
        return made[-1]

    yield make
    delete_topics(kafka_admin, set(made))


@pytest.fixture
def group() -> str:
    return unique("group")


def unique(prefix: str) -> str:
    return f"{prefix}-{uuid.uuid4().hex[:12]}"


def create_topic(admin: AdminClient, name: str, partitions: int, config: Mapping[str, str] | None = None) -> None:
    new = NewTopic(name, num_partitions=partitions, replication_factor=1, config=dict(config or {}))
    admin.create_topics([new])[name].result(timeout=20)

    await_partitions(admin, name, partitions)


def await_partitions(admin: AdminClient, name: str, partitions: int) -> None:
    """Until the broker tells everybody of them. It has said that they are made a moment before that, and to whoever
    writes in that moment it says that there is no such partition."""

    def led() -> bool:
        # All topics, not this one: asking for a topic by name may make it, on brokers that allow that.
        known = admin.list_topics(timeout=20).topics.get(name)
        return (
            known is not None
            and len(known.partitions) == partitions
            and all(partition.leader >= 0 for partition in known.partitions.values())
        )

    eventually(led, what=f"a leader for each of the {partitions} partitions of {name}")


def delete_topics(admin: AdminClient, names: Collection[str]) -> None:
    """Those that are gone already, because the test deleted them, are no error."""
    for deleted in admin.delete_topics(list(names)).values() if names else ():
        try:
            deleted.result(timeout=20)
        except KafkaException as failed:
            if failed.args[0].code() != KafkaError.UNKNOWN_TOPIC_OR_PART:
                raise


def produce(
    bootstrap: str,
    topic: str,
    values: Iterable[Payload],
    keys: Iterable[Payload] | None = None,
    partition: int | None = None,
    *,
    anew: bool = False,
    gaps: bool = False,
) -> int:
    """Write one record a value, in order, and return how many once the broker has confirmed every one. `anew`: by a
    producer that knows of nothing yet, where the lasting one may not have heard of a new partition. `gaps`: in
    transactions, so that markers of theirs take offsets between the records, and behind the last."""
    make = _lasting_producer if bootstrap in LASTING and not anew else _producer
    producer = make(bootstrap, gaps)
    pairs: _Pairs = list(zip(values, keys, strict=True)) if keys is not None else [(value, None) for value in values]
    place = -1 if partition is None else partition
    try:
        for part in _transactions(pairs) if gaps else [pairs]:
            if gaps:
                producer.begin_transaction()
            _write(producer, topic, part, place)
            if gaps:
                producer.commit_transaction(60)
    except BaseException:
        _lasting_producer.cache_clear()  # it may have failed for good, and is not for the next test
        raise
    return len(pairs)


def _transactions(pairs: _Pairs) -> Iterator[_Pairs]:
    """The first record by itself, so that there is a gap however few there are."""
    yield pairs[:1]
    for first in range(1, len(pairs), 200):
        yield pairs[first : first + 200]


def _write(producer: Producer, topic: str, pairs: _Pairs, place: int) -> None:
    refused: list[str] = []

    def refuse(error: KafkaError | None, message: Message) -> None:
        if error is not None:
            refused.append(str(error))

    for value, key in pairs:
        while not _took(producer, topic, value, key, place, refuse):
            producer.poll(0.1)  # the queue is full: let it drain
    unconfirmed = producer.flush(60)
    assert not refused, f"{len(refused)} of {len(pairs)} records were not written to {topic}: {refused[0]}"
    assert unconfirmed == 0, f"{unconfirmed} of {len(pairs)} records to {topic} were not confirmed within 60 s"


LASTING: set[str] = set()
"""The addresses of brokers that last as long as the run. Another's may be that of one that has ended, of whose topics a
producer would still know."""


@cache
def _lasting_producer(bootstrap: str, transactional: bool) -> Producer:
    """One for each such broker: a new idempotent producer waits half a second for its id."""
    return _producer(bootstrap, transactional)


def _producer(bootstrap: str, transactional: bool) -> Producer:
    producer = Producer(
        {
            "bootstrap.servers": bootstrap,
            "enable.idempotence": True,  # a retry neither doubles nor reorders
            # Only failures are reported one by one, because a million calls back into Python would cost
            # more than the writing. That nothing is missing, flush() says.
            "delivery.report.only.error": True,
            "linger.ms": 5,
            "batch.size": 1_000_000,
            "queue.buffering.max.messages": 500_000,
            "log_level": 0,  # it outlives brokers that tests kill, and would complain of each
            **({"transactional.id": unique("tests")} if transactional else {}),
        }
    )
    if transactional:
        producer.init_transactions(60)
    return producer


def _took(
    producer: Producer,
    topic: str,
    value: Payload,
    key: Payload,
    partition: int,
    refuse: Callable[[KafkaError | None, Message], None],
) -> bool:
    try:
        producer.produce(topic, value, key, partition, on_delivery=refuse)
    except BufferError:
        return False
    return True

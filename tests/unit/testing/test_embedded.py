"""The embedded Kafka as clients see it: real producers and consumers, over TCP, in this process."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from confluent_kafka import Consumer, KafkaError, KafkaException, Message, Producer, TopicPartition
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from kconsume._embedded import librdkafka
from kconsume.errors import ConfigurationError, EmbeddedBrokerError
from kconsume.testing import EmbeddedKafka
from tests.waiting import eventually

DEADLINE = 20.0


@pytest.fixture
def kafka() -> Iterator[EmbeddedKafka]:
    with EmbeddedKafka({"orders": 4}) as running:
        yield running


def produce(kafka: EmbeddedKafka, topic: str, *values: bytes, partitions: int = 1) -> list[KafkaError | None]:
    outcomes: list[KafkaError | None] = []
    producer = Producer({"bootstrap.servers": kafka.bootstrap, "log_level": 2})
    for number, value in enumerate(values):
        producer.produce(
            topic, value, partition=number % partitions, on_delivery=lambda error, _: outcomes.append(error)
        )
    assert producer.flush(DEADLINE) == 0
    return outcomes


def consumer(kafka: EmbeddedKafka, **settings: str | int | bool) -> Consumer:
    return Consumer(
        {
            "bootstrap.servers": kafka.bootstrap,
            "group.id": "g",
            "auto.offset.reset": "earliest",
            "enable.auto.commit": False,
            "log_level": 2,
            **settings,
        }
    )


def read(client: Consumer, count: int) -> list[Message]:
    records: list[Message] = []

    def enough() -> bool:
        records.extend(message for message in client.consume(count, 0.1) if message.error() is None)
        return len(records) >= count

    eventually(enough, what=f"{count} records")
    return records


def end_of(kafka: EmbeddedKafka, topic: str, partition: int) -> tuple[int, int]:
    client = consumer(kafka)
    try:
        low, high = client.get_watermark_offsets(TopicPartition(topic, partition), timeout=DEADLINE)
        return low, high
    finally:
        client.close()


def test_what_is_produced_to_several_partitions_is_consumed_from_them(kafka: EmbeddedKafka) -> None:
    sent = [b"%d" % n for n in range(40)]
    assert produce(kafka, "orders", *sent, partitions=4) == [None] * 40

    client = consumer(kafka)
    client.subscribe(["orders"])
    records = read(client, 40)
    client.close()

    assert sorted(int(record.value() or b"") for record in records) == list(range(40))
    assert {record.partition() for record in records} == {0, 1, 2, 3}


def test_committed_offsets_outlive_the_consumer(kafka: EmbeddedKafka) -> None:
    produce(kafka, "orders", b"a", b"b", b"c")
    first = consumer(kafka)
    first.subscribe(["orders"])
    read(first, 2)
    first.commit(offsets=[TopicPartition("orders", 0, 2, "mark")], asynchronous=False)
    first.close()

    second = consumer(kafka)
    (stored,) = second.committed([TopicPartition("orders", 0)], timeout=DEADLINE)
    second.close()

    assert (stored.offset, stored.metadata) == (2, "mark")


@pytest.mark.parametrize(
    "protocol",
    [
        {"session.timeout.ms": 2000, "heartbeat.interval.ms": 100},
        {
            "session.timeout.ms": 2000,
            "heartbeat.interval.ms": 100,
            "partition.assignment.strategy": "cooperative-sticky",
        },
        {"group.protocol": "consumer"},
    ],
    ids=["classic", "cooperative", "kip-848"],
)
def test_two_members_of_a_group_share_the_partitions(kafka: EmbeddedKafka, protocol: dict[str, str | int]) -> None:
    members = [consumer(kafka, **protocol) for _ in range(2)]
    for member in members:
        member.subscribe(["orders"])

    def shared() -> bool:
        for member in members:
            member.poll(0.02)
        return [len(member.assignment()) for member in members] == [2, 2]

    eventually(shared, what="two partitions each")
    for member in members:
        member.close()


def test_topics_lists_those_created_and_those_a_producer_brought_into_being(kafka: EmbeddedKafka) -> None:
    kafka.create_topic("payments", 2)
    produce(kafka, "unheard-of", b"x")

    assert kafka.topics() == {"orders": 4, "payments": 2, "unheard-of": 4}


def test_a_topic_cannot_be_created_twice_unless_that_is_said_to_be_fine(kafka: EmbeddedKafka) -> None:
    with pytest.raises(EmbeddedBrokerError, match="TOPIC_ALREADY_EXISTS"):
        kafka.create_topic("orders", 4)
    kafka.create_topic("orders", 4, exist_ok=True)
    with pytest.raises(EmbeddedBrokerError, match="has 4 partitions and not 5"):
        kafka.create_topic("orders", 5, exist_ok=True)


@pytest.mark.parametrize(("name", "partitions"), [("bad name!", 1), ("", 1), ("..", 1), ("orders2", 0)])
def test_a_topic_no_kafka_would_take_is_refused(kafka: EmbeddedKafka, name: str, partitions: int) -> None:
    with pytest.raises(ConfigurationError):
        kafka.create_topic(name, partitions)


def test_a_deleted_topic_comes_back_empty(kafka: EmbeddedKafka) -> None:
    produce(kafka, "orders", b"old", b"older")
    kafka.delete_topic("orders")
    assert kafka.topics() == {}
    kafka.create_topic("orders", 2)

    assert end_of(kafka, "orders", 0) == (0, 0)
    with pytest.raises(EmbeddedBrokerError, match="UNKNOWN_TOPIC_OR_PART"):
        kafka.delete_topic("never-was")


def test_deleted_records_move_the_start_of_the_log(kafka: EmbeddedKafka) -> None:
    produce(kafka, "orders", b"a", b"b", b"c")
    kafka.delete_records("orders", 0, before=2)

    assert end_of(kafka, "orders", 0) == (2, 3)
    with pytest.raises(EmbeddedBrokerError, match="OFFSET_OUT_OF_RANGE"):
        kafka.delete_records("orders", 0, before=99)


def test_an_injected_error_reaches_the_client_once(kafka: EmbeddedKafka) -> None:
    kafka.fail_next("Produce", KafkaError.MSG_SIZE_TOO_LARGE)
    (failed,) = produce(kafka, "orders", b"x")
    (delivered,) = produce(kafka, "orders", b"x")

    assert failed is not None
    assert failed.code() == KafkaError.MSG_SIZE_TOO_LARGE
    assert delivered is None


def test_injected_errors_come_in_the_order_given(kafka: EmbeddedKafka) -> None:
    kafka.fail_next("OffsetCommit", KafkaError.TOPIC_AUTHORIZATION_FAILED, KafkaError.GROUP_AUTHORIZATION_FAILED)
    client = consumer(kafka)
    codes = []
    for _ in range(2):
        with pytest.raises(KafkaException) as caught:
            client.commit(offsets=[TopicPartition("orders", 0, 1)], asynchronous=False)
        codes.append(caught.value.args[0].code())
    client.close()

    assert codes == [KafkaError.TOPIC_AUTHORIZATION_FAILED, KafkaError.GROUP_AUTHORIZATION_FAILED]


def test_cleared_failures_are_not_met(kafka: EmbeddedKafka) -> None:
    kafka.fail_next("Produce", KafkaError.MSG_SIZE_TOO_LARGE)
    kafka.clear_failures("Produce")

    assert produce(kafka, "orders", b"x") == [None]


@pytest.mark.parametrize(("api", "errors"), [("Fech", (1,)), ("Fetch", ())])
def test_a_failure_that_makes_no_sense_is_refused(kafka: EmbeddedKafka, api: str, errors: tuple[int, ...]) -> None:
    with pytest.raises(ConfigurationError, match=api):
        kafka.fail_next(api, *errors)


def test_a_broker_that_is_down_answers_nobody_until_it_is_up(kafka: EmbeddedKafka) -> None:
    client = AdminClient({"bootstrap.servers": kafka.bootstrap, "log_level": 2})
    kafka.broker_down()
    with pytest.raises(KafkaException):
        client.list_topics(timeout=0.5)
    kafka.broker_up()

    assert set(client.list_topics(timeout=DEADLINE).topics) == {"orders"}


def test_a_slow_broker_misses_a_short_deadline(kafka: EmbeddedKafka) -> None:
    client = AdminClient({"bootstrap.servers": kafka.bootstrap, "log_level": 2})
    kafka.round_trip(1, 5000)
    with pytest.raises(KafkaException):
        client.list_topics(timeout=0.3)


def test_a_leader_moves_to_the_broker_that_is_named() -> None:
    with EmbeddedKafka({"orders": 1}, brokers=3) as kafka:
        client = AdminClient({"bootstrap.servers": kafka.bootstrap, "log_level": 2})
        for broker in (3, 1):
            kafka.move_leader("orders", 0, broker)
            assert client.list_topics(timeout=DEADLINE).topics["orders"].partitions[0].leader == broker
        with pytest.raises(EmbeddedBrokerError, match="broker 9"):
            kafka.move_leader("orders", 0, 9)


def test_a_group_follows_its_coordinator() -> None:
    with EmbeddedKafka({"orders": 1}, brokers=2) as kafka:
        for broker in (1, 2):
            kafka.move_coordinator("g", broker)
            kafka.broker_down(3 - broker)
            kafka.move_leader("orders", 0, broker)
            client = consumer(kafka)
            (stored,) = client.commit(offsets=[TopicPartition("orders", 0, broker)], asynchronous=False) or []
            assert stored.error is None
            client.close()
            kafka.broker_up()


def test_admin_clients_are_told_at_once_what_is_unsupported(kafka: EmbeddedKafka) -> None:
    client = AdminClient({"bootstrap.servers": kafka.bootstrap, "log_level": 2})
    with pytest.raises(KafkaException) as caught:
        client.create_topics([NewTopic("late", 1, 1)])["late"].result(DEADLINE)

    assert caught.value.args[0].code() == KafkaError._UNSUPPORTED_FEATURE


def test_requests_are_counted_from_the_first_count_on(kafka: EmbeddedKafka) -> None:
    kafka.count_requests()
    assert kafka.count_requests() == 0
    produce(kafka, "orders", b"x")

    assert kafka.count_requests() > 0
    assert kafka.count_requests() == 0


def test_starting_and_stopping_twice_is_starting_and_stopping_once() -> None:
    kafka = EmbeddedKafka({"orders": 1})
    kafka.stop()
    kafka.start()
    address = kafka.bootstrap
    kafka.start()
    assert kafka.bootstrap == address
    kafka.stop()
    kafka.stop()

    with pytest.raises(EmbeddedBrokerError, match="not running"):
        _ = kafka.bootstrap


def test_a_stopped_kafka_starts_again_with_its_topics_and_no_records() -> None:
    kafka = EmbeddedKafka({"orders": 2})
    with kafka:
        produce(kafka, "orders", b"x")
    with kafka:
        assert kafka.topics() == {"orders": 2}
        assert end_of(kafka, "orders", 0) == (0, 0)


def test_a_kafka_that_fails_to_start_leaves_nothing_running() -> None:
    kafka = EmbeddedKafka({"bad name!": 1})
    with pytest.raises(ConfigurationError):
        kafka.start()
    with pytest.raises(EmbeddedBrokerError, match="not running"):
        _ = kafka.bootstrap
    with pytest.raises(ConfigurationError):
        EmbeddedKafka(brokers=0)


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_a_forked_child_is_told_that_the_broker_is_not_its_own(kafka: EmbeddedKafka) -> None:
    child = os.fork()
    if child == 0:
        try:
            kafka.stop()
            kafka.create_topic("from-the-child", 1)
        except EmbeddedBrokerError as error:
            os._exit(0 if "is a fork" in str(error) else 1)
        os._exit(2)
    _, status = os.waitpid(child, 0)

    assert os.waitstatus_to_exitcode(status) == 0
    assert kafka.topics() == {"orders": 4}


def test_a_client_without_its_library_is_told_how_to_get_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("confluent_kafka.__file__", str(tmp_path / "confluent_kafka" / "__init__.py"))
    monkeypatch.setattr("ctypes.util.find_library", lambda _: None)
    with pytest.raises(EmbeddedBrokerError, match="from a wheel"):
        librdkafka._find_librdkafka()

    monkeypatch.setattr("ctypes.util.find_library", lambda _: "librdkafka.so.1")
    assert librdkafka._find_librdkafka() == "librdkafka.so.1"
    mac = tmp_path / "confluent_kafka" / ".dylibs" / "librdkafka.1.dylib"
    mac.parent.mkdir(parents=True)
    mac.touch()
    assert librdkafka._find_librdkafka() == str(mac)

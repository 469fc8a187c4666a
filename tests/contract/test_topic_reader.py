"""The reader without a group: it reads to an end that it knows, past gaps, and leaves nothing behind in the cluster."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient

from kconsume import Partition
from kconsume._config.client_settings import client_settings
from kconsume._kafka.cluster import Cluster
from kconsume._kafka.topic_reader import RecordPlace, TopicReader
from kconsume.errors import BrokerUnavailable, ConfigurationError
from kconsume.testing.services import KafkaService
from tests.fix_kafka import MakeTopic, produce, unique


@pytest.fixture
def reader(kafka: KafkaService) -> TopicReader:
    return TopicReader(Cluster(kafka.bootstrap), client_settings(kafka.bootstrap, "tools", {}))


@pytest.fixture
def transactional(kafka: KafkaService) -> Callable[[], Producer]:
    def make() -> Producer:
        producer = Producer({"bootstrap.servers": kafka.bootstrap, "transactional.id": unique("writer")})
        producer.init_transactions(20)
        producer.begin_transaction()
        return producer

    return make


def test_all_of_a_topic_is_read_to_its_end_behind_the_last_marker(
    reader: TopicReader, kafka: KafkaService, topic: MakeTopic
) -> None:
    name = topic(3)
    produce(kafka.bootstrap, name, ["a", "b"], partition=0, gaps=True)
    produce(kafka.bootstrap, name, ["c"], partition=2)
    read = [(message.partition(), message.value()) for message in reader.topic(name)]

    assert sorted(read) == [(0, b"a"), (0, b"b"), (2, b"c")]
    assert [value for number, value in read if number == 0] == [b"a", b"b"], "a partition keeps its order"


def test_an_empty_topic_has_no_records(reader: TopicReader, topic: MakeTopic) -> None:
    assert list(reader.topic(topic(2))) == []


def test_a_range_ends_before_its_end_though_the_log_goes_on(
    reader: TopicReader, kafka: KafkaService, topic: MakeTopic
) -> None:
    name = topic(1)
    produce(kafka.bootstrap, name, map(str, range(10)))
    values = [message.value() for message in reader.between(Partition(name, 0), 3, 6)]

    assert values == [b"3", b"4", b"5"]


def test_aborted_records_and_markers_are_gaps(
    reader: TopicReader, topic: MakeTopic, transactional: Callable[[], Producer]
) -> None:
    name = topic(1)
    undone = transactional()
    undone.produce(name, b"aborted")
    undone.flush(20)
    undone.abort_transaction(20)
    done = transactional()
    done.produce(name, b"committed")
    done.commit_transaction(20)
    place = Partition(name, 0)

    assert [(m.offset(), m.value()) for m in reader.topic(name)] == [(2, b"committed")]
    assert reader.record(RecordPlace(place, 2)).value() == b"committed"
    with pytest.raises(ConfigurationError, match=rf"is a gap .*; the next record is {name}/0@2"):
        reader.record(RecordPlace(place, 0))
    with pytest.raises(ConfigurationError, match=r"is a gap .*; no record follows it"):
        reader.record(RecordPlace(place, 3))


def test_a_record_of_an_open_transaction_is_not_read_and_not_waited_for(
    reader: TopicReader, kafka: KafkaService, topic: MakeTopic, transactional: Callable[[], Producer]
) -> None:
    name = topic(1)
    produce(kafka.bootstrap, name, ["before"])
    open_one = transactional()
    open_one.produce(name, b"open")
    open_one.flush(20)

    assert [message.value() for message in reader.topic(name)] == [b"before"]
    with pytest.raises(ConfigurationError, match="there is no record"):
        reader.record(RecordPlace(Partition(name, 0), 1))
    open_one.abort_transaction(20)


@pytest.mark.parametrize(
    ("place", "why"), [("0@2", "holds 0 to 1; that offset is not written yet"), ("1@0", "has 1 partitions")]
)
def test_a_place_outside_of_the_log_is_an_error_that_says_what_is_there(
    reader: TopicReader, kafka: KafkaService, topic: MakeTopic, place: str, why: str
) -> None:
    name = topic(1)
    produce(kafka.bootstrap, name, ["a", "b"])

    with pytest.raises(ConfigurationError, match=why):
        reader.record(RecordPlace.parse(f"{name}/{place}"))


def test_no_group_is_left_behind(
    reader: TopicReader, kafka: KafkaService, kafka_admin: AdminClient, topic: MakeTopic
) -> None:
    name = topic(1)
    produce(kafka.bootstrap, name, ["a"])
    assert len(list(reader.topic(name))) == 1

    groups = [each.group_id for each in kafka_admin.list_consumer_groups().result(20).valid]
    assert [each for each in groups if "kconsume-reader" in each] == []


def test_a_broker_that_is_not_there_is_an_error_within_the_patience() -> None:
    cluster = Cluster("127.0.0.1:1", patience=0.5)
    reader = TopicReader(cluster, client_settings("127.0.0.1:1", "tools", {}), patience=0.5)

    with pytest.raises(BrokerUnavailable, match="no broker answered"):
        list(reader.topic("orders"))

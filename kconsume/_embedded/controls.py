"""What tests can do to an embedded Kafka, in this process or in another one: topics, failures, leaders.

Each control is one function of librdkafka's mock cluster, called by `KafkaControls.control`. `EmbeddedKafka` calls it
in this process. `NamedBroker` sends it to the broker's process.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Literal, TypeAlias

from confluent_kafka import KafkaError, KafkaException
from confluent_kafka.admin import AdminClient

from kconsume.errors import ConfigurationError, EmbeddedBrokerError

Argument: TypeAlias = int | str | Sequence[int]

# Kafka's numbers (https://kafka.apache.org/protocol#protocol_api_keys) of the requests that the mock cluster serves.
API_KEYS: Mapping[str, int] = {
    "Produce": 0,
    "Fetch": 1,
    "ListOffsets": 2,
    "Metadata": 3,
    "OffsetCommit": 8,
    "OffsetFetch": 9,
    "FindCoordinator": 10,
    "JoinGroup": 11,
    "Heartbeat": 12,
    "LeaveGroup": 13,
    "SyncGroup": 14,
    "ApiVersions": 18,
    "InitProducerId": 22,
    "OffsetForLeaderEpoch": 23,
    "AddPartitionsToTxn": 24,
    "AddOffsetsToTxn": 25,
    "EndTxn": 26,
    "TxnOffsetCommit": 28,
    "ConsumerGroupHeartbeat": 68,
}

_TOPIC_NAME = re.compile(r"[A-Za-z0-9._-]{1,249}")
_LIST_DEADLINE = 5.0
_EVERY_BROKER = -1


class KafkaControls(ABC):
    """What can be done to an embedded Kafka, wherever it runs. Brokers are numbered from 1."""

    @property
    @abstractmethod
    def bootstrap(self) -> str:
        """The address for the client property `bootstrap.servers`."""

    @abstractmethod
    def control(self, function: str, *arguments: Argument) -> int:
        """Call a function of the mock cluster and return a Kafka error code, 0 for success.

        Args:
            function: one of `librdkafka.CONTROLS`.
            arguments: the arguments of the function after the cluster.
        """

    def topics(self) -> dict[str, int]:
        """Return each topic with its number of partitions, including topics that clients have created."""
        client = AdminClient({"bootstrap.servers": self.bootstrap, "log_level": 2})
        try:
            known = client.list_topics(timeout=_LIST_DEADLINE).topics
        except KafkaException as error:
            raise EmbeddedBrokerError(
                f"the embedded broker at {self.bootstrap} did not list its topics in {_LIST_DEADLINE:g} s "
                f"({error.args[0].name()}): start it, or call broker_up() if it was taken down"
            ) from error
        return {name: len(topic.partitions) for name, topic in known.items()}

    def create_topic(self, name: str, partitions: int = 4, *, exist_ok: bool = False) -> None:
        """Create a topic.

        Args:
            name: the name of the topic.
            partitions: how many partitions it gets. 1 or more.
            exist_ok: True to accept an existing topic with the same number of partitions. With False, that is an error.
        """
        if not _TOPIC_NAME.fullmatch(name) or name in {".", ".."}:
            raise ConfigurationError(f"{name!r} is not a topic name: use 1 to 249 of a-z A-Z 0-9 . _ -")
        if partitions < 1:
            raise ConfigurationError(f"topic {name!r} cannot have {partitions} partitions: give 1 or more")
        code = self.control("topic_create", name, partitions, 1)
        if exist_ok and code == KafkaError.TOPIC_ALREADY_EXISTS:
            self._must_have(name, partitions)
        else:
            _check(code, f"topic {name!r} cannot be created")

    def _must_have(self, name: str, partitions: int) -> None:
        existing = self.topics().get(name)
        if existing != partitions:
            raise EmbeddedBrokerError(
                f"topic {name!r} has {existing} partitions and not {partitions}: delete it first, or take another name"
            )

    def delete_topic(self, name: str) -> None:
        """Delete a topic and its records. A new topic of the same name gets another topic id.

        Args:
            name: the name of the topic.
        """
        _check(self.control("topic_delete", name), f"topic {name!r} cannot be deleted")

    def delete_records(self, topic: str, partition: int, before: int) -> None:
        """Delete the oldest records of a partition, as retention would.

        Args:
            topic, partition: the partition.
            before: the offset of the first record that stays.
        """
        code = self.control("partition_delete_records", topic, partition, before)
        _check(code, f"records of {topic}/{partition} before {before} cannot be deleted")

    def fail_next(self, api: str, *errors: int) -> None:
        """Let the next requests of one kind fail.

        Args:
            api: Kafka's name of the request: "Fetch", "OffsetCommit", "JoinGroup" …
            errors: a `KafkaError` code for each of the next requests, in order. `KafkaError._TRANSPORT` closes the
                connection instead. 0 lets a request succeed.
        """
        if not errors:
            raise ConfigurationError(f"fail_next({api!r}) has no error: give a KafkaError code for each request")
        self.control("push_request_errors_array", _api_key(api), errors)

    def clear_failures(self, api: str) -> None:
        """Remove the errors of `fail_next` that no request has received yet.

        Args:
            api: Kafka's name of the request.
        """
        self.control("clear_request_errors", _api_key(api))

    def broker_down(self, broker: int | None = None) -> None:
        """Close the connections of all clients and refuse new ones. Partitions keep their leaders.

        Args:
            broker: the number of the broker. None for all brokers.
        """
        code = self.control("broker_set_down", _EVERY_BROKER if broker is None else broker)
        _check(code, f"broker {broker} cannot be taken down")

    def broker_up(self, broker: int | None = None) -> None:
        """Accept connections again.

        Args:
            broker: the number of the broker. None for all brokers.
        """
        code = self.control("broker_set_up", _EVERY_BROKER if broker is None else broker)
        _check(code, f"broker {broker} cannot be brought up")

    def round_trip(self, broker: int | None, ms: int) -> None:
        """Delay each response.

        Args:
            broker: the number of the broker. None for all brokers.
            ms: the delay in milliseconds.
        """
        code = self.control("broker_set_rtt", _EVERY_BROKER if broker is None else broker, ms)
        _check(code, f"broker {broker} cannot be slowed down")

    def move_leader(self, topic: str, partition: int, broker: int) -> None:
        """Make a broker the leader of a partition.

        Args:
            topic, partition: the partition.
            broker: the number of the broker. -1 leaves the partition without a leader.
        """
        code = self.control("partition_set_leader", topic, partition, broker)
        _check(code, f"{topic}/{partition} cannot be led by broker {broker}")

    def move_coordinator(self, key: str, broker: int, *, kind: Literal["group", "transaction"] = "group") -> None:
        """Make a broker the coordinator of a group or of a transactional id.

        Args:
            key: the group, or the transactional id.
            broker: the number of the broker.
            kind: "group" or "transaction".
        """
        code = self.control("coordinator_set", kind, key, broker)
        _check(code, f"broker {broker} cannot coordinate {kind} {key!r}")


def _api_key(api: str) -> int:
    try:
        return API_KEYS[api]
    except KeyError:
        raise ConfigurationError(
            f"{api!r} is not a request that fail_next can make fail: use one of {', '.join(API_KEYS)}"
        ) from None


def _check(code: int, message: str) -> None:
    if code:
        error = KafkaError(code)
        raise EmbeddedBrokerError(f"{message}: {error.name()} ({error.str()})")

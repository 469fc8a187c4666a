"""Sorts the messages that the client returns: records, in runs of one partition, and events that look like records.

The client reports the end of a partition, an offset that is not in the log and its own failure as messages with an
error. Such an error is judged by its code: its flags are never set (measured). This file must not call the consumer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import groupby
from typing import cast

from confluent_kafka import KafkaError
from confluent_kafka import Message as ClientMessage

from kconsume._config.client_settings import RECEIVE_LIMIT
from kconsume._runtime.assignment.partition_trouble import out_of_range
from kconsume.errors import (
    ClientFailed,
    InstanceTaken,
    KconsumeError,
    NotAuthorized,
    TopicNotFound,
    UnreadableBatch,
)
from kconsume.records import Message, Partition

_error_of = ClientMessage.error
# The stub allows None, but a message without an error has a topic and a partition.
_topic_of = cast(Callable[[Message], str], ClientMessage.topic)
_number_of = cast(Callable[[Message], int], ClientMessage.partition)

Runs = list[tuple[Partition, list[Message]]]
"""Records in the order of their arrival. Each change of partition begins a new list."""

_NO_SUCH_TOPIC = {KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError._UNKNOWN_TOPIC, KafkaError._UNKNOWN_PARTITION}
_INSTANCE_TAKEN = {KafkaError.FENCED_INSTANCE_ID, KafkaError.UNRELEASED_INSTANCE_ID}
_FATAL = {
    KafkaError._FATAL,
    KafkaError.GROUP_AUTHORIZATION_FAILED,
    KafkaError.CLUSTER_AUTHORIZATION_FAILED,
    KafkaError._AUTHENTICATION,
    *_INSTANCE_TAKEN,
}
# Brokers or the network report these for a while, and the client tries again. Any other code that names a partition
# counts as a lasting fault of that partition.
_TRANSIENT = {
    KafkaError._TRANSPORT,
    KafkaError._ALL_BROKERS_DOWN,
    KafkaError._RESOLVE,
    KafkaError._TIMED_OUT,
    KafkaError._TIMED_OUT_QUEUE,
    KafkaError._WAIT_COORD,
    KafkaError._MAX_POLL_EXCEEDED,
    KafkaError.BROKER_NOT_AVAILABLE,
    KafkaError.COORDINATOR_LOAD_IN_PROGRESS,
    KafkaError.COORDINATOR_NOT_AVAILABLE,
    KafkaError.FENCED_LEADER_EPOCH,
    KafkaError.KAFKA_STORAGE_ERROR,
    KafkaError.LEADER_NOT_AVAILABLE,
    KafkaError.NETWORK_EXCEPTION,
    KafkaError.NOT_COORDINATOR,
    KafkaError.NOT_LEADER_FOR_PARTITION,
    KafkaError.OFFSET_NOT_AVAILABLE,
    KafkaError.REPLICA_NOT_AVAILABLE,
    KafkaError.REQUEST_TIMED_OUT,
    KafkaError.THROTTLING_QUOTA_EXCEEDED,
    KafkaError.UNKNOWN_LEADER_EPOCH,
    KafkaError.UNKNOWN_TOPIC_ID,
}
_FIXES = {
    KafkaError.GROUP_AUTHORIZATION_FAILED: "allow this user READ on the group",
    KafkaError.TOPIC_AUTHORIZATION_FAILED: "allow this user READ on the topic",
    KafkaError.CLUSTER_AUTHORIZATION_FAILED: "allow this user the operation on the cluster",
    KafkaError._AUTHENTICATION: "correct the sasl.* or ssl.* properties in kafka={...}",
    KafkaError.OFFSET_METADATA_TOO_LARGE: "set offset.metadata.max.bytes to 64 or more on the brokers (4096 is usual)",
}

# What a KIP-848 broker refuses (measured on Kafka 4.1), by the client's text for the broker's error.
_FIXES_BY_TEXT = {
    "API version not supported": "these brokers have no KIP-848 groups (Kafka 4.0 and later have them, unless "
    "group.coordinator.rebalance.protocols leaves them out): leave group.protocol='consumer' out of kafka={...}",
    "assignor or its version range is not supported": "set group.remote.assignor='uniform' or 'range' in kafka={...}, "
    "or add yours to group.consumer.assignors on the brokers",
    "reached maximum size": "run fewer members, or raise group.consumer.max.size on the brokers",
}


class FetchedMessages:
    """Sorts messages: returns the records, and keeps what else the client reported.

    Args:
        instance: the name of a static member.
        record_limit: the size in bytes above which a record holds its partition.
    """

    def __init__(self, instance: str | None, record_limit: int | None = None) -> None:
        self.ends: set[Partition] = set()
        """Partitions whose end was reached and that had no record since."""
        self.end_offsets: dict[Partition, int] = {}
        """The end offset of each partition in `ends`: after the last record, and after anything that follows it, such
        as a transaction marker."""
        self.connection_errors: list[KafkaError] = []
        """Reports of the client that are neither records nor faults. The loop logs them."""
        self.fault: BaseException | None = None
        """The first error that ends the consumer, until `raise_fault`."""
        self.death: KconsumeError | None = None
        """Why the client gave up, as soon as the client has reported the cause."""
        self.one_topic: str | None = None
        """The topic, if only one is subscribed. Then the partition number identifies a partition."""
        self.named: set[str] = set()
        """Topics that are subscribed by name, and so must exist."""
        self.has_patterns = False
        """Whether patterns are subscribed too. A missing topic that only a pattern matches is no fault."""
        self.waited: set[Partition] = set()
        """Partitions that wait, or waited, at `PAUSED_AT_ZERO` and had no record since."""
        self.wait_offset_missing: set[Partition] = set()
        """Partitions in `waited` whose log does not contain offset 0, as the client reported."""
        self.faults: dict[Partition, KconsumeError] = {}
        """The faults of single partitions, until the consumer takes them."""
        self.topic_faults: dict[str, KconsumeError] = {}
        """The faults of whole topics, until the consumer takes them."""
        self.stopped: set[Partition] = set()
        """Partitions with a fault. The client may continue after the fault. These later records are dropped until the
        partition is started again; otherwise the unreadable records would be skipped without notice."""
        self._instance = instance
        self._record_limit = record_limit
        self._reached: set[Partition] = set()

    def forget(self, partitions: Iterable[Partition]) -> None:
        """Drop the faults of partitions that are started again or given up."""
        for partition in partitions:
            self.stopped.discard(partition)
            self.faults.pop(partition, None)

    def sort(self, messages: list[ClientMessage]) -> Runs:
        """Return the records among the messages, in runs; keep the rest."""
        if self.stopped or self._record_limit is not None or any(map(_error_of, messages)):
            messages = self._sift(messages)
        runs = self._runs(cast(list[Message], messages))
        if self.waited:
            self.waited.difference_update(partition for partition, _ in runs)
        if self.ends:
            self.ends.difference_update(partition for partition, _ in runs)
        if self._reached:
            self.ends |= self._reached
            self._reached.clear()
        return runs

    def not_authorized(self, partition: Partition, error: KafkaError) -> NotAuthorized | None:
        """Return the fault if the error says that the topic may not be read, else None."""
        if error.code() != KafkaError.TOPIC_AUTHORIZATION_FAILED:
            return None
        return NotAuthorized(f"topic {partition.topic!r} may not be read ({error.str()}): {_FIXES[error.code()]}")

    def keep_fault(self, fault: BaseException) -> None:
        """Keep an error that ends the consumer. The next fetch raises the first one."""
        self.fault = self.fault or fault

    def raise_fault(self) -> None:
        """Raise the kept error, once."""
        fault, self.fault = self.fault, None
        if fault is not None:
            raise fault

    def refusal(self, error: KafkaError, sentence: str) -> KconsumeError:
        """Return the error for a refusal that is final.

        Args:
            error: the refusal.
            sentence: what was refused, for the text.
        """
        if error.code() in _INSTANCE_TAKEN or (self._instance is not None and "instance" in error.str().lower()):
            return InstanceTaken(
                f"another process is a member of the group under the name {self._instance!r} ({error.str()}): give "
                f"each process an instance= of its own, or wait until the other one has gone"
            )
        if error.code() in _NO_SUCH_TOPIC and self.one_topic is not None:
            return _no_such_topic(self.one_topic)
        fix = _FIXES.get(error.code()) or _fix_by_text(error.str())
        return ClientFailed(f"{sentence} ({error.str()}): {fix}")

    def _runs(self, messages: list[Message]) -> Runs:
        numbers = list(map(_number_of, messages))
        if self.one_topic is not None and numbers and numbers.count(numbers[0]) == len(numbers):
            return [(Partition(self.one_topic, numbers[0]), messages)]
        return [
            (Partition(topic, number), list(run))
            for number, mixed in groupby(messages, _number_of)
            for topic, run in groupby(mixed, _topic_of)
        ]

    def _sift(self, messages: list[ClientMessage]) -> list[ClientMessage]:
        records: list[ClientMessage] = []
        for message in messages:
            error = message.error()
            if error is not None:
                self._judge(error, message)
                continue
            if self._record_limit is not None and (size := _size_of(message)) > self._record_limit:
                self._stop(_partition_of(message), _too_large(message, size, self._record_limit))
            if not self.stopped or _partition_of(message) not in self.stopped:
                records.append(message)
                self._reached.discard(_partition_of(message))
        return records

    def _judge(self, error: KafkaError, message: ClientMessage) -> None:
        code, partition = error.code(), _partition_of(message)
        if code == KafkaError._PARTITION_EOF:
            if partition not in self.stopped:  # records of a stopped partition were dropped before this end
                self._reached.add(partition)
                self.end_offsets[partition] = message.offset() or 0
        elif code == KafkaError._AUTO_OFFSET_RESET and partition in self.waited and message.offset() == 0:
            self.wait_offset_missing.add(partition)
        elif code == KafkaError._AUTO_OFFSET_RESET:
            self._stop(partition, out_of_range(partition, error.str()))
        elif code in _NO_SUCH_TOPIC:
            if not self.has_patterns or partition.topic in self.named:
                self.topic_faults.setdefault(partition.topic, _no_such_topic(partition.topic))
            # A pattern may match no topic yet, so a missing topic is no fault.
        elif (fault := self.not_authorized(partition, error)) is not None:
            self.topic_faults.setdefault(partition.topic, fault)
        elif code in _FATAL:
            self.death = self.refusal(error, "the Kafka client gave up")
            self.keep_fault(self.death)
        elif code not in _TRANSIENT and _is_of_a_partition(message):
            self._stop(partition, _unreadable(partition, error))
        else:
            self.connection_errors.append(error)

    def _stop(self, partition: Partition, fault: KconsumeError) -> None:
        """Drop further records of the partition. Only the first fault of a partition is kept."""
        if partition not in self.stopped:
            self.stopped.add(partition)
            self.faults[partition] = fault
            self.ends.discard(partition)
            self._reached.discard(partition)


def _fix_by_text(text: str) -> str:
    """Return the fix for an error that has no code of its own, by its text."""
    fixes = (fix for phrase, fix in _FIXES_BY_TEXT.items() if phrase in text)
    return next(fixes, "start it again; records that were not committed are handled again")


def _partition_of(message: ClientMessage) -> Partition:
    return Partition(message.topic() or "", message.partition() or 0)


def _size_of(message: ClientMessage) -> int:
    return len(message.key() or b"") + len(message.value() or b"")


def _is_of_a_partition(message: ClientMessage) -> bool:
    """Whether an error is about one partition.

    An error of the group has no topic, and an error of a whole topic has no offset; both have partition 0.
    """
    return bool(message.topic()) and message.offset() is not None


def _no_such_topic(topic: str) -> TopicNotFound:
    return TopicNotFound(f"topic {topic!r} is not on the cluster (any more): create it, or correct the name")


def _unreadable(partition: Partition, error: KafkaError) -> UnreadableBatch:
    return UnreadableBatch(
        f"{partition} has records that cannot be read ({error.str()}): the batch is damaged on the broker, or in a "
        f"format that this client does not know. Nothing was skipped. Restore the log from a replica, or go on after "
        f"the batch with store.reset(group, {{partition: offset}}), or app.seek(partition, offset)"
    )


def _too_large(message: ClientMessage, size: int, limit: int) -> UnreadableBatch:
    partition = _partition_of(message)
    return UnreadableBatch(
        f"{partition}@{message.offset()} has {size:,} bytes, more than {RECEIVE_LIMIT}={limit} in kafka={{...}} "
        f"allows. Nothing was skipped. Raise the limit, or continue after the record with "
        f"store.reset(group, {{partition: offset}}), or app.seek(partition, offset)"
    )

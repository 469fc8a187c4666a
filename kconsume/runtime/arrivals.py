"""What comes out of the client as messages: records, cut into runs of one partition, and events that look like records.

The client reports the end of a partition, an offset that is not in the log and its own death as messages with an error
(rule 15: judged by their code; the flags of such errors are not set). Nothing here touches the consumer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import groupby
from typing import cast

from confluent_kafka import KafkaError
from confluent_kafka import Message as ClientMessage

from kconsume.errors import (
    ClientFailed,
    InstanceTaken,
    KconsumeError,
    NotAuthorized,
    TopicNotFound,
    UnreadableBatch,
)
from kconsume.records import Message, Partition
from kconsume.runtime.trouble import out_of_range
from kconsume.settings import RECEIVE_LIMIT

_error_of = ClientMessage.error
# The stub says that they may be None; of a message without an error they are not.
_topic_of = cast(Callable[[Message], str], ClientMessage.topic)
_number_of = cast(Callable[[Message], int], ClientMessage.partition)

Runs = list[tuple[Partition, list[Message]]]
"""Records as they came, cut where the partition changes."""

_NO_SUCH_TOPIC = {KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError._UNKNOWN_TOPIC, KafkaError._UNKNOWN_PARTITION}
_TAKEN = {KafkaError.FENCED_INSTANCE_ID, KafkaError.UNRELEASED_INSTANCE_ID}
_FATAL = {
    KafkaError._FATAL,
    KafkaError.GROUP_AUTHORIZATION_FAILED,
    KafkaError.CLUSTER_AUTHORIZATION_FAILED,
    KafkaError._AUTHENTICATION,
    *_TAKEN,
}
# What the brokers or the network say for a while, and the client tries again by itself. Any other code that names a
# partition is taken for something that stays.
_PASSES = {
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
    KafkaError.CLUSTER_AUTHORIZATION_FAILED: "allow this user what it asks of the cluster",
    KafkaError._AUTHENTICATION: "correct the sasl.* or ssl.* properties in kafka={...}",
    KafkaError.OFFSET_METADATA_TOO_LARGE: "set offset.metadata.max.bytes to 64 or more on the brokers (4096 is usual)",
}

# What a KIP-848 broker does not grant (measured on Kafka 4.1), by the client's words for the broker's error.
_FIXES_OF_FATAL = {
    "API version not supported": "these brokers have no KIP-848 groups (Kafka 4.0 and later have them, unless "
    "group.coordinator.rebalance.protocols leaves them out): leave group.protocol='consumer' out of kafka={...}",
    "assignor or its version range is not supported": "say group.remote.assignor='uniform' or 'range' in kafka={...}, "
    "or add yours to group.consumer.assignors on the brokers",
    "reached maximum size": "run fewer members, or raise group.consumer.max.size on the brokers",
}


class Arrivals:
    """Sorts what was fetched."""

    def __init__(self, instance: str | None, record_limit: int | None = None) -> None:
        """`instance`: the name of a static member. `record_limit`: bytes above which a record holds its partition."""
        self.ends: set[Partition] = set()
        """Partitions whose end was reached, and of which nothing came since."""
        self.end_offsets: dict[Partition, int] = {}
        """Where they end: behind the last record, and behind what follows it (a transaction marker, say)."""
        self.trouble: list[KafkaError] = []
        """What the client said that is neither a record nor a fault, for the loop to report."""
        self.fault: BaseException | None = None
        """The first thing that went wrong for good, until somebody raises it."""
        self.death: KconsumeError | None = None
        """Why the client has died, once it has said so."""
        self.one_topic: str | None = None
        """The only topic there is, if there is only one: then partitions are told apart by their number."""
        self.named: set[str] = set()
        self.has_patterns = False
        """What is subscribed to: a topic that is named must be there."""
        self.unproven: set[Partition] = set()
        """Partitions that wait at an offset nobody chose, or did, and of which no record has come since."""
        self.astray: set[Partition] = set()
        """Those of them whose log does not reach down to that offset, as the client found out."""
        self.faults: dict[Partition, KconsumeError] = {}
        """What is wrong with single partitions, until somebody takes it."""
        self.topic_faults: dict[str, KconsumeError] = {}
        """What is wrong with whole topics, likewise."""
        self.stopped: set[Partition] = set()
        """Partitions with a fault. The client may read on behind it; nothing of that is let through until they are
        placed again, or what is unreadable would be passed in silence."""
        self._instance = instance
        self._record_limit = record_limit
        self._reached: set[Partition] = set()

    def forget(self, partitions: Iterable[Partition]) -> None:
        """They are placed anew, or are no longer ours: what was wrong with them before does not count."""
        for partition in partitions:
            self.stopped.discard(partition)
            self.faults.pop(partition, None)

    def sort(self, messages: list[ClientMessage]) -> Runs:
        if self.stopped or self._record_limit is not None or any(map(_error_of, messages)):
            messages = self._sift(messages)
        runs = self._runs(cast(list[Message], messages))
        if self.unproven:
            self.unproven.difference_update(partition for partition, _ in runs)
        if self.ends:
            self.ends.difference_update(partition for partition, _ in runs)
        if self._reached:
            self.ends |= self._reached
            self._reached.clear()
        return runs

    def not_authorized(self, partition: Partition, error: KafkaError) -> NotAuthorized | None:
        """The fault, if the error says that the topic may not be read."""
        if error.code() != KafkaError.TOPIC_AUTHORIZATION_FAILED:
            return None
        return NotAuthorized(f"topic {partition.topic!r} may not be read ({error.str()}): {_FIXES[error.code()]}")

    def park(self, fault: BaseException) -> None:
        """The first one is raised, by the next fetch."""
        self.fault = self.fault or fault

    def raise_fault(self) -> None:
        fault, self.fault = self.fault, None
        if fault is not None:
            raise fault

    def refusal(self, error: KafkaError, sentence: str) -> KconsumeError:
        """Why the client has died: `sentence` says what it was doing."""
        if error.code() in _TAKEN or (self._instance is not None and "instance" in error.str().lower()):
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
            if partition not in self.stopped:  # else it is behind what was not let through
                self._reached.add(partition)
                self.end_offsets[partition] = message.offset() or 0
        elif code == KafkaError._AUTO_OFFSET_RESET and partition in self.unproven and message.offset() == 0:
            self.astray.add(partition)
        elif code == KafkaError._AUTO_OFFSET_RESET:
            self._stop(partition, out_of_range(partition, error.str()))
        elif code in _NO_SUCH_TOPIC:
            if not self.has_patterns or partition.topic in self.named:
                self.topic_faults.setdefault(partition.topic, _no_such_topic(partition.topic))
            # Else it was one of a pattern's, which takes what there is; or that waits for its first topic.
        elif (fault := self.not_authorized(partition, error)) is not None:
            self.topic_faults.setdefault(partition.topic, fault)
        elif code in _FATAL:
            self.death = self.refusal(error, "the Kafka client gave up")
            self.park(self.death)
        elif code not in _PASSES and _is_of_a_partition(message):
            self._stop(partition, _unreadable(partition, error))
        else:
            self.trouble.append(error)

    def _stop(self, partition: Partition, fault: KconsumeError) -> None:
        """Nothing behind it is let through; the first fault of a partition counts."""
        if partition not in self.stopped:
            self.stopped.add(partition)
            self.faults[partition] = fault
            self.ends.discard(partition)
            self._reached.discard(partition)


def _fix_by_text(text: str) -> str:
    """The client has died, and says only in words of what."""
    fixes = (fix for phrase, fix in _FIXES_OF_FATAL.items() if phrase in text)
    return next(fixes, "start it again; what was not committed comes again")


def _partition_of(message: ClientMessage) -> Partition:
    return Partition(message.topic() or "", message.partition() or 0)


def _size_of(message: ClientMessage) -> int:
    return len(message.key() or b"") + len(message.value() or b"")


def _is_of_a_partition(message: ClientMessage) -> bool:
    """An error of the group has no topic, and one of a whole topic no offset; both have partition 0."""
    return bool(message.topic()) and message.offset() is not None


def _no_such_topic(topic: str) -> TopicNotFound:
    return TopicNotFound(f"topic {topic!r} is not on the cluster (any more): create it, or correct the name")


def _unreadable(partition: Partition, error: KafkaError) -> UnreadableBatch:
    return UnreadableBatch(
        f"{partition} has records that cannot be read ({error.str()}): the batch is damaged on the broker or of a form "
        f"that this client does not know. Nothing was skipped. Restore the log from a replica, or go on behind it with "
        f"store.reset(group, {{partition: offset}}), or app.seek(partition, offset)"
    )


def _too_large(message: ClientMessage, size: int, limit: int) -> UnreadableBatch:
    partition = _partition_of(message)
    return UnreadableBatch(
        f"{partition}@{message.offset()} has {size:,} bytes, more than {RECEIVE_LIMIT}={limit} in kafka={{...}} "
        f"allows. Nothing was skipped. Raise the limit, or go on behind it with "
        f"store.reset(group, {{partition: offset}}), or app.seek(partition, offset)"
    )

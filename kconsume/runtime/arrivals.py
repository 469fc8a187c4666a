"""What comes out of the client as messages: records, cut into runs of one partition, and events that look like records.

The client reports the end of a partition, an offset that is not in the log and its own death as messages with an error
(rule 15: judged by their code; the flags of such errors are not set). Nothing here touches the consumer.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import groupby
from typing import cast

from confluent_kafka import KafkaError
from confluent_kafka import Message as ClientMessage

from kconsume.errors import ClientFailed, InstanceTaken, KconsumeError, OffsetOutOfRange, TopicNotFound
from kconsume.records import Message, Partition

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
    KafkaError.TOPIC_AUTHORIZATION_FAILED,
    KafkaError.CLUSTER_AUTHORIZATION_FAILED,
    KafkaError._AUTHENTICATION,
    *_TAKEN,
}
_FIXES = {
    KafkaError.GROUP_AUTHORIZATION_FAILED: "allow this user READ on the group",
    KafkaError.TOPIC_AUTHORIZATION_FAILED: "allow this user READ on the topic",
    KafkaError.CLUSTER_AUTHORIZATION_FAILED: "allow this user what it asks of the cluster",
    KafkaError._AUTHENTICATION: "correct the sasl.* or ssl.* properties in kafka={...}",
    KafkaError.OFFSET_METADATA_TOO_LARGE: "set offset.metadata.max.bytes to 64 or more on the brokers (4096 is usual)",
}


class Arrivals:
    """Sorts what was fetched."""

    def __init__(self, instance: str | None) -> None:
        """`instance`: the name of a static member."""
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
        self._instance = instance
        self._reached: set[Partition] = set()

    def sort(self, messages: list[ClientMessage]) -> Runs:
        if any(map(_error_of, messages)):
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
        fix = _FIXES.get(error.code(), "start it again; what was not committed comes again")
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
            if error is None:
                records.append(message)
                self._reached.discard(_partition_of(message))
            else:
                self._judge(error, message)
        return records

    def _judge(self, error: KafkaError, message: ClientMessage) -> None:
        code, partition = error.code(), _partition_of(message)
        if code == KafkaError._PARTITION_EOF:
            self._reached.add(partition)
            self.end_offsets[partition] = message.offset() or 0
        elif code == KafkaError._AUTO_OFFSET_RESET and partition in self.unproven and message.offset() == 0:
            self.astray.add(partition)
        elif code == KafkaError._AUTO_OFFSET_RESET:
            self.park(_out_of_range(partition, error))
        elif code in _NO_SUCH_TOPIC:
            if not self.has_patterns or partition.topic in self.named:
                self.park(_no_such_topic(partition.topic))
            # Else it was one of a pattern's, which takes what there is; or that waits for its first topic.
        elif code in _FATAL:
            self.death = self.refusal(error, "the Kafka client gave up")
            self.park(self.death)
        else:
            self.trouble.append(error)


def _partition_of(message: ClientMessage) -> Partition:
    return Partition(message.topic() or "", message.partition() or 0)


def _no_such_topic(topic: str) -> TopicNotFound:
    return TopicNotFound(f"topic {topic!r} is not on the cluster (any more): create it, or correct the name")


def _out_of_range(partition: Partition, error: KafkaError) -> OffsetOutOfRange:
    return OffsetOutOfRange(
        f"the stored offset of {partition} is not in its log ({error.str()}): records were deleted by retention, "
        f"or the topic was cut or made again. Nothing was skipped. Choose where to go on with "
        f"store.reset(group, {{partition: offset}}), or app.seek(partition, offset)"
    )

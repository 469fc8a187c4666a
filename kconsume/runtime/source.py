"""The Kafka consumer: the only file that touches `confluent_kafka.Consumer`.

One thread owns a `Source`; every method is called on it. The client's callbacks run inside `fetch` and
`close`, on that same thread, and are total: nothing escapes into librdkafka, where an exception destroys the
records in hand and can hang `close()`. What goes wrong in one is parked and raised by the next `fetch`.

The story of a rebalance (cooperative-sticky, KIP-429)
------------------------------------------------------
1. A member joins or leaves. The coordinator tells everybody at their next heartbeat; nothing stops.
2. `on_revoke` names the partitions that move away from us. The tenant (`runtime/tenancy.py`) stops their
   lanes, gives the handlers that run a short grace to end, and sends the last offsets; then they are
   unassigned and the client joins the next round. The commit is ahead of that join on the same connection,
   so the next owner reads it. The grace is short because nothing is fetched meanwhile. Answering
   `incremental_unassign([])` and unassigning later would not hold the partitions back: the client leaves
   them out of its next join all the same, and they were assigned to another member while their handler
   still ran (measured). A handler that outlasts the grace is what the fence is for.
3. `on_assign` names what is new, often nothing. The tenant claims them in the store, off this thread. Usually
   that is done within half a second and they are assigned at the claimed offsets at once. If it is slower,
   the *full* list is assigned, paused, and `place` starts each partition when its claim is in. Offsets
   are always passed: an element without one would start at the offset committed in Kafka (rule 5).
4. `on_lost` means that the broker has given the partitions away already: no commit, no waiting. The fence
   of the store keeps late writes out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import groupby
from typing import NamedTuple, Protocol, cast

from confluent_kafka import (
    OFFSET_BEGINNING,
    Consumer,
    KafkaError,
    KafkaException,
    TopicPartition,
)
from confluent_kafka import Message as ClientMessage

from kconsume.errors import ClientFailed, ConfigurationError, OffsetOutOfRange, TopicNotFound
from kconsume.records import Message, Partition
from kconsume.runtime.client_log import client_log
from kconsume.settings import ClientValue

_error_of = ClientMessage.error
# The stub says that they may be None; of a message without an error they are not.
_topic_of = cast(Callable[[Message], str], ClientMessage.topic)
_number_of = cast(Callable[[Message], int], ClientMessage.partition)

# A commit that met a rebalance or a moved coordinator: said again with the next one, if still owned.
_COMMIT_AGAIN = {
    KafkaError.REBALANCE_IN_PROGRESS,
    KafkaError.COORDINATOR_LOAD_IN_PROGRESS,
    KafkaError.COORDINATOR_NOT_AVAILABLE,
    KafkaError.NOT_COORDINATOR,
    KafkaError.REQUEST_TIMED_OUT,
    KafkaError._WAIT_COORD,
    KafkaError._TIMED_OUT,
    KafkaError._TRANSPORT,
}
# The broker does not know us (any more); the client's own callbacks follow.
_COMMIT_DISOWNED = {
    KafkaError.ILLEGAL_GENERATION,
    KafkaError.UNKNOWN_MEMBER_ID,
    KafkaError.FENCED_MEMBER_EPOCH,
    KafkaError.STALE_MEMBER_EPOCH,
    KafkaError._NO_OFFSET,
    KafkaError._ASSIGNMENT_LOST,
}
_FATAL = {
    KafkaError._FATAL,
    KafkaError.FENCED_INSTANCE_ID,
    KafkaError.GROUP_AUTHORIZATION_FAILED,
    KafkaError.TOPIC_AUTHORIZATION_FAILED,
    KafkaError.CLUSTER_AUTHORIZATION_FAILED,
    KafkaError._AUTHENTICATION,
}


Runs = list[tuple[Partition, list[Message]]]
"""Records as they came, cut where the partition changes."""


class Place(NamedTuple):
    """Where to start reading a partition."""

    offset: int
    leader_epoch: int | None = None
    paused: bool = False


class Mark(NamedTuple):
    """An offset to commit."""

    offset: int
    leader_epoch: int | None
    metadata: str


class CommitResult(NamedTuple):
    """The broker's answer to a commit. Without an error, it has confirmed our membership."""

    offsets: dict[Partition, int]
    error: str | None


class Tenant(Protocol):
    """Who lives in the partitions. Called on the owner thread, inside the client's callbacks; must not
    raise for a reason that is not a fault, and must not block beyond its budget."""

    def assigned(self, partitions: list[Partition]) -> Mapping[Partition, Place]:
        """Where to start each; one that is left out is assigned paused, until `Source.place`."""
        ...

    def revoked(self, partitions: list[Partition]) -> None:
        """Finish with them: when this returns, they are unassigned."""
        ...

    def lost(self, partitions: list[Partition]) -> None:
        """They belong to others already."""
        ...


class Source:
    """A consumer of one group."""

    def __init__(self, settings: Mapping[str, ClientValue], tenant: Tenant, *, batch: int = 1000) -> None:
        self.ends: set[Partition] = set()
        """Partitions whose end was reached, and of which nothing came since."""
        self.trouble: list[KafkaError] = []
        """What the client said of its connections, for the loop to report."""
        self.commit_results: list[CommitResult] = []
        self._tenant = tenant
        self._batch = batch
        self._one_topic: str | None = None
        self._reached: set[Partition] = set()
        self._fault: BaseException | None = None
        try:
            self._consumer = Consumer(
                {
                    **settings,
                    "error_cb": self._on_error,
                    "on_commit": self._on_commit,
                },
                logger=client_log(),
            )
        except KafkaException as error:
            raise ConfigurationError(
                f"the Kafka client refused its configuration: {error.args[0].str()}; "
                f"check the property's name and value in kafka={{...}}"
            ) from None

    # Reading

    def subscribe(self, topics: list[str]) -> None:
        self._one_topic = topics[0] if len(topics) == 1 else None
        self._consumer.subscribe(topics, on_assign=self._on_assign, on_revoke=self._on_revoke, on_lost=self._on_lost)

    def fetch(self, timeout: float) -> Runs:
        """Records that are there, by partition and in order; waits for the first up to `timeout`."""
        # consume(n, t) would wait the whole t for n messages, so it only ever takes what is there.
        messages = self._consumer.consume(self._batch, 0)
        if not messages:
            first = self._consumer.poll(timeout)
            messages = [] if first is None else [first]
        if self._fault is not None:
            self._raise_fault()
        return self._sorted(messages)

    def poll(self) -> Runs:
        """Serve the client's callbacks and take at most one record."""
        message = self._consumer.poll(0)
        if self._fault is not None:
            self._raise_fault()
        return [] if message is None else self._sorted([message])

    # Partitions

    def place(self, places: Mapping[Partition, Place]) -> None:
        """Start (or restart) assigned partitions at these places."""
        self._consumer.incremental_unassign([TopicPartition(*p) for p in places])
        self._start(places)
        self.ends.difference_update(places)

    def take(self, places: Mapping[Partition, Place]) -> None:
        """Assign partitions without a group's coordination."""
        self._one_topic = next(iter(places)).topic
        self._start(places)

    def _start(self, places: Mapping[Partition, Place]) -> None:
        self._consumer.incremental_assign([_element(p, place) for p, place in places.items()])
        # A pause outlives a revoke on the same consumer (rule 10), so both lists are said.
        self.pause(p for p, place in places.items() if place.paused)
        self.resume(p for p, place in places.items() if not place.paused)

    def pause(self, partitions: Iterable[Partition]) -> None:
        """Stop fetching. Discards what the client has prefetched of them (librdkafka issue 5343)."""
        self._consumer.pause([TopicPartition(*p) for p in partitions])

    def resume(self, partitions: Iterable[Partition]) -> None:
        self._consumer.resume([TopicPartition(*p) for p in partitions])

    def commit(self, marks: Mapping[Partition, Mark]) -> None:
        """Send offsets to the group; the answer comes to `commit_results`. Never waits (rule 14)."""
        elements = [
            TopicPartition(p.topic, p.number, m.offset, m.metadata, *_epoch(m.leader_epoch)) for p, m in marks.items()
        ]
        try:
            self._consumer.commit(offsets=elements, asynchronous=True)
        except KafkaException as error:
            self._note_commit(error.args[0], {p: mark.offset for p, mark in marks.items()})

    def close(self) -> None:
        """Leave the group. May hang when brokers accept connections and do not answer: watch it."""
        self._consumer.close()
        self._raise_fault()

    # Callbacks

    def _on_assign(self, _: Consumer, elements: list[TopicPartition]) -> None:
        self._total(self._assign, elements)

    def _on_revoke(self, consumer: Consumer, elements: list[TopicPartition]) -> None:
        self._total(self._revoke, consumer, elements)

    def _on_lost(self, consumer: Consumer, elements: list[TopicPartition]) -> None:
        self._total(self._lose, consumer, elements)

    def _assign(self, elements: list[TopicPartition]) -> None:
        partitions = [Partition(e.topic, e.partition) for e in elements]
        places: Mapping[Partition, Place] = {}
        try:
            places = self._tenant.assigned(partitions)
        finally:
            # Whatever happened, the full list is assigned: a subset, or none, would leave it to the client
            # to start at offsets that are not ours.
            unknown = Place(OFFSET_BEGINNING, paused=True)
            self._start({p: places.get(p, unknown) for p in partitions})

    def _revoke(self, consumer: Consumer, elements: list[TopicPartition]) -> None:
        partitions = [Partition(e.topic, e.partition) for e in elements]
        self.ends.difference_update(partitions)
        try:
            self._tenant.revoked(partitions)
        finally:
            consumer.incremental_unassign(elements)

    def _lose(self, consumer: Consumer, elements: list[TopicPartition]) -> None:
        partitions = [Partition(e.topic, e.partition) for e in elements]
        self.ends.difference_update(partitions)
        try:
            self._tenant.lost(partitions)
        finally:
            consumer.incremental_unassign(elements)

    def _on_commit(self, error: KafkaError | None, elements: list[TopicPartition]) -> None:
        self._total(self._committed, error, elements)

    def _committed(self, error: KafkaError | None, elements: list[TopicPartition]) -> None:
        offsets = {Partition(e.topic, e.partition): e.offset for e in elements}
        first = error or next((e.error for e in elements if e.error is not None), None)
        self._note_commit(first, offsets)

    def _note_commit(self, error: KafkaError | None, offsets: dict[Partition, int]) -> None:
        code = None if error is None else error.code()
        if error is not None and code not in _COMMIT_AGAIN and code not in _COMMIT_DISOWNED:
            self._fault = self._fault or ClientFailed(f"the broker refused the offset commit: {error.str()}")
        self.commit_results.append(CommitResult(offsets, None if error is None else error.str()))

    def _on_error(self, error: KafkaError) -> None:
        self.trouble.append(error)

    def _total(self, step: Callable[..., None], *arguments: object) -> None:
        """Run a callback's body so that nothing escapes into librdkafka (rules 3 and 16)."""
        try:
            step(*arguments)
        except BaseException as error:  # noqa: BLE001  (parked, raised by the next fetch)
            self._fault = self._fault or error

    # What comes as messages

    def _sorted(self, messages: list[ClientMessage]) -> Runs:
        if any(map(_error_of, messages)):
            messages = self._sift(messages)
        runs = self._runs(cast(list[Message], messages))
        if self.ends:
            self.ends.difference_update(partition for partition, _ in runs)
        if self._reached:
            self.ends |= self._reached
            self._reached.clear()
        return runs

    def _runs(self, messages: list[Message]) -> Runs:
        numbers = list(map(_number_of, messages))
        if self._one_topic is not None and numbers and numbers.count(numbers[0]) == len(numbers):
            return [(Partition(self._one_topic, numbers[0]), messages)]
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
        elif code == KafkaError._AUTO_OFFSET_RESET:
            self._fault = self._fault or _out_of_range(partition, error)
        elif code in (
            KafkaError.UNKNOWN_TOPIC_OR_PART,
            KafkaError._UNKNOWN_TOPIC,
            KafkaError._UNKNOWN_PARTITION,
        ):
            self._fault = self._fault or TopicNotFound(
                f"topic {partition.topic!r} is not on the cluster (any more): create it, or correct the name"
            )
        elif code in _FATAL:
            self._fault = self._fault or ClientFailed(f"the Kafka client gave up: {error.str()}")
        else:
            self.trouble.append(error)

    def _raise_fault(self) -> None:
        fault, self._fault = self._fault, None
        if fault is not None:
            raise fault


def _partition_of(message: ClientMessage) -> Partition:
    return Partition(message.topic() or "", message.partition() or 0)


def _element(partition: Partition, place: Place) -> TopicPartition:
    # The leader epoch lets the broker report a truncated log instead of serving other records (KIP-320).
    return TopicPartition(partition.topic, partition.number, place.offset, "", *_epoch(place.leader_epoch))


def _epoch(leader_epoch: int | None) -> tuple[int, ...]:
    return () if leader_epoch is None else (leader_epoch,)


def _out_of_range(partition: Partition, error: KafkaError) -> OffsetOutOfRange:
    return OffsetOutOfRange(
        f"the stored offset of {partition} is not in its log ({error.str()}): records were deleted by retention, "
        f"or the topic was cut or made again. Nothing was skipped. Choose where to go on with "
        f"store.reset(group, {{partition: offset}}), or app.seek(partition, offset)"
    )

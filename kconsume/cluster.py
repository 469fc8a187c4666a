"""What the cluster says of topics and groups: which there are, their ids, where logs begin and end.

Each question has one deadline, which all its requests share, and is asked on any thread but the one that polls. The
consumer itself is `runtime/source.py`'s. Here is the one exception: a reader of committed offsets that never
subscribes.
"""

from __future__ import annotations

import difflib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple, TypeAlias, TypeVar

from confluent_kafka import (
    Consumer,
    ConsumerGroupState,
    ConsumerGroupTopicPartitions,
    ConsumerGroupType,
    KafkaError,
    KafkaException,
    TopicCollection,
    TopicPartition,
)
from confluent_kafka.admin import (  # type: ignore[attr-defined]
    AdminClient,
    ClusterMetadata,
    ConfigResource,
    NewTopic,
    OffsetSpec,
    ResourceType,
)

from kconsume.errors import (
    BrokerUnavailable,
    ClientFailed,
    ConfigurationError,
    KconsumeError,
    StoreError,
    TopicNotFound,
)
from kconsume.records import Partition
from kconsume.runtime.budget import Deadline
from kconsume.runtime.limits import Limit
from kconsume.settings import ClientValue, check_group, connection_settings

T = TypeVar("T")

_MOCK_CLUSTER = "mockCluster"
_MOCK_PATIENCE = 0.5
_GRACE = 0.2
"""Seconds after a deadline in which the client itself says that the time is up, and why."""
_LEAST = 0.01
"""Seconds that a request has at least; the client takes whole milliseconds."""
_NO_OFFSET = -1001
# Records keep their timestamps on their way: by those, an old one would be past its retention when it arrives.
_KEEPS_ALL = {"cleanup.policy": "delete", "retention.ms": "-1"}
_NOT_ALLOWED = {
    KafkaError.TOPIC_AUTHORIZATION_FAILED,
    KafkaError.GROUP_AUTHORIZATION_FAILED,
    KafkaError.CLUSTER_AUTHORIZATION_FAILED,
}
# Nobody there, or the one who would answer is being chosen: asking again may help.
_AWAY = {
    KafkaError._ALL_BROKERS_DOWN,
    KafkaError._RESOLVE,
    KafkaError._TIMED_OUT,
    KafkaError._TIMED_OUT_QUEUE,
    KafkaError._TRANSPORT,
    KafkaError._WAIT_COORD,
    KafkaError.BROKER_NOT_AVAILABLE,
    KafkaError.COORDINATOR_LOAD_IN_PROGRESS,
    KafkaError.COORDINATOR_NOT_AVAILABLE,
    KafkaError.FENCED_LEADER_EPOCH,
    KafkaError.KAFKA_STORAGE_ERROR,
    KafkaError.LEADER_NOT_AVAILABLE,
    KafkaError.NETWORK_EXCEPTION,
    KafkaError.NOT_CONTROLLER,
    KafkaError.NOT_COORDINATOR,
    KafkaError.NOT_ENOUGH_REPLICAS,
    KafkaError.NOT_LEADER_FOR_PARTITION,
    KafkaError.OFFSET_NOT_AVAILABLE,
    KafkaError.REPLICA_NOT_AVAILABLE,
    KafkaError.REQUEST_TIMED_OUT,
    KafkaError.UNKNOWN_LEADER_EPOCH,
    KafkaError.UNSTABLE_OFFSET_COMMIT,
}
_CHOOSING = {
    KafkaError.COORDINATOR_LOAD_IN_PROGRESS,
    KafkaError.COORDINATOR_NOT_AVAILABLE,
    KafkaError.NOT_COORDINATOR,
}
"""A coordinator will be there in a moment."""
# What a broker says to one who is not a member, of a group that has some.
_HAS_MEMBERS = {
    KafkaError.FENCED_MEMBER_EPOCH,
    KafkaError.GROUP_SUBSCRIBED_TO_TOPIC,
    KafkaError.ILLEGAL_GENERATION,
    KafkaError.NON_EMPTY_GROUP,
    KafkaError.REBALANCE_IN_PROGRESS,
    KafkaError.STALE_MEMBER_EPOCH,
    KafkaError.UNKNOWN_MEMBER_ID,
}
_SOON: Mapping[str, ClientValue] = {
    # Half of it is how long a client waits between its first connection and the next, 50 ms by default.
    "reconnect.backoff.ms": 20,
    # Some questions go to the broker that was named as the controller, which under KRaft is any of them. If that one
    # dies, they wait for it until the brokers are asked for again: five minutes by default, and our patience is 10 s.
    "topic.metadata.refresh.interval.ms": 5000,
}


_EDGES = {"earliest": OffsetSpec.earliest(), "latest": OffsetSpec.latest()}  # type: ignore[no-untyped-call]


Place: TypeAlias = tuple[int, str] | tuple[int, str, int]
"""An offset to commit, its metadata and, where it is known, its leader epoch."""


class Committed(NamedTuple):
    """An offset that a group has committed in Kafka."""

    offset: int
    leader_epoch: int | None
    metadata: str


class GroupMember(NamedTuple):
    """A member of a group, as the coordinator knows it."""

    id: str
    instance: str | None
    """The name of a static member."""
    client: str
    owned: tuple[Partition, ...]


class Group(NamedTuple):
    """A group, as the coordinator knows it."""

    state: str
    """`stable`, `empty`, or what it is in the middle of, such as `reconciling`."""
    assignor: str
    members: tuple[GroupMember, ...]
    is_classic: bool = True
    """Whether its members assign the partitions themselves, not the broker (KIP-848)."""


class Cluster:
    """A cluster by its address. Connects at the first question."""

    def __init__(
        self, brokers: str, overrides: Mapping[str, ClientValue] | None = None, *, patience: float = 10.0
    ) -> None:
        self.brokers = brokers
        self.patience = patience
        self._settings = connection_settings(brokers, overrides or {})
        # What the clients said of their connections. They call its `append`: a method of ours would tie this
        # object and its client into a cycle, and keep the client's threads until the collector comes by.
        self._trouble: deque[KafkaError] = deque(maxlen=8)
        self._client: AdminClient | None = None
        self._tells_ids: bool | None = None
        self._lock = threading.Lock()

    def topics(self, wanted: Sequence[str]) -> dict[str, int]:
        """How many partitions each topic has; `TopicNotFound` if one is not there."""
        return self._topics(wanted, self._deadline())

    def _topics(self, wanted: Iterable[str], deadline: Deadline) -> dict[str, int]:
        known = {name: len(topic.partitions) for name, topic in self._metadata(deadline).topics.items()}
        for name in wanted:
            if name not in known:
                close = difflib.get_close_matches(name, known, n=1)
                hint = f"did you mean {close[0]!r}?" if close else "create it, or correct the name"
                raise TopicNotFound(f"topic {name!r} is not on the cluster at {self.brokers}: {hint}")
        return {name: known[name] for name in wanted}

    def all_topics(self) -> list[str]:
        """The names of all topics that this client may see, sorted; not those of Kafka's own."""
        return sorted(name for name in self._metadata(self._deadline()).topics if not name.startswith("__"))

    def those_there(self, topics: Iterable[str]) -> list[str]:
        """Of these topics, the ones that the cluster has."""
        there = self._metadata(self._deadline()).topics
        return [name for name in topics if name in there]

    def topic_ids(self, topics: Iterable[str]) -> dict[str, str | None]:
        """The id of each topic, None where the cluster does not tell (a mock broker may not)."""
        return self.ask_topic_ids(topics)()

    def ask_topic_ids(self, topics: Iterable[str]) -> Callable[[], dict[str, str | None]]:
        """The same, asked now; the answer is waited for by who calls what this returns."""
        names = sorted(set(topics))
        if self._tells_ids is False:
            return lambda: dict.fromkeys(names)
        deadline = self._deadline()
        is_mock = not self._tells_ids and self._is_mock(deadline)
        if is_mock:
            deadline = Deadline(_MOCK_PATIENCE)
        asked = self._admin().describe_topics(TopicCollection(names), request_timeout=_left(deadline))

        def answer() -> dict[str, str | None]:
            try:
                ids: dict[str, str | None] = {
                    name: str(self._answer(f, deadline).topic_id) for name, f in asked.items()
                }
            except BrokerUnavailable:
                if not is_mock:
                    raise
                self._tells_ids = False
                return dict.fromkeys(names)
            self._tells_ids = True
            return ids

        return answer

    def ask_limits(self, topics: Sequence[str]) -> dict[str, Future[Limit | None]]:
        """What each topic takes; None where the topic is missing or the cluster does not tell us."""
        if self._tells_ids is False:
            return {}  # a mock broker does not answer
        resources = [ConfigResource(ResourceType.TOPIC, name) for name in topics]
        asked = self._admin().describe_configs(resources, request_timeout=self.patience)
        return {resource.name: _limit_in(future) for resource, future in asked.items()}

    def make_topics(self, wanted: Mapping[str, str]) -> None:
        """Make those of the topics that are not there, each with as many partitions and replicas as the one it is
        named with. Refused with their names where that is not allowed."""
        deadline = self._deadline()
        there = self._metadata(deadline).topics
        self._topics(sorted(set(wanted.values())), deadline)
        new: list[NewTopic] = []
        for name, like in wanted.items():
            if name not in there:
                partitions = there[like].partitions
                new.append(NewTopic(name, len(partitions), max(1, len(partitions[0].replicas)), config=_KEEPS_ALL))
        made = self._admin().create_topics(new, request_timeout=_left(deadline)) if new else {}
        for future in made.values():
            outcome = self._outcome(future, deadline)
            if isinstance(outcome, KafkaError) and outcome.code() in _AWAY:
                raise self._refused(outcome)
            if isinstance(outcome, KafkaError) and outcome.code() != KafkaError.TOPIC_ALREADY_EXISTS:
                names = ", ".join(f"{topic.topic} ({topic.num_partitions} partitions)" for topic in new)
                raise ConfigurationError(
                    f"the cluster at {self.brokers} has no topic {names}, and does not let this client make one "
                    f"({outcome.str()}): create them, or give the principal Create"
                )
        if made:
            self._await_topics(made, deadline)

    def _await_topics(self, names: Iterable[str], deadline: Deadline) -> None:
        """Until the brokers tell of topics that they have made."""
        wanted = set(names)
        while not wanted <= self._metadata(deadline).topics.keys():
            if deadline.passed:
                raise self._unavailable(f"topic {min(wanted)!r} was made and did not appear")
            time.sleep(0.05)

    def edges(self, partitions: Iterable[Partition], edge: Literal["earliest", "latest"]) -> dict[Partition, int]:
        """The first offset of each log, or the one after the last."""
        return self.ask_edges(partitions, edge)()

    def ask_edges(
        self, partitions: Iterable[Partition], edge: Literal["earliest", "latest"]
    ) -> Callable[[], dict[Partition, int]]:
        """The same, asked now; the answer is waited for by who calls what this returns."""
        spec, deadline = _EDGES[edge], self._deadline()
        asked = self._admin().list_offsets(
            {TopicPartition(*p): spec for p in partitions}, request_timeout=_left(deadline)
        )

        def answer() -> dict[Partition, int]:
            edges = {
                Partition(e.topic, e.partition): self._answer(future, deadline).offset for e, future in asked.items()
            }
            for partition, offset in edges.items():
                if offset < 0:  # what the client answers for a leader that it cannot reach, without an error
                    raise self._unavailable(f"the leader of {partition} did not answer")
            return edges

        return answer

    def committed(self, group: str, partitions: Iterable[Partition]) -> dict[Partition, Committed]:
        """The offsets that the group has committed in Kafka; the missing are left out."""
        check_group(group)
        elements = [TopicPartition(*p) for p in partitions]
        if not elements:
            return {}
        with self._reader(group) as reader:
            answered = self._once_there_is_a_coordinator(lambda left: reader.committed(elements, timeout=left))
        found: dict[Partition, Committed] = {}
        for element in answered:
            if element.error is not None:
                raise self._refused(element.error)
            if element.offset != _NO_OFFSET:
                partition = Partition(element.topic, element.partition)
                found[partition] = Committed(element.offset, element.leader_epoch, element.metadata or "")
        return found

    def _once_there_is_a_coordinator(self, ask: Callable[[float], T]) -> T:
        """In a cluster that has never had a group the client is told at once that nobody is it, and does not wait.
        `ask` is given the seconds that are left."""
        deadline = self._deadline()
        while True:
            try:
                return ask(_left(deadline))
            except KafkaException as error:
                if error.args[0].code() not in _CHOOSING or deadline.passed:
                    raise
            time.sleep(0.05)

    def set_committed(self, group: str, offsets: Mapping[Partition, Place], *, known: bool = False) -> None:
        """Write the group's offsets; an error while the group has members, which alone may commit then. `known`: the
        partitions were asked for before."""
        check_group(group)
        if not offsets:
            return
        deadline = self._deadline()
        if not known:
            self._must_exist(offsets, deadline)  # else the broker would write some of the offsets and refuse the others
        elements = [TopicPartition(*p, *place) for p, place in offsets.items()]
        while (error := self._set_committed(group, elements, deadline)) is not None:
            if error.code() not in _CHOOSING or deadline.passed:
                raise self._refused(error, group)
            time.sleep(0.05)  # a new group has no coordinator yet

    def _set_committed(self, group: str, elements: list[TopicPartition], deadline: Deadline) -> KafkaError | None:
        """Write them once; why they were refused, if they were."""
        request = [ConsumerGroupTopicPartitions(group, elements)]
        (asked,) = self._admin().alter_consumer_group_offsets(request, request_timeout=_left(deadline)).values()
        outcome = self._outcome(asked, deadline)
        if isinstance(outcome, KafkaError):
            return outcome
        return next((element.error for element in outcome.topic_partitions if element.error is not None), None)

    def delete_group(self, group: str) -> None:
        """Forget the group, if it is there; an error while it has members."""
        deadline = self._deadline()
        for future in self._admin().delete_consumer_groups([group], request_timeout=_left(deadline)).values():
            outcome = self._outcome(future, deadline)
            if isinstance(outcome, KafkaError) and outcome.code() != KafkaError.GROUP_ID_NOT_FOUND:
                raise self._refused(outcome, group)

    def groups(self) -> list[str]:
        """The groups that the cluster knows, sorted; all of them or an error."""
        deadline = self._deadline()
        listed = self._answer(self._admin().list_consumer_groups(request_timeout=_left(deadline)), deadline)
        for error in listed.errors:  # of the brokers that did not answer; the others' groups are in `valid`
            raise self._refused(error.args[0] if isinstance(error, KafkaException) else error)
        return sorted(group.group_id for group in listed.valid)

    def group(self, name: str) -> Group | None:
        """The group with its members and what each has; None if the cluster knows no such group."""
        check_group(name)
        deadline = self._deadline()
        while True:
            asked = self._admin().describe_consumer_groups([name], request_timeout=_left(deadline))
            outcome = self._outcome(asked[name], deadline)
            if not isinstance(outcome, KafkaError) or outcome.code() not in _CHOOSING or deadline.passed:
                break
            time.sleep(0.05)  # as a new cluster says, which makes the topic of its groups at the first question
        if isinstance(outcome, KafkaError):
            if outcome.code() == KafkaError.GROUP_ID_NOT_FOUND:
                return None
            raise self._refused(outcome)
        if outcome.state is ConsumerGroupState.DEAD:  # what brokers before KIP-1043 say of a group that is none
            return None
        return Group(
            outcome.state.name.lower(),
            outcome.partition_assignor,
            tuple(
                GroupMember(
                    member.member_id,
                    member.group_instance_id,
                    member.client_id,
                    tuple(sorted(Partition(p.topic, p.partition) for p in member.assignment.topic_partitions)),
                )
                for member in outcome.members
            ),
            outcome.type is not ConsumerGroupType.CONSUMER,
        )

    def _must_exist(self, partitions: Iterable[Partition], deadline: Deadline) -> None:
        wanted = list(partitions)
        counts = self._topics([p.topic for p in wanted], deadline)
        for partition in wanted:
            if not 0 <= partition.number < counts[partition.topic]:
                raise StoreError(
                    f"{partition} is not on the cluster at {self.brokers}, where the topic has "
                    f"{counts[partition.topic]} partitions, numbered from 0: nothing was written; correct the number"
                )

    def _admin(self) -> AdminClient:
        with self._lock:
            if self._client is None:
                # The stub knows plain values only; error_cb is documented all the same.
                settings = {**_SOON, **self._settings, "error_cb": self._trouble.append}
                self._client = AdminClient(settings)  # type: ignore[arg-type]
            return self._client

    @contextmanager
    def _reader(self, group: str) -> Iterator[Consumer]:
        """A consumer that never subscribes, so that it reads the group's offsets without being a member.

        The admin client's `list_consumer_group_offsets` is not safe to call: on NOT_COORDINATOR and
        COORDINATOR_NOT_AVAILABLE it reads through NULL, and the process is gone (librdkafka issue 5040).
        """
        reader = Consumer(
            {
                **_SOON,
                **self._settings,
                "group.id": group,
                "enable.auto.commit": False,
                "error_cb": self._trouble.append,
            }
        )
        try:
            yield reader
        except KafkaException as error:
            reader.poll(0)  # calls error_cb, which knows more than that the time was up
            raise self._refused(error.args[0]) from None
        finally:
            reader.close()

    def _deadline(self) -> Deadline:
        """Of one question, all its requests together: what is said when nobody answers is what was waited."""
        return Deadline(self.patience)

    def _metadata(self, deadline: Deadline) -> ClusterMetadata:
        try:
            metadata = self._admin().list_topics(timeout=_left(deadline))
        except KafkaException as error:
            raise self._refused(error.args[0]) from None
        return metadata

    def _is_mock(self, deadline: Deadline) -> bool:
        """A mock without a controller never answers for ids; it is known by its cluster's name."""
        return str(self._metadata(deadline).cluster_id).startswith(_MOCK_CLUSTER)

    def _answer(self, future: Future[T], deadline: Deadline) -> T:
        outcome = self._outcome(future, deadline)
        if isinstance(outcome, KafkaError):
            raise self._refused(outcome)
        return outcome

    def _outcome(self, future: Future[T], deadline: Deadline) -> T | KafkaError:
        try:
            return future.result(timeout=deadline.left + _GRACE)
        except FutureTimeout:
            raise self._unavailable("timed out") from None
        except KafkaException as error:
            refusal: KafkaError = error.args[0]
            return refusal

    def _refused(self, error: KafkaError, group: str | None = None) -> KconsumeError:
        """The error to raise; `group` is the one that was to be changed."""
        if error.code() in _AWAY and error.code() > 0:  # a broker's own word; the client's are below 0
            return BrokerUnavailable(
                f"the cluster at {self.brokers} cannot answer yet ({error.str()}): a leader or a coordinator is being "
                f"chosen; if it stays so, look at the brokers' log"
            )
        if error.code() in _AWAY:
            return self._unavailable(error.str())
        if group is not None and error.code() in _HAS_MEMBERS:
            return StoreError(
                f"group {group!r} has members, and while it has, the broker takes offsets from them alone "
                f"({error.str()}): nothing was changed; stop them first, or move a running app with app.seek"
            )
        if error.code() == KafkaError.UNKNOWN_TOPIC_OR_PART:
            return TopicNotFound(f"the cluster at {self.brokers} does not know the topic (any more): {error.str()}")
        if error.code() in _NOT_ALLOWED:
            return ClientFailed(
                f"the cluster at {self.brokers} does not allow it: {error.str()}; give the principal Describe and Read "
                f"on the topics and the group"
            )
        return ClientFailed(f"the cluster at {self.brokers} refused what was asked: {error.str()} ({error.name()})")

    def _unavailable(self, cause: str) -> BrokerUnavailable:
        admin = self._client
        if admin is not None:
            admin.poll(0)
        # "All brokers are down" comes last and says nothing of why.
        reasons = [trouble.str() for trouble in self._trouble if trouble.code() != KafkaError._ALL_BROKERS_DOWN]
        told = reasons[-1] if reasons else cause
        return BrokerUnavailable(
            f"no broker answered at {self.brokers} within {self.patience:g} s ({told}): check the address, that "
            f"the broker runs, and security.protocol in kafka={{...}}"
        )


def _left(deadline: Deadline) -> float:
    """Seconds for the next request of a question."""
    return max(_LEAST, deadline.left)


def _limit_in(described: Future[Any]) -> Future[Limit | None]:
    limit: Future[Limit | None] = Future()

    def take(answered: Future[Any]) -> None:
        if answered.exception() is not None:
            limit.set_result(None)
            return
        entries = answered.result()
        most, policy = entries.get("max.message.bytes"), entries.get("cleanup.policy")
        compacted = policy is not None and "compact" in (policy.value or "")
        limit.set_result(None if most is None else Limit(int(most.value), compacted))

    described.add_done_callback(take)
    return limit

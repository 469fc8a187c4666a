"""Requests to the cluster about topics and groups: names, ids, first and last offsets, committed offsets.

All requests of one method call share one deadline. The methods block, so they must not be called on the thread that
polls the consumer. The one consumer of this file reads committed offsets and never subscribes.
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

from kconsume._config.client_settings import ClientValue, check_group, connection_settings
from kconsume._kafka.cluster_errors import AWAY, COORDINATOR_ELECTION, no_answer, refusal
from kconsume._kafka.topic_limits import TopicLimit
from kconsume._runtime.deadlines import Deadline
from kconsume.errors import (
    BrokerUnavailable,
    ConfigurationError,
    KconsumeError,
    StoreError,
    TopicNotFound,
)
from kconsume.records import Partition

T = TypeVar("T")

_MOCK_CLUSTER = "mockCluster"
_MOCK_PATIENCE = 0.5
_GRACE = 0.2
"""Seconds after a deadline in which the client itself reports the timeout and its cause."""
_LEAST = 0.01
"""The shortest time for a request. The client takes whole milliseconds."""
_NO_OFFSET = -1001
# The configuration of retry and re-drive topics. A record keeps its timestamp there, so retention by time would delete
# an old record at once.
_KEEPS_ALL = {"cleanup.policy": "delete", "retention.ms": "-1"}
_QUICK_RECOVERY: Mapping[str, ClientValue] = {
    # The client waits half of this time between its first connection and the next. The default is 50 ms.
    "reconnect.backoff.ms": 20,
    # Some requests go to the broker that was named as the controller, which under KRaft is any broker. If that broker
    # dies, the requests wait until the client refreshes its metadata: five minutes by default, with a deadline of 10 s.
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
    """A member of a group, as the coordinator describes it."""

    id: str
    instance: str | None
    """The `group.instance.id`, if this is a static member."""
    client: str
    owned: tuple[Partition, ...]


class Group(NamedTuple):
    """A group, as the coordinator describes it."""

    state: str
    """`stable`, `empty`, or a state in between, such as `reconciling`."""
    assignor: str
    members: tuple[GroupMember, ...]
    is_classic: bool = True
    """True if the members assign the partitions. In a KIP-848 group the broker assigns them."""


class Cluster:
    """Sends requests to one Kafka cluster. The first request connects.

    Args:
        brokers: the address of the brokers.
        overrides: librdkafka properties of the user.
        patience: seconds for one method call.
    """

    def __init__(
        self, brokers: str, overrides: Mapping[str, ClientValue] | None = None, *, patience: float = 10.0
    ) -> None:
        self.brokers = brokers
        self.patience = patience
        self._settings = connection_settings(brokers, overrides or {})
        # Connection errors. `error_cb` is `append` of this deque: a method of `Cluster` would make a reference cycle
        # with the client, and the client's threads would live until the garbage collector runs.
        self._connection_errors: deque[KafkaError] = deque(maxlen=8)
        self._client: AdminClient | None = None
        self._tells_ids: bool | None = None
        self._lock = threading.Lock()

    def topics(self, wanted: Sequence[str]) -> dict[str, int]:
        """Return the number of partitions of each topic. Raises TopicNotFound if a topic does not exist.

        Args:
            wanted: the names of the topics.
        """
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
        """Return the names of all topics that this client may see, sorted, without Kafka's own topics."""
        return sorted(name for name in self._metadata(self._deadline()).topics if not name.startswith("__"))

    def those_there(self, topics: Iterable[str]) -> list[str]:
        """Return the given topics that exist."""
        there = self._metadata(self._deadline()).topics
        return [name for name in topics if name in there]

    def topic_ids(self, topics: Iterable[str]) -> dict[str, str | None]:
        """Return the id of each topic; None if the cluster, such as a mock broker, does not report the id."""
        return self.ask_topic_ids(topics)()

    def ask_topic_ids(self, topics: Iterable[str]) -> Callable[[], dict[str, str | None]]:
        """Send the request of `topic_ids` now. The returned function waits for the answer."""
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

    def ask_limits(self, topics: Sequence[str]) -> dict[str, Future[TopicLimit | None]]:
        """Return a future for each topic, with its limits, or with None if the cluster does not report them."""
        if self._tells_ids is False:
            return {}  # a mock broker does not answer
        resources = [ConfigResource(ResourceType.TOPIC, name) for name in topics]
        asked = self._admin().describe_configs(resources, request_timeout=self.patience)
        return {resource.name: _limit_in(future) for resource, future in asked.items()}

    def make_topics(self, wanted: Mapping[str, str]) -> None:
        """Create missing topics. Raises ConfigurationError with their names if this client may not create them.

        Args:
            wanted: the topics, each with the topic whose numbers of partitions and replicas it gets.
        """
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
            if isinstance(outcome, KafkaError) and outcome.code() in AWAY:
                raise self._refused(outcome)
            if isinstance(outcome, KafkaError) and outcome.code() != KafkaError.TOPIC_ALREADY_EXISTS:
                names = ", ".join(f"{topic.topic} ({topic.num_partitions} partitions)" for topic in new)
                raise ConfigurationError(
                    f"the cluster at {self.brokers} lacks the topics {names}, and this client could not create them "
                    f"({outcome.str()}): create them, or give the principal Create"
                )
        if made:
            self._await_topics(made, deadline)

    def _await_topics(self, names: Iterable[str], deadline: Deadline) -> None:
        """Wait until the brokers list the topics that they have created."""
        wanted = set(names)
        while not wanted <= self._metadata(deadline).topics.keys():
            if deadline.passed:
                raise self._unavailable(f"topic {min(wanted)!r} was created and is not listed")
            time.sleep(0.05)

    def edges(self, partitions: Iterable[Partition], edge: Literal["earliest", "latest"]) -> dict[Partition, int]:
        """Return the first offset of each log, or the offset after its last record.

        Args:
            partitions: the partitions.
            edge: `earliest` or `latest`.
        """
        return self.ask_edges(partitions, edge)()

    def ask_edges(
        self, partitions: Iterable[Partition], edge: Literal["earliest", "latest"]
    ) -> Callable[[], dict[Partition, int]]:
        """Send the request of `edges` now. The returned function waits for the answer."""
        spec, deadline = _EDGES[edge], self._deadline()
        asked = self._admin().list_offsets(
            {TopicPartition(*p): spec for p in partitions}, request_timeout=_left(deadline)
        )

        def answer() -> dict[Partition, int]:
            edges = {
                Partition(e.topic, e.partition): self._answer(future, deadline).offset for e, future in asked.items()
            }
            for partition, offset in edges.items():
                if offset < 0:  # the client could not reach the leader, and reports no error
                    raise self._unavailable(f"the leader of {partition} did not answer")
            return edges

        return answer

    def committed(self, group: str, partitions: Iterable[Partition]) -> dict[Partition, Committed]:
        """Return the offsets that the group has committed in Kafka. Partitions without such an offset are left out."""
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
        """Repeat a request until the group has a coordinator, and return the answer.

        A cluster that never had a group has no coordinator yet and refuses the request at once.

        Args:
            ask: sends the request. Called with the seconds that are left.
        """
        deadline = self._deadline()
        while True:
            try:
                return ask(_left(deadline))
            except KafkaException as error:
                if error.args[0].code() not in COORDINATOR_ELECTION or deadline.passed:
                    raise
            time.sleep(0.05)

    def set_committed(self, group: str, offsets: Mapping[Partition, Place], *, known: bool = False) -> None:
        """Write the group's offsets. Raises StoreError while the group has members, because then only they may commit.

        Args:
            group: the name of the group.
            offsets: the offset and the metadata of each partition.
            known: whether the partitions are known to exist.
        """
        check_group(group)
        if not offsets:
            return
        deadline = self._deadline()
        if not known:
            self._must_exist(offsets, deadline)  # else the broker might write some offsets and refuse others
        elements = [TopicPartition(*p, *place) for p, place in offsets.items()]
        while (error := self._set_committed(group, elements, deadline)) is not None:
            if error.code() not in COORDINATOR_ELECTION or deadline.passed:
                raise self._refused(error, group)
            time.sleep(0.05)  # a new group has no coordinator yet

    def _set_committed(self, group: str, elements: list[TopicPartition], deadline: Deadline) -> KafkaError | None:
        """Write the offsets once. Return the error if they were refused."""
        request = [ConsumerGroupTopicPartitions(group, elements)]
        (asked,) = self._admin().alter_consumer_group_offsets(request, request_timeout=_left(deadline)).values()
        outcome = self._outcome(asked, deadline)
        if isinstance(outcome, KafkaError):
            return outcome
        return next((element.error for element in outcome.topic_partitions if element.error is not None), None)

    def delete_group(self, group: str) -> None:
        """Delete the group if it exists. Raises StoreError while it has members."""
        deadline = self._deadline()
        for future in self._admin().delete_consumer_groups([group], request_timeout=_left(deadline)).values():
            outcome = self._outcome(future, deadline)
            if isinstance(outcome, KafkaError) and outcome.code() != KafkaError.GROUP_ID_NOT_FOUND:
                raise self._refused(outcome, group)

    def groups(self) -> list[str]:
        """Return the names of all groups, sorted. Raises if a broker did not answer."""
        deadline = self._deadline()
        listed = self._answer(self._admin().list_consumer_groups(request_timeout=_left(deadline)), deadline)
        for error in listed.errors:  # each comes from a broker that did not answer; `valid` has the rest
            raise self._refused(error.args[0] if isinstance(error, KafkaException) else error)
        return sorted(group.group_id for group in listed.valid)

    def group(self, name: str) -> Group | None:
        """Return the group with its members and their partitions; None if there is no such group."""
        check_group(name)
        deadline = self._deadline()
        while True:
            asked = self._admin().describe_consumer_groups([name], request_timeout=_left(deadline))
            outcome = self._outcome(asked[name], deadline)
            if not isinstance(outcome, KafkaError) or outcome.code() not in COORDINATOR_ELECTION or deadline.passed:
                break
            time.sleep(0.05)  # a new cluster creates its group topic at the first request
        if isinstance(outcome, KafkaError):
            if outcome.code() == KafkaError.GROUP_ID_NOT_FOUND:
                return None
            raise self._refused(outcome)
        if outcome.state is ConsumerGroupState.DEAD:  # how brokers before KIP-1043 answer if there is no group
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
                # The stub allows only plain values, but error_cb is documented.
                settings = {**_QUICK_RECOVERY, **self._settings, "error_cb": self._connection_errors.append}
                self._client = AdminClient(settings)  # type: ignore[arg-type]
            return self._client

    @contextmanager
    def _reader(self, group: str) -> Iterator[Consumer]:
        """Yield a consumer that reads the group's offsets. The reader never subscribes, so it is not a member.

        The admin client's `list_consumer_group_offsets` is not safe: on NOT_COORDINATOR and COORDINATOR_NOT_AVAILABLE
        it dereferences NULL, which ends the process (librdkafka issue 5040).
        """
        reader = Consumer(
            {
                **_QUICK_RECOVERY,
                **self._settings,
                "group.id": group,
                "enable.auto.commit": False,
                "error_cb": self._connection_errors.append,
            }
        )
        try:
            yield reader
        except KafkaException as error:
            reader.poll(0)  # runs error_cb, which gets the cause of a timeout
            raise self._refused(error.args[0]) from None
        finally:
            reader.close()

    def _deadline(self) -> Deadline:
        """Return the deadline that all requests of one method call share."""
        return Deadline(self.patience)

    def _metadata(self, deadline: Deadline) -> ClusterMetadata:
        try:
            metadata = self._admin().list_topics(timeout=_left(deadline))
        except KafkaException as error:
            raise self._refused(error.args[0]) from None
        return metadata

    def _is_mock(self, deadline: Deadline) -> bool:
        """Whether the cluster id is that of a mock cluster, which may never answer a request for topic ids."""
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
        """Return the error for a refusal.

        Args:
            error: the refusal.
            group: the group, if the request was to change one.
        """
        return self._unavailable(error.str()) if no_answer(error) else refusal(error, self.brokers, group)

    def _unavailable(self, cause: str) -> BrokerUnavailable:
        admin = self._client
        if admin is not None:
            admin.poll(0)
        # "All brokers are down" comes last and does not name the cause.
        reasons = [error.str() for error in self._connection_errors if error.code() != KafkaError._ALL_BROKERS_DOWN]
        reason = reasons[-1] if reasons else cause
        return BrokerUnavailable(
            f"no broker answered at {self.brokers} within {self.patience:g} s ({reason}): check the address, that "
            f"the broker runs, and security.protocol in kafka={{...}}"
        )


def _left(deadline: Deadline) -> float:
    """Return the seconds for the next request."""
    return max(_LEAST, deadline.left)


def _limit_in(described: Future[Any]) -> Future[TopicLimit | None]:
    limit: Future[TopicLimit | None] = Future()

    def take(answered: Future[Any]) -> None:
        if answered.exception() is not None:
            limit.set_result(None)
            return
        entries = answered.result()
        most, policy = entries.get("max.message.bytes"), entries.get("cleanup.policy")
        compacted = policy is not None and "compact" in (policy.value or "")
        limit.set_result(None if most is None else TopicLimit(int(most.value), compacted))

    described.add_done_callback(take)
    return limit

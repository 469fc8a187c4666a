"""One consumer that may be two members of its group: one for the topics of its handlers, one for their side topics.

*Side topics* carry failed records: retry topics and re-drive topics. Side topics are empty most of the time. Assignors
that balance how many partitions a member has in total (cooperative-sticky, and `uniform` of KIP-848 brokers) count an
empty partition like any other. Measured: after one re-drive of `orders`, a second process got all partitions of
`orders`, and the first kept those of `orders.inventory.redrive`. So the side topics have a member of their own, which
subscribes to nothing else, and each kind of topic is balanced separately. Assignors that spread each topic separately
(range, roundrobin) need no second member.

Both members belong to one loop, whose thread serves both clients. Owned partitions, lanes, commits and limits are
counted once. A topic's name does not tell which member owns its partitions: the pattern of a handler may match a side
topic, and a member of an earlier version subscribes to all topics. So this file notes the member to which each
partition was assigned.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TypeAlias, TypeVar

from confluent_kafka import KafkaError

from kconsume._config.client_settings import ClientValue, side_settings
from kconsume._config.group_protocol import balances_the_total
from kconsume._kafka.commit_result import CommitResult
from kconsume._kafka.consumer import LEAVE_WITHIN, AssignmentListener, KafkaConsumer, StartAt
from kconsume._kafka.fetched import Runs
from kconsume._runtime.deadlines import Deadline
from kconsume.errors import KconsumeError
from kconsume.records import Partition

V = TypeVar("V")


class SplitConsumer:
    """The clients of one consumer. The second one is made when the first side topic is subscribed.

    Args:
        settings: all properties of the first client. The properties of the second client are derived from them.
        listener: receives the partitions of both members.
        batch: the number of records that `fetch` takes at most from each client.
    """

    def __init__(self, settings: Mapping[str, ClientValue], listener: AssignmentListener, *, batch: int = 1000) -> None:
        self.batch = batch
        self._settings = settings
        self._listener = listener
        self._splits = balances_the_total(settings)
        self._owners: dict[Partition, KafkaConsumer] = {}
        """The member to which each owned partition was assigned."""
        self._in_callback: list[KafkaConsumer] = []
        """The members whose callback runs, innermost last."""
        self._main = self._member(settings)
        self._side: KafkaConsumer | None = None
        self._subscribed: dict[KafkaConsumer, list[str]] = {}
        self.commit_results: list[CommitResult] = self._main.commit_results

    def _member(self, settings: Mapping[str, ClientValue]) -> KafkaConsumer:
        callbacks = _MemberCallbacks(self._listener, self._owners, self._in_callback)
        callbacks.member = KafkaConsumer(settings, callbacks, batch=self.batch)
        return callbacks.member

    @property
    def _members(self) -> Sequence[KafkaConsumer]:
        return [self._main] if self._side is None else [self._main, self._side]

    def generations(self, partitions: Iterable[Partition]) -> dict[Partition, int]:
        """Return the generation for the partitions that belong to the member whose callback runs.

        The other member may already have a later generation than the one of its assignment.
        """
        if not self._in_callback:
            return {}
        member = self._in_callback[-1]
        return dict.fromkeys((p for p in partitions if self._owners.get(p) is member), member.generation())

    @property
    def joined(self) -> bool:
        """Whether each member has received an assignment."""
        return all(member.joined for member in self._members)

    @property
    def main_joined(self) -> bool:
        """Whether the member of the handlers' topics has received an assignment. May be read on any thread."""
        return self._main.joined

    @property
    def is_member(self) -> bool:
        """Whether the broker has admitted each member."""
        return all(member.is_member for member in self._members)

    @property
    def joins(self) -> int:
        """How many assignments the group has made to both members."""
        return sum(member.joins for member in self._members)

    def assume_joined(self) -> None:
        """Count each member as joined. KIP-848 has no callback for a member that gets no partitions."""
        for member in self._members:
            member.assume_joined()

    # Reading

    def subscribe(self, topics: list[str], side_topics: Sequence[str] = ()) -> None:
        """Subscribe, or change the subscription of a running consumer.

        Args:
            topics: the topics of the handlers; one that begins with ^ is a pattern.
            side_topics: retry topics and re-drive topics.
        """
        if not self._splits:
            return self._subscribe(self._main, [*topics, *side_topics])
        self._subscribe(self._main, topics)
        if side_topics and self._side is None:
            self._side = self._member(side_settings(self._settings))
            self._side.commit_results = self.commit_results
        if self._side is not None:
            self._subscribe(self._side, list(side_topics))
        return None

    def _subscribe(self, member: KafkaConsumer, topics: list[str]) -> None:
        if self._subscribed.get(member) != topics:  # subscribing to the same topics again causes a rebalance
            self._subscribed[member] = topics
            member.subscribe(topics)

    def fetch(self, timeout: float, most: int | None = None) -> Runs:
        """Return the records that have arrived. If there are none, wait for a record of the handlers' topics.

        Args:
            timeout: seconds to wait for the first record of the handlers' topics.
            most: the number of records at most from each client; None for `batch`.
        """
        if self._side is None:
            return self._main.fetch(timeout, most)
        runs = self._side.fetch(0, most)
        main_runs = self._main.fetch(0 if runs else timeout, most)
        return self._owned(self._side, runs) + self._owned(self._main, main_runs)

    def poll(self) -> Runs:
        """Run the callbacks of both clients, and return at most one record of each."""
        return [run for member in self._members for run in self._owned(member, member.poll())]

    def _owned(self, member: KafkaConsumer, runs: Runs) -> Runs:
        """Drop records of partitions that the other member owns. This member may not have noticed the loss yet."""
        return [run for run in runs if self._owners.get(run[0]) is member]

    @property
    def ends(self) -> set[Partition]:
        """Partitions whose end was reached and that had no record since."""
        if self._side is None:
            return self._main.ends
        return {p for member in self._members for p in member.ends if self._owners.get(p) is member}

    def end_of(self, partition: Partition) -> int:
        """Return the end offset of a partition that is in `ends`."""
        return self._owners[partition].end_of(partition)

    def take_connection_errors(self) -> list[KafkaError]:
        """Return and forget what the clients reported about their connections."""
        return [error for member in self._members for error in member.take_connection_errors()]

    @property
    def has_faults(self) -> bool:
        """Whether `take_faults` has something to return."""
        return any(member.has_faults for member in self._members)

    def take_faults(self) -> tuple[dict[Partition, KconsumeError], dict[str, KconsumeError]]:
        """Return and forget the faults of single partitions and of whole topics, as `KafkaConsumer.take_faults`."""
        partitions, topics = dict[Partition, KconsumeError](), dict[str, KconsumeError]()
        for member in self._members:
            of_partitions, of_topics = member.take_faults()
            partitions.update({p: fault for p, fault in of_partitions.items() if self._owners.get(p) is member})
            topics.update(of_topics)
        return partitions, topics

    # Partitions

    def assign_explicitly(self, starts: Mapping[Partition, StartAt]) -> None:
        """Assign partitions of one topic without the coordination of a group."""
        self._owners.update(dict.fromkeys(starts, self._main))
        self._main.assign_explicitly(starts)

    def start_at(self, starts: Mapping[Partition, StartAt]) -> None:
        """Start assigned partitions at these offsets, or restart them there."""
        for member, part in self.by_member(starts):
            member.start_at(part)

    def pause(self, partitions: Iterable[Partition]) -> None:
        """Stop fetching these partitions."""
        for member, part in self.by_member(dict.fromkeys(partitions)):
            member.pause(part)

    def resume(self, partitions: Iterable[Partition]) -> None:
        """Fetch these partitions again."""
        for member, part in self.by_member(dict.fromkeys(partitions)):
            member.resume(part)

    def by_member(self, values: Mapping[Partition, V]) -> list[tuple[KafkaConsumer, Mapping[Partition, V]]]:
        """Return the values by the member that owns their partitions."""
        if self._side is None:
            return [(self._main, values)]
        of_side = {p: value for p, value in values.items() if self._owners.get(p) is self._side}
        of_main = {p: value for p, value in values.items() if p not in of_side}
        return [(member, part) for member, part in ((self._main, of_main), (self._side, of_side)) if part]

    def close(self, patience: float = LEAVE_WITHIN) -> None:
        """Leave the group with both members. This call may hang, like `KafkaConsumer.close`.

        Args:
            patience: seconds that leaving may take.
        """
        deadline = Deadline(patience)
        try:
            self._main.close(deadline.left)
        finally:
            if self._side is not None:
                self._side.close(deadline.left)


AnyConsumer: TypeAlias = KafkaConsumer | SplitConsumer


class _MemberCallbacks:
    """Passes the callbacks of one member to the listener, and notes which partitions the member owns."""

    member: KafkaConsumer

    def __init__(
        self, listener: AssignmentListener, owners: dict[Partition, KafkaConsumer], in_callback: list[KafkaConsumer]
    ) -> None:
        self._listener = listener
        self._owners = owners
        self._in_callback = in_callback

    @contextmanager
    def _callback(self) -> Iterator[None]:
        self._in_callback.append(self.member)
        try:
            yield
        finally:
            self._in_callback.pop()

    def assigned(self, partitions: list[Partition]) -> Mapping[Partition, StartAt]:
        with self._callback():
            return self._assigned(partitions)

    def _assigned(self, partitions: list[Partition]) -> Mapping[Partition, StartAt]:
        if taken := [p for p in partitions if self._owners.get(p, self.member) is not self.member]:
            self._listener.lost(taken)  # the broker has removed our other member, which does not know it yet
        self._owners.update(dict.fromkeys(partitions, self.member))
        return self._listener.assigned(partitions)

    def revoked(self, partitions: list[Partition]) -> None:
        mine = self._mine(partitions)
        try:
            with self._callback():
                self._listener.revoked(mine)
        finally:
            self._let_go(mine)

    def lost(self, partitions: list[Partition]) -> None:
        mine = self._mine(partitions)
        try:
            with self._callback():
                self._listener.lost(mine)
        finally:
            self._let_go(mine)

    def _mine(self, partitions: list[Partition]) -> list[Partition]:
        return [p for p in partitions if self._owners.get(p) is self.member]

    def _let_go(self, partitions: list[Partition]) -> None:
        for partition in partitions:
            del self._owners[partition]

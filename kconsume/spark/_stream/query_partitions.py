"""What one run of a query owns in its group: the claimed partitions, the relay of their outboxes, the group mirror.

Claiming a partition fences off an embedded app, or another query, of the group. The ledger registers the topics first,
so that a second query of the group is refused before it claims anything.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace

from kconsume._config.client_settings import ClientValue
from kconsume._config.options import StartPolicy
from kconsume._kafka.cluster import Cluster
from kconsume._kafka.commit_metadata import name_of
from kconsume._kafka.producer import RelayProducer, relay_settings
from kconsume._kafka.topic_limits import TopicLimits
from kconsume._runtime.assignment.claims import Claims
from kconsume._runtime.assignment.partition_trouble import positions_in
from kconsume._runtime.assignment.topic_checks import TopicChecks
from kconsume._runtime.background import BackgroundThread
from kconsume._runtime.deadlines import Deadline
from kconsume._runtime.output.outbox_relay import OutboxRelay
from kconsume.backends.base import OffsetStore, Position
from kconsume.backends.capabilities import capabilities_of
from kconsume.errors import KconsumeError
from kconsume.failures.policy import Policy
from kconsume.records import Partition
from kconsume.spark._batch.ledger.base import Ledger
from kconsume.spark._batch.ranges import Plan
from kconsume.spark._stream.group_mirror import GroupMirror


class PlannedClaims(Claims):
    """Claims for a user's own query: a partition without a stored offset begins where the query begins."""

    planned: Mapping[Partition, int] = {}

    def start_offsets(self, missing: Sequence[Partition], added: object) -> dict[Partition, int]:  # noqa: ARG002
        return {partition: self.planned[partition] for partition in missing}


class QueryPartitions:
    """The partitions of one run of a query.

    One thread at a time calls the methods and writes all fields: first the thread that starts the query, then the
    thread that runs its batches. The heartbeat thread reads `positions` and `cluster`.
    """

    def __init__(
        self,
        store: OffsetStore,
        group: str,
        owner: str,
        ledger: Ledger,
        policy: Policy,
        kafka: Mapping[str, ClientValue],
    ) -> None:
        """Make the object, without I/O.

        Args:
            store: the offset store.
            group: the consumer group.
            owner: the name of this run, which is written into the rows of claimed partitions.
            ledger: registers the query.
            policy: the handler's; if it has a dead-letter topic, the outbox is relayed.
            kafka: properties of librdkafka, for the outbox relay.
        """
        self.positions: dict[Partition, Position] = {}
        """The stored offset and our epoch of each claimed partition."""
        self.cluster: Cluster | None = None
        """None before `open`."""
        self._store = store
        self._group = group
        self._owner = owner
        self._ledger = ledger
        self._policy = policy
        self._kafka = kafka
        self._claims: Claims | None = None
        self._mirror: GroupMirror | None = None
        self._relay: OutboxRelay | None = None
        self._producer: RelayProducer | None = None

    def open(self, cluster: Cluster, topics: Sequence[str], begin: StartPolicy | None, *, mirror: bool) -> None:
        """Register as the one query of the group on these topics. Claims nothing yet.

        Args:
            begin: where partitions without a stored offset begin; None to begin where the query begins.
            mirror: True to write the offsets to the Kafka group.
        """
        self.cluster = cluster
        is_new = None if begin is not None else ask_whether_group_is_new(cluster, self._group)
        self._ledger.register(topics)
        kind = PlannedClaims if begin is None else Claims
        self._claims = kind(self._store, cluster, self._group, self._owner, lambda _: begin or "earliest")
        self._claims.store_check.is_new = is_new is not None and is_new.result()
        if mirror:
            self._mirror = GroupMirror(cluster, self._group, name_of(self._store))
        if self._policy.dead_letter is not None and self._policy.dead_letter.topic is not None:
            self._start_relay(cluster)

    def _start_relay(self, cluster: Cluster) -> None:
        outbox = capabilities_of(self._store).outbox
        assert outbox is not None  # checked when the query was made
        self._producer = RelayProducer(relay_settings(cluster.brokers, self._kafka), f"kconsume-relay-{self._group}")
        limits = TopicLimits(cluster, self._producer.largest_batch)
        self._relay = OutboxRelay(outbox, self._group, self._producer, self._owner, limits)
        self._relay.start()

    def check_topics(self, topics: Sequence[str], *, is_new: bool) -> None:
        """Check the topics and the group before the first claim.

        Args:
            is_new: True if the cluster does not know the group.
        """
        assert self._claims is not None
        assert self.cluster is not None
        self._claims.store_check.is_new = is_new
        TopicChecks(self.cluster, self._group, self._claims).survey(topics)

    def claim(self, partitions: Sequence[Partition]) -> None:
        assert self._claims is not None
        self._ledger.add_topics(sorted({p.topic for p in partitions}))
        self._update(self._claims.claim_all(partitions))

    def claim_new(self, plan: Plan) -> None:
        """Claim the partitions of the plan that are not claimed yet."""
        new = [p for p in plan.partitions if p not in self.positions]
        if new:
            if isinstance(self._claims, PlannedClaims):
                self._claims.planned = plan.starts
            self.claim(new)

    def reclaim(self, epochs: Mapping[Partition, int]) -> Mapping[Partition, Position]:
        """Raise the epochs of these partitions, and return their stored positions."""
        assert self._claims is not None
        if capabilities_of(self._store).fenced is None:
            return self._read_again(epochs)
        positions = positions_in(self._claims.reclaim(epochs))
        self._open_outboxes(positions)
        return positions

    def _read_again(self, partitions: Iterable[Partition]) -> Mapping[Partition, Position]:
        """The positions with the stored offsets, for a store without epochs."""
        known = {p: self.positions[p] for p in partitions}
        stored = self._store.load(self._group, known)
        return {p: replace(at, next_offset=stored[p].next_offset) if p in stored else at for p, at in known.items()}

    def _update(self, positions: Mapping[Partition, Position]) -> None:
        self.positions.update(positions)
        self._open_outboxes(positions)

    def _open_outboxes(self, positions: Mapping[Partition, Position]) -> None:
        if self._relay is not None:
            for partition, position in positions.items():
                self._relay.open(partition, position.epoch)

    def outbox_rows_committed(self, rows: Mapping[Partition, int]) -> None:
        """Tell the relay that a transaction has committed with these numbers of new outbox rows."""
        if self._relay is not None:
            for partition, count in rows.items():
                self._relay.rows_committed(partition, count)

    def mirror(self) -> None:
        """Queue the offsets for the Kafka group."""
        if self._mirror is not None:
            self._mirror.offer({p: position.next_offset for p, position in self.positions.items()})

    def lag(self) -> dict[Partition, int]:
        """How many offsets each claimed partition is behind the end of its log."""
        positions = dict(self.positions)
        if self.cluster is None or not positions:
            return {}
        ends = self.cluster.edges(positions, "latest")
        return {p: max(0, ends[p] - position.next_offset) for p, position in positions.items()}

    def close(self) -> None:
        if self._mirror is not None:
            self._mirror.close()
        if self._relay is not None:
            self._relay.close(Deadline(10.0))
        if self._producer is not None:
            self._producer.close(5.0)
        self._ledger.unregister()


def ask_whether_group_is_new(cluster: Cluster, group: str) -> Future[bool]:
    """Ask on another thread whether the group is new to the cluster. False if the cluster does not answer.

    A new group has no committed offsets, so kconsume saves the request for them, and the client that this request
    needs. The thread lets the store be opened while the cluster answers.
    """

    def ask() -> bool:
        try:
            return cluster.group(group) is None
        except KconsumeError:
            return False

    asking = BackgroundThread(f"kconsume-ask-{group}")
    answer = asking.send(ask)
    asking.close(0.0)  # the thread ends after the call
    return answer

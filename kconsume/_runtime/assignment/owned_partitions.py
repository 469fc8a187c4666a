"""The partitions of one consumer, and why each is paused at the client.

The answer to every question that takes time (a report of a lane, a claim, a receipt of a commit) passes `current`, the
one place where late answers are recognised.
"""

from __future__ import annotations

from collections.abc import Iterable

from kconsume._kafka.two_member_consumer import AnyConsumer
from kconsume._runtime.assignment.partition import OwnedPartition, State
from kconsume._runtime.assignment.partition_trouble import PartitionTrouble
from kconsume.records import Partition


class OwnedPartitions(dict[Partition, OwnedPartition]):
    """Fields: the owner thread writes all of them. Other threads may copy the dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.paused: set[Partition] = set()
        """Partitions that the user has paused. They stay paused when they leave and return."""
        self.commit_is_due = False
        """Whether an offset must be committed before the next regular commit."""
        self._consumer: AnyConsumer | None = None

    def attach(self, consumer: AnyConsumer) -> None:
        """Connect the Kafka consumer, which pauses and resumes the partitions."""
        self._consumer = consumer

    @property
    def consumer(self) -> AnyConsumer:
        assert self._consumer is not None
        return self._consumer

    def current(self, partition: Partition, token: object) -> OwnedPartition | None:
        """The partition, if the token is still in charge of it; else None. So the answers to earlier assignments, lanes
        and claims change nothing."""
        owned = self.get(partition)
        return owned if owned is not None and token is not None and owned.token is token else None

    def among(self, partitions: Iterable[Partition]) -> list[OwnedPartition]:
        """Those of the partitions that are ours."""
        return [owned for p in partitions if (owned := self.get(p)) is not None]

    @property
    def are_settled(self) -> bool:
        """Whether every partition is open or held, with no claim pending."""
        return all(owned.state in (State.OPEN, State.HELD) for owned in self.values())

    @property
    def troubles(self) -> dict[Partition, PartitionTrouble]:
        """The partitions that are held, and why."""
        return {p: owned.trouble for p, owned in self.items() if owned.trouble is not None}

    def add_pause(self, owned: OwnedPartition, reason: str) -> None:
        """Pause a partition at the client for one more reason."""
        if not owned.pause_reasons:
            self.consumer.pause([owned.partition])
        owned.pause_reasons.add(reason)

    def remove_pause(self, owned: OwnedPartition, reason: str) -> None:
        """Remove a reason. The partition is resumed at the client when no reason is left."""
        if reason in owned.pause_reasons:
            owned.pause_reasons.discard(reason)
            if not owned.pause_reasons:
                self.consumer.resume([owned.partition])

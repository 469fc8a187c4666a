"""`kafka://`: offsets in the Kafka group itself, where Kafka's own tools expect them.

This store reads offsets, and writes offsets of groups that have no members. While a group has members, the members
commit the offsets (`_kafka.consumer`), because the broker then accepts commits from members only. A group without
members has no other writer, so this store moves an offset forward in three steps: read, compare, write.

The commit metadata (`_kafka.commit_metadata`) contains the topic id, because Kafka stores only the topic name with an
offset.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import ClassVar

from kconsume._config.client_settings import ClientValue
from kconsume._kafka.cluster import Cluster, Place
from kconsume._kafka.commit_metadata import KAFKA, note_of, topic_id_in
from kconsume.backends.base import Position, Positions
from kconsume.errors import BrokerUnavailable, StoreError, StoreUnavailable
from kconsume.records import Partition


class KafkaStore:
    """Offsets in the Kafka group: `KafkaStore("localhost:9092")`."""

    guarantee: ClassVar[str] = "at least once: after a crash, records in flight are handled again"

    def __init__(
        self, brokers: str, kafka: Mapping[str, ClientValue] | None = None, *, cluster: Cluster | None = None
    ) -> None:
        """
        Args:
            brokers: the addresses of the cluster, `host:port,…`.
            kafka: properties of the client.
            cluster: the admin client to use instead of a new one.
        """
        self.address = "kafka://"
        self._cluster = cluster or Cluster(brokers, kafka)

    def load(self, group: str, partitions: Iterable[Partition]) -> dict[Partition, Position]:
        with _as_store_errors():
            found = self._cluster.committed(group, partitions)
        return {
            partition: Position(
                committed.offset,
                topic_id=topic_id_in(committed.metadata),
                leader_epoch=committed.leader_epoch,
                metadata=committed.metadata,
            )
            for partition, committed in found.items()
        }

    def save(self, group: str, positions: Positions) -> None:
        """Move offsets forward. The broker refuses this while the group has members, because then only members may
        commit."""
        stored = self.load(group, positions)
        places = {p: _forward(group, p, position, stored.get(p)) for p, position in positions.items()}
        with _as_store_errors():
            self._cluster.set_committed(group, places)

    def reset(self, group: str, offsets: Mapping[Partition, int]) -> None:
        """Set offsets. The broker refuses this while the group has members; this store has no epoch that fences
        members."""
        with _as_store_errors():
            self._cluster.set_committed(group, {p: (offset, "") for p, offset in offsets.items()})

    def delete(self, group: str, partitions: Iterable[Partition] | None = None) -> None:
        if partitions is not None:
            raise StoreError(
                f"kafka:// deletes a whole group at once: leave partitions out to delete all of {group!r}, or set the "
                f"offsets of some partitions with reset"
            )
        with _as_store_errors():
            self._cluster.delete_group(group)

    def groups(self) -> list[str]:
        with _as_store_errors():
            return self._cluster.groups()

    def close(self) -> None:
        """The admin client has nothing to close."""


@contextmanager
def _as_store_errors() -> Iterator[None]:
    """Raise `StoreUnavailable` in place of `BrokerUnavailable`."""
    try:
        yield
    except BrokerUnavailable as error:
        raise StoreUnavailable(str(error)) from error


def _forward(group: str, partition: Partition, new: Position, stored: Position | None) -> Place:
    if stored is not None and stored.next_offset > new.next_offset:
        raise StoreError(
            f"{partition} of group {group!r} is at offset {stored.next_offset} and was not saved at "
            f"{new.next_offset}, because save only goes forward: use reset to go back"
        )
    metadata = note_of(new.topic_id or (stored.topic_id if stored is not None else None), KAFKA)
    return (new.next_offset, metadata) if new.leader_epoch is None else (new.next_offset, metadata, new.leader_epoch)

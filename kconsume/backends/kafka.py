"""`kafka://`: offsets in the consumer group itself, where Kafka's own tools look for them.

What is here reads, and writes for people and tools. While a group runs, its offsets are committed by the consumer
that is a member of it (`runtime/source.py`): the broker accepts them from members only. A group without members
has nobody else who writes, so to move an offset forward is to read, to compare and to write.

The commit metadata (`commit_note.py`) says which topic the offset belongs to, because Kafka itself keeps only the name.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import ClassVar

from kconsume.backends.abc import Position, Positions
from kconsume.backends.commit_note import KAFKA, note_of, topic_id_in
from kconsume.cluster import Cluster, Place
from kconsume.errors import BrokerUnavailable, StoreError, StoreUnavailable
from kconsume.records import Partition
from kconsume.settings import ClientValue


class KafkaStore:
    """Offsets in Kafka's own group: `KafkaStore("localhost:9092")`."""

    guarantee: ClassVar[str] = "at least once: after a crash, records in flight are handled again"

    def __init__(
        self, brokers: str, kafka: Mapping[str, ClientValue] | None = None, *, cluster: Cluster | None = None
    ) -> None:
        self.address = "kafka://"
        self._cluster = cluster or Cluster(brokers, kafka)

    def load(self, group: str, partitions: Iterable[Partition]) -> dict[Partition, Position]:
        with _as_the_store():
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
        """Refused by the broker while the group has members; they commit for themselves."""
        stored = self.load(group, positions)
        places = {p: _forward(group, p, position, stored.get(p)) for p, position in positions.items()}
        with _as_the_store():
            self._cluster.set_committed(group, places)

    def reset(self, group: str, offsets: Mapping[Partition, int]) -> None:
        """Refused while the group has members: there is no epoch by which they could be fenced."""
        with _as_the_store():
            self._cluster.set_committed(group, {p: (offset, "") for p, offset in offsets.items()})

    def delete(self, group: str, partitions: Iterable[Partition] | None = None) -> None:
        if partitions is not None:
            raise StoreError(
                f"kafka:// forgets a whole group at once: leave partitions out to forget all of {group!r}, or set the "
                f"offsets of some with reset"
            )
        with _as_the_store():
            self._cluster.delete_group(group)

    def groups(self) -> list[str]:
        with _as_the_store():
            return self._cluster.groups()

    def close(self) -> None:
        """The admin client has nothing to close."""


@contextmanager
def _as_the_store() -> Iterator[None]:
    """A broker that is away is, here, the store that is."""
    try:
        yield
    except BrokerUnavailable as error:
        raise StoreUnavailable(str(error)) from error


def _forward(group: str, partition: Partition, new: Position, stored: Position | None) -> Place:
    if stored is not None and stored.next_offset > new.next_offset:
        raise StoreError(
            f"{partition} of group {group!r} stands at offset {stored.next_offset} and is not saved at "
            f"{new.next_offset}, because save only goes forward: use reset to go back"
        )
    metadata = note_of(new.topic_id or (stored.topic_id if stored is not None else None), KAFKA)
    return (new.next_offset, metadata) if new.leader_epoch is None else (new.next_offset, metadata, new.leader_epoch)

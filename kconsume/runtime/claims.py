"""Where to start, and with what right: a partition's position and epoch, from the store.

Blocking; run as an errand. Decides nothing silently: a missing row starts where the person said, pinned as a
number; a topic that is not the one the offset was stored for is an error.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal

from kconsume.backends.abc import FencedStore, OffsetStore, Position, Positions
from kconsume.cluster import Cluster
from kconsume.errors import BrokerUnavailable, StartRequired, TopicRecreated
from kconsume.records import Partition

Begin = Literal["earliest", "latest", "error"]


class Claims:
    """Claims partitions for one consumer of a group."""

    def __init__(
        self, store: OffsetStore, cluster: Cluster, group: str, owner: str, begin: Mapping[str, Begin]
    ) -> None:
        self._store = store
        self._cluster = cluster
        self._group = group
        self._owner = owner
        self._begin = begin

    def claim(self, partitions: Sequence[Partition]) -> dict[Partition, Position]:
        """From here on the partitions are ours in the store; answers where each stands."""
        ids = self._cluster.topic_ids(p.topic for p in partitions)

        def start(missing: Sequence[Partition]) -> Positions:
            offsets = self._starts(missing)
            return {p: Position(offsets[p], topic_id=ids[p.topic]) for p in missing}

        if isinstance(self._store, FencedStore):
            positions = self._store.claim(self._group, partitions, self._owner, start)
        else:
            positions = self._store.load(self._group, partitions)
            missing = [p for p in partitions if p not in positions]
            positions.update(start(missing) if missing else {})
        known = {p: self._same_topic(p, position, ids[p.topic]) for p, position in positions.items()}
        learnt = {p: position for p, position in known.items() if position.topic_id != positions[p].topic_id}
        if learnt and isinstance(self._store, FencedStore):
            self._store.save(self._group, learnt)
        return known

    def check_topics(self, known: Mapping[str, str]) -> None:
        """Whether the topics are still the ones that we claimed; a cluster that does not answer proves nothing."""
        try:
            ids = self._cluster.topic_ids(known)
        except BrokerUnavailable:
            return
        for topic, topic_id in known.items():
            if ids[topic] is not None and ids[topic] != topic_id:
                raise TopicRecreated(
                    f"topic {topic!r} had id {topic_id} and now has {ids[topic]}: it was deleted and made again while "
                    f"it was consumed. Stopped. {self._choices()}"
                )

    def restart(self, offsets: Mapping[Partition, int]) -> dict[Partition, Position]:
        """Set offsets by a person's word, under a new epoch, and claim again."""
        if isinstance(self._store, FencedStore):
            self._store.reset(self._group, offsets)
            return self.claim(list(offsets))
        ids = self._cluster.topic_ids(p.topic for p in offsets)
        return {p: Position(offset, topic_id=ids[p.topic]) for p, offset in offsets.items()}

    def _starts(self, missing: Sequence[Partition]) -> dict[Partition, int]:
        starts: dict[Partition, int] = {}
        for begin in sorted({self._begin[p.topic] for p in missing}):
            chosen = [p for p in missing if self._begin[p.topic] == begin]
            if begin == "error":
                raise StartRequired(
                    f"{', '.join(map(str, chosen))} of group {self._group!r} has no stored offset in "
                    f"{self._store.address}, and start='error' asks not to choose one: set it with "
                    f"store.reset(group, {{partition: offset}}), or say start='earliest' or 'latest'"
                )
            starts.update(self._cluster.edges(chosen, begin))
        return starts

    def _same_topic(self, partition: Partition, position: Position, topic_id: str | None) -> Position:
        if topic_id is None or position.topic_id == topic_id:
            return position
        if position.topic_id is None:
            return replace(position, topic_id=topic_id)
        raise TopicRecreated(
            f"{partition} stands at offset {position.next_offset} of topic id {position.topic_id}, but the topic "
            f"now has id {topic_id}: it was deleted and made again, and the offset means nothing in it. Nothing "
            f"was skipped. {self._choices()}"
        )

    def _choices(self) -> str:
        return f"Choose: store.delete({self._group!r}) to begin where start= says, or consume under a new group"

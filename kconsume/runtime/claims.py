"""Where to start, and with what right: a partition's position and epoch, from the store.

Blocking; run as an errand. Decides nothing silently: a missing row starts where the person said, pinned as a
number; a topic that is not the one the offset was stored for is an error.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import replace
from typing import Literal

from kconsume.backends.abc import FencedStore, OffsetStore, Position, Positions
from kconsume.backends.commit_note import place_in, place_of
from kconsume.cluster import Cluster
from kconsume.errors import (
    BrokerUnavailable,
    ClientFailed,
    ConfigurationError,
    Fenced,
    StartRequired,
    StoreUnavailable,
    TopicNotFound,
    TopicRecreated,
)
from kconsume.records import Partition

_log = logging.getLogger("kconsume.rebalance")

Begin = Literal["earliest", "latest", "error"]


class Claims:
    """Claims partitions for one consumer of a group."""

    def __init__(
        self, store: OffsetStore, cluster: Cluster, group: str, owner: str, begin: Callable[[str], Begin]
    ) -> None:
        """`begin`: where partitions of a topic start that have no stored offset."""
        self._store = store
        self._cluster = cluster
        self._group = group
        self._owner = owner
        self._begin = begin
        self.added: set[Partition] = set()
        """Partitions that were claimed, and had been added to a topic that the group consumes."""
        self._known: dict[str, int] = {}
        """By topic: how many partitions the group knew of when we first looked. Those beyond were added since."""
        self._unread: dict[str, int] = {}
        """How many there were in topics of which the store has not been asked yet."""
        self._claimed = False
        self.is_new = False
        """Whether the cluster was asked for the group and knows none: then it has no offset of it either."""
        self.over = threading.Event()
        """Set when nothing more will be asked for."""

    def survey(self, topics: Iterable[str]) -> None:
        """What there is, before we join; `TopicNotFound` if one is not there.

        Asked later, the store would also tell of what other members of a new group have claimed by then, and the rest
        of their topic would look as if it had been added.
        """
        self._unread.update(self._cluster.topics(sorted(topics)))
        try:
            self._read()
        except (StoreUnavailable, BrokerUnavailable):
            return  # the first claim asks again

    def make_topics(self, wanted: Mapping[str, str]) -> None:
        """Make those that are not there, each like the topic it is named with. Waits for brokers that are away."""
        pause = 0.5
        while True:
            try:
                return self._cluster.make_topics(wanted)
            except BrokerUnavailable as error:
                _log.warning("retry topics cannot be looked for yet, again_in=%.1fs cause=%s", pause, error)
            if self.over.wait(pause):
                return None
            pause = min(2 * pause, 5.0)

    def must_be_alone(self) -> None:
        """Refuse partitions that a person chose in a group whose members are given theirs."""
        try:
            group = self._cluster.group(self._group)
        except ClientFailed:
            return  # an embedded broker cannot say, and whoever may not ask does not use the group
        if group is not None and group.members:
            raise ConfigurationError(
                f"group {self._group!r} has members ({', '.join(sorted(m.client for m in group.members)[:3])}), who "
                f"share its partitions, and partitions= takes them without asking: give this handler a group= of its "
                f"own, or stop the others first"
            )

    def claim(self, partitions: Sequence[Partition]) -> dict[Partition, Position]:
        """From here on the partitions are ours in the store; answers where each stands. One that another has claimed
        in the same moment is left out."""
        ids = self._cluster.topic_ids(p.topic for p in partitions)
        added = self._added(partitions)

        def start(missing: Sequence[Partition]) -> Positions:
            self.added.update(added.intersection(missing))
            offsets = self._starts(missing, added)
            return {p: Position(offsets[p], topic_id=ids[p.topic]) for p in missing}

        if isinstance(self._store, FencedStore):
            positions = self._store.claim(self._group, partitions, self._owner, start)
        else:
            positions = self._store.load(self._group, partitions)
            missing = [p for p in partitions if p not in positions]
            positions.update(start(missing) if missing else {})
        known = {p: self._same_topic(p, position, ids[p.topic]) for p, position in positions.items()}
        learnt = {p: position for p, position in known.items() if position.topic_id != positions[p].topic_id}
        if isinstance(self._store, FencedStore):
            for partition, position in learnt.items():
                try:
                    self._store.save(self._group, {partition: position})
                except Fenced:
                    del known[partition]  # claimed by another since; the others are ours all the same
        return known

    def rows(self, partitions: Sequence[Partition]) -> dict[Partition, Position]:
        """What the store has, claimed by whomever."""
        return self._store.load(self._group, partitions)

    def take_over(self, epochs: Mapping[Partition, int]) -> dict[Partition, Position]:
        """Claim partitions that are still under these epochs, whoever has them; `Fenced` if one is not."""
        assert isinstance(self._store, FencedStore)
        return self._store.reclaim(self._group, epochs, self._owner)

    def reclaim(self, epochs: Mapping[Partition, int]) -> dict[Partition, Position]:
        """After an outcome that we do not know: still ours, under a new epoch, or `Fenced`."""
        assert isinstance(self._store, FencedStore)
        try:
            return self._store.reclaim(self._group, epochs, self._owner)
        except Fenced:
            # The answer to an earlier one may have been lost on its way, and the newer epoch be our own.
            stored = self._store.load(self._group, epochs)
            ours = {p: position.epoch for p, position in stored.items() if position.owner == self._owner}
            if ours.keys() != epochs.keys() or ours == dict(epochs):
                raise
            return self._store.reclaim(self._group, ours, self._owner)

    def check_topics(self, known: Mapping[str, str], named: Sequence[str] = ()) -> None:
        """Whether those that a handler names are there, and those that we claimed are the same, by their ids; a cluster
        that does not answer proves nothing."""
        try:
            self._cluster.topics(named)
            ids = self._ids_of(known) if known else {}
        except BrokerUnavailable:
            return
        for topic, topic_id in known.items():
            if ids.get(topic) is not None and ids[topic] != topic_id:
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

    def _starts(self, missing: Sequence[Partition], added: Set[Partition]) -> dict[Partition, int]:
        # With 'latest', what was written to a new partition before somebody noticed it would be lost.
        begins = {
            p: begin if (begin := self._begin(p.topic)) != "latest" or p not in added else "earliest" for p in missing
        }
        starts: dict[Partition, int] = {}
        for begin in sorted(set(begins.values())):
            chosen = [p for p in missing if begins[p] == begin]
            if begin == "error":
                raise StartRequired(
                    f"{', '.join(map(str, chosen))} of group {self._group!r} has no stored offset in "
                    f"{self._store.address}, and start='error' asks not to choose one: set it with "
                    f"store.reset(group, {{partition: offset}}), or say start='earliest' or 'latest'"
                )
            starts.update(self._cluster.edges(chosen, begin))
        return starts

    def _added(self, partitions: Sequence[Partition]) -> set[Partition]:
        """Those that their topic did not have when we first looked."""
        unknown = {p.topic for p in partitions} - self._known.keys() - self._unread.keys()
        if self._claimed:  # a pattern matches them, and they came into being after we had joined
            self._known.update(dict.fromkeys(unknown, 0))
        elif unknown:
            self._unread.update(self._cluster.topics(sorted(unknown)))
        self._read()
        self._claimed = True
        return {p for p in partitions if p.number >= self._known[p.topic]}

    def _read(self) -> None:
        """Of a topic with offsets, all up to the last that has one are known; of one without, all that there are."""
        if self._unread:
            every = [Partition(topic, number) for topic, count in self._unread.items() for number in range(count)]
            positions, stored = self._store.load(self._group, every), dict[str, int]()
            self._must_be_the_only_store(every, positions)
            for partition in positions:
                stored[partition.topic] = max(partition.number + 1, stored.get(partition.topic, 0))
            self._known = {**self._unread, **stored, **self._known}
            self._unread = {}

    def _must_be_the_only_store(self, partitions: Sequence[Partition], stored: Positions) -> None:
        """Refuse a group whose offsets another deployment keeps elsewhere, and further than we know: its partitions
        would be handled again from where we stand. Who runs with a store says so in the Kafka group (`commits.py`)."""
        place = place_of(self._store)
        if place is None or self.is_new or not isinstance(self._store, FencedStore):
            return
        for partition, there in sorted(self._cluster.committed(self._group, partitions).items()):
            here = stored[partition].next_offset if partition in stored else None
            if place_in(there.metadata) not in (None, place) and (here is None or here < there.offset):
                raise ConfigurationError(
                    f"group {self._group!r} keeps its offsets in another store than {self._store.address}: {partition} "
                    f"stands at {there.offset} there and at {here or 0} here, so its records would be handled again. "
                    f"Give both deployments the same offsets=, or this one a group= of its own; to move the group "
                    f"here, stop the other and take its offsets over with store.reset(group, {{partition: offset}})"
                )

    def _ids_of(self, topics: Iterable[str]) -> Mapping[str, str | None]:
        try:
            return self._cluster.topic_ids(topics)
        except TopicNotFound:
            return {}  # it has gone, and no handler names it: whoever has a pattern takes what there is

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

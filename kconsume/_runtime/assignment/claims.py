"""Claims partitions in the store: the position and the epoch of each.

Blocking; runs on the background thread. A partition without a row starts where `start=` says, and that offset is stored
as a number. A topic whose id differs from the id in the row is an error.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import replace
from typing import NamedTuple, TypeAlias

from kconsume._config.options import StartPolicy
from kconsume._kafka.cluster import Cluster
from kconsume._runtime.assignment.partition_trouble import PartitionTrouble, positions_in, recreated
from kconsume._runtime.assignment.store_check import StoreCheck
from kconsume.backends.base import ClaimTerms, FencedStore, OffsetStore, Position, Positions, Refused, Start
from kconsume.backends.capabilities import capabilities_of
from kconsume.errors import (
    BrokerUnavailable,
    ConfigurationError,
    Fenced,
    StartRequired,
    TopicNotFound,
    Undecided,
)
from kconsume.records import Partition

Answers: TypeAlias = dict[Partition, Position | Refused | PartitionTrouble]


class HeldRows(NamedTuple):
    """The rows and topics that were read for held partitions."""

    rows: Mapping[Partition, Position]
    topics_there: Set[str]
    """The topics that were missing and exist now."""


class Claims:
    """Claims partitions for one consumer of a group.

    Fields: only the background thread uses them, with two exceptions. `added` is also read on the owner thread, after a
    claim was answered. `unpinned` is filled on the background thread before the claim is answered, and emptied on the
    owner thread.
    """

    def __init__(
        self, store: OffsetStore, cluster: Cluster, group: str, owner: str, begin: Callable[[str], StartPolicy]
    ) -> None:
        """
        Args:
            store: where the offsets are kept.
            cluster: answers questions about topics and the group.
            group: the consumer group.
            owner: the name of this consumer in the rows that it claims.
            begin: where the partitions of a topic start if they have no stored offset.
        """
        offers = capabilities_of(store)
        if offers.fenced is not None:
            _must_take_terms(offers.fenced)
        self.store_check = StoreCheck(store, offers.named, cluster, group)
        self.added: set[Partition] = set()
        """Claimed partitions that had been added to a topic while the group consumed it."""
        self.unpinned: set[Partition] = set()
        """Partitions that begin at the end of their log, in a store whose claim cannot pin that offset. Their first
        commit pins it."""
        self._store = store
        self._fenced = offers.fenced
        self._cluster = cluster
        self._group = group
        self._owner = owner
        self._begin = begin
        self._known: dict[str, int] = {}
        """By topic: how many partitions the group knew at our first look. Partitions beyond this number were added
        later."""
        self._unread: dict[str, int] = {}
        """By topic: how many partitions exist. Only topics whose rows were not read yet."""
        self._has_claimed = False

    def claim(
        self, partitions: Sequence[Partition], generation: int | None = None, had: Positions | None = None
    ) -> Answers:
        """Claim partitions. Afterwards the store accepts writes of this owner only.

        Returns the position of each partition, or what is wrong with it. A partition that another owner has claimed
        under a later generation, or at the same moment, is `Refused`.

        Args:
            generation: the generation of the Kafka group; None for a consumer without a group.
            had: the rows that this process owned until now, as it last saw them.
        """
        self.store_check.note_owned(had or {})
        if generation is not None and generation <= 0 and self._fenced is not None:
            cause = Fenced(f"group {self._group!r} does not list this process as a member (generation {generation})")
            return dict.fromkeys(partitions, Refused(cause))
        return self._claim(partitions, None if generation is None else ClaimTerms(generation))

    def claim_all(self, partitions: Sequence[Partition]) -> dict[Partition, Position]:
        """Claim partitions without a group. Raises if one is refused or has trouble."""
        return positions_in(self.claim(partitions))

    def take_over(self, epochs: Mapping[Partition, int], generation: int) -> Answers:
        """Claim partitions whose rows still have these epochs, under any generation of the rows. Call it only after the
        broker has confirmed the membership, and after the rows were read."""
        return self._claim(sorted(epochs), ClaimTerms(generation, epochs))

    def reclaim(self, epochs: Mapping[Partition, int]) -> Answers:
        """Claim again after an unknown outcome. If the rows still have these epochs, they get a new epoch; else
        `Fenced` is raised."""
        assert self._fenced is not None
        try:
            return self._with_ids(self._fenced.reclaim(self._group, epochs, self._owner))
        except Undecided as error:
            stopped = self._undecided(epochs, error)
            rest = {p: epoch for p, epoch in epochs.items() if p not in stopped}
            return {**stopped, **(self.reclaim(rest) if rest else {})}
        except Fenced:
            # The answer to an earlier reclaim may have been lost, so this process may have written the newer epoch
            # itself.
            stored = self._store.load(self._group, epochs)
            ours = {p: position.epoch for p, position in stored.items() if position.owner == self._owner}
            if ours.keys() != epochs.keys() or ours == dict(epochs):
                raise
            return self._with_ids(self._fenced.reclaim(self._group, ours, self._owner))

    def seek(self, offsets: Mapping[Partition, int], generation: int | None = None) -> Answers:
        """Set offsets that the user chose, under a new epoch, and claim the partitions again."""
        if self._fenced is not None:
            self._fenced.reset(self._group, offsets)
            return self.claim(list(offsets), generation)
        ids = self._cluster.topic_ids(p.topic for p in offsets)
        return {p: Position(offset, topic_id=ids[p.topic]) for p, offset in offsets.items()}

    def rows(self, partitions: Sequence[Partition]) -> dict[Partition, Position]:
        """The rows in the store, under any owner."""
        return self._store.load(self._group, partitions)

    def read_held(self, partitions: Sequence[Partition], missing: Sequence[str]) -> HeldRows:
        """The rows of partitions that are held, and which of the missing topics exist by now. Claims nothing."""
        return HeldRows(self._store.load(self._group, partitions), frozenset(self._cluster.those_there(missing)))

    def note_partition_counts(self, counts: Mapping[str, int]) -> None:
        """Note how many partitions these topics have before the consumer joins."""
        self._unread.update(counts)

    def read_stored_partitions(self) -> None:
        """Learn which partitions the group knows. If a topic has stored offsets, the group knows all partitions up to
        the last one with an offset; else it knows all partitions of the topic. Raises if the group keeps its offsets in
        another store."""
        if self._unread:
            every = [Partition(topic, number) for topic, count in self._unread.items() for number in range(count)]
            positions, stored = self._store.load(self._group, every), dict[str, int]()
            self.store_check.must_be_same(every, positions)
            for partition in positions:
                stored[partition.topic] = max(partition.number + 1, stored.get(partition.topic, 0))
            self._known = {**self._unread, **stored, **self._known}
            self._unread = {}

    def _claim(self, partitions: Sequence[Partition], terms: ClaimTerms | None) -> Answers:
        ids, troubles = self._topic_ids(partitions)
        wanted = [p for p in partitions if p not in troubles]
        added = self._added(wanted)

        def start(missing: Sequence[Partition]) -> Positions:
            return self._start(missing, added, ids, terms)

        answers: Answers = dict(troubles)
        while wanted:
            try:
                answers.update(self._same_topics(self._ask_store(wanted, start, terms), ids))
            except StartRequired as error:
                answers.update({p: PartitionTrouble(error, None, open_lane=False) for p in error.partitions})
                wanted = [p for p in wanted if p not in error.partitions]
            except Undecided as error:
                answers.update(stopped := self._undecided(wanted, error))
                wanted = [p for p in wanted if p not in stopped]
            except TopicNotFound as error:  # a topic was deleted while we asked where its log begins
                there = self._cluster.those_there({p.topic for p in wanted})
                gone = [p for p in wanted if p.topic not in there]
                if not gone:
                    raise
                answers.update({p: PartitionTrouble(error, None, open_lane=False) for p in gone})
                wanted = [p for p in wanted if p.topic in there]
            else:
                break
        return answers

    def _start(
        self,
        missing: Sequence[Partition],
        added: set[Partition],
        ids: Mapping[str, str | None],
        terms: ClaimTerms | None,
    ) -> Positions:
        """The positions of partitions without a row. The store calls it inside its claim."""
        reasons = self.store_check.explain_missing(missing)
        self.added.update(added.intersection(missing))
        offsets = self.start_offsets(missing, added)
        self.store_check.log_starts(offsets, reasons)
        starts = {p: Position(offsets[p], topic_id=ids[p.topic]) for p in missing}
        at_the_end = {p: starts[p] for p in missing if self._begin(p.topic) == "latest" and p not in added}
        if self._fenced is None:
            self.unpinned.update(at_the_end)
        elif at_the_end and terms is not None:
            self._pin_whole_topics(self._fenced, at_the_end)
        return starts

    def _ask_store(
        self, partitions: Sequence[Partition], start: Start, terms: ClaimTerms | None
    ) -> Mapping[Partition, Position | Refused]:
        if self._fenced is not None:
            return self._fenced.claim(self._group, partitions, self._owner, start, terms)
        positions = self._store.load(self._group, partitions)
        missing = [p for p in partitions if p not in positions]
        positions.update(start(missing) if missing else {})
        return positions

    def _undecided(self, partitions: Iterable[Partition], error: Undecided) -> dict[Partition, PartitionTrouble]:
        """The partitions with a record that failed half-way. The store refuses every claim of these partitions until a
        user has decided about the record. The decision changes the rows."""
        stopped = [p for p in partitions if p in error.partitions]
        if not stopped:
            raise error
        rows = self._store.load(self._group, stopped)
        return {p: PartitionTrouble(error, rows.get(p), open_lane=False) for p in stopped}

    # Topics

    def _topic_ids(
        self, partitions: Sequence[Partition]
    ) -> tuple[dict[str, str | None], dict[Partition, PartitionTrouble]]:
        """The id of each topic that exists, and the partitions of topics that do not exist."""
        topics = sorted({p.topic for p in partitions})
        try:
            return self._cluster.topic_ids(topics), {}
        except TopicNotFound as error:
            if len(topics) == 1:
                return {}, {p: PartitionTrouble(error, None, open_lane=False) for p in partitions}
        ids, troubles = dict[str, str | None](), dict[Partition, PartitionTrouble]()
        for topic in topics:  # a topic is missing: ask for each topic alone, so that the others are claimed
            known, missing = self._topic_ids([p for p in partitions if p.topic == topic])
            ids.update(known)
            troubles.update(missing)
        return ids, troubles

    def _same_topics(self, answers: Mapping[Partition, Position | Refused], ids: Mapping[str, str | None]) -> Answers:
        """The answers, but with a `PartitionTrouble` for each partition whose topic was deleted and created again after
        the offset was stored. A stored position without a topic id gets the topic's present id."""
        known: Answers = {}
        for partition, answer in answers.items():
            topic_id = ids.get(partition.topic)
            if isinstance(answer, Refused) or topic_id is None or answer.topic_id == topic_id:
                known[partition] = answer
            elif answer.topic_id is not None:
                known[partition] = PartitionTrouble(
                    recreated(self._group, partition, answer, topic_id), answer, open_lane=False
                )
            else:
                known[partition] = self._save_topic_id(partition, replace(answer, topic_id=topic_id))
        return known

    def _save_topic_id(self, partition: Partition, position: Position) -> Position | Refused:
        if self._fenced is not None:
            try:
                self._fenced.save(self._group, {partition: position})
            except Fenced as error:
                return Refused(error)  # another owner has claimed the partition since; the others are still ours
        return position

    def _with_ids(self, positions: Positions) -> Answers:
        """The positions, with topic ids for rows that have none because they were reset. Without an id, it would go
        unnoticed if the topic is made again."""
        if all(position.topic_id is not None for position in positions.values()):
            return dict(positions)
        try:
            ids, _ = self._topic_ids(list(positions))
        except BrokerUnavailable:
            return dict(positions)  # without the missing ids; the next claim asks for them again
        return self._same_topics(positions, ids)

    # Starts

    def start_offsets(self, missing: Sequence[Partition], added: Set[Partition]) -> dict[Partition, int]:
        """Where partitions without a stored offset begin. A subclass may choose other offsets.

        Args:
            missing: the partitions.
            added: partitions that were added to a topic while the group consumed it.
        """
        # With 'latest', an added partition would lose the records that were written before we noticed the partition.
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
                    f"store.reset(group, {{partition: offset}}), or say start='earliest' or 'latest'",
                    chosen,
                )
            starts.update(self._cluster.edges(chosen, begin))
        return starts

    def _pin_whole_topics(self, store: FencedStore, ours: Positions) -> None:
        """With 'latest', store the start of all partitions of a topic at the same moment. Otherwise a partition that no
        member claims now would start later: at the end that its log has when the partition is first claimed.

        The rows get generation 0. So any member can claim them, and this claim takes no partition from another member.
        """
        ids = {p.topic: start.topic_id for p, start in ours.items()}
        every = [Partition(topic, number) for topic in sorted(ids) for number in range(self._known[topic])]
        there = store.load(self._group, every)
        others = [p for p in every if p not in there and p not in ours]
        if not others:
            return
        others = self.store_check.may_start(others)
        ends = self._cluster.edges(others, "latest") if others else {}
        pinned = {**ours, **{p: Position(ends[p], topic_id=ids[p.topic]) for p in others}}
        store.claim(self._group, sorted(pinned), self._owner, lambda _: pinned, ClaimTerms(0))

    def _added(self, partitions: Sequence[Partition]) -> set[Partition]:
        """The partitions that their topic did not have when we first looked."""
        unknown = {p.topic for p in partitions} - self._known.keys() - self._unread.keys()
        if self._has_claimed:  # these topics match a pattern and were made after we had joined
            self._known.update(dict.fromkeys(unknown, 0))
        elif unknown:
            self._unread.update(self._cluster.topics(sorted(unknown)))
        self.read_stored_partitions()
        self._has_claimed = True
        return {p for p in partitions if p.number >= self._known[p.topic]}


def _must_take_terms(store: FencedStore) -> None:
    """Refuse a store that was written before claims were ordered: a late claim would fence the rightful owner."""
    try:
        inspect.signature(store.claim).bind("group", (), "owner", None, None)
    except ValueError:
        return  # a function that is not written in Python may have no signature
    except TypeError:
        raise ConfigurationError(
            f"{type(store).__name__}.claim() takes no `terms`, by which claims are ordered: add a parameter "
            f"`terms: ClaimTerms | None = None` behind `start`, return `Refused` for a row that "
            f"kconsume.backends.claim.accepts() does not accept, and run FencedSuite of kconsume.testing.conformance"
        ) from None

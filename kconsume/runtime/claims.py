"""Where to start, and with what right: a partition's position and epoch, from the store.

Blocking; run as an errand. Decides nothing silently: a missing row starts where the person said, pinned as a
number; a topic that is not the one the offset was stored for is an error.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import replace
from typing import Literal, NamedTuple, TypeAlias

from kconsume.backends.abc import ClaimTerms, FencedStore, NamedStore, OffsetStore, Position, Positions, Refused, Start
from kconsume.backends.commit_note import Source, StoreName, name_of, source_in
from kconsume.backends.kafka import KafkaStore
from kconsume.cluster import Cluster
from kconsume.errors import (
    BrokerUnavailable,
    ClientFailed,
    ConfigurationError,
    Fenced,
    KconsumeError,
    RowLost,
    StartRequired,
    StoreUnavailable,
    TopicNotFound,
    TopicRecreated,
    Undecided,
)
from kconsume.records import Partition
from kconsume.runtime.same_store import Shown, Verdict, judged
from kconsume.runtime.trouble import NOT_SKIPPED, Trouble, choices, positions_in, recreated

_log = logging.getLogger("kconsume.rebalance")

Answers: TypeAlias = dict[Partition, Position | Refused | Trouble]

Begin = Literal["earliest", "latest", "error"]


class Look(NamedTuple):
    """What was found out about partitions that are held."""

    rows: Mapping[Partition, Position]
    there: Set[str]
    """Those of the missing topics that are there."""


class Claims:
    """Claims partitions for one consumer of a group."""

    def __init__(
        self, store: OffsetStore, cluster: Cluster, group: str, owner: str, begin: Callable[[str], Begin]
    ) -> None:
        """`begin`: where partitions of a topic start that have no stored offset."""
        if isinstance(store, FencedStore):
            _must_take_terms(store)
        self._store = store
        self._cluster = cluster
        self._group = group
        self._owner = owner
        self._begin = begin
        self.added: set[Partition] = set()
        """Partitions that were claimed, and had been added to a topic that the group consumes."""
        self.unpinned: set[Partition] = set()
        """Partitions that begin at the end of their log, where the store has no claim that would pin that: their first
        commit does. Added to by the errand thread, before the claim is answered; taken from by the owner."""
        self.seen: set[str] = set()
        """Topics that were there when we looked: if one of them goes, that is its own trouble. Read by the owner."""
        self._known: dict[str, int] = {}
        """By topic: how many partitions the group knew of when we first looked. Those beyond were added since."""
        self._unread: dict[str, int] = {}
        """How many there were in topics of which the store has not been asked yet."""
        self._claimed = False
        self.answered = False
        """Whether the store has answered once."""
        self.unanswered: BaseException | None = None
        """Why the survey was not answered; from then on a claim has to tell."""
        self.waits_for_topics = False
        """Whether no topic matches the patterns: then the client does not join its group."""
        self.name: StoreName | None = None
        """How the store is told from others, once it was asked; None for one that is forgotten with the process."""
        self._is_named = False
        self._shown: dict[Partition, Shown] = {}
        """What the Kafka group showed when we last asked."""
        self._had: dict[Partition, Position] = {}
        """Rows that we held ourselves: a row that is gone is known to have been there, also where the group does not
        show it yet, or never, because it refuses our commits."""
        self.is_new = False
        """Whether the cluster was asked for the group and knows none: then it has no offset of it either."""

    def survey(self, topics: Iterable[str], matches: Callable[[str], bool] | None = None) -> None:
        """What there is, before we join; `TopicNotFound` if one is not there. `matches`: of a consumer that names no
        topic, whether its patterns take one.

        Asked later, the store would also tell of what other members of a new group have claimed by then, and the rest
        of their topic would look as if it had been added.
        """
        there = self._cluster.topics(sorted(topics))
        self.seen.update(there)
        self._unread.update(there)
        try:
            self.waits_for_topics = matches is not None and not any(map(matches, self._cluster.all_topics()))
            self._read()
        except (StoreUnavailable, BrokerUnavailable) as error:
            self.unanswered = error  # the first claim asks again; without one, `check_topics` does
        else:
            self.answered, self.unanswered = True, None

    def make_topics(self, wanted: Mapping[str, str]) -> None:
        """Make those that are not there, each like the topic it is named with."""
        self._cluster.make_topics(wanted)

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

    def claim(
        self, partitions: Sequence[Partition], generation: int | None = None, had: Positions | None = None
    ) -> Answers:
        """From here on the partitions are ours in the store; returns where each stands, or what is wrong with it. One
        that another has claimed under a later generation, or in the same moment, is `Refused`. `generation` is None for
        one who is in no group. `had`: the rows that we have held until now, as we know them."""
        self._had.update(had or {})
        if generation is not None and generation <= 0 and isinstance(self._store, FencedStore):
            cause = Fenced(f"group {self._group!r} does not know us as a member (generation {generation})")
            return dict.fromkeys(partitions, Refused(cause))
        return self._claim(partitions, None if generation is None else ClaimTerms(generation))

    def claim_all(self, partitions: Sequence[Partition]) -> dict[Partition, Position]:
        """As one whose partitions no group gives away: what is refused, or wrong, is raised."""
        return positions_in(self.claim(partitions))

    def take_over(self, epochs: Mapping[Partition, int], generation: int) -> Answers:
        """Claim partitions whose rows are still under these epochs, whatever their generation: the broker has confirmed
        us since the rows were read."""
        return self._claim(sorted(epochs), ClaimTerms(generation, epochs))

    def _claim(self, partitions: Sequence[Partition], terms: ClaimTerms | None) -> Answers:
        ids, troubles = self._topic_ids(partitions)
        wanted = [p for p in partitions if p not in troubles]
        added = self._added(wanted)

        def start(missing: Sequence[Partition]) -> Positions:
            reasons = self._must_not_be_lost(missing)
            self.added.update(added.intersection(missing))
            offsets = self._starts(missing, added)
            self._tell_of_starts(offsets, reasons)
            starts = {p: Position(offsets[p], topic_id=ids[p.topic]) for p in missing}
            at_the_end = {p: starts[p] for p in missing if self._begin(p.topic) == "latest" and p not in added}
            if not isinstance(self._store, FencedStore):
                self.unpinned.update(at_the_end)
            elif at_the_end and terms is not None:
                self._pin_with_the_others(self._store, at_the_end)
            return starts

        answers: Answers = dict(troubles)
        while wanted:
            try:
                answers.update(self._same_topics(self._ask(wanted, start, terms), ids))
            except StartRequired as error:
                answers.update({p: Trouble(error, None, open_lane=False) for p in error.partitions})
                wanted = [p for p in wanted if p not in error.partitions]
            except Undecided as error:
                answers.update(waiting := self._waiting(wanted, error))
                wanted = [p for p in wanted if p not in waiting]
            except TopicNotFound as error:  # it went while we asked where its log begins
                there = self._cluster.those_there({p.topic for p in wanted})
                gone = [p for p in wanted if p.topic not in there]
                if not gone:
                    raise
                answers.update({p: Trouble(error, None, open_lane=False) for p in gone})
                wanted = [p for p in wanted if p.topic in there]
            else:
                break
        return answers

    def _waiting(self, partitions: Iterable[Partition], error: Undecided) -> dict[Partition, Trouble]:
        """Those of which a record failed half-way. The store gives them to nobody until a user has decided, and that
        changes their rows."""
        stopped = [p for p in partitions if p in error.partitions]
        if not stopped:
            raise error
        rows = self._store.load(self._group, stopped)
        return {p: Trouble(error, rows.get(p), open_lane=False) for p in stopped}

    def _topic_ids(self, partitions: Sequence[Partition]) -> tuple[dict[str, str | None], dict[Partition, Trouble]]:
        """The id of each topic that is there, and the partitions of those that are not."""
        topics = sorted({p.topic for p in partitions})
        try:
            return self._cluster.topic_ids(topics), {}
        except TopicNotFound as error:
            if len(topics) == 1:
                return {}, {p: Trouble(error, None, open_lane=False) for p in partitions}
        ids, troubles = dict[str, str | None](), dict[Partition, Trouble]()
        for topic in topics:  # one of them is gone: ask for each, so that the others are claimed
            known, missing = self._topic_ids([p for p in partitions if p.topic == topic])
            ids.update(known)
            troubles.update(missing)
        return ids, troubles

    def _ask(
        self, partitions: Sequence[Partition], start: Start, terms: ClaimTerms | None
    ) -> Mapping[Partition, Position | Refused]:
        if isinstance(self._store, FencedStore):
            return self._store.claim(self._group, partitions, self._owner, start, terms)
        positions = self._store.load(self._group, partitions)
        missing = [p for p in partitions if p not in positions]
        positions.update(start(missing) if missing else {})
        return positions

    def _same_topics(self, answers: Mapping[Partition, Position | Refused], ids: Mapping[str, str | None]) -> Answers:
        """The same, where the topic is still the one that the position belongs to. An id that was not known is kept."""
        known: Answers = {}
        for partition, answer in answers.items():
            topic_id = ids.get(partition.topic)
            if isinstance(answer, Refused) or topic_id is None or answer.topic_id == topic_id:
                known[partition] = answer
            elif answer.topic_id is not None:
                known[partition] = Trouble(recreated(self._group, partition, answer, topic_id), answer, open_lane=False)
            else:
                known[partition] = self._learnt(partition, replace(answer, topic_id=topic_id))
        return known

    def rows(self, partitions: Sequence[Partition]) -> dict[Partition, Position]:
        """What the store has, claimed by whomever."""
        return self._store.load(self._group, partitions)

    def _learnt(self, partition: Partition, position: Position) -> Position | Refused:
        """The store learns the id of a topic that it did not know."""
        if isinstance(self._store, FencedStore):
            try:
                self._store.save(self._group, {partition: position})
            except Fenced as error:
                return Refused(error)  # claimed by another since; the others are ours all the same
        return position

    def reclaim(self, epochs: Mapping[Partition, int]) -> Answers:
        """After an outcome that we do not know: still ours, under a new epoch, or `Fenced`."""
        assert isinstance(self._store, FencedStore)
        try:
            return self._with_ids(self._store.reclaim(self._group, epochs, self._owner))
        except Undecided as error:
            waiting = self._waiting(epochs, error)
            rest = {p: epoch for p, epoch in epochs.items() if p not in waiting}
            return {**waiting, **(self.reclaim(rest) if rest else {})}
        except Fenced:
            # The answer to an earlier one may have been lost on its way, and the newer epoch be our own.
            stored = self._store.load(self._group, epochs)
            ours = {p: position.epoch for p, position in stored.items() if position.owner == self._owner}
            if ours.keys() != epochs.keys() or ours == dict(epochs):
                raise
            return self._with_ids(self._store.reclaim(self._group, ours, self._owner))

    def _with_ids(self, positions: Positions) -> Answers:
        """A row that was reset has no topic id. It is asked for, so that a topic that is made again is noticed."""
        if all(position.topic_id is not None for position in positions.values()):
            return dict(positions)
        try:
            ids, _ = self._topic_ids(list(positions))
        except BrokerUnavailable:
            return dict(positions)  # the next claim asks again
        return self._same_topics(positions, ids)

    def check_topics(self, known: Mapping[str, str], named: Sequence[str] = ()) -> dict[str, KconsumeError]:
        """What is wrong with topics: one that a handler names is not there, or one that we claimed is not the same, by
        its id. A cluster that does not answer proves nothing. A store that has not answered the survey is asked again.
        """
        if self.unanswered is not None:
            self.survey(named)
        found: dict[str, KconsumeError] = {}
        try:
            for topic in named:
                try:
                    self._cluster.topics([topic])
                except TopicNotFound as error:
                    found[topic] = error
            ids = self._ids_of(known) if known else {}
        except BrokerUnavailable:
            return {}
        for topic, topic_id in known.items():
            now = ids.get(topic)
            if now is not None and now != topic_id:
                found[topic] = TopicRecreated(
                    f"topic {topic!r} had id {topic_id} and now has {now}: it was deleted and made again while it was "
                    f"consumed. {NOT_SKIPPED} {choices(self._group)}"
                )
        return found

    def look(self, partitions: Sequence[Partition], missing: Sequence[str]) -> Look:
        """What the store has of partitions that are held, and which of these topics are there by now."""
        return Look(self._store.load(self._group, partitions), frozenset(self._cluster.those_there(missing)))

    def restart(self, offsets: Mapping[Partition, int], generation: int | None = None) -> Answers:
        """Set offsets by a person's word, under a new epoch, and claim again."""
        if isinstance(self._store, FencedStore):
            self._store.reset(self._group, offsets)
            return self.claim(list(offsets), generation)
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
                    f"store.reset(group, {{partition: offset}}), or say start='earliest' or 'latest'",
                    chosen,
                )
            starts.update(self._cluster.edges(chosen, begin))
        return starts

    def _pin_with_the_others(self, store: FencedStore, ours: Positions) -> None:
        """With 'latest', all partitions of a topic begin at the same moment, in one step: another's, whose owner does
        not come to claim them, would else begin where the log ends on the day that somebody does.

        Under generation 0, so that the claim of any member takes them, and this one takes nothing from any.
        """
        ids = {p.topic: start.topic_id for p, start in ours.items()}
        every = [Partition(topic, number) for topic in sorted(ids) for number in range(self._known[topic])]
        there = store.load(self._group, every)
        others = [p for p in every if p not in there and p not in ours]
        if not others:
            return
        self._shown.update(self._asked(others, {}))
        others = [p for p in others if self._judged(p, None).starts]
        ends = self._cluster.edges(others, "latest") if others else {}
        pinned = {**ours, **{p: Position(ends[p], topic_id=ids[p.topic]) for p in others}}
        store.claim(self._group, sorted(pinned), self._owner, lambda _: pinned, ClaimTerms(0))

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
            self._must_be_the_same_store(every, positions)
            for partition in positions:
                stored[partition.topic] = max(partition.number + 1, stored.get(partition.topic, 0))
            self._known = {**self._unread, **stored, **self._known}
            self._unread = {}

    def _must_be_the_same_store(self, partitions: Sequence[Partition], stored: Positions) -> None:
        """Refuse a group whose offsets are kept elsewhere, and further than we know: its records would be handled again
        from where we stand. Who runs with a store says so in the Kafka group (`commits.py`)."""
        self._shown.update(self._asked(partitions, stored))
        behind: list[Partition] = []
        for partition in sorted(stored.keys() | self._shown.keys() & set(partitions)):
            match self._judged(partition, stored.get(partition)):
                case Verdict.ANOTHER:
                    raise self._another_store(partition, self._shown[partition], stored.get(partition))
                case Verdict.BEHIND:
                    behind.append(partition)
        if behind:
            _log.warning(
                "store is behind what it has shown before, records are handled again store=%s partitions=%s reason=%s",
                self._store.address,
                " ".join(f"{p}@{stored[p].next_offset} (committed {self._shown[p].offset})" for p in behind),
                Verdict.BEHIND.value,
            )

    def _must_not_be_lost(self, missing: Sequence[Partition]) -> dict[Partition, tuple[Verdict, Shown | None]]:
        """Why these have no row. One whose row is gone is not started: the records up to where it stood would be
        skipped, or handled again. Asked anew: since the survey another member may have had the partition."""
        for partition in missing:
            self._shown.pop(partition, None)
        self._shown.update(self._asked(missing, {}))
        self._shown.update(self._held_until_now(missing))
        found = {p: (self._judged(p, None), self._shown.get(p)) for p in sorted(missing)}
        for partition, (verdict, shown) in found.items():
            if verdict is Verdict.ANOTHER and shown is not None:
                raise self._another_store(partition, shown, None)
        if lost := {p: shown for p, (verdict, shown) in found.items() if verdict is Verdict.LOST and shown is not None}:
            raise self._lost(lost)
        return found

    def _held_until_now(self, missing: Sequence[Partition]) -> dict[Partition, Shown]:
        """What we know ourselves of rows that are gone, where the group shows less. What it shows of another store
        stands."""
        if self.name is None:
            return {}
        known = {p: Shown(h.next_offset, Source(self.name.kind, self.name.id, h.epoch)) for p, h in self._had.items()}
        return {p: mine for p in missing if (mine := known.get(p)) and not self._shows_more(p, mine)}

    def _shows_more(self, partition: Partition, mine: Shown) -> bool:
        shown = self._shown.get(partition)
        if shown is None or shown.source is None or self.name is None:
            return False
        return not shown.source.is_of(self.name) or shown.offset >= mine.offset

    def _asked(self, partitions: Sequence[Partition], stored: Positions) -> dict[Partition, Shown]:
        """What the Kafka group shows of them."""
        if not self._is_named:
            self.name, self._is_named = name_of(self._store), True
        if self.name is None or self.is_new:
            return {}
        if isinstance(self._store, KafkaStore):
            return {p: Shown(row.next_offset, source_in(row.metadata)) for p, row in stored.items()}
        committed = self._cluster.committed(self._group, partitions)
        return {p: Shown(each.offset, source_in(each.metadata)) for p, each in committed.items()}

    def _judged(self, partition: Partition, row: Position | None) -> Verdict:
        if self.name is None:
            return Verdict.NEW if row is None else Verdict.FINE
        verdict = judged(self.name, self._shown.get(partition), row, None)
        if verdict is not Verdict.LOST:
            return verdict
        if not isinstance(self._store, NamedStore):
            return Verdict.UNKNOWN  # it does not keep which rows were deleted
        deleted = self._store.deleted(self._group, [partition]).get(partition)
        return judged(self.name, self._shown.get(partition), row, deleted)

    def _tell_of_starts(
        self, offsets: Mapping[Partition, int], reasons: Mapping[Partition, tuple[Verdict, Shown | None]]
    ) -> None:
        for verdict in sorted({verdict for verdict, _ in reasons.values()}, key=str):
            where = " ".join(
                f"{p}@{offsets[p]}" + ("" if shown is None else f" (committed {shown.offset})")
                for p, (reason, shown) in sorted(reasons.items())
                if reason is verdict
            )
            why = verdict.value if self.name is not None else f"{self._store.address} forgets its rows with the process"
            level = logging.WARNING if verdict is Verdict.UNKNOWN else logging.INFO
            _log.log(level, "no stored offset, begins where start= says partitions=%s reason=%s", where, why)

    def _another_store(self, partition: Partition, there: Shown, row: Position | None) -> ConfigurationError:
        here = "has no row here" if row is None else f"at {row.next_offset} here"
        return ConfigurationError(
            f"group {self._group!r} keeps its offsets in another store than {self._store.address}: {partition} "
            f"stands at {there.offset} there and {here}, so its records would be handled again or skipped. Give both "
            f"deployments the same offsets=, or this one a group= of its own. To move the group here, or if the other "
            f"store is gone, stop the other deployment and set the offsets with "
            f"store.reset(group, {{Partition({partition.topic!r}, {partition.number}): {there.offset}, ...}})"
        )

    def _lost(self, lost: Mapping[Partition, Shown]) -> RowLost:
        stood = ", ".join(f"{p} at {shown.offset}" for p, shown in lost.items())
        (partition, shown), *_ = lost.items()
        named = f"Partition({partition.topic!r}, {partition.number})"
        return RowLost(
            f"{self._store.address} has lost rows of group {self._group!r}: it had {stood}, has no row now, and nobody "
            f"has deleted it with store.delete. Nothing was skipped. Restore the rows, or choose: "
            f"store.reset(group, {{{named}: {shown.offset}}}) to go on from there, or "
            f"store.delete(group, [{named}]) to begin where start= says",
            lost,
        )

    def _ids_of(self, topics: Iterable[str]) -> Mapping[str, str | None]:
        try:
            return self._cluster.topic_ids(topics)
        except TopicNotFound:
            return {}  # it has gone, and no handler names it: whoever has a pattern takes what there is


def _must_take_terms(store: FencedStore) -> None:
    """Refuse a store of the time before claims were ordered: it would let a late claim fence the rightful owner."""
    try:
        inspect.signature(store.claim).bind("group", (), "owner", None, None)
    except ValueError:
        return  # what is not written in Python does not say what it takes
    except TypeError:
        raise ConfigurationError(
            f"{type(store).__name__}.claim() takes no `terms`, by which claims are ordered: add a parameter "
            f"`terms: ClaimTerms | None = None` behind `start`, answer with `Refused` for a row that "
            f"kconsume.backends.claiming.accepts() does not accept, and run FencedSuite of kconsume.testing.conformance"
        ) from None

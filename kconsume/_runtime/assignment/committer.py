"""Sends watermarks to the place where offsets are kept, and collects the receipts.

Two committers have one contract: they send one set of offsets at a time, and its receipt is collected later. Only
`settle` and `hand_over` wait. `GroupCommitter` commits to the Kafka group, `StoreCommitter` saves to any other store.
All methods are called on the owner thread.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from typing import NamedTuple, Protocol

from kconsume._event_log import EventLog
from kconsume._kafka.commit_metadata import StoreName, note_of, numbered
from kconsume._kafka.commit_result import CommitResult, OffsetToCommit
from kconsume._kafka.two_member_consumer import AnyConsumer
from kconsume._runtime.assignment.partition import OwnedPartition, State
from kconsume._runtime.background import BackgroundThread
from kconsume._runtime.deadlines import Deadline
from kconsume.backends.base import OffsetStore, Position
from kconsume.errors import Fenced, KconsumeError, StoreUnavailable
from kconsume.records import Partition

_log = EventLog("commits")

UNANSWERED = 15.0
"""Seconds until a commit to the Kafka group is given up, because its coordinator is lost."""
_REMEMBERED = 100
"""How many given-up commits are kept, so that their late answers are recognised."""


class CommitEntry(NamedTuple):
    """An offset to store, and the token of the partition when the offset was sent. A late answer is recognised by the
    token."""

    owned: OwnedPartition
    offset: int
    token: object


CommitEntries = Mapping[Partition, CommitEntry]


class Receipt(NamedTuple):
    """The answer to a set of offsets."""

    kept: CommitEntries
    """The offsets that are stored now."""
    fenced: Mapping[Partition, tuple[CommitEntry, BaseException]]
    """The offsets that were refused because another owner has claimed the partition."""
    error: str | None = None
    generation: int | None = None
    """The generation of the Kafka group, if it did not change between sending and answer."""
    faults: Mapping[Partition, tuple[CommitEntry, KconsumeError]] = {}
    """The errors of single partitions whose offsets cannot be stored."""


class Committer(Protocol):
    """Sends offsets, one set at a time. On the owner thread; only `settle` and `hand_over` may block."""

    @property
    def busy(self) -> bool:
        """Whether an answer is outstanding."""
        ...

    def send(self, entries: CommitEntries) -> None:
        """Send a set of offsets. Not while `busy`."""
        ...

    def collect(self) -> Receipt | None:
        """The next answer, if there is one. Raises errors that must end the consumer."""
        ...

    def settle(self, deadline: Deadline) -> None:
        """Wait for the outstanding answer, if the next offsets depend on it."""
        ...

    def hand_over(self, entries: CommitEntries, deadline: Deadline) -> None:
        """Send the last offsets of partitions that leave, so that they are stored before the next owner reads them."""
        ...


class _SentCommit(NamedTuple):
    """A commit to the Kafka group whose answer is outstanding."""

    entries: CommitEntries
    generation: int
    """The generation of the group when the commit was sent."""
    number: int
    """How many commits had been given up when this commit was sent. The number distinguishes this commit from them."""
    until: Deadline

    def is_answered_by(self, result: CommitResult) -> bool:
        offsets = {p: entry.offset for p, entry in self.entries.items()}
        return self.number == result.number and offsets == result.offsets


class GroupCommitter:
    """Offsets committed to the Kafka group, by the member that owns the partition.

    A commit that is not answered in time is given up, so that the next one is sent. The client may still send the old
    commit, and the broker may accept it. The late answer only says which offset the group has now; this may be an
    earlier offset than that of a later commit. The late answer does not answer another commit and does not confirm our
    membership.
    """

    def __init__(
        self, consumer: AnyConsumer, *, advisory: bool = False, name: Callable[[], StoreName | None] = lambda: None
    ) -> None:
        """consumer: commits, and collects the results while it polls.

        Args:
            advisory: whether the offsets are a mirror of another store, so that a refused commit does no harm.
            name: the name of that store, written into the commit metadata for the other members.
        """
        self._consumer = consumer
        self._advisory = advisory
        self._name = name
        self._sent: list[_SentCommit] = []
        self._given_up: deque[_SentCommit] = deque(maxlen=_REMEMBERED)
        """Commits that were not answered in time, the latest last."""
        self._given_up_count = 0
        self._last_error: str | None = None
        """The error of the last answer. The same error is logged once, not every second."""
        self.coordinator_is_lost = False
        """Whether the last commit had no answer."""

    @property
    def busy(self) -> bool:
        return bool(self._sent)

    def send(self, entries: CommitEntries) -> None:
        name = self._name()
        for member, part in self._consumer.by_member(entries):
            number = self._given_up_count
            self._sent.append(_SentCommit(part, member.generation(), number, Deadline(UNANSWERED)))
            member.commit(
                {
                    p: OffsetToCommit(offset, o.leader_epoch, numbered(note_of(o.topic_id, name, _epoch_of(o)), number))
                    for p, (o, offset, _) in part.items()
                }
            )

    def collect(self) -> Receipt | None:
        if not self._consumer.commit_results:
            self._give_up_unanswered()
            return None
        result = self._consumer.commit_results.pop(0)
        (entries, generation), last_error, self._last_error = self._take_sent(result), self._last_error, result.error
        if result.refusal is not None and not self._advisory:
            raise result.refusal
        if result.error is not None and result.error != last_error:
            # Normal for partitions that stay during a rebalance. The next commit has the same offsets or later ones.
            level = logging.INFO if result.met_rebalance else logging.WARNING
            _log.at(
                level, "commit refused", cause=result.error, effect="tried again while this process owns the partitions"
            )
        kept = {p: entry for p, entry in entries.items() if p not in result.refused}
        confirmed = bool(kept) and generation == result.generation
        faults = (
            {} if self._advisory else {p: (entries[p], why) for p, why in result.refused.items() if why is not None}
        )
        return Receipt(kept, {}, result.error, generation if confirmed else None, faults)

    def settle(self, deadline: Deadline) -> None:
        """Does nothing: a commit does not depend on the previous one, and polling brings its answer."""

    def hand_over(self, entries: CommitEntries, deadline: Deadline) -> None:  # noqa: ARG002  (nothing to wait for)
        # The commit leaves before the client's next join, on the same connection.
        self.send(entries)

    def _give_up_unanswered(self) -> None:
        for sent in [sent for sent in self._sent if sent.until.passed]:
            self._sent.remove(sent)
            self._given_up.append(sent)
            self._given_up_count += 1
            self.coordinator_is_lost = True
            _log.warning(
                "coordinator lost",
                partitions=sorted(sent.entries),
                cause=f"no answer to a commit for {UNANSWERED:g} s",
                effect="sent again",
            )

    def _take_sent(self, result: CommitResult) -> tuple[CommitEntries, int | None]:
        """The offsets that this result answers, and their generation; None for a commit that was given up.

        Results may arrive out of order. A commit that the client repeats at another coordinator is answered after later
        commits. A commit that the client refuses to send is answered before earlier commits.

        A result that matches no sent set proves nothing. The sets with its partitions are given up, because their own
        answers may never come. The next commit sends their offsets again.
        """
        for sent in self._sent:
            if sent.is_answered_by(result):
                self._sent.remove(sent)
                self.coordinator_is_lost = False
                return sent.entries, sent.generation
        for sent in self._given_up:
            if sent.is_answered_by(result):
                self._given_up.remove(sent)
                return sent.entries, None
        _log.warning("commit answer unknown", offsets=result.offsets, cause="these offsets were not sent")
        self._sent = [sent for sent in self._sent if sent.entries.keys().isdisjoint(result.offsets)]
        return {}, None


def _epoch_of(owned: OwnedPartition) -> int:
    """The epoch of the row whose offset is committed."""
    row = None if owned.state is not State.FENCED or owned.confirmation is None else owned.confirmation.row
    return owned.epoch if row is None else row.epoch


class StoreCommitter:
    """Offsets saved to an external store. A separate background thread does only these saves, so that a slow claim does
    not delay the saves of healthy partitions.

    The order between a claim and the saves of the same partition is kept as follows:

    - A save is sent only for an open partition. So no save is sent between the claim of a partition and its answer.
    - A save may be under way when its partition is taken away. The lane notes the save, and the next claim of the
      partition waits for it (`OwnedPartition.waits_for_previous_lane`). If the claim overtook the save, a fenced store
      would refuse the save because of its earlier epoch, and the records of the save would be handled again. A store
      without epochs would accept the save, and the next lane would not know.
    - Claims of other members are not ordered with our saves; the epoch protects against them. A save that such a claim
      overtakes is refused, and its receipt changes nothing, because its token is no longer current.
    - Saves stay in order, because only one is sent at a time.
    """

    def __init__(self, store: OffsetStore, group: str, thread: BackgroundThread) -> None:
        self._store = store
        self._group = group
        self._thread = thread
        self._sent: CommitEntries = {}
        self._unknown: CommitEntries = {}
        """Offsets whose answer was lost. They are sent again unchanged: the row has the old or the new offset."""
        self._answer: Future[dict[Partition, BaseException]] | None = None
        self.store_error = ""
        """Why the last save was not answered, if it was not."""

    @property
    def busy(self) -> bool:
        return self._answer is not None

    def send(self, entries: CommitEntries) -> None:
        entries = {p: self._as_before(p, entry) for p, entry in entries.items()}
        positions = {
            p: Position(offset, o.epoch, o.topic_id, leader_epoch=o.leader_epoch, previous=o.stored)
            for p, (o, offset, _) in entries.items()
        }
        self._sent = entries
        self._answer = self._thread.send(lambda: self._save(positions))
        for owned, _, _ in entries.values():
            if owned.lane is not None:
                owned.lane.last_save = self._answer

    def _as_before(self, partition: Partition, entry: CommitEntry) -> CommitEntry:
        unknown = self._unknown.get(partition)
        return unknown if unknown is not None and unknown.token is entry.token else entry

    def collect(self) -> Receipt | None:
        answer = self._answer
        if answer is None or not answer.done():
            return None
        self._answer = None
        error = answer.exception()
        if error is None:
            fenced, self._unknown, self.store_error = answer.result(), {}, ""
            kept = {p: entry for p, entry in self._sent.items() if p not in fenced}
            return Receipt(kept, {p: (self._sent[p], cause) for p, cause in fenced.items()})
        if isinstance(error, StoreUnavailable):
            self._unknown, self.store_error = self._sent, str(error)
            _log.warning("save failed", cause=error, effect="tried again")
            return Receipt({}, {}, str(error))
        raise error

    def settle(self, deadline: Deadline) -> None:
        """Wait for the previous save: the next save names the offset that the row has then (compare-and-set)."""
        if self._answer is not None:
            wait([self._answer], timeout=deadline.left)

    def hand_over(self, entries: CommitEntries, deadline: Deadline) -> None:
        if not self.busy:
            self.send(entries)
        if self._answer is not None and wait([self._answer], timeout=deadline.left).not_done:
            _log.error("save timed out", partitions=sorted(entries), effect="the next owner handles the records again")

    def _save(self, positions: dict[Partition, Position]) -> dict[Partition, BaseException]:
        try:
            self._store.save(self._group, positions)
        except Fenced:
            return self._save_each(positions)
        return {}

    def _save_each(self, positions: dict[Partition, Position]) -> dict[Partition, BaseException]:
        """Save each row alone, to find out which rows are fenced. A save of several rows is all or nothing."""
        fenced: dict[Partition, BaseException] = {}
        for partition, position in positions.items():
            try:
                self._store.save(self._group, {partition: position})
            except Fenced as error:
                fenced[partition] = error
        return fenced

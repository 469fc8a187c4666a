"""How watermarks reach the place where they are kept, and how we know that they did.

Two ledgers with one contract: send a set of marks, one set at a time, and collect the receipts later; nothing
here waits, but for `settle` and `hand_over`. `GroupLedger` is the Kafka group itself; `StoreLedger` is any other store.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from typing import NamedTuple, Protocol

from kconsume.backends.abc import OffsetStore, Position
from kconsume.backends.commit_note import StoreName, note_of
from kconsume.errors import Fenced, KconsumeError, StoreUnavailable
from kconsume.records import Partition
from kconsume.runtime.budget import Deadline
from kconsume.runtime.errands import Errands
from kconsume.runtime.holding import Holding, State
from kconsume.runtime.source import CommitResult, Mark
from kconsume.runtime.split_source import AnySource

_log = logging.getLogger("kconsume.commits")


class Entry(NamedTuple):
    """An offset to keep, and the token of who asked for it: by it a late answer is recognised."""

    holding: Holding
    offset: int
    token: object


Marks = Mapping[Partition, Entry]


class Receipt(NamedTuple):
    """The answer to a set of marks: which are kept now, and which were refused because we were fenced."""

    kept: Marks
    fenced: Mapping[Partition, tuple[Entry, BaseException]]
    error: str | None = None
    generation: int | None = None
    """Of the Kafka group, if it was the same when the marks were sent and when they were answered."""
    faults: Mapping[Partition, tuple[Entry, KconsumeError]] = {}
    """What is wrong with single partitions, so that they cannot be kept."""


class Ledger(Protocol):
    @property
    def busy(self) -> bool:
        """Whether an answer is still awaited."""
        ...

    def send(self, marks: Marks) -> None: ...

    def collect(self) -> Receipt | None: ...

    def settle(self, deadline: Deadline) -> None:
        """Await the answer that is under way, if what is sent next depends on it."""
        ...

    def hand_over(self, marks: Marks, deadline: Deadline) -> None:
        """Send the last marks of partitions that leave, so that they are kept before the next owner looks."""
        ...


class GroupLedger:
    """Offsets committed to the Kafka group, by the member that has the partition."""

    def __init__(
        self, source: AnySource, *, advisory: bool = False, name: Callable[[], StoreName | None] = lambda: None
    ) -> None:
        """`advisory`: the offsets that count are kept elsewhere, so a commit that is refused harms nobody. `name`:
        which store that is, for others of the group to see."""
        self._source = source
        self._advisory = advisory
        self._name = name
        self._sent: list[tuple[Marks, int]] = []
        """Each with the generation under which it was sent."""
        self._refused: str | None = None
        """What the last answer said, if it was a refusal: reported once, and not each second."""

    @property
    def busy(self) -> bool:
        return bool(self._sent)

    def send(self, marks: Marks) -> None:
        name = self._name()
        for member, part in self._source.parts(marks):
            self._sent.append((part, member.generation()))
            member.commit(
                {
                    p: Mark(offset, h.leader_epoch, note_of(h.topic_id, name, _epoch_of(h)))
                    for p, (h, offset, _) in part.items()
                }
            )

    def collect(self) -> Receipt | None:
        if not self._source.commit_results:
            return None
        result = self._source.commit_results.pop(0)
        (marks, generation), said, self._refused = self._answered(result), self._refused, result.error
        if result.refusal is not None and not self._advisory:
            raise result.refusal
        if result.error is not None and result.error != said:
            # What works on during a rebalance meets it: nothing is lost, for the next commit has the same offsets.
            level = logging.INFO if result.met_rebalance else logging.WARNING
            _log.log(level, "commit refused, tried again if still owned error=%r", result.error)
        kept = {p: entry for p, entry in marks.items() if p not in result.refused}
        confirmed = bool(kept) and generation == result.generation
        faults = {} if self._advisory else {p: (marks[p], why) for p, why in result.refused.items() if why is not None}
        return Receipt(kept, {}, result.error, generation if confirmed else None, faults)

    def settle(self, deadline: Deadline) -> None:
        """A commit does not depend on the one before, and its answer comes by polling."""

    def hand_over(self, marks: Marks, deadline: Deadline) -> None:  # noqa: ARG002  (nothing to wait for)
        # It goes out before the client's next join, on the same connection.
        self.send(marks)

    def _answered(self, result: CommitResult) -> tuple[Marks, int]:
        """What was sent. Not always the oldest: what the client sends again, to a coordinator that has moved, is
        answered after later ones, and what it refuses to send before earlier ones.

        An answer to nothing that was sent proves nothing. What was sent of its partitions is given up with it, and sent
        again with the next commit: an answer of its own may never come.
        """
        for sent in self._sent:
            if {p: entry.offset for p, entry in sent[0].items()} == result.offsets:
                self._sent.remove(sent)
                return sent
        _log.warning("the answer to a commit names offsets that were not sent offsets=%s", result.offsets)
        self._sent = [sent for sent in self._sent if sent[0].keys().isdisjoint(result.offsets)]
        return {}, -1


def _epoch_of(holding: Holding) -> int:
    """Of the row whose offset is committed."""
    row = None if holding.state is not State.EJECTED or holding.confirmation is None else holding.confirmation.row
    return holding.epoch if row is None else row.epoch


class StoreLedger:
    """Offsets saved to an external store, off the owner thread.

    On a thread of their own, so that a claim which the store is slow to answer delays no save of a partition that is
    healthy. The order between a claim and the saves of the same partition is kept all the same:

    - A save is sent for an open partition only, so none is sent between the claim of a partition and its answer.
    - A save that is under way when the partition goes is noted with its lane, and the next claim of the partition waits
      for it (`Holding.is_awaited`). Overtaken by the claim it would do no harm to the row: on a fenced store it comes
      under the earlier epoch and is refused. But the records that it stands for would be handled again, and a store
      without epochs would take it, behind the back of the next lane.
    - Another member's claim was never ordered with our saves: that is what the epoch is for. A save that it overtakes
      is refused, and the receipt changes nothing, because its token is no longer current.
    - Saves among themselves stay in order: there is one at a time.
    """

    def __init__(self, store: OffsetStore, group: str, errands: Errands) -> None:
        self._store = store
        self._group = group
        self._errands = errands
        self._sent: Marks = {}
        self._unknown: Marks = {}
        """Those whose answer was lost. They are sent again as they were: the row is at the old offset, or at theirs."""
        self._answer: Future[dict[Partition, BaseException]] | None = None

    @property
    def busy(self) -> bool:
        return self._answer is not None

    def send(self, marks: Marks) -> None:
        marks = {p: self._as_before(p, entry) for p, entry in marks.items()}
        positions = {
            p: Position(offset, h.epoch, h.topic_id, leader_epoch=h.leader_epoch, previous=h.stored)
            for p, (h, offset, _) in marks.items()
        }
        self._sent = marks
        self._answer = self._errands.send(lambda: self._save(positions))
        for holding, _, _ in marks.values():
            if holding.lane is not None:
                holding.lane.save = self._answer

    def _as_before(self, partition: Partition, entry: Entry) -> Entry:
        unknown = self._unknown.get(partition)
        return unknown if unknown is not None and unknown.token is entry.token else entry

    def collect(self) -> Receipt | None:
        answer = self._answer
        if answer is None or not answer.done():
            return None
        self._answer = None
        error = answer.exception()
        if error is None:
            fenced, self._unknown = answer.result(), {}
            kept = {p: entry for p, entry in self._sent.items() if p not in fenced}
            return Receipt(kept, {p: (self._sent[p], cause) for p, cause in fenced.items()})
        if isinstance(error, StoreUnavailable):
            self._unknown = self._sent
            _log.warning("store away, tried again error=%r", str(error))
            return Receipt({}, {}, str(error))
        raise error

    def settle(self, deadline: Deadline) -> None:
        """A row is moved from where the answer before says it is."""
        if self._answer is not None:
            wait([self._answer], timeout=deadline.left)

    def hand_over(self, marks: Marks, deadline: Deadline) -> None:
        if not self.busy:
            self.send(marks)
        if self._answer is not None and wait([self._answer], timeout=deadline.left).not_done:
            _log.error("not saved in time, handled again by the next owner partitions=%s", ",".join(map(str, marks)))

    def _save(self, positions: dict[Partition, Position]) -> dict[Partition, BaseException]:
        try:
            self._store.save(self._group, positions)
        except Fenced:
            return self._save_each(positions)
        return {}

    def _save_each(self, positions: dict[Partition, Position]) -> dict[Partition, BaseException]:
        """All or none was none: find out whose fault it was."""
        fenced: dict[Partition, BaseException] = {}
        for partition, position in positions.items():
            try:
                self._store.save(self._group, {partition: position})
            except Fenced as error:
                fenced[partition] = error
        return fenced

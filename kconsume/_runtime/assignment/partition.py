"""One assigned partition, its claims, and its confirmation after a fence: values with a little state.

The owner thread writes them. A claim on the background thread reads `OwnedPartition.token` of the partitions in a
`Membership`.

A late answer (a report of a lane, a claim, a confirmation) is recognised by its *token*: the object that was in charge
of the partition when the question was asked. `Assignment.current` compares the token with the object in charge now.
"""

from __future__ import annotations

import enum
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import NamedTuple

from kconsume._runtime.assignment.partition_trouble import PartitionTrouble
from kconsume._runtime.assignment.watermark import Watermark
from kconsume._runtime.deadlines import Deadline
from kconsume._runtime.lanes.lane import Lane
from kconsume.backends.base import Position, Positions, Refused
from kconsume.records import Partition

Answers = Mapping[Partition, Position | Refused | PartitionTrouble]
"""The answer to a claim, by partition: the position, the refusal of the store, or the trouble of the partition."""


class State(enum.Enum):
    CLAIMING = "claiming"
    OPEN = "open"
    FENCED = "fenced"
    HELD = "held"
    """The claim found trouble. A partition that was open when its trouble appeared stays `OPEN`."""


class OwnedPartition:
    """One assigned partition, and the only holder of its offsets."""

    __slots__ = (
        "answered", "claim", "claim_tries", "confirmation", "epoch", "handled", "lane", "leader_epoch",
        "listeners_know", "mirrored", "moved_at", "opened_at", "partition", "pause_reasons", "previous_lane",
        "progress", "sought", "state", "stored", "topic_id", "trouble",
    )  # fmt: skip

    def __init__(self, partition: Partition, previous_lane: Lane | None = None) -> None:
        self.partition = partition
        self.state = State.CLAIMING
        self.claim: PendingClaim | None = None
        """Its latest claim."""
        self.confirmation: Confirmation | None = None
        """The steps to claim it again, after the store has refused our work or our claim."""
        self.lane: Lane | None = None
        self.previous_lane = previous_lane
        """The lane before this one. It may still be busy with its last record."""
        self.progress = Watermark(0)
        self.epoch = 0
        self.topic_id: str | None = None
        self.leader_epoch: int | None = None
        self.stored: int | None = None
        """The offset that the store is known to have."""
        self.moved_at: float | None = None
        """When the stored offset moved last."""
        self.opened_at: float | None = None
        """When its claim succeeded."""
        self.mirrored: int | None = None
        """The offset that the Kafka group is known to have, where the offsets are kept in another store."""
        self.pause_reasons: set[str] = {"claim"}
        """Why it is paused at the client: 'claim', 'start', 'pressure', 'user', 'trouble'. A new partition is paused
        for 'claim', which only the answer to the claim removes. 'start' is removed when the first offset is stored."""
        self.sought: int | None = None
        """The offset of a user's seek that the store has not answered yet."""
        self.trouble: PartitionTrouble | None = None
        """Why it is held, while it is held."""
        self.answered = False
        """Whether its first claim was answered: the partition is open, or it is known why not."""
        self.claim_tries = 0
        """How many claims were made since records were last finished."""
        self.handled = 0
        """How many records were finished or skipped."""
        self.listeners_know = False
        """Whether the listeners were told that the partition is assigned."""

    def note_stored(self, offset: int) -> None:
        """Note that the store has this offset now."""
        if offset != self.stored:
            self.stored, self.moved_at = offset, time.monotonic()

    @property
    def token(self) -> object:
        """The object that is in charge of the partition now."""
        match self.state:
            case State.CLAIMING:
                return self.claim
            case State.OPEN:
                return self.lane
            case State.FENCED:
                return self.confirmation
            case State.HELD:
                return self.trouble

    @property
    def waits_for_previous_lane(self) -> bool:
        """Whether the next lane must wait: the handler of the previous lane runs, or its offset is being saved."""
        return self.previous_lane is not None and (self.previous_lane.occupied or not self.previous_lane.is_saved)

    @property
    def unsaved(self) -> bool:
        """Whether the periodic save must save the offset. False where the transactions of the lane move the offset. If
        a row had two writers, neither would know the last offset of the row, and the two would fence each other at each
        gap in the log."""
        if self.lane is None or self.lane.commits_itself:
            return False
        return self.progress.watermark != self.stored

    @property
    def offset_to_mirror(self) -> int | None:
        """The offset to commit to the Kafka group, because the store is ahead of the mirror or to confirm our
        membership. None while a claim is pending: our copy of the row may be behind the offset of the group."""
        if self.state is State.FENCED:
            row = None if self.confirmation is None else self.confirmation.row
            return None if row is None else row.next_offset
        if self.state is not State.OPEN or self.stored == self.mirrored:
            return None
        return self.stored

    @property
    def is_running(self) -> bool:
        """Whether its lane may still report."""
        return self.lane is not None and self.lane.unfinished

    @property
    def is_done(self) -> bool:
        """Whether all delivered records are finished. For a held partition: all records that can still be finished."""
        return self.progress.idle if self.trouble is None else not self.is_running


class Membership(NamedTuple):
    """Our partitions, and for each the generation of the Kafka group in which it is ours. Both are read together,
    inside a callback of the client."""

    generations: Mapping[Partition, int | None]
    """The generations by partition; None for a consumer without a group."""
    partitions: Mapping[Partition, OwnedPartition]


ClaimCall = Callable[[list[Partition], int | None], Answers]
"""Claims partitions in the store, under a generation. Called with the partitions that are still ours at that time."""


class PendingClaim:
    """A claim, from its planning until its partitions open.

    The claim waits for its due time and for the previous lanes, then for the answer of the store, then for the
    listeners. Two lanes of one partition never run at the same time, because records would be handled out of order.
    """

    def __init__(self, partitions: Mapping[Partition, OwnedPartition], call: ClaimCall, pause: float = 0.0) -> None:
        """pause: seconds until the claim is due."""
        self.partitions = partitions
        self.call = call
        self.answer: Future[Answers] | None = None
        self.positions: Positions | None = None
        self.listeners_called: Future[None] | None = None
        self.listeners_deadline = Deadline(0.0)
        self._due = Deadline(pause)
        for owned in partitions.values():
            owned.claim = self

    @property
    def ready(self) -> bool:
        """Whether the claim can be sent."""
        due = bool(self.partitions) and self._due.passed
        return due and not any(owned.waits_for_previous_lane for owned in self.partitions.values())


class Confirmation:
    """Confirms our membership for a partition that the store has refused. First the row of the partition is read, then
    the offset of the row is committed to the group. If the broker accepts the commit, the partition is claimed under
    the epoch of the row."""

    def __init__(self, pause: float = 0.0) -> None:
        """pause: seconds until the row is read."""
        self.due = Deadline(pause)
        self.reading: Future[dict[Partition, Position]] | None = None
        self.row: Position | None = None

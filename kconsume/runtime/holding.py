"""One assigned partition, and what it waits for: values with a little state, all on the owner thread.

Whatever answers later (a lane, a claim, a confirmation) is recognised by its *token*: the object that was in charge of
the partition when the question was asked. `Tenancy.current` compares it with the one in charge now.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import NamedTuple

from kconsume.backends.abc import Position, Positions, Refused
from kconsume.records import Partition
from kconsume.runtime.budget import Deadline
from kconsume.runtime.lanes import Lane
from kconsume.runtime.tracker import Tracker
from kconsume.runtime.trouble import Trouble

Answers = Mapping[Partition, Position | Refused | Trouble]
"""What a claim got for each partition: where it stands, why the store refused it, or what is wrong with it."""


class State(enum.Enum):
    CLAIMING = "claiming"
    OPEN = "open"
    EJECTED = "ejected"
    HELD = "held"
    """Its claim found that something is wrong with it. One that was open stays so when it is held."""


class Holding:
    """One assigned partition."""

    __slots__ = (
        "answered", "claim", "closed", "confirmation", "epoch", "handled", "held", "lane", "leader_epoch", "mirrored",
        "partition", "state", "stored", "told", "topic_id", "tracker", "tries", "trouble",
    )  # fmt: skip

    def __init__(self, partition: Partition, closed: Lane | None = None) -> None:
        self.partition = partition
        self.state = State.CLAIMING
        self.claim: Claim | None = None
        """The latest one for it."""
        self.confirmation: Confirmation | None = None
        """How it comes back, once the store has refused us."""
        self.lane: Lane | None = None
        self.closed = closed
        """The lane before, which may still be busy with its last record."""
        self.tracker = Tracker(0)
        self.epoch = 0
        self.topic_id: str | None = None
        self.leader_epoch: int | None = None
        self.stored: int | None = None
        """The offset that the store is known to have."""
        self.mirrored: int | None = None
        """The offset that the Kafka group is known to have, where the store is another."""
        self.held: set[str] = {"claim"}
        """Why it is paused at the client: 'claim', 'start', 'pressure', 'person', 'trouble'. It is assigned paused, and
        nothing but the answer to its claim takes 'claim' away; 'start' goes when its first offset is kept."""
        self.trouble: Trouble | None = None
        """Why it is held, while it is."""
        self.answered = False
        """Whether its first claim was answered: it has flowed, or waits for what is known."""
        self.tries = 0
        """Claims since something was last finished."""
        self.handled = 0
        """Records that were finished, or skipped."""
        self.told = False
        """Whether listeners were told that it is ours."""

    @property
    def token(self) -> object:
        """What is in charge of the partition now."""
        match self.state:
            case State.CLAIMING:
                return self.claim
            case State.OPEN:
                return self.lane
            case State.EJECTED:
                return self.confirmation
            case State.HELD:
                return self.trouble

    @property
    def is_awaited(self) -> bool:
        """Whether its next lane has to wait for the one before."""
        return self.closed is not None and (self.closed.occupied or not self.closed.is_saved)

    @property
    def watermark(self) -> int | None:
        """How far it may be committed; None while that is not ours to say."""
        return None if self.lane is None else self.tracker.watermark

    @property
    def unsaved(self) -> bool:
        """Whether its offset is to be saved from here. Never where the lane's own transactions move it: a row with two
        writers does not have the offset that one of them saw last, and at each gap in the log they would meet."""
        if self.lane is None or self.lane.commits_itself:
            return False
        return self.tracker.watermark != self.stored


class Membership(NamedTuple):
    """The partitions that are ours, and the Kafka group's generation in which each is: read together in a callback."""

    generations: Mapping[Partition, int | None]
    """None for one who is in no group."""
    holdings: Mapping[Partition, Holding]


Errand = Callable[[list[Partition], int | None], Answers]
"""Asks the store for partitions, those that are still ours when it is asked, under the generation of that moment."""


class Claim:
    """Partitions that wait for the store: until the claim is due and their earlier lanes have come to rest (two lanes
    of one partition never run at once, or order would be lost), then for the answer, then for listeners."""

    def __init__(self, holdings: Mapping[Partition, Holding], errand: Errand, pause: float = 0.0) -> None:
        self.holdings = holdings
        self.errand = errand
        self.answer: Future[Answers] | None = None
        self.positions: Positions | None = None
        self.told: Future[None] | None = None
        self.listening = Deadline(0.0)
        """How long listeners are waited for."""
        self._due = Deadline(pause)
        for holding in holdings.values():
            holding.claim = self

    @property
    def ready(self) -> bool:
        return bool(self.holdings) and self._due.passed and not any(h.is_awaited for h in self.holdings.values())


class Confirmation:
    """The way back of a partition that the store refused us: its row is read, the row's own offset is committed to the
    group, and if the broker accepts that from us, the partition is claimed under the epoch that was read."""

    def __init__(self, pause: float = 0.0) -> None:
        self.due = Deadline(pause)
        self.reading: Future[dict[Partition, Position]] | None = None
        self.row: Position | None = None

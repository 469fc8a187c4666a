"""One assigned partition, and what it waits for: values with a little state, all on the owner thread."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from concurrent.futures import Future

from kconsume.backends.abc import Position, Positions
from kconsume.records import Partition
from kconsume.runtime.budget import Deadline
from kconsume.runtime.lanes import Lane
from kconsume.runtime.tracker import Tracker


class State(enum.Enum):
    CLAIMING = "claiming"
    OPEN = "open"
    EJECTED = "ejected"


class Holding:
    """One assigned partition."""

    __slots__ = (
        "claim", "closed", "epoch", "handled", "held", "lane", "leader_epoch", "mirrored", "partition", "state",
        "stored", "told", "topic_id", "tracker", "tries",
    )  # fmt: skip

    def __init__(self, partition: Partition, closed: Lane | None = None) -> None:
        self.partition = partition
        self.state = State.CLAIMING
        self.claim: Claim | None = None
        """The latest one for it; the answer to an earlier one is not for it any more."""
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
        self.held: set[str] = set()
        """Why it is paused: 'claim', 'pressure', 'person'."""
        self.tries = 0
        """Claims since something was last finished."""
        self.handled = 0
        """Records that were finished, or skipped."""
        self.told = False
        """Whether listeners were told that it is ours."""

    @property
    def watermark(self) -> int | None:
        """How far it may be committed; None while that is not ours to say."""
        return None if self.lane is None else self.tracker.watermark

    @property
    def unsaved(self) -> bool:
        return self.watermark is not None and self.watermark != self.stored


Errand = Callable[[list[Partition]], dict[Partition, Position]]
"""Asks the store for partitions, those that are still ours when it is asked."""


class Claim:
    """Partitions that wait for the store: until the claim is due and their earlier lanes have come to rest (two lanes
    of one partition never run at once, or order would be lost), then for the answer, then for listeners."""

    def __init__(self, holdings: Mapping[Partition, Holding], errand: Errand, pause: float = 0.0) -> None:
        self.holdings = holdings
        self.errand = errand
        self.answer: Future[dict[Partition, Position]] | None = None
        self.positions: Positions | None = None
        self.told: Future[None] | None = None
        self.listening = Deadline(0.0)
        """How long listeners are waited for."""
        self._due = Deadline(pause)
        for holding in holdings.values():
            holding.claim = self

    @property
    def ready(self) -> bool:
        return self._due.passed and not any(h.closed is not None and h.closed.busy for h in self.holdings.values())

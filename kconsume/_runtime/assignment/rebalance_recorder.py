"""Combines the client's callbacks into one `Rebalance`, from the first callback until all new partitions are open.

The client calls back several times in one rebalance (revoked or lost, then assigned, often with an empty list) and
never gives a reason. Known reasons are those of this process: it has just joined, it leaves, it was evicted, or it
changed its subscription.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime

from kconsume._runtime.observation.events import Events, RebalanceEnded
from kconsume.rebalance.events import Rebalance
from kconsume.records import Partition


class RebalanceRecorder:
    """The rebalance of one consumer that has not ended. All methods are called on the owner thread."""

    def __init__(self, protocol: str, events: Events) -> None:
        """protocol: the protocol of the group, for the record.

        Args:
            events: gets `RebalanceEnded`.
        """
        self._protocol = protocol
        self._events = events
        self._has_joined = False
        self._expected: str | None = None
        self._open: _Open | None = None

    @property
    def is_open(self) -> bool:
        """Whether a rebalance has begun and not ended."""
        return self._open is not None

    def expect(self, reason: str) -> None:
        """Note that this consumer causes the next rebalance, and the reason."""
        self._expected = reason

    def begins(self, kept: Iterable[Partition]) -> None:
        """Note that a callback began.

        Args:
            kept: our partitions that this callback does not take away.
        """
        if self._open is None:
            self._open = _Open(self._expected or ("members" if self._has_joined else "joined"))
            self._expected, self._has_joined = None, True
        self._open.kept = set(kept)

    def gives_up(
        self, partitions: Sequence[Partition], drained: int, dropped: int, abandoned: Sequence[Partition]
    ) -> None:
        """Note that partitions were revoked.

        Args:
            drained: records that were finished since the callback began.
            dropped: records that had not started and were dropped.
            abandoned: partitions whose handler still runs.
        """
        rebalance = self._now()
        rebalance.gives(partitions)
        rebalance.drained += drained
        rebalance.dropped += dropped
        rebalance.abandoned.update(abandoned)

    def loses(self, partitions: Sequence[Partition], dropped: int) -> None:
        """Note that partitions were lost: other members may have them already."""
        rebalance = self._now()
        rebalance.reason, rebalance.success = "lost", False
        rebalance.gives(partitions)
        rebalance.dropped += dropped

    def gains(self, partitions: Sequence[Partition]) -> None:
        """Note that partitions were assigned."""
        rebalance = self._now()
        rebalance.gained.update(partitions)
        rebalance.waiting.update(partitions)
        rebalance.is_assigned = True

    def opened(self, partitions: Iterable[Partition], *, added: bool) -> None:
        """Note that claimed partitions are open now.

        Args:
            added: whether some of them were added to their topic while the group consumed it.
        """
        if self._open is not None:
            self._open.waiting.difference_update(partitions)
            if added and self._open.reason == "members":
                self._open.reason = "partitions"

    def held(self, partitions: Iterable[Partition]) -> None:
        """Note that the claim of these partitions found trouble. They do not open, and the rebalance does not wait for
        them."""
        if self._open is not None:
            self._open.waiting.difference_update(partitions)
            self._open.success = False

    def so_far(self) -> Rebalance:
        """The rebalance as it is now, for listeners that are called before it ends."""
        return self._now().value(self._protocol)

    def ends(self) -> None:
        """End the rebalance, if there is one and all new partitions are open."""
        if self._open is not None and self._open.is_assigned and not self._open.waiting:
            self._close()

    def leaves(self) -> None:
        """End the rebalance after the last callback: the consumer has left the group."""
        if self._open is not None:
            self._close()

    def _now(self) -> _Open:
        if self._open is None:
            self.begins(())
        assert self._open is not None
        return self._open

    def _close(self) -> None:
        rebalance, self._open = self._now().value(self._protocol), None
        self._events.publish(RebalanceEnded(rebalance))


class _Open:
    """A rebalance that has not ended."""

    def __init__(self, reason: str) -> None:
        self.reason = reason
        self.gained: set[Partition] = set()
        self.gone: set[Partition] = set()
        self.kept: set[Partition] = set()
        self.waiting: set[Partition] = set()
        """Partitions that are assigned and not open yet."""
        self.drained = 0
        self.dropped = 0
        self.abandoned: set[Partition] = set()
        self.success = True
        self.is_assigned = False
        """Whether the client has already called `assigned` in this rebalance."""
        self._began = datetime.now(UTC)
        self._clock = time.monotonic()

    def gives(self, partitions: Sequence[Partition]) -> None:
        self.gone.update(partitions)
        if not self.waiting.isdisjoint(partitions):
            self.success = False  # their claim was not answered, so they were never open here
        self.waiting.difference_update(partitions)  # their next owner opens them

    def value(self, protocol: str) -> Rebalance:
        return Rebalance(
            reason=self.reason,
            protocol=protocol,
            gained=tuple(sorted(self.gained)),
            gone=tuple(sorted(self.gone)),
            kept=tuple(sorted(self.kept)),
            began=self._began,
            duration=time.monotonic() - self._clock,
            drained=self.drained,
            dropped=self.dropped,
            abandoned=tuple(sorted(self.abandoned)),
            success=self.success and not self.abandoned and not self.waiting,
        )

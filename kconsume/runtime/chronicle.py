"""Makes one record of a rebalance out of the client's callbacks: from the first of them until what is new flows.

The client calls back in pieces (revoked or lost, then assigned, often with nothing) and never says why. The reason is
what can be told from here: whether we have just joined, leave, were put out, or changed our subscription.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime

from kconsume.rebalance.record import History, Rebalance
from kconsume.records import Partition

_log = logging.getLogger("kconsume.rebalance")


class Chronicle:
    """The rebalances of one consumer. Written on the owner thread; `history` may be read on any."""

    def __init__(self, protocol: str) -> None:
        self.history = History(datetime.now(UTC))
        self._protocol = protocol
        self._ever = False
        self._expected: str | None = None
        self._open: _Open | None = None

    def expect(self, reason: str) -> None:
        """The next rebalance is of our own making."""
        self._expected = reason

    def begins(self, kept: Iterable[Partition]) -> None:
        """A callback came. `kept`: what we have, and this callback does not take."""
        if self._open is None:
            self._open = _Open(self._expected or ("members" if self._ever else "joined"))
            self._expected, self._ever = None, True
        self._open.kept = set(kept)

    def gives_up(
        self, partitions: Sequence[Partition], drained: int, dropped: int, abandoned: Sequence[Partition]
    ) -> None:
        rebalance = self._now()
        rebalance.gives(partitions)
        rebalance.drained += drained
        rebalance.dropped += dropped
        rebalance.abandoned.update(abandoned)

    def loses(self, partitions: Sequence[Partition], dropped: int) -> None:
        rebalance = self._now()
        rebalance.reason, rebalance.success = "lost", False
        rebalance.gives(partitions)
        rebalance.dropped += dropped

    def gains(self, partitions: Sequence[Partition]) -> None:
        rebalance = self._now()
        rebalance.gained.update(partitions)
        rebalance.waiting.update(partitions)
        rebalance.told = True

    def opened(self, partitions: Iterable[Partition], *, added: bool) -> None:
        """They flow now. `added`: some of them are new in their topic."""
        if self._open is not None:
            self._open.waiting.difference_update(partitions)
            if added and self._open.reason == "members":
                self._open.reason = "partitions"

    def held(self, partitions: Iterable[Partition]) -> None:
        """Their claim found that something is wrong with them: they do not flow, and are not waited for."""
        if self._open is not None:
            self._open.waiting.difference_update(partitions)
            self._open.success = False

    def so_far(self) -> Rebalance:
        """As it stands, for those who are told in the middle of it."""
        return self._now().value(self._protocol)

    def ends(self) -> None:
        """Close the record, if there is one and nothing new still waits."""
        if self._open is not None and self._open.told and not self._open.waiting:
            self._close()

    def leaves(self) -> None:
        """The last callback has been: we have left the group."""
        if self._open is not None:
            self._close()

    def _now(self) -> _Open:
        if self._open is None:
            self.begins(())
        assert self._open is not None
        return self._open

    def _close(self) -> None:
        rebalance, self._open = self._now().value(self._protocol), None
        self.history.add(rebalance)
        _log.info("rebalance %s", rebalance)


class _Open:
    """A rebalance that is going on."""

    def __init__(self, reason: str) -> None:
        self.reason = reason
        self.gained: set[Partition] = set()
        self.gone: set[Partition] = set()
        self.kept: set[Partition] = set()
        self.waiting: set[Partition] = set()
        """Gained, and not open yet."""
        self.drained = 0
        self.dropped = 0
        self.abandoned: set[Partition] = set()
        self.success = True
        self.told = False
        """Whether the client has said what is new."""
        self._began = datetime.now(UTC)
        self._clock = time.monotonic()

    def gives(self, partitions: Sequence[Partition]) -> None:
        self.gone.update(partitions)
        if not self.waiting.isdisjoint(partitions):
            self.success = False  # their claim has not succeeded: they never flowed here
        self.waiting.difference_update(partitions)  # whoever has them now opens them

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

"""Which partitions are ours, and in what state: from claim to release.

    claiming ──► open ──► gone         revoked: finished with and committed first; lost: gone at once
        ▲          │
        └─ ejected ┘     the store refused us; claimed again once the broker has confirmed our membership

All on the owner thread. The client's callbacks come in through `assigned`, `revoked` and `lost`; the loop calls
`step` on each turn for what takes time. Nothing here waits, but for the half second that `assigned` gives a claim.
"""

from __future__ import annotations

import enum
import logging
import random
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Protocol

from kconsume.backends.abc import Position
from kconsume.errors import BrokerUnavailable, Fenced, StoreUnavailable
from kconsume.records import Partition
from kconsume.runtime.budget import Deadline
from kconsume.runtime.claims import Claims
from kconsume.runtime.errands import Errands
from kconsume.runtime.lanes import Lane
from kconsume.runtime.source import Place, Source
from kconsume.runtime.tracker import Tracker

_log = logging.getLogger("kconsume.rebalance")

CLAIM_PATIENCE = 0.5
_BACKOFF_MOST = 15.0


class State(enum.Enum):
    CLAIMING = "claiming"
    OPEN = "open"
    EJECTED = "ejected"


class Holding:
    """One assigned partition."""

    __slots__ = (
        "closed", "epoch", "held", "lane", "leader_epoch", "mirrored", "partition", "state", "stored",
        "topic_id", "tracker", "tries",
    )  # fmt: skip

    def __init__(self, partition: Partition, closed: Lane | None = None) -> None:
        self.partition = partition
        self.state = State.CLAIMING
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

    @property
    def watermark(self) -> int | None:
        """How far it may be committed; None while that is not ours to say."""
        return None if self.lane is None else self.tracker.watermark

    @property
    def unsaved(self) -> bool:
        return self.watermark is not None and self.watermark != self.stored


_ClaimErrand = Callable[[], dict[Partition, Position]]


class LaneMaker(Protocol):
    """Makes the lane of a partition that was claimed."""

    def __call__(self, partition: Partition, position: Position, /) -> Lane: ...


class _Claiming:
    """A claim on its way."""

    def __init__(self, holdings: Mapping[Partition, Holding], answer: Future[dict[Partition, Position]]) -> None:
        self.holdings = holdings
        self.answer = answer


class _Planned:
    """A claim to be made when it is due and the partitions' earlier lanes have come to rest: two lanes of one
    partition never run at once, or order would be lost."""

    def __init__(self, holdings: Mapping[Partition, Holding], pause: float, errand: _ClaimErrand | None = None) -> None:
        self.holdings = holdings
        self.errand = errand
        self._due = Deadline(pause)

    @property
    def ready(self) -> bool:
        return self._due.passed and not any(h.closed is not None and h.closed.busy for h in self.holdings.values())


class Tenancy:
    """The partitions that one consumer holds."""

    def __init__(
        self, claims: Claims, errands: Errands, make_lane: LaneMaker, *, shutdown: float, grouped: bool
    ) -> None:
        self.holdings: dict[Partition, Holding] = {}
        self.paused: set[Partition] = set()
        """What the person asked to pause."""
        self.abandoned: list[Partition] = []
        """Partitions that were given up while their handler still ran."""
        self.joined = False
        self._claims = claims
        self._errands = errands
        self._make_lane = make_lane
        self._shutdown = shutdown
        self._grouped = grouped
        self._resting: dict[Partition, Lane] = {}
        """The last lane of each partition that went; it may still be busy when the partition comes back."""
        self._claiming: list[_Claiming] = []
        self._planned: list[_Planned] = []
        self._late: list[tuple[Lane, Deadline]] = []
        """Lanes of partitions that went, with a handler that still runs."""
        self._source: Source | None = None

    def attach(self, source: Source, see_off: Callable[[list[Holding]], None]) -> None:
        """The source whose callbacks come here, and how to finish with partitions that were revoked."""
        self._source = source
        self._see_off = see_off

    @property
    def source(self) -> Source:
        assert self._source is not None
        return self._source

    @property
    def settled(self) -> bool:
        """Whether every partition is open, with no claim on its way."""
        return self.joined and all(h.state is State.OPEN for h in self.holdings.values())

    # Called inside the client's callbacks

    def assigned(self, partitions: list[Partition]) -> Mapping[Partition, Place]:
        self.joined = True
        if not partitions:
            return {}
        new = {p: Holding(p, self._resting.pop(p, None)) for p in partitions}
        self.holdings.update(new)
        planned = _Planned(new, 0.0)
        if not planned.ready:
            self._planned.append(planned)
            return {}
        claiming = self._claim(new)
        try:
            claiming.answer.exception(timeout=CLAIM_PATIENCE)
        except FutureTimeout:
            _log.info("claim is slow, partitions wait paused partitions=%s", _names(partitions))
            return {}
        self._claiming.remove(claiming)
        return self._opened(claiming)

    def revoked(self, partitions: list[Partition]) -> None:
        leaving = [h for p in partitions if (h := self.holdings.get(p)) is not None]
        began = time.monotonic()
        dropped = self._brake(leaving, "revoked")
        self._see_off(leaving)
        seconds = time.monotonic() - began
        _log.info("revoked partitions=%s dropped=%d drained_in=%.3fs", _names(partitions), dropped, seconds)
        self._forget(leaving)

    def lost(self, partitions: list[Partition]) -> None:
        self.joined = False  # or having nothing would be taken for having read everything
        leaving = [h for p in partitions if (h := self.holdings.get(p)) is not None]
        self._brake(leaving, "lost")
        self._forget(leaving)
        _log.warning("lost partitions=%s: the broker gave them to others; nothing was committed", _names(partitions))

    # Called by the loop

    def take(self, partitions: Iterable[Partition]) -> None:
        """Claim partitions without a group's coordination."""
        chosen = sorted(partitions)
        self.joined = True
        self.source.take({p: Place(0, paused=True) for p in chosen})
        self._claim({p: Holding(p) for p in chosen})

    def step(self) -> None:
        """Go on with what takes time. Cheap when there is nothing."""
        if self._claiming:
            self._collect_claims()
        if self._planned:
            self._make_planned_claims()
        if self._late:
            self._give_up_late_handlers()

    def eject(self, holding: Holding, error: BaseException) -> None:
        """The store refused us. Stop the lane; the partition is claimed again after `confirm`."""
        if isinstance(error, Fenced) and not self._grouped:
            raise error
        _log.warning("stopped partition=%s, claimed again when confirmed cause=%s", holding.partition, error)
        self._close_lane(holding, "store")
        holding.state = State.EJECTED
        self.hold(holding, "claim")
        if not self._grouped:
            self._planned.append(_Planned({holding.partition: holding}, self._backoff([holding])))

    def confirm(self, holding: Holding) -> None:
        """The broker has confirmed our membership since the ejection: the partition is still ours to claim."""
        if holding.state is State.EJECTED and self.holdings.get(holding.partition) is holding:
            holding.state = State.CLAIMING
            self._planned.append(_Planned({holding.partition: holding}, self._backoff([holding])))

    def restart(self, offsets: Mapping[Partition, int]) -> None:
        """A person's seek: stop the lanes, set the offsets under a new epoch, claim and go on there."""
        holdings = {p: self.holdings[p] for p in offsets if p in self.holdings}
        for holding in holdings.values():
            self._close_lane(holding, "seek")
            holding.state = State.CLAIMING
            self.hold(holding, "claim")
        self._planned.append(_Planned(holdings, 0.0, lambda: self._claims.restart(offsets)))

    def pause(self, partitions: Iterable[Partition]) -> None:
        """A person's pause; it outlives rebalances."""
        for partition in partitions:
            self.paused.add(partition)
            if (holding := self.holdings.get(partition)) is not None:
                self.hold(holding, "person")

    def resume(self, partitions: Iterable[Partition]) -> None:
        for partition in partitions:
            self.paused.discard(partition)
            if (holding := self.holdings.get(partition)) is not None:
                self.free(holding, "person")

    def hold(self, holding: Holding, reason: str) -> None:
        if not holding.held:
            self.source.pause([holding.partition])
        holding.held.add(reason)

    def free(self, holding: Holding, reason: str) -> None:
        if reason in holding.held:
            holding.held.discard(reason)
            if not holding.held:
                self.source.resume([holding.partition])

    def brake_all(self, reason: str) -> int:
        """Stop every lane after the record that runs; answers how many records were dropped unstarted."""
        return self._brake(list(self.holdings.values()), reason)

    # Claims

    def _claim(self, holdings: Mapping[Partition, Holding], errand: _ClaimErrand | None = None) -> _Claiming:
        partitions = sorted(holdings)
        for partition, holding in holdings.items():
            holding.state = State.CLAIMING
            self.holdings[partition] = holding
        answer = self._errands.send(errand or (lambda: self._claims.claim(partitions)))
        claiming = _Claiming(holdings, answer)
        self._claiming.append(claiming)
        return claiming

    def _collect_claims(self) -> None:
        for claiming in [c for c in self._claiming if c.answer.done()]:
            self._claiming.remove(claiming)
            places = self._opened(claiming)
            if places:
                self.source.place(places)

    def _opened(self, claiming: _Claiming) -> dict[Partition, Place]:
        """Open the lanes of a claim that is in; of one that failed, try again or raise."""
        current = {p: h for p, h in claiming.holdings.items() if self._awaits_claim(h)}
        error = claiming.answer.exception()
        if isinstance(error, StoreUnavailable | BrokerUnavailable):
            pause = self._backoff(list(current.values()))
            _log.error(
                "claim failed, partitions wait partitions=%s again_in=%.1fs cause=%s",
                _names(current),
                pause,
                error,
            )
            self._planned.append(_Planned(current, pause))
            return {}
        if error is not None:
            raise error
        positions = claiming.answer.result()
        for partition, holding in current.items():
            self._open(holding, positions[partition])
        where = " ".join(f"{p}@{positions[p].next_offset}" for p in sorted(current))
        _log.info("assigned partitions=%d at=%s", len(current), where)
        return {
            p: Place(positions[p].next_offset, positions[p].leader_epoch, paused=bool(holding.held))
            for p, holding in current.items()
        }

    def _open(self, holding: Holding, position: Position) -> None:
        holding.lane = self._make_lane(holding.partition, position)
        holding.lane.lanes.open()
        holding.tracker = Tracker(position.next_offset)
        holding.epoch = position.epoch
        holding.topic_id = position.topic_id
        holding.leader_epoch = position.leader_epoch
        # Without an epoch the start was not pinned by the claim: it is unsaved until it is committed.
        holding.stored = position.next_offset if position.epoch else None
        holding.mirrored = None
        holding.state = State.OPEN
        holding.tries = 0
        holding.held = {"person"} if holding.partition in self.paused else set()

    def _awaits_claim(self, holding: Holding) -> bool:
        return holding.state is State.CLAIMING and self.holdings.get(holding.partition) is holding

    def _make_planned_claims(self) -> None:
        for planned in [p for p in self._planned if p.ready]:
            self._planned.remove(planned)
            current = {
                p: h
                for p, h in planned.holdings.items()
                if self.holdings.get(p) is h and h.state in (State.CLAIMING, State.EJECTED)
            }
            if current:
                self._claim(current, planned.errand)

    def _backoff(self, holdings: list[Holding]) -> float:
        for holding in holdings:
            holding.tries += 1
        tries = max((h.tries for h in holdings), default=1)
        return min(_BACKOFF_MOST, 0.25 * 2.0**tries) * random.uniform(0.5, 1.0)

    # Partitions that go

    def _give_up_late_handlers(self) -> None:
        self._late = [(lane, deadline) for lane, deadline in self._late if lane.busy]
        for lane, _ in [late for late in self._late if late[1].passed]:
            self.abandoned.append(lane.partition)
            lane.lanes.abandon(lane)
            _log.error(
                "abandoned partition=%s: its handler still runs %.1f s after the partition went to another owner; "
                "the record is handled there",
                lane.partition, self._shutdown,
            )  # fmt: skip
        self._late = [late for late in self._late if not late[1].passed]

    def _brake(self, holdings: list[Holding], reason: str) -> int:
        return sum(holding.lane.brake(reason) for holding in holdings if holding.lane is not None)

    def _close_lane(self, holding: Holding, reason: str) -> None:
        if holding.lane is not None:
            holding.lane.brake(reason)
            holding.lane.lanes.shut()
            holding.lane, holding.closed = None, holding.lane

    def _forget(self, holdings: list[Holding]) -> None:
        for holding in holdings:
            if holding.lane is not None:
                holding.lane.lanes.shut()
                self._resting[holding.partition] = holding.lane
                if holding.lane.busy:
                    self._late.append((holding.lane, Deadline(self._shutdown)))
            if self.holdings.get(holding.partition) is holding:
                del self.holdings[holding.partition]


def _names(partitions: Iterable[Partition]) -> str:
    return ",".join(map(str, sorted(partitions))) or "-"

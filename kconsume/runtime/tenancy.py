"""Which partitions are ours, and in what state: from claim to release.

    claiming ──► open ──► gone         revoked: finished with and committed first; lost: gone at once
        ▲          │
        ├──────────┤     the store was away: reclaimed under the epoch that we had
        └─ ejected ┘     the store refused us: its row is read, and claimed under the epoch that was read once the
                         broker has confirmed our membership since

All on the owner thread. The client's callbacks come in through `assigned`, `revoked` and `lost`; the loop calls
`step` on each turn for what takes time. Nothing here waits, but for the half second that `assigned` gives a claim.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, wait
from functools import partial
from typing import Protocol

from kconsume.backends.abc import Position, Positions
from kconsume.errors import BrokerUnavailable, Fenced, StoreUnavailable, TooManyFailures, Undecided
from kconsume.records import Partition
from kconsume.runtime.audience import Audience
from kconsume.runtime.budget import Deadline
from kconsume.runtime.chronicle import Chronicle
from kconsume.runtime.claims import Claims
from kconsume.runtime.errands import Errands
from kconsume.runtime.holding import Claim, Confirmation, Errand, Holding, State
from kconsume.runtime.lanes import Lane
from kconsume.runtime.source import NOWHERE, Place, Source
from kconsume.runtime.tracker import Tracker

_log = logging.getLogger("kconsume.rebalance")

CLAIM_PATIENCE = 0.5
LISTENERS_PATIENCE = 10.0
"""Seconds that a new partition waits for its listeners, who may have something to load."""
_BACKOFF_MOST = 15.0


class LaneMaker(Protocol):
    """Makes the lane of a partition that was claimed."""

    def __call__(self, partition: Partition, position: Position, /) -> Lane: ...


class Tenancy:
    """The partitions that one consumer holds."""

    def __init__(
        self,
        claims: Claims,
        errands: Errands,
        make_lane: LaneMaker,
        audience: Audience,
        chronicle: Chronicle,
        *,
        budget: float,
        shutdown: float,
        grouped: bool,
        may_be_left: Callable[[Lane], bool] = lambda _: True,
    ) -> None:
        """`budget`: seconds in which revoked partitions are given up. `may_be_left`: whether the next lane of a
        partition may open beside a handler that does not return."""
        self.holdings: dict[Partition, Holding] = {}
        self.paused: set[Partition] = set()
        """What the person asked to pause."""
        self.abandoned: list[Partition] = []
        """Partitions that were given up while their handler still ran."""
        self.joined = False
        self._claims = claims
        self._errands = errands
        self._make_lane = make_lane
        self._audience = audience
        self._chronicle = chronicle
        self._budget = budget
        self._shutdown = shutdown
        self._grouped = grouped
        self._may_be_left = may_be_left
        self.asks_for_commit = False
        """Whether a confirmation waits for the next commit to the group."""
        self._ejected: set[Holding] = set()
        self._leaving: Deadline | None = None
        self._resting: dict[Partition, Lane] = {}
        """The last lane of each partition that went; it may still be busy when the partition comes back."""
        self._waiting: list[Claim] = []
        self._late: list[tuple[Lane, Deadline]] = []
        """Lanes of partitions that went, with a handler that still runs."""
        self._source: Source | None = None

    def attach(self, source: Source, see_off: Callable[[list[Holding], Deadline], int]) -> None:
        """The source whose callbacks come here, and how to finish with partitions that were revoked: it answers how
        many records were finished in that time."""
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

    def current(self, partition: Partition, token: object) -> Holding | None:
        """The partition, if what answers now is still in charge of it. Whatever comes of an earlier assignment, an
        earlier lane or an earlier claim is recognised here."""
        holding = self.holdings.get(partition)
        return holding if holding is not None and token is not None and holding.token is token else None

    # Called inside the client's callbacks

    def assigned(self, partitions: list[Partition]) -> Mapping[Partition, Place]:
        self.joined = True
        self._chronicle.begins(self.holdings)
        self._chronicle.gains(partitions)
        places = self._take_up(partitions) if partitions else {}
        self._chronicle.ends()
        return places

    def revoked(self, partitions: list[Partition]) -> None:
        budget = Deadline(self._budget if self._leaving is None else min(self._budget, self._leaving.left))
        leaving = self._held(partitions)
        self._chronicle.begins(self.holdings.keys() - set(partitions))
        try:
            dropped = self._brake(leaving, "revoked")
            drained = self._see_off(leaving, budget)
            late = [h.partition for h in leaving if h.lane is not None and h.lane.unfinished]
            self._chronicle.gives_up(partitions, drained, dropped, late)
            told = self._audience.tell("revoked", _told(leaving), self._chronicle.so_far())
            self._audience.wait(told, budget.left)
        finally:
            self._forget(leaving)  # whatever went wrong, they are ours no more
        if self._leaving is not None:
            self._chronicle.leaves()

    def lost(self, partitions: list[Partition]) -> None:
        self.joined = False  # or having nothing would be taken for having read everything
        leaving = self._held(partitions)
        self._chronicle.begins(self.holdings.keys() - set(partitions))
        try:
            self._chronicle.loses(partitions, self._brake(leaving, "lost"))
            self._audience.tell("lost", _told(leaving), self._chronicle.so_far())
        finally:
            self._forget(leaving)
        _log.warning("lost partitions=%s: the broker gave them to others; nothing was committed", _names(partitions))

    def _take_up(self, partitions: list[Partition]) -> Mapping[Partition, Place]:
        """Claim them, and wait a little: usually that is all it takes."""
        new = {p: Holding(p, self._resting.pop(p, None)) for p in partitions}
        self.holdings.update(new)
        claim, patience = self._plan(new), Deadline(CLAIM_PATIENCE)
        if not claim.ready:
            return {}
        wait([self._send(claim)], patience.left)
        places = self._go_on(claim)
        if claim.told is not None:
            wait([claim.told], patience.left)
            places = places or self._go_on(claim)
        if not places:
            _log.info("claim is slow, partitions wait paused partitions=%s", _names(partitions))
        return places

    def _held(self, partitions: Iterable[Partition]) -> list[Holding]:
        return [h for p in partitions if (h := self.holdings.get(p)) is not None]

    # Called by the loop

    def take(self, partitions: Iterable[Partition]) -> None:
        """Claim partitions without a group's coordination."""
        chosen = sorted(partitions)
        self.joined = True
        self.source.take(dict.fromkeys(chosen, NOWHERE))
        self.holdings.update({p: Holding(p) for p in chosen})
        self._send(self._plan(self.holdings))

    def leave(self, deadline: Deadline) -> None:
        """The group is left now: what is revoked by that is given up by the deadline."""
        self._leaving = deadline
        self._chronicle.expect("left")

    def step(self) -> None:
        """Go on with what takes time. Cheap when there is nothing."""
        if self._waiting:
            self._go_on_with_claims()
        if self._ejected:
            self._read_rows()
        if self._late:
            self._give_up_late_handlers()

    def eject(self, holding: Holding, error: BaseException) -> None:
        """The store did not take our work. Stop the lane. If somebody else has claimed the partition, it is claimed
        again after `confirm`; if the store was away, or its answer is not known, we ask under the epoch we had."""
        self._close_lane(holding, "store")
        self.hold(holding, "claim")
        if isinstance(error, Undecided):
            raise error  # a record has failed now; one that had when we came only waits (`_undecided`)
        if isinstance(error, Fenced):
            return self._fenced([holding], error)
        pause, epoch = self._backoff([holding]), holding.epoch
        _log.warning("stopped partition=%s, goes on in %.1fs cause=%s", holding.partition, pause, error)
        self._plan({holding.partition: holding}, lambda ours: self._claims.reclaim(dict.fromkeys(ours, epoch)), pause)
        return None

    def confirm(self, holding: Holding) -> None:
        """The broker has confirmed our membership since the row was read: the partition is ours to claim, unless
        another has claimed it since then."""
        assert holding.confirmation is not None
        row = holding.confirmation.row
        assert row is not None
        self._plan(
            {holding.partition: holding},
            lambda ours: self._claims.take_over(dict.fromkeys(ours, row.epoch)),
            self._backoff([holding]),
        )

    def restart(self, offsets: Mapping[Partition, int]) -> None:
        """A person's seek: stop the lanes, set the offsets under a new epoch, claim and go on there."""
        holdings = {p: self.holdings[p] for p in offsets if p in self.holdings}
        for holding in holdings.values():
            self._close_lane(holding, "seek")
            self.hold(holding, "claim")
        self._plan(holdings, lambda ours: self._claims.restart({p: offsets[p] for p in ours}))

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

    def _fenced(self, holdings: Iterable[Holding], error: Fenced) -> None:
        if not self._grouped:
            raise error
        for holding in holdings:
            holding.state, holding.confirmation = State.EJECTED, Confirmation()
            self._ejected.add(holding)
            self._audience.tell("lost", _told([holding]), self._chronicle.so_far())
            holding.told = False
            _log.warning("fenced partition=%s, claimed again when confirmed cause=%s", holding.partition, error)

    def _read_rows(self) -> None:
        """First the row, then the commit: a broker that accepts it afterwards has confirmed us since."""
        self._ejected = {h for h in self._ejected if self.current(h.partition, h.confirmation) is h}
        for holding in list(self._ejected):
            way = holding.confirmation
            assert way is not None
            if way.reading is None and way.due.passed:
                way.reading = self._errands.send(partial(self._claims.rows, [holding.partition]))
            if way.reading is None or way.row is not None or not way.reading.done():
                continue
            error = way.reading.exception()
            if isinstance(error, StoreUnavailable):
                holding.confirmation = Confirmation(self._backoff([holding]))
            elif error is not None:
                raise error
            elif (row := way.reading.result().get(holding.partition)) is None:
                self._plan({holding.partition: holding}, pause=self._backoff([holding]))  # deleted: it begins anew
            else:
                way.row = row
                self.asks_for_commit = True

    # Claims

    def _plan(self, holdings: Mapping[Partition, Holding], errand: Errand | None = None, pause: float = 0.0) -> Claim:
        """Ask the store for these partitions when it is time; what was asked for them before is forgotten."""
        for holding in holdings.values():
            holding.state = State.CLAIMING
        claim = Claim(holdings, errand or self._claims.claim, pause)
        self._waiting.append(claim)
        return claim

    def _send(self, claim: Claim) -> Future[dict[Partition, Position]]:
        partitions = sorted(self._current(claim))
        claim.answer = self._errands.send(lambda: claim.errand(partitions))
        return claim.answer

    def _go_on_with_claims(self) -> None:
        for claim in list(self._waiting):
            if not self._current(claim):
                self._waiting.remove(claim)
            elif places := self._go_on(claim):
                self.source.place(places)
        self._chronicle.ends()

    def _go_on(self, claim: Claim) -> dict[Partition, Place]:
        """Take what steps of a claim can be taken without waiting; answers with what flows then."""
        if claim.answer is None:
            if claim.ready:
                self._send(claim)
            return {}
        if claim.positions is None and not (claim.answer.done() and self._answered(claim, claim.answer)):
            return {}
        assert claim.positions is not None
        if claim.told is not None and not claim.told.done():
            if not claim.listening.passed:
                return {}
            self._audience.give_up()
        self._waiting.remove(claim)
        return self._opened(self._current(claim), claim.positions)

    def _current(self, claim: Claim) -> dict[Partition, Holding]:
        """Of the partitions of a claim, those that still are ours, and for which nothing else was asked since."""
        return {p: h for p, h in claim.holdings.items() if self.current(p, claim) is h}

    def _answered(self, claim: Claim, answer: Future[dict[Partition, Position]]) -> bool:
        """The store has answered; whether they are ours. What failed is tried again, or raised."""
        current, error = self._current(claim), answer.exception()
        if error is None:
            claim.positions = answer.result()
            if taken := [holding for p, holding in current.items() if p not in claim.positions]:
                self._fenced(taken, Fenced("another member has claimed it in the same moment"))
                current = self._current(claim)
            self._tell_of_new(claim, current)
            return True
        self._waiting.remove(claim)
        if isinstance(error, StoreUnavailable | BrokerUnavailable):
            pause = self._backoff(list(current.values()))
            _log.error(
                "claim failed, partitions wait partitions=%s again_in=%.1fs cause=%s", _names(current), pause, error
            )
            self._plan(current, claim.errand, pause)
        elif isinstance(error, Undecided):
            self._undecided(current, claim.errand, error)
        elif isinstance(error, Fenced):
            self._fenced(current.values(), error)
        else:
            raise error
        return False

    def _tell_of_new(self, claim: Claim, holdings: Mapping[Partition, Holding]) -> None:
        """Before anything flows, for a listener may load what its handler needs."""
        new = [p for p, holding in holdings.items() if not holding.told]
        claim.told = self._audience.tell("assigned", sorted(new), self._chronicle.so_far())
        claim.listening = Deadline(LISTENERS_PATIENCE)
        for partition in new:
            holdings[partition].told = True

    def _undecided(self, holdings: Mapping[Partition, Holding], errand: Errand, error: Undecided) -> None:
        """Those that wait for a person's decision are looked at again and again; the others are claimed without."""
        waiting = {p: h for p, h in holdings.items() if p in error.partitions} or holdings
        self._plan({p: h for p, h in holdings.items() if p not in waiting}, errand)
        pause = self._backoff(list(waiting.values()))
        _log.error("partitions wait for a person partitions=%s again_in=%.1fs cause=%s", _names(waiting), pause, error)
        self._plan(waiting, errand, pause)

    def _opened(self, holdings: Mapping[Partition, Holding], positions: Positions) -> dict[Partition, Place]:
        for partition, holding in holdings.items():
            self._open(holding, positions[partition])
        where = " ".join(f"{p}@{positions[p].next_offset}" for p in sorted(holdings))
        _log.info("assigned partitions=%d at=%s", len(holdings), where)
        self._chronicle.opened(holdings, added=not self._claims.added.isdisjoint(holdings))
        return {
            p: Place(positions[p].next_offset, positions[p].leader_epoch, paused=bool(holding.held))
            for p, holding in holdings.items()
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
        holding.claim, holding.state = None, State.OPEN
        holding.held = {"person"} if holding.partition in self.paused else set()

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
            self._leave_behind(lane)
            _log.error(
                "abandoned partition=%s: its handler still runs %.1f s after the partition went to another owner; "
                "the record is handled there",
                lane.partition, self._shutdown,
            )  # fmt: skip
        self._late = [late for late in self._late if not late[1].passed]

    def _leave_behind(self, lane: Lane) -> None:
        """Its handler does not return, and the partition may be ours again: that must not wait for ever."""
        holding = self.holdings.get(lane.partition)
        if self._may_be_left(lane):
            lane.given_up = True
        elif holding is not None and holding.closed is lane:
            raise TooManyFailures(
                f"a handler call of {lane.partition} has not returned, and the partition is ours again: its next "
                f"record cannot be handled beside it, so the process ends. Give the handler a timeout="
            )

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


def _told(holdings: Iterable[Holding]) -> list[Partition]:
    """Those that listeners know to be ours."""
    return sorted(h.partition for h in holdings if h.told)


def _names(partitions: Iterable[Partition]) -> str:
    return ",".join(map(str, sorted(partitions))) or "-"

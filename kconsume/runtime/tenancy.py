"""Which partitions are ours, and in what state: from claim to release.

    claiming ──► open ──► gone         revoked: finished with and committed first; lost: gone at once
        ▲          │
        ├──────────┤     the store was away: reclaimed under the epoch that we had
        └─ ejected ┘     the store fenced us, or refused the claim because its row is of a later generation: the row is
                         read, and claimed under the epoch that was read once the broker has confirmed our membership
                         since, whatever its generation

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

from kconsume.backends.abc import Position, Positions, Refused
from kconsume.errors import (
    BrokerUnavailable,
    Fenced,
    HandlerFailed,
    KconsumeError,
    StoreUnavailable,
    TooManyFailures,
    TopicNotFound,
    Undecided,
)
from kconsume.records import Partition
from kconsume.runtime.audience import Audience
from kconsume.runtime.budget import Deadline
from kconsume.runtime.chronicle import Chronicle
from kconsume.runtime.claims import Claims, Look
from kconsume.runtime.errands import Errands
from kconsume.runtime.holding import Answers, Claim, Confirmation, Errand, Holding, Membership, State
from kconsume.runtime.lanes import Lane
from kconsume.runtime.source import NOWHERE, Place
from kconsume.runtime.split_source import AnySource
from kconsume.runtime.tracker import Tracker
from kconsume.runtime.trouble import Trouble

_log = logging.getLogger("kconsume.rebalance")

CLAIM_PATIENCE = 0.5
LISTENERS_PATIENCE = 10.0
"""Seconds that a new partition waits for its listeners, who may have something to load."""
_BACKOFF_MOST = 15.0
LOOK_EVERY = 2.0
"""Seconds between two looks at the rows of partitions that are held."""
SAY_EVERY = 60.0
"""Seconds after which the log names a partition again that is still held."""
READ_AGAIN_EVERY = 60.0
"""Seconds after which a partition is read again whose trouble may have gone by itself."""


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
        self.unanswered: BaseException | None = None
        """Why the last claim was not answered. Read by other threads, as `joined` is."""
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
        self._hung: list[Lane] = []
        """Those that were abandoned, where no other lane may run beside them."""
        self._source: AnySource | None = None
        self._membership = Membership({}, {})
        """Written by the owner thread, read by the errand thread when a claim's turn has come."""
        self._has_troubles = False
        """Whether a partition may be held."""
        self._look: Future[Look] | None = None
        self._looked_for: dict[Holding, Trouble | None] = {}
        """The troubles that the look was sent for: its answer is about no other."""
        self._look_due = self._say_due = self._read_due = Deadline(0.0)

    def attach(self, source: AnySource, see_off: Callable[[list[Holding], Deadline], int]) -> None:
        """The source whose callbacks come here, and how to finish with partitions that were revoked: it answers how
        many records were finished in that time."""
        self._source = source
        self._see_off = see_off

    @property
    def source(self) -> AnySource:
        assert self._source is not None
        return self._source

    @property
    def settled(self) -> bool:
        """Whether every partition is open or held, with no claim on its way."""
        return self.joined and all(h.state in (State.OPEN, State.HELD) for h in self.holdings.values())

    @property
    def troubles(self) -> dict[Partition, Trouble]:
        """The partitions that are held, and why."""
        return {p: h.trouble for p, h in self.holdings.items() if h.trouble is not None}

    def claims_it(self, holding: Holding) -> bool:
        """Whether a claim of the partition is pending."""
        return any(claim is holding.claim for claim in self._waiting)

    def reads_row_of(self, holding: Holding) -> bool:
        """Whether a partition that the store refused us is on its way back."""
        return holding in self._ejected and holding.confirmation is not None

    def admitted(self) -> None:
        """We are a member of a group that assigns us nothing, and has no callback that says so (KIP-848)."""
        self.joined = True

    @property
    def started(self) -> bool:
        """Whether the group has given us an assignment, also one of nothing, and the store has answered its claim. A
        partition that waits for a user's decision counts, because its answer is in; so does a pattern that matches no
        topic yet."""
        if self.holdings:
            return all(h.answered for h in self.holdings.values())
        return self._claims.answered and (self.joined or self._claims.waits_for_topics)

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
        new = {p: Holding(p, self._resting.pop(p, None)) for p in partitions}
        self.holdings.update(new)
        self._read_membership()
        places = self._take_up(new) if new else {}
        self._chronicle.ends()
        return places

    def revoked(self, partitions: list[Partition]) -> None:
        budget = Deadline(self._budget if self._leaving is None else min(self._budget, self._leaving.left))
        leaving = self._held(partitions)
        if self._leaving is not None:
            self._chronicle.expect("left")  # each time: a consumer may be two members
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
            self._read_membership()
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
            self._read_membership()
        _log.warning("lost partitions=%s: the broker gave them to others; nothing was committed", _names(partitions))

    def _read_membership(self) -> None:
        """Inside each callback, and nowhere else. Read apart from the partitions, the generation could be a later one,
        in which they are another member's."""
        held = dict(self.holdings)
        generations: dict[Partition, int | None] = dict.fromkeys(held)
        if self._grouped:
            now = {} if self._leaving is not None else self.source.generations(held)
            before = {} if self._leaving is not None else self._membership.generations
            generations = {p: now.get(p, before.get(p, -1)) for p in held}
        self._membership = Membership(generations, held)

    def _take_up(self, new: Mapping[Partition, Holding]) -> Mapping[Partition, Place]:
        """Claim them, and wait a little: usually that is all it takes."""
        claim, patience = self._plan(new), Deadline(CLAIM_PATIENCE)
        if not claim.ready:
            return {}
        wait([self._send(claim)], patience.left)
        places = self._go_on(claim)
        if claim.told is not None:
            wait([claim.told], patience.left)
            places = places or self._go_on(claim)
        if waiting := [p for p, holding in new.items() if holding.state is State.CLAIMING]:
            _log.info("claim is slow, partitions wait paused partitions=%s", _names(waiting))
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
        self._read_membership()
        self._send(self._plan(self.holdings))

    def leave(self, deadline: Deadline) -> None:
        """The group is left now: what is revoked by that is given up by the deadline."""
        self._leaving = deadline

    def step(self) -> None:
        """Go on with what takes time. Cheap when there is nothing."""
        if self._waiting:
            self._go_on_with_claims()
        if self._ejected:
            self._read_rows()
        if self._late or self._hung:
            self._give_up_late_handlers()
        if self._has_troubles:
            self._watch_troubles()

    def put_on_hold(self, holding: Holding, error: KconsumeError, *, drains: bool = True) -> None:
        """Something is wrong with a partition that is open, and with no other: it stops, with its cause.

        `drains`: whether its lane still works off what it has in hand.
        """
        if holding.state is not State.OPEN:
            return  # its claim will find out
        if holding.lane is not None and not drains:
            holding.lane.brake("held")
        self.hold(holding, "trouble")
        row = Position(holding.stored or 0, holding.epoch, holding.topic_id)
        trouble, earlier = Trouble(error, row, open_lane=True), holding.trouble
        if earlier is not None and (earlier.code == trouble.code or not (earlier.tries or trouble.outranks(earlier))):
            earlier.tries = False  # it was read again, and nothing has changed
            return
        self._note_trouble(holding, trouble)

    def stored(self, holding: Holding, offset: int) -> None:
        """The store has this offset."""
        holding.stored = offset
        if "start" in holding.held:
            self._claims.unpinned.discard(holding.partition)
            self.free(holding, "start")

    def passed(self, holding: Holding) -> None:
        """Records of a partition that is held were finished, or its end was reached: if that was after it was read
        again, its trouble is over."""
        if holding.trouble is not None and holding.trouble.tries:
            _log.info("partition released partition=%s code=%s", holding.partition, holding.trouble.code)
            holding.trouble = None

    def eject(self, holding: Holding, error: BaseException, *, holds: bool = False) -> None:
        """The store did not take our work. Stop the lane. If somebody else has claimed the partition, it is claimed
        again after `confirm`; if the store was away, or its answer is not known, we ask under the epoch we had.

        `holds`: whether a record that fails stops only its partition.
        """
        self._close_lane(holding, "store")
        self.hold(holding, "claim")
        if isinstance(error, Undecided) and not holds:
            raise error  # a record has failed now; one that had when we came only holds its partition
        if isinstance(error, Fenced):
            return self._fenced([holding], error)
        pause, epoch = self._backoff([holding]), holding.epoch
        _log.warning("stopped partition=%s, goes on in %.1fs cause=%s", holding.partition, pause, error)
        self._plan(
            {holding.partition: holding}, lambda ours, _: self._claims.reclaim(dict.fromkeys(ours, epoch)), pause
        )
        return None

    def confirm(self, holdings: list[Holding], generation: int) -> None:
        """The broker has confirmed our membership since the rows were read: the partitions are ours to claim, unless
        another has claimed them since then."""
        epochs = {h.partition: h.confirmation.row.epoch for h in holdings if h.confirmation and h.confirmation.row}
        never_open = all(h.epoch == 0 and h.tries == 0 for h in holdings)
        pause = self._backoff(holdings)
        self._plan(
            {h.partition: h for h in holdings},
            lambda ours, _: self._claims.take_over({p: epochs[p] for p in ours}, generation),
            0.0 if never_open else pause,  # a static member that starts again is refused once, and need not wait
        )

    def restart(self, offsets: Mapping[Partition, int]) -> None:
        """A person's seek: stop the lanes, set the offsets under a new epoch, claim and go on there."""
        holdings = {p: self.holdings[p] for p in offsets if p in self.holdings}
        for holding in holdings.values():
            self._close_lane(holding, "seek")
            self.hold(holding, "claim")
        self._plan(holdings, lambda ours, generation: self._claims.restart({p: offsets[p] for p in ours}, generation))

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
                if holding.trouble is not None:
                    self._claim_again(holding, "resumed")

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

    def _fenced(self, holdings: Iterable[Holding], error: Fenced, event: str = "fenced") -> None:
        if not self._grouped:
            raise error
        for holding in holdings:
            holding.state, holding.confirmation = State.EJECTED, Confirmation()
            self._ejected.add(holding)
            self._audience.tell("lost", _told([holding]), self._chronicle.so_far())
            holding.told = False
            _log.warning("%s partition=%s, claimed again when confirmed cause=%s", event, holding.partition, error)

    def _read_rows(self) -> None:
        """First the row, then the commit: a broker that accepts it afterwards has confirmed us since."""
        self._ejected = {h for h in self._ejected if self.current(h.partition, h.confirmation) is h}
        ways = {h: h.confirmation for h in self._ejected if h.confirmation is not None}
        if due := {h: way for h, way in ways.items() if way.reading is None and way.due.passed}:
            reading = self._errands.send(partial(self._claims.rows, sorted(h.partition for h in due)))
            for way in due.values():
                way.reading = reading
        for holding, way in ways.items():
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

    # Partitions that are held

    def _note_trouble(self, holding: Holding, trouble: Trouble) -> None:
        holding.trouble = trouble
        if not self._has_troubles:
            self._has_troubles = True
            self._look_due, self._say_due = Deadline(LOOK_EVERY), Deadline(SAY_EVERY)
            self._read_due = Deadline(READ_AGAIN_EVERY)
        error = trouble.error
        _log.error("partition held partition=%s code=%s cause=%s", holding.partition, trouble.code, error)
        if isinstance(error, HandlerFailed):
            _log.error("see it again: %s", error.try_command, exc_info=error.__cause__)

    def _watch_troubles(self) -> None:
        """By reading alone. What has changed is claimed again; what may have gone by itself is read again."""
        held = [h for h in self.holdings.values() if h.trouble is not None]
        self._has_troubles = bool(held)
        if self._say_due.passed:
            self._say_due = Deadline(SAY_EVERY)
            for holding in held:
                assert holding.trouble is not None
                _log.error(
                    "partition still held partition=%s code=%s seconds=%.0f cause=%s",
                    holding.partition, holding.trouble.code, holding.trouble.seconds, holding.trouble.error,
                )  # fmt: skip
        if self._look is None and self._look_due.passed and held:
            missing = [h.partition.topic for h in held if isinstance(_error_of(h), TopicNotFound)]
            partitions = sorted(h.partition for h in held)
            self._looked_for = {h: h.trouble for h in held}
            self._look = self._errands.send(partial(self._claims.look, partitions, sorted(set(missing))))
        elif self._look is not None and self._look.done():
            look, self._look, self._look_due = self._look, None, Deadline(LOOK_EVERY)
            if look.exception() is None:
                self._judge([h for h in held if self._looked_for.get(h) is h.trouble], look.result())
            elif not isinstance(look.exception(), StoreUnavailable | BrokerUnavailable):
                look.result()
        if self._read_due.passed:
            self._read_due = Deadline(READ_AGAIN_EVERY)
            for holding in held:
                self._read_again(holding)

    def _judge(self, held: Iterable[Holding], look: Look) -> None:
        for holding in held:
            trouble, row = holding.trouble, look.rows.get(holding.partition)
            if trouble is None:
                continue
            if isinstance(trouble.error, TopicNotFound):
                if holding.partition.topic in look.there:
                    self._claim_again(holding, "the topic is there")
            elif not trouble.row_changed(row):
                continue
            elif row is None or row.owner is None:
                self._claim_again(holding, "its row was changed")
            else:
                self._close_lane(holding, "store")
                self.hold(holding, "claim")
                holding.trouble = None
                self._fenced([holding], Fenced(f"{row.owner} has claimed it while it was held"))

    def _claim_again(self, holding: Holding, reason: str) -> None:
        assert holding.trouble is not None
        _log.info(
            "partition tried again partition=%s code=%s reason=%s", holding.partition, holding.trouble.code, reason
        )
        self._close_lane(holding, "held")
        self.hold(holding, "claim")
        self._plan({holding.partition: holding})

    def _read_again(self, holding: Holding) -> None:
        """From the offset where it stands. The client says again what is wrong, or records come."""
        trouble, lane = holding.trouble, holding.lane
        if trouble is None or not trouble.reads_again or lane is None or lane.unfinished or not holding.tracker.idle:
            return
        if lane.gathering:  # they would come a second time, into the same batch
            return
        trouble.tries = True
        holding.held.discard("trouble")
        place = Place(holding.tracker.watermark, holding.leader_epoch, paused=bool(holding.held))
        self.source.place({holding.partition: place})

    # Claims

    def _plan(self, holdings: Mapping[Partition, Holding], errand: Errand | None = None, pause: float = 0.0) -> Claim:
        """Ask the store for these partitions when it is time; what was asked for them before is forgotten. One whose
        earlier lane is still busy is asked for by itself, later: it holds up no other, and the answer is without it."""
        for holding in holdings.values():
            holding.state, holding.trouble = State.CLAIMING, None
        errand = errand or self._claim_of(holdings)
        claim = Claim({p: h for p, h in holdings.items() if not h.is_awaited}, errand, pause)
        later = [Claim({p: h}, errand, pause) for p, h in holdings.items() if h.is_awaited]
        self._waiting.extend(each for each in (claim, *later) if each.holdings)
        return claim

    def _claim_of(self, holdings: Mapping[Partition, Holding]) -> Errand:
        had = {p: Position(h.stored or 0, h.epoch) for p, h in holdings.items() if h.epoch > 0}
        return partial(self._claims.claim, had=had) if had else self._claims.claim

    def _send(self, claim: Claim) -> Future[Answers]:
        claim.answer = self._errands.send(partial(self._ask, claim))
        return claim.answer

    def _ask(self, claim: Claim) -> Answers:
        """On the errand thread, when the claim's turn has come: a slow store may have kept it waiting, and what is no
        longer ours then is not asked for. What goes after this is kept from us by the generation."""
        member = self._membership
        by_generation: dict[int | None, list[Partition]] = {}
        for partition, holding in sorted(claim.holdings.items()):
            if member.holdings.get(partition) is holding and holding.token is claim:
                by_generation.setdefault(member.generations[partition], []).append(partition)
        return {p: each for g, ours in by_generation.items() for p, each in claim.errand(ours, g).items()}

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

    def _answered(self, claim: Claim, answer: Future[Answers]) -> bool:
        """The store has answered; whether they are ours. What failed is tried again, or raised."""
        current, error = self._current(claim), answer.exception()
        if error is None:
            answers, self.unanswered = answer.result(), None
            claim.positions = {p: found for p, found in answers.items() if isinstance(found, Position)}
            for partition, holding in current.items():
                found = answers[partition]
                if isinstance(found, Trouble):
                    self._hold_unopened(holding, found)
                elif isinstance(found, Refused):
                    self._refused(holding, found)
            self._tell_of_new(claim, self._current(claim))
            return True
        self._waiting.remove(claim)
        self.unanswered = error
        if isinstance(error, StoreUnavailable | BrokerUnavailable):
            pause = self._backoff(list(current.values()))
            _log.error(
                "claim failed, partitions wait partitions=%s again_in=%.1fs cause=%s", _names(current), pause, error
            )
            self._plan(current, claim.errand, pause)
        elif isinstance(error, Fenced):
            self._fenced(current.values(), error)
        else:
            raise error
        return False

    def _hold_unopened(self, holding: Holding, trouble: Trouble) -> None:
        holding.state, holding.epoch = State.HELD, 0 if trouble.row is None else trouble.row.epoch
        holding.answered = True
        holding.held.add("trouble")  # the client has paused it already: it waits nowhere, or was stopped for its claim
        self._note_trouble(holding, trouble)
        self._chronicle.held([holding.partition])

    def _refused(self, holding: Holding, refused: Refused) -> None:
        """The others of its claim are ours all the same."""
        if not isinstance(refused.cause, Fenced):
            raise refused.cause
        self._fenced([holding], refused.cause, "claim refused")

    def _tell_of_new(self, claim: Claim, holdings: Mapping[Partition, Holding]) -> None:
        """Before anything flows, for a listener may load what its handler needs."""
        new = [p for p, holding in holdings.items() if not holding.told]
        claim.told = self._audience.tell("assigned", sorted(new), self._chronicle.so_far())
        claim.listening = Deadline(LISTENERS_PATIENCE)
        for partition in new:
            holdings[partition].told = True

    def _opened(self, holdings: Mapping[Partition, Holding], positions: Positions) -> dict[Partition, Place]:
        for partition, holding in holdings.items():
            self._open(holding, positions[partition])
        if not holdings:
            return {}
        where = " ".join(f"{p}@{positions[p].next_offset}" for p in sorted(holdings))
        _log.info("assigned partitions=%d at=%s", len(holdings), where)
        self._chronicle.opened(holdings, added=not self._claims.added.isdisjoint(holdings))
        return {
            p: Place(positions[p].next_offset, positions[p].leader_epoch, paused=bool(holding.held))
            for p, holding in holdings.items()
        }

    def _open(self, holding: Holding, position: Position) -> None:
        holding.answered = True
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
        if holding.partition in self._claims.unpinned:
            # A record that is handled before its start is kept would be skipped by the next run, which begins at the
            # end of that day, if this one died now.
            holding.held.add("start")
            self.asks_for_commit = True

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
                "abandoned partition=%s: its handler still runs %.1f s after the partition was taken from it; "
                "the record is handled by the next owner",
                lane.partition, self._shutdown,
            )  # fmt: skip
            self._leave_behind(lane)
        self._late = [late for late in self._late if not late[1].passed]
        self._end_for_hung_handlers()

    def _leave_behind(self, lane: Lane) -> None:
        """Its handler does not return, and the partition may be ours again: that must not wait for ever."""
        if self._may_be_left(lane):
            lane.given_up = True
        else:
            self._hung.append(lane)

    def _end_for_hung_handlers(self) -> None:
        self._hung = [lane for lane in self._hung if lane.busy]
        for lane in self._hung:
            holding = self.holdings.get(lane.partition)
            if holding is not None and holding.closed is lane:
                raise TooManyFailures(
                    f"a handler call of {lane.partition} has not returned, and the partition is ours again: its next "
                    f"record cannot be handled beside it, so the process ends. Give the handler a timeout="
                )

    def _brake(self, holdings: list[Holding], reason: str) -> int:
        return sum(holding.lane.brake(reason) for holding in holdings if holding.lane is not None)

    def _close_lane(self, holding: Holding, reason: str) -> None:
        """The partition stays ours, and its next lane waits for this one; for a handler that hangs only where it has
        to."""
        lane = holding.lane
        if lane is None:
            return
        lane.brake(reason)
        self._set_aside(holding)
        if self._may_be_left(lane):
            self._expect_end(lane)

    def _set_aside(self, holding: Holding) -> None:
        if holding.lane is not None:
            holding.lane.lanes.shut()
            holding.lane, holding.closed = None, holding.lane

    def _forget(self, holdings: list[Holding]) -> None:
        for holding in holdings:
            self._set_aside(holding)
            if holding.closed is not None:
                self._resting[holding.partition] = holding.closed
                self._expect_end(holding.closed)
            if self.holdings.get(holding.partition) is holding:
                del self.holdings[holding.partition]

    def _expect_end(self, lane: Lane) -> None:
        known = [*self._hung, *(late for late, _ in self._late)]
        if lane.occupied and not any(each is lane for each in known):
            self._late.append((lane, Deadline(self._shutdown)))


def _error_of(holding: Holding) -> KconsumeError | None:
    return None if holding.trouble is None else holding.trouble.error


def _told(holdings: Iterable[Holding]) -> list[Partition]:
    """Those that listeners know to be ours."""
    return sorted(h.partition for h in holdings if h.told)


def _names(partitions: Iterable[Partition]) -> str:
    return ",".join(map(str, sorted(partitions))) or "-"

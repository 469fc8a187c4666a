"""The partitions that this process owns, and the state of each: from its claim to its release.

    claiming ──► open ──► gone         revoked: finished and committed first; lost: gone at once
        ▲          │
        ├──────────┤     the store was unavailable: claimed again under the same epoch
        └─ fenced ─┘     the store fenced us, or refused the claim because its row has a later generation: the row is
                         read; once the broker has confirmed our membership since then, the partition is claimed under
                         the epoch of that row, whatever its generation

The client calls `assigned`, `revoked` and `lost`. The loop calls `step` on each turn to continue everything that takes
time. Only two methods wait: `assigned` waits up to half a second for a claim, and `revoked` waits for listeners within
its budget.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, wait
from functools import partial
from typing import Protocol

from kconsume._event_log import EventLog
from kconsume._kafka.consumer import PAUSED_AT_ZERO, StartAt
from kconsume._kafka.two_member_consumer import AnyConsumer
from kconsume._runtime.assignment.claims import Claims
from kconsume._runtime.assignment.held_watch import HeldWatch
from kconsume._runtime.assignment.late_lanes import LateLanes
from kconsume._runtime.assignment.listener_calls import ListenerCalls
from kconsume._runtime.assignment.partition import (
    Answers,
    ClaimCall,
    Confirmation,
    Membership,
    OwnedPartition,
    PendingClaim,
    State,
)
from kconsume._runtime.assignment.partition_trouble import PartitionTrouble
from kconsume._runtime.assignment.rebalance_recorder import RebalanceRecorder
from kconsume._runtime.assignment.topic_checks import TopicChecks
from kconsume._runtime.assignment.watermark import Watermark
from kconsume._runtime.background import BackgroundThread
from kconsume._runtime.deadlines import Deadline
from kconsume._runtime.lanes.lane import Lane
from kconsume.backends.base import Position, Positions, Refused
from kconsume.errors import (
    BrokerUnavailable,
    Fenced,
    HandlerFailed,
    KconsumeError,
    StoreUnavailable,
    Undecided,
)
from kconsume.records import Partition

_log = EventLog("rebalance")

CLAIM_PATIENCE = 0.5
"""Seconds that the client's callback waits for a claim. Most claims are answered within this time."""
LISTENERS_PATIENCE = 10.0
"""Seconds that a new partition waits for its listeners, which may have something to load."""
SAME_CAUSE_EVERY = 30.0
"""Seconds between two log lines about claims that fail for the same cause."""
_BACKOFF_MOST = 15.0


class LaneMaker(Protocol):
    """Makes the lane of a partition that was claimed."""

    def __call__(self, partition: Partition, position: Position, /) -> Lane: ...


class Assignment:
    """The partitions of one consumer.

    Methods are called on the owner thread, except `_ask_store`, which runs on the background thread. Fields: the owner
    thread writes all of them. Other threads read `partitions` (the background thread through `_membership`, which is
    replaced as a whole; tools take a copy), `joined` and `last_error`.
    """

    def __init__(
        self,
        claims: Claims,
        topic_checks: TopicChecks,
        background: BackgroundThread,
        make_lane: LaneMaker,
        listener_calls: ListenerCalls,
        recorder: RebalanceRecorder,
        *,
        budget: float,
        shutdown: float,
        grouped: bool,
        may_be_left: Callable[[Lane], bool] = lambda _: True,
    ) -> None:
        """claims: asks the store.

        Args:
            topic_checks: knows whether the survey before the first claim was answered.
            background: runs the calls of `claims`.
            make_lane: makes the lane of a claimed partition.
            listener_calls: calls the rebalance listeners.
            recorder: records each rebalance.
            budget: seconds within which revoked partitions must be given up.
            shutdown: seconds until the handler of a partition that was taken away is abandoned.
            grouped: whether a Kafka group assigns the partitions.
            may_be_left: whether the next lane of a partition may open beside an abandoned handler.
        """
        self.partitions: dict[Partition, OwnedPartition] = {}
        self.paused: set[Partition] = set()
        """Partitions that the user has paused."""
        self.abandoned: list[Partition] = []
        """Partitions that were given up while their handler still ran."""
        self.joined = False
        """Whether the group has given this consumer an assignment."""
        self.last_error: BaseException | None = None
        """The error because of which the last claim was not answered."""
        self._logged_causes: dict[Partition, tuple[str, Deadline]] = {}
        """Why a partition does not flow, as it was logged last, and until when the same cause is not logged again."""
        self.asks_for_commit = False
        """Whether a confirmation, or the first offset of a partition, waits for the next commit."""
        self._claims = claims
        self._topic_checks = topic_checks
        self._background = background
        self._make_lane = make_lane
        self._listener_calls = listener_calls
        self._recorder = recorder
        self._budget = budget
        self._grouped = grouped
        self._fenced_partitions: set[OwnedPartition] = set()
        self._leaving: Deadline | None = None
        self._previous_lanes: dict[Partition, Lane] = {}
        """The last lane of each partition that left. The lane may still be busy when the partition is assigned
        again."""
        self._pending: list[PendingClaim] = []
        self._late_lanes = LateLanes(shutdown, may_be_left, self.abandoned)
        self._held_watch = HeldWatch(claims, background)
        self._consumer: AnyConsumer | None = None
        self._membership = Membership({}, {})
        """Written in the client's callbacks. `_ask_store` reads it when a claim is sent to the store."""

    def attach(self, consumer: AnyConsumer, finish_revoked: Callable[[list[OwnedPartition], Deadline], int]) -> None:
        """Connect the Kafka consumer.

        Args:
            consumer: calls back `assigned`, `revoked` and `lost`.
            finish_revoked: finishes revoked partitions within a deadline; returns how many records were finished.
        """
        self._consumer = consumer
        self._finish_revoked = finish_revoked

    @property
    def consumer(self) -> AnyConsumer:
        """The Kafka consumer."""
        assert self._consumer is not None
        return self._consumer

    @property
    def settled(self) -> bool:
        """Whether every partition is open or held, with no claim pending."""
        return self.joined and all(o.state in (State.OPEN, State.HELD) for o in self.partitions.values())

    @property
    def troubles(self) -> dict[Partition, PartitionTrouble]:
        """The partitions that are held, and why."""
        return {p: o.trouble for p, o in self.partitions.items() if o.trouble is not None}

    def has_pending_claim(self, owned: OwnedPartition) -> bool:
        return any(claim is owned.claim for claim in self._pending)

    def awaits_confirmation(self, owned: OwnedPartition) -> bool:
        """Whether the store has refused us the partition, and its row is being read or confirmed."""
        return owned in self._fenced_partitions and owned.confirmation is not None

    def note_empty_assignment(self) -> None:
        """Note that the group has assigned no partition to this member. Under KIP-848 there is no callback."""
        self.joined = True

    @property
    def started(self) -> bool:
        """Whether the group has given us an assignment, even an empty one, and the store has answered the claim of it.

        A partition that waits for a decision of the user counts as answered. A pattern that matches no topic yet also
        counts as an assignment. Only the assignment of the handlers' own topics counts; the assignment of the retry
        topics may arrive seconds earlier.
        """
        if not (self.consumer.main_joined or self._topic_checks.waits_for_topics):
            return False
        if self.partitions:
            return all(o.answered for o in self.partitions.values())
        return self._topic_checks.store_answered

    def current(self, partition: Partition, token: object) -> OwnedPartition | None:
        """The partition, if the token is still in charge of it; else None. So the answers to earlier assignments, lanes
        and claims change nothing."""
        owned = self.partitions.get(partition)
        return owned if owned is not None and token is not None and owned.token is token else None

    # Called inside the client's callbacks

    def assigned(self, partitions: list[Partition]) -> Mapping[Partition, StartAt]:
        """Claim new partitions. Returns the start of each partition whose claim was answered in time."""
        self.joined = True
        self._recorder.begins(self.partitions)
        self._recorder.gains(partitions)
        new = {p: OwnedPartition(p, self._previous_lanes.pop(p, None)) for p in partitions}
        self.partitions.update(new)
        self._read_membership()
        places = self._claim_new(new) if new else {}
        self._recorder.ends()
        return places

    def revoked(self, partitions: list[Partition]) -> None:
        """Give partitions up in order: stop their lanes, finish the records that run, commit, call the listeners."""
        budget = Deadline(self._budget if self._leaving is None else min(self._budget, self._leaving.left))
        leaving = self._owned(partitions)
        if self._leaving is not None:
            self._recorder.expect("left")  # at each callback, because a consumer may be two members
        self._recorder.begins(self.partitions.keys() - set(partitions))
        try:
            dropped = self._brake(leaving, "revoked")
            drained = self._finish_revoked(leaving, budget)
            late = [o.partition for o in leaving if o.lane is not None and o.lane.unfinished]
            self._recorder.gives_up(partitions, drained, dropped, late)
            called = self._listener_calls.call("revoked", _known_to_listeners(leaving), self._recorder.so_far())
            self._listener_calls.wait(called, budget.left)
        finally:
            self._forget(leaving)  # even after a failure: the broker has revoked these partitions
            self._read_membership()
        if self._leaving is not None:
            self._recorder.leaves()

    def lost(self, partitions: list[Partition]) -> None:
        """Other members may have these partitions already, so nothing is committed. The fence protects the store."""
        self.joined = False  # a consumer that lost its partitions must not count as having read everything
        leaving = self._owned(partitions)
        self._recorder.begins(self.partitions.keys() - set(partitions))
        try:
            self._recorder.loses(partitions, self._brake(leaving, "lost"))
            self._listener_calls.call("lost", _known_to_listeners(leaving), self._recorder.so_far())
        finally:
            self._forget(leaving)
            self._read_membership()
        _log.warning("partitions lost", partitions=sorted(partitions), effect="nothing was committed")

    def _read_membership(self) -> None:
        """Read the generation and the partitions together. Called only inside the client's callbacks: at any other time
        the generation could be a later one, in which the partitions belong to another member."""
        owned = dict(self.partitions)
        generations: dict[Partition, int | None] = dict.fromkeys(owned)
        if self._grouped:
            now = {} if self._leaving is not None else self.consumer.generations(owned)
            before = {} if self._leaving is not None else self._membership.generations
            generations = {p: now.get(p, before.get(p, -1)) for p in owned}
        self._membership = Membership(generations, owned)

    def _claim_new(self, new: Mapping[Partition, OwnedPartition]) -> Mapping[Partition, StartAt]:
        """Claim new partitions. Waits a short time for the answer and for the listeners."""
        claim, patience = self._queue_claim(new), Deadline(CLAIM_PATIENCE)
        if not claim.ready:
            return {}
        wait([self._send_claim(claim)], patience.left)
        places = self._advance_claim(claim)
        if claim.listeners_called is not None:
            wait([claim.listeners_called], patience.left)
            places = places or self._advance_claim(claim)
        if waiting := [p for p, owned in new.items() if owned.state is State.CLAIMING]:
            _log.info("claim is slow", partitions=sorted(waiting), effect="the partitions wait paused")
        return places

    def _owned(self, partitions: Iterable[Partition]) -> list[OwnedPartition]:
        return [o for p in partitions if (o := self.partitions.get(p)) is not None]

    # Called by the loop

    def claim_explicit(self, partitions: Iterable[Partition]) -> None:
        """Claim partitions that the user chose, without a group (`partitions=`)."""
        chosen = sorted(partitions)
        self.joined = True
        self.consumer.assign_explicitly(dict.fromkeys(chosen, PAUSED_AT_ZERO))
        self.partitions.update({p: OwnedPartition(p) for p in chosen})
        self._read_membership()
        self._send_claim(self._queue_claim(self.partitions))

    def leave(self, deadline: Deadline) -> None:
        """Prepare to leave the group now. The partitions that this revokes are given up by the deadline."""
        self._leaving = deadline

    def step(self) -> None:
        """Continue claims, fences, late lanes and held partitions. Cheap when there is nothing to do."""
        if self._pending:
            self._advance_claims()
        if self._fenced_partitions:
            self._read_rows()
        if self._late_lanes:
            self._late_lanes.step(self.partitions)
        if self._held_watch.active:
            self._step_held()

    def put_on_hold(self, owned: OwnedPartition, error: KconsumeError, *, drains: bool = True) -> None:
        """Hold an open partition because of an error that concerns no other partition.

        Args:
            drains: whether the lane still handles the records that it already has.
        """
        if owned.state is not State.OPEN:
            return  # the claim of the partition will find the same trouble
        if owned.lane is not None and not drains:
            owned.lane.request_stop("held")
        self.add_pause(owned, "trouble")
        row = Position(owned.stored or 0, owned.epoch, owned.topic_id)
        trouble, earlier = PartitionTrouble(error, row, open_lane=True), owned.trouble
        if earlier is not None:
            is_same = earlier.code == trouble.code
            if is_same or not (earlier.is_read_again or trouble.outranks(earlier)):
                earlier.is_read_again = False  # the partition was read again and has the same trouble
                return
        self._note_trouble(owned, trouble)

    def offset_stored(self, owned: OwnedPartition, offset: int) -> None:
        """Note that the store now has this offset of the partition."""
        owned.stored = offset
        if "start" in owned.pause_reasons:
            self._claims.unpinned.discard(owned.partition)
            self.remove_pause(owned, "start")

    def note_progress(self, owned: OwnedPartition) -> None:
        """Note that records of a partition were finished, or that its end was reached. If the partition was being read
        again after a trouble, the trouble is over."""
        if owned.trouble is not None and owned.trouble.is_read_again:
            _log.info("partition released", partition=owned.partition, code=owned.trouble.code)
            owned.trouble = None

    def store_refused(self, owned: OwnedPartition, error: BaseException, *, holds: bool = False) -> None:
        """Stop the lane of a partition whose work the store did not accept, and claim the partition again.

        If another owner has claimed the partition, the new claim waits for `claim_confirmed`. If the store was
        unavailable or its answer is not known, the new claim is under the same epoch.

        Args:
            holds: whether a record that fails holds its partition instead of ending the consumer.
        """
        self._close_lane(owned, "store")
        self.add_pause(owned, "claim")
        if isinstance(error, Undecided) and not holds:
            raise error  # a record failed in this run; a record that failed in an earlier run only holds its partition
        if isinstance(error, Fenced):
            return self._fenced([owned], error)
        pause, epoch = self._backoff([owned]), owned.epoch
        if self._is_new_cause([owned.partition], error):
            _log.warning("partition stopped", partition=owned.partition, again_in=pause, cause=error)
        self._queue_claim(
            {owned.partition: owned}, lambda ours, _: self._claims.reclaim(dict.fromkeys(ours, epoch)), pause
        )
        return None

    def claim_confirmed(self, owned_partitions: list[OwnedPartition], generation: int) -> None:
        """Claim these partitions, because the broker has confirmed our membership after their rows were read. A
        partition that another owner has claimed in the meantime is refused."""
        epochs = {
            o.partition: o.confirmation.row.epoch for o in owned_partitions if o.confirmation and o.confirmation.row
        }
        never_open = all(o.epoch == 0 and o.claim_tries == 0 for o in owned_partitions)
        pause = self._backoff(owned_partitions)
        self._queue_claim(
            {o.partition: o for o in owned_partitions},
            lambda ours, _: self._claims.take_over({p: epochs[p] for p in ours}, generation),
            0.0 if never_open else pause,  # a static member that starts again is refused once and need not wait
        )

    def seek(self, offsets: Mapping[Partition, int]) -> None:
        """Stop the lanes, set the offsets that the user chose under a new epoch, claim and continue there."""
        chosen = {p: self.partitions[p] for p in offsets if p in self.partitions}
        for partition in sorted(offsets.keys() - chosen.keys()):
            _log.warning(
                "seek ignored",
                partition=partition,
                offset=offsets[partition],
                hint="this process does not have the partition: seek in the process that has it",
            )
        for partition, owned in chosen.items():
            owned.sought = offsets[partition]
            self._close_lane(owned, "seek")
            self.add_pause(owned, "claim")
        self._queue_claim(chosen, lambda ours, generation: self._claims.seek({p: offsets[p] for p in ours}, generation))

    def pause(self, partitions: Iterable[Partition]) -> None:
        """Pause partitions for the user. The pause outlives rebalances."""
        for partition in partitions:
            self.paused.add(partition)
            if (owned := self.partitions.get(partition)) is not None:
                self.add_pause(owned, "user")

    def resume(self, partitions: Iterable[Partition]) -> None:
        """End the user's pause. A held partition is tried again."""
        for partition in partitions:
            self.paused.discard(partition)
            if (owned := self.partitions.get(partition)) is not None:
                self.remove_pause(owned, "user")
                if owned.trouble is not None:
                    self._claim_again(owned, "resumed")

    def add_pause(self, owned: OwnedPartition, reason: str) -> None:
        """Pause a partition at the client for one more reason."""
        if not owned.pause_reasons:
            self.consumer.pause([owned.partition])
        owned.pause_reasons.add(reason)

    def remove_pause(self, owned: OwnedPartition, reason: str) -> None:
        """Remove a reason. The partition is resumed at the client when no reason is left."""
        if reason in owned.pause_reasons:
            owned.pause_reasons.discard(reason)
            if not owned.pause_reasons:
                self.consumer.resume([owned.partition])

    def brake_all(self, reason: str) -> int:
        """Stop every lane after its current record. Returns how many records were dropped before they had started."""
        return self._brake(list(self.partitions.values()), reason)

    # Fenced partitions

    def _fenced(self, owned_partitions: Iterable[OwnedPartition], error: Fenced, *, refused: bool = False) -> None:
        """Handle partitions that have another owner in the store, or whose claim the store refused."""
        if not self._grouped:
            raise error
        for owned in owned_partitions:
            owned.state, owned.confirmation = State.FENCED, Confirmation()
            self._fenced_partitions.add(owned)
            self._listener_calls.call("lost", _known_to_listeners([owned]), self._recorder.so_far())
            owned.listeners_know = False
            then = "claimed again when the broker has confirmed the membership"
            if refused:
                _log.warning("claim refused", partition=owned.partition, cause=error, effect=then)
            else:
                _log.warning("partition fenced", partition=owned.partition, cause=error, effect=then)

    def _read_rows(self) -> None:
        """Read the rows of fenced partitions before their offsets are committed. A commit confirms our membership only
        if it is accepted after the row was read."""
        self._fenced_partitions = {o for o in self._fenced_partitions if self.current(o.partition, o.confirmation) is o}
        ways = {o: o.confirmation for o in self._fenced_partitions if o.confirmation is not None}
        if due := {o: way for o, way in ways.items() if way.reading is None and way.due.passed}:
            reading = self._background.send(partial(self._claims.rows, sorted(o.partition for o in due)))
            for way in due.values():
                way.reading = reading
        for owned, way in ways.items():
            if way.reading is None or way.row is not None or not way.reading.done():
                continue
            error = way.reading.exception()
            if isinstance(error, StoreUnavailable):
                owned.confirmation = Confirmation(self._backoff([owned]))
            elif error is not None:
                raise error
            elif (row := way.reading.result().get(owned.partition)) is None:
                # The row was deleted: the partition starts again as `start=` says.
                self._queue_claim({owned.partition: owned}, pause=self._backoff([owned]))
            else:
                way.row = row
                self.asks_for_commit = True

    # Held partitions

    def _note_trouble(self, owned: OwnedPartition, trouble: PartitionTrouble) -> None:
        owned.trouble = trouble
        self._held_watch.begin()
        error = trouble.error
        if isinstance(error, HandlerFailed):
            hint = f"see it again: {error.try_command}"
            _log.error(
                "partition held",
                partition=owned.partition,
                code=trouble.code,
                cause=error,
                hint=hint,
                exc_info=error.__cause__,
            )
        else:
            _log.error("partition held", partition=owned.partition, code=trouble.code, cause=error)

    def _step_held(self) -> None:
        decisions = self._held_watch.step([o for o in self.partitions.values() if o.trouble is not None])
        for owned, reason in decisions.claim_again:
            self._claim_again(owned, reason)
        for owned, error in decisions.fenced:
            self._close_lane(owned, "store")
            self.add_pause(owned, "claim")
            owned.trouble = None
            self._fenced([owned], error)
        for owned in decisions.read_again:
            self._read_again(owned)

    def _claim_again(self, owned: OwnedPartition, reason: str) -> None:
        assert owned.trouble is not None
        _log.info("partition tried again", partition=owned.partition, code=owned.trouble.code, reason=reason)
        self._close_lane(owned, "held")
        self.add_pause(owned, "claim")
        self._queue_claim({owned.partition: owned})

    def _read_again(self, owned: OwnedPartition) -> None:
        """Read the partition again from its watermark. Then records arrive, or the client reports the same trouble."""
        trouble, lane = owned.trouble, owned.lane
        if trouble is None or not trouble.reads_again or lane is None or lane.unfinished or not owned.progress.idle:
            return
        if lane.batch_buffer:  # the buffered records would arrive a second time, in the same batch
            return
        trouble.is_read_again = True
        owned.pause_reasons.discard("trouble")
        place = StartAt(owned.progress.watermark, owned.leader_epoch, paused=bool(owned.pause_reasons))
        self.consumer.start_at({owned.partition: place})

    # Claims

    def _queue_claim(
        self, partitions: Mapping[Partition, OwnedPartition], call: ClaimCall | None = None, pause: float = 0.0
    ) -> PendingClaim:
        """Claim these partitions after the pause, and forget their earlier claims.

        A partition whose previous lane is still busy gets a separate claim, so that it does not delay the others. The
        returned claim does not contain such partitions.

        Args:
            call: how to ask the store; the usual claim if None.
            pause: seconds until the claim is due.
        """
        for owned in partitions.values():
            owned.state, owned.trouble = State.CLAIMING, None
        call = call or self._usual_call(partitions)
        claim = PendingClaim({p: o for p, o in partitions.items() if not o.waits_for_previous_lane}, call, pause)
        later = [PendingClaim({p: o}, call, pause) for p, o in partitions.items() if o.waits_for_previous_lane]
        self._pending.extend(each for each in (claim, *later) if each.partitions)
        return claim

    def _usual_call(self, partitions: Mapping[Partition, OwnedPartition]) -> ClaimCall:
        had = {p: Position(o.stored or 0, o.epoch) for p, o in partitions.items() if o.epoch > 0}
        return partial(self._claims.claim, had=had) if had else self._claims.claim

    def _send_claim(self, claim: PendingClaim) -> Future[Answers]:
        claim.answer = self._background.send(partial(self._ask_store, claim))
        return claim.answer

    def _ask_store(self, claim: PendingClaim) -> Answers:
        """Send the claim to the store, on the background thread. A slow store may have delayed the claim, so partitions
        that are no longer ours are left out. Partitions that are taken away later are protected by the generation."""
        member = self._membership
        by_generation: dict[int | None, list[Partition]] = {}
        for partition, owned in sorted(claim.partitions.items()):
            if member.partitions.get(partition) is owned and owned.token is claim:
                by_generation.setdefault(member.generations[partition], []).append(partition)
        return {p: each for g, ours in by_generation.items() for p, each in claim.call(ours, g).items()}

    def _advance_claims(self) -> None:
        for claim in list(self._pending):
            if not self._still_ours(claim):
                self._pending.remove(claim)
            elif places := self._advance_claim(claim):
                self.consumer.start_at(places)
        self._recorder.ends()

    def _advance_claim(self, claim: PendingClaim) -> dict[Partition, StartAt]:
        """Advance a claim as far as possible without waiting. Returns the start positions of the partitions that are
        open now."""
        if claim.answer is None:
            if claim.ready:
                self._send_claim(claim)
            return {}
        if claim.positions is None and not (claim.answer.done() and self._take_answer(claim, claim.answer)):
            return {}
        assert claim.positions is not None
        if claim.listeners_called is not None and not claim.listeners_called.done():
            if not claim.listeners_deadline.passed:
                return {}
            self._listener_calls.give_up()
        self._pending.remove(claim)
        return self._open_all(self._still_ours(claim), claim.positions)

    def _still_ours(self, claim: PendingClaim) -> dict[Partition, OwnedPartition]:
        """The partitions of a claim that are still ours and have no later claim."""
        return {p: o for p, o in claim.partitions.items() if self.current(p, claim) is o}

    def _take_answer(self, claim: PendingClaim, answer: Future[Answers]) -> bool:
        """Take the answer of the store. Returns whether the answer has positions. A claim that failed is queued again,
        or its error is raised."""
        current, error = self._still_ours(claim), answer.exception()
        if error is None:
            answers, self.last_error = answer.result(), None
            claim.positions = {p: found for p, found in answers.items() if isinstance(found, Position)}
            for partition, owned in current.items():
                found, owned.sought = answers[partition], None
                if isinstance(found, PartitionTrouble):
                    self._hold_unopened(owned, found)
                elif isinstance(found, Refused):
                    self._refused(owned, found)
            self._call_assigned_listeners(claim, self._still_ours(claim))
            return True
        self._pending.remove(claim)
        self.last_error = error
        if isinstance(error, StoreUnavailable | BrokerUnavailable):
            pause = self._backoff(list(current.values()))
            if self._is_new_cause(current, error):
                _log.error("claim failed", partitions=sorted(current), again_in=pause, cause=error)
            self._queue_claim(current, claim.call, pause)
        elif isinstance(error, Fenced):
            self._fenced(current.values(), error)
        else:
            raise error
        return False

    def _is_new_cause(self, partitions: Iterable[Partition], error: BaseException) -> bool:
        """Whether to log why partitions do not flow: each partition's cause is logged at once, and the same cause
        again after `SAME_CAUSE_EVERY` seconds."""
        partitions, cause = list(partitions), str(error)
        known = (self._logged_causes.get(partition, ("", Deadline(0.0))) for partition in partitions)
        if all(last == cause and not until.passed for last, until in known):
            return False
        self._logged_causes |= dict.fromkeys(partitions, (cause, Deadline(SAME_CAUSE_EVERY)))
        return True

    def _hold_unopened(self, owned: OwnedPartition, trouble: PartitionTrouble) -> None:
        owned.state, owned.epoch = State.HELD, 0 if trouble.row is None else trouble.row.epoch
        owned.answered = True
        owned.pause_reasons.add("trouble")  # the client has already paused the partition, for its claim
        self._note_trouble(owned, trouble)
        self._recorder.held([owned.partition])

    def _refused(self, owned: OwnedPartition, refused: Refused) -> None:
        """Handle a partition whose claim was refused. The other partitions of the claim stay claimed."""
        if not isinstance(refused.cause, Fenced):
            raise refused.cause
        self._fenced([owned], refused.cause, refused=True)

    def _call_assigned_listeners(
        self, claim: PendingClaim, owned_partitions: Mapping[Partition, OwnedPartition]
    ) -> None:
        """Call the listeners before records are delivered, because a listener may load data that its handler needs."""
        new = [p for p, owned in owned_partitions.items() if not owned.listeners_know]
        claim.listeners_called = self._listener_calls.call("assigned", sorted(new), self._recorder.so_far())
        claim.listeners_deadline = Deadline(LISTENERS_PATIENCE)
        for partition in new:
            owned_partitions[partition].listeners_know = True

    def _open_all(
        self, owned_partitions: Mapping[Partition, OwnedPartition], positions: Positions
    ) -> dict[Partition, StartAt]:
        for partition, owned in owned_partitions.items():
            self._open(owned, positions[partition])
        if not owned_partitions:
            return {}
        _log.info(
            "partitions assigned",
            partitions=len(owned_partitions),
            at={p: positions[p].next_offset for p in sorted(owned_partitions)},
        )
        self._recorder.opened(owned_partitions, added=not self._claims.added.isdisjoint(owned_partitions))
        return {
            p: StartAt(positions[p].next_offset, positions[p].leader_epoch, paused=bool(owned.pause_reasons))
            for p, owned in owned_partitions.items()
        }

    def _open(self, owned: OwnedPartition, position: Position) -> None:
        owned.answered = True
        owned.lane = self._make_lane(owned.partition, position)
        owned.lane.lanes.lane_opened()
        owned.progress = Watermark(position.next_offset)
        owned.epoch = position.epoch
        owned.topic_id = position.topic_id
        owned.leader_epoch = position.leader_epoch
        # Without an epoch, the claim did not pin the start: the offset is unsaved until it is committed.
        owned.stored = position.next_offset if position.epoch else None
        owned.mirrored = None
        owned.claim, owned.state = None, State.OPEN
        owned.pause_reasons = {"user"} if owned.partition in self.paused else set()
        if owned.partition in self._claims.unpinned:
            # The start must be stored before a record is handled. If this process died in between, the next run would
            # begin at a later end of the log and skip the records before that end.
            owned.pause_reasons.add("start")
            self.asks_for_commit = True

    def _backoff(self, owned_partitions: list[OwnedPartition]) -> float:
        for owned in owned_partitions:
            owned.claim_tries += 1
        tries = max((o.claim_tries for o in owned_partitions), default=1)
        return min(_BACKOFF_MOST, 0.25 * 2.0**tries) * random.uniform(0.5, 1.0)

    # Partitions that go

    def _brake(self, owned_partitions: list[OwnedPartition], reason: str) -> int:
        return sum(owned.lane.request_stop(reason) for owned in owned_partitions if owned.lane is not None)

    def _close_lane(self, owned: OwnedPartition, reason: str) -> None:
        """Stop the lane of a partition that stays ours. The next lane waits until this lane has ended. It waits for a
        handler that hangs only where the fence does not protect the store."""
        lane = owned.lane
        if lane is None:
            return
        lane.request_stop(reason)
        self._set_aside(owned)
        if self._late_lanes.may_be_left(lane):
            self._late_lanes.expect_end(lane)

    def _set_aside(self, owned: OwnedPartition) -> None:
        if owned.lane is not None:
            owned.lane.lanes.lane_closed()
            owned.lane, owned.previous_lane = None, owned.lane

    def _forget(self, owned_partitions: list[OwnedPartition]) -> None:
        for owned in owned_partitions:
            if owned.sought is not None:
                _log.warning(
                    "seek interrupted",
                    partition=owned.partition,
                    offset=owned.sought,
                    hint="the partition left before the store answered: check its offset, and seek again if needed",
                )
            self._set_aside(owned)
            if owned.previous_lane is not None:
                self._previous_lanes[owned.partition] = owned.previous_lane
                self._late_lanes.expect_end(owned.previous_lane)
            if self.partitions.get(owned.partition) is owned:
                del self.partitions[owned.partition]
                self._logged_causes.pop(owned.partition, None)


def _known_to_listeners(owned_partitions: Iterable[OwnedPartition]) -> list[Partition]:
    return sorted(o.partition for o in owned_partitions if o.listeners_know)

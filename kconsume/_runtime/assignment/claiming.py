"""The claims of the partitions of one consumer, from the assignment until each partition is open.

    claiming ──► open
        ▲          │     the store was unavailable: claimed again under the same epoch
        ├──────────┤
        └─ fenced ─┘     the store fenced us, or refused the claim because its row has a later generation: the row is
                         read; once the broker has confirmed our membership since then, the partition is claimed under
                         the epoch of that row, whatever its generation

`step` continues everything that takes time. Only `claim_new` waits, up to half a second. All methods are called on the
owner thread, except `_ask_store`, which runs on the background thread.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, wait
from functools import partial
from typing import Protocol

from kconsume._event_log import EventLog
from kconsume._kafka.consumer import StartAt
from kconsume._runtime.assignment.claims import Claims
from kconsume._runtime.assignment.held_watch import HeldWatch
from kconsume._runtime.assignment.late_lanes import LateLanes
from kconsume._runtime.assignment.listener_calls import ListenerCalls
from kconsume._runtime.assignment.owned_partitions import OwnedPartitions
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
from kconsume._runtime.assignment.watermark import Watermark
from kconsume._runtime.background import BackgroundThread
from kconsume._runtime.deadlines import Deadline
from kconsume._runtime.lanes.lane import Lane
from kconsume._runtime.observation.events import (
    ClaimFailed,
    Events,
    PartitionFenced,
    PartitionsAssigned,
    PartitionStopped,
)
from kconsume.backends.base import Position, Positions, Refused
from kconsume.errors import BrokerUnavailable, Fenced, StoreUnavailable, Undecided
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


class Claiming:
    """Fields: the owner thread writes all of them. `_membership` is replaced as a whole; the background thread reads
    it. Other threads read `last_error`."""

    def __init__(
        self,
        partitions: OwnedPartitions,
        claims: Claims,
        background: BackgroundThread,
        make_lane: LaneMaker,
        listener_calls: ListenerCalls,
        recorder: RebalanceRecorder,
        late_lanes: LateLanes,
        held_watch: HeldWatch,
        events: Events,
        *,
        grouped: bool,
    ) -> None:
        """
        Args:
            partitions: the partitions of the consumer.
            claims: asks the store.
            background: runs the calls of `claims`.
            make_lane: makes the lane of a claimed partition.
            listener_calls: calls the rebalance listeners.
            recorder: records each rebalance.
            late_lanes: closes the lane of a partition that is claimed again.
            held_watch: watches a partition whose claim finds trouble.
            events: gets what happens to claims.
            grouped: whether a Kafka group assigns the partitions.
        """
        self.last_error: BaseException | None = None
        """The error because of which the last claim was not answered."""
        self._partitions = partitions
        self._claims = claims
        self._background = background
        self._make_lane = make_lane
        self._listener_calls = listener_calls
        self._recorder = recorder
        self._late_lanes = late_lanes
        self._held_watch = held_watch
        self._events = events
        self._grouped = grouped
        self._pending: list[PendingClaim] = []
        self._fenced: set[OwnedPartition] = set()
        self._membership = Membership({}, {})
        """Written in the client's callbacks. `_ask_store` reads it when a claim is sent to the store."""
        self._logged_causes: dict[Partition, tuple[str, Deadline]] = {}
        """Why a partition does not flow, as it was logged last, and until when the same cause is not logged again."""

    @property
    def is_pending(self) -> bool:
        """Whether any claim is pending."""
        return bool(self._pending)

    def has_pending(self, owned: OwnedPartition) -> bool:
        """Whether a claim of the partition is pending."""
        return any(claim is owned.claim for claim in self._pending)

    def awaits_confirmation(self, owned: OwnedPartition) -> bool:
        """Whether the store has refused us the partition, and its row is being read or confirmed."""
        return owned in self._fenced and owned.confirmation is not None

    def read_membership(self, *, leaving: bool) -> None:
        """Read the generation and the partitions together. Called only inside the client's callbacks: at any other time
        the generation could be a later one, in which the partitions belong to another member."""
        owned = dict(self._partitions)
        generations: dict[Partition, int | None] = dict.fromkeys(owned)
        if self._grouped:
            now = {} if leaving else self._partitions.consumer.generations(owned)
            before = {} if leaving else self._membership.generations
            generations = {p: now.get(p, before.get(p, -1)) for p in owned}
        self._membership = Membership(generations, owned)

    def claim_new(self, new: Mapping[Partition, OwnedPartition]) -> Mapping[Partition, StartAt]:
        """Claim new partitions. Waits a short time for the answer and for the listeners. Returns the start of each
        partition that is open now."""
        claim, patience = self.queue(new), Deadline(CLAIM_PATIENCE)
        if not claim.ready:
            return {}
        wait([self._send(claim)], patience.left)
        places = self._advance(claim)
        if claim.listeners_called is not None:
            wait([claim.listeners_called], patience.left)
            places = places or self._advance(claim)
        if waiting := [p for p, owned in new.items() if owned.state is State.CLAIMING]:
            _log.info("claim is slow", partitions=sorted(waiting), effect="the partitions wait paused")
        return places

    def claim_explicit(self, chosen: Mapping[Partition, OwnedPartition]) -> None:
        """Claim partitions that no group assigns."""
        self._send(self.queue(chosen))

    def claim_again(self, owned: OwnedPartition, reason: str) -> None:
        """Close the lane of a partition, and claim the partition again.

        Args:
            reason: why the lane is closed.
        """
        self._close_lane(owned, reason)
        self.queue({owned.partition: owned})

    def seek(self, chosen: Mapping[Partition, OwnedPartition], offsets: Mapping[Partition, int]) -> None:
        """Stop the lanes, set the offsets that the user chose under a new epoch, claim and continue there."""
        for partition, owned in chosen.items():
            owned.sought = offsets[partition]
            self._close_lane(owned, "seek")
        self.queue(chosen, lambda ours, generation: self._claims.seek({p: offsets[p] for p in ours}, generation))

    def store_refused(self, owned: OwnedPartition, error: BaseException, *, holds: bool = False) -> None:
        """Stop the lane of a partition whose work the store did not accept, and claim the partition again.

        If another owner has claimed the partition, the new claim waits for `confirmed`. If the store was unavailable or
        its answer is not known, the new claim is under the same epoch.

        Args:
            holds: whether a record that fails holds its partition instead of ending the consumer.
        """
        self._close_lane(owned, "store")
        if isinstance(error, Undecided) and not holds:
            raise error  # a record failed in this run; a record that failed in an earlier run only holds its partition
        if isinstance(error, Fenced):
            return self._fence([owned], error)
        pause, epoch = self._backoff([owned]), owned.epoch
        if self._is_new_cause([owned.partition], error):
            self._events.publish(PartitionStopped(owned.partition, pause, error))
        self.queue({owned.partition: owned}, lambda ours, _: self._claims.reclaim(dict.fromkeys(ours, epoch)), pause)
        return None

    def fenced_while_held(self, owned: OwnedPartition, error: Fenced) -> None:
        """Give up a held partition that another owner has claimed in the store."""
        self._close_lane(owned, "store")
        owned.trouble = None
        self._fence([owned], error)

    def confirmed(self, owned_partitions: list[OwnedPartition], generation: int) -> None:
        """Claim these partitions, because the broker has confirmed our membership after their rows were read. A
        partition that another owner has claimed in the meantime is refused."""
        epochs = {
            o.partition: o.confirmation.row.epoch for o in owned_partitions if o.confirmation and o.confirmation.row
        }
        never_open = all(o.epoch == 0 and o.claim_tries == 0 for o in owned_partitions)
        pause = self._backoff(owned_partitions)
        self.queue(
            {o.partition: o for o in owned_partitions},
            lambda ours, _: self._claims.take_over({p: epochs[p] for p in ours}, generation),
            0.0 if never_open else pause,  # a static member that starts again is refused once and need not wait
        )

    def offset_stored(self, owned: OwnedPartition, offset: int) -> None:
        """Note that the store now has this offset of the partition."""
        owned.note_stored(offset)
        if "start" in owned.pause_reasons:
            self._claims.unpinned.discard(owned.partition)
            self._partitions.remove_pause(owned, "start")

    def forget(self, partition: Partition) -> None:
        """Forget what was logged of a partition that leaves."""
        self._logged_causes.pop(partition, None)

    def step(self) -> None:
        """Continue claims and fences. Cheap when there is nothing to do."""
        if self._pending:
            self._advance_all()
        if self._fenced:
            self._read_rows()

    def queue(
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

    # Fenced partitions

    def _fence(self, owned_partitions: Iterable[OwnedPartition], error: Fenced, *, refused: bool = False) -> None:
        """Handle partitions that have another owner in the store, or whose claim the store refused."""
        if not self._grouped:
            raise error
        for owned in owned_partitions:
            owned.state, owned.confirmation = State.FENCED, Confirmation()
            self._fenced.add(owned)
            if owned.listeners_know:
                self._listener_calls.call("lost", [owned.partition], self._recorder.so_far())
            owned.listeners_know = False
            self._events.publish(PartitionFenced(owned.partition, error, refused))

    def _read_rows(self) -> None:
        """Read the rows of fenced partitions before their offsets are committed. A commit confirms our membership only
        if it is accepted after the row was read."""
        self._fenced = {o for o in self._fenced if self._partitions.current(o.partition, o.confirmation) is o}
        ways = {o: o.confirmation for o in self._fenced if o.confirmation is not None}
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
                self.queue({owned.partition: owned}, pause=self._backoff([owned]))
            else:
                way.row = row
                self._partitions.commit_is_due = True

    # Claims

    def _usual_call(self, partitions: Mapping[Partition, OwnedPartition]) -> ClaimCall:
        had = {p: Position(o.stored or 0, o.epoch) for p, o in partitions.items() if o.epoch > 0}
        return partial(self._claims.claim, had=had) if had else self._claims.claim

    def _send(self, claim: PendingClaim) -> Future[Answers]:
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

    def _advance_all(self) -> None:
        for claim in list(self._pending):
            if not self._still_ours(claim):
                self._pending.remove(claim)
            elif places := self._advance(claim):
                self._partitions.consumer.start_at(places)
        self._recorder.ends()

    def _advance(self, claim: PendingClaim) -> dict[Partition, StartAt]:
        """Advance a claim as far as possible without waiting. Returns the start positions of the partitions that are
        open now."""
        if claim.answer is None:
            if claim.ready:
                self._send(claim)
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
        return {p: o for p, o in claim.partitions.items() if self._partitions.current(p, claim) is o}

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
                    self._hold(owned, found)
                elif isinstance(found, Refused):
                    self._refused(owned, found)
            self._call_listeners(claim, self._still_ours(claim))
            return True
        self._pending.remove(claim)
        self.last_error = error
        if isinstance(error, StoreUnavailable | BrokerUnavailable):
            pause = self._backoff(list(current.values()))
            if self._is_new_cause(current, error):
                self._events.publish(ClaimFailed(sorted(current), pause, error))
            self.queue(current, claim.call, pause)
        elif isinstance(error, Fenced):
            self._fence(current.values(), error)
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

    def _hold(self, owned: OwnedPartition, trouble: PartitionTrouble) -> None:
        """Hold a partition whose claim found trouble."""
        owned.state, owned.epoch = State.HELD, 0 if trouble.row is None else trouble.row.epoch
        owned.answered = True
        owned.pause_reasons.add("trouble")  # the client has already paused the partition, for its claim
        self._held_watch.begin(owned, trouble)
        self._recorder.held([owned.partition])

    def _refused(self, owned: OwnedPartition, refused: Refused) -> None:
        """Handle a partition whose claim was refused. The other partitions of the claim stay claimed."""
        if not isinstance(refused.cause, Fenced):
            raise refused.cause
        self._fence([owned], refused.cause, refused=True)

    def _call_listeners(self, claim: PendingClaim, owned_partitions: Mapping[Partition, OwnedPartition]) -> None:
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
        self._events.publish(PartitionsAssigned({p: positions[p].next_offset for p in sorted(owned_partitions)}))
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
        owned.claim, owned.state, owned.opened_at = None, State.OPEN, time.monotonic()
        owned.pause_reasons = {"user"} if owned.partition in self._partitions.paused else set()
        if owned.partition in self._claims.unpinned:
            # No record is handled before the start is stored. If the process died after it had handled records, with no
            # offset stored, the next run would begin at the end that the log has by then, and skip the records before.
            owned.pause_reasons.add("start")
            self._partitions.commit_is_due = True

    def _backoff(self, owned_partitions: list[OwnedPartition]) -> float:
        for owned in owned_partitions:
            owned.claim_tries += 1
        tries = max((o.claim_tries for o in owned_partitions), default=1)
        return min(_BACKOFF_MOST, 0.25 * 2.0**tries) * random.uniform(0.5, 1.0)

    def _close_lane(self, owned: OwnedPartition, reason: str) -> None:
        self._late_lanes.close(owned, reason)
        self._partitions.add_pause(owned, "claim")

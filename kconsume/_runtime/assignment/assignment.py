"""The partitions that this process owns: the one door for the client's callbacks and for everything that follows.

    assigned   claim ─► listeners ─► lanes open                                     (`claiming`)
    revoked    stop the lanes ─► drain: running handlers, offsets, outbox rows ─► listeners ─► forget
    lost       stop the lanes ─► listeners ─► forget; nothing is committed

The client calls `assigned`, `revoked` and `lost`. The loop calls `step` on each turn to continue everything that takes
time, and `drain_all` at the end. Only these methods wait: `assigned` up to half a second for a claim, `revoked` and
`drain_all` within their deadlines.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from kconsume._event_log import EventLog
from kconsume._kafka.consumer import PAUSED_AT_ZERO, StartAt
from kconsume._kafka.two_member_consumer import AnyConsumer
from kconsume._runtime.assignment.claiming import Claiming, LaneMaker
from kconsume._runtime.assignment.claims import Claims
from kconsume._runtime.assignment.commits import Commits
from kconsume._runtime.assignment.committer import Committer, GroupCommitter
from kconsume._runtime.assignment.completion import Completion
from kconsume._runtime.assignment.held_watch import HeldWatch
from kconsume._runtime.assignment.holds import Holds
from kconsume._runtime.assignment.late_lanes import LateLanes
from kconsume._runtime.assignment.listener_calls import ListenerCalls
from kconsume._runtime.assignment.owned_partitions import OwnedPartitions
from kconsume._runtime.assignment.partition import OwnedPartition
from kconsume._runtime.assignment.rebalance_recorder import RebalanceRecorder
from kconsume._runtime.assignment.topic_checks import TopicChecks
from kconsume._runtime.background import BackgroundThread
from kconsume._runtime.deadlines import (
    DRAIN_SHARE,
    LAST_COMMIT_SHARE,
    REVOKED_HANDLERS_SHARE,
    REVOKED_OUTBOX_SHARE,
    Deadline,
)
from kconsume._runtime.lanes.lane import Lane
from kconsume._runtime.lanes.reports import LaneReports
from kconsume._runtime.observation.events import Events, PartitionsLost
from kconsume._runtime.output.outbox_relay import OutboxRelay
from kconsume.errors import StoreUnavailable
from kconsume.records import Partition

_log = EventLog("rebalance")

_MOMENT = 0.005
"""Seconds that a callback waits for one report. A lane stops running just after its last report, and reports nothing
more."""
_POLL_EVERY = 0.05
"""Seconds between two polls of the client while handlers finish at the end."""


class Assignment:
    """The partitions of one consumer.

    All methods are called on the owner thread. Fields: the owner thread writes all of them; other threads read
    `partitions` (tools take a copy), `joined` and `abandoned`.
    """

    def __init__(
        self,
        claims: Claims,
        topic_checks: TopicChecks,
        background: BackgroundThread,
        make_lane: LaneMaker,
        listener_calls: ListenerCalls,
        recorder: RebalanceRecorder,
        reports: LaneReports,
        events: Events,
        relay: OutboxRelay | None = None,
        *,
        budget: float,
        shutdown: float,
        grouped: bool,
        may_be_left: Callable[[Lane], bool] = lambda _: True,
    ) -> None:
        """
        Args:
            claims: asks the store.
            topic_checks: knows whether the survey before the first claim was answered.
            background: runs the calls of `claims`.
            make_lane: makes the lane of a claimed partition.
            listener_calls: calls the rebalance listeners.
            recorder: records each rebalance.
            reports: collects the reports of the lanes.
            events: gets what happens.
            relay: sends the rows of the outbox, if the store has one.
            budget: seconds within which revoked partitions must be given up.
            shutdown: seconds until the handler of a partition that was taken away is abandoned.
            grouped: whether a Kafka group assigns the partitions.
            may_be_left: whether the next lane of a partition may open beside an abandoned handler.
        """
        self.partitions = OwnedPartitions()
        self.abandoned: list[Partition] = []
        """Partitions that were given up while their handler still ran."""
        self.joined = False
        """Whether the group has given this consumer an assignment."""
        self.unsent = 0
        """How many rows of the outbox were left when this consumer left its group."""
        self.check_is_due = False
        """Whether the topics must be checked, because partitions were revoked. Under KIP-848 the partitions of a
        deleted topic are revoked without an error."""
        self._topic_checks = topic_checks
        self._listener_calls = listener_calls
        self._recorder = recorder
        self._relay = relay
        self._budget = budget
        self._ends = False
        self._leaving: Deadline | None = None
        self._late_lanes = LateLanes(shutdown, may_be_left, self.abandoned)
        self._events = events
        held_watch = HeldWatch(claims, background, events)
        self.claiming = Claiming(
            self.partitions,
            claims,
            background,
            make_lane,
            listener_calls,
            recorder,
            self._late_lanes,
            held_watch,
            events,
            grouped=grouped,
        )
        self.holds = Holds(self.partitions, self.claiming, held_watch, events)
        self.completion = Completion(self.partitions, self.claiming, self.holds, reports, events)

    def attach(self, consumer: AnyConsumer, committer: Committer, mirror: GroupCommitter | None) -> None:
        """Connect the Kafka consumer, and what commits through it.

        Args:
            consumer: calls back `assigned`, `revoked` and `lost`.
            committer: stores the offsets.
            mirror: also commits the offsets to the Kafka group, if they are kept in another store.
        """
        self.partitions.attach(consumer)
        self.commits = Commits(self.partitions, self.claiming, self.holds, committer, mirror, self._events)

    @property
    def settled(self) -> bool:
        """Whether every partition is open or held, with no claim pending."""
        return self.joined and self.partitions.are_settled

    @property
    def store_error(self) -> str:
        """Why the store did not answer the last claim or save, if it did not."""
        error = self.claiming.last_error if self.claiming.is_pending else None
        return str(error) if isinstance(error, StoreUnavailable) else self.commits.store_error

    @property
    def is_rebalancing(self) -> bool:
        return self._recorder.is_open

    @property
    def blocked_outboxes(self) -> Mapping[Partition, str]:
        """The partitions whose outbox has a row that is refused, and why."""
        blocked = () if self._relay is None else self._relay.blocked
        return {row.partition: f"row {row.number} for topic {row.topic}: {row.cause}" for row in blocked}

    def outbox_is_full(self, partition: Partition) -> bool:
        """Whether handlers of the partition wait because too many rows wait in its outbox."""
        return self._relay is not None and self._relay.is_full(partition)

    def can_be_confirmed(self, owned: OwnedPartition) -> bool:
        """Whether the row of a fenced partition is being read, or a commit that confirms our membership is due or under
        way."""
        if not (self.commits.confirms_membership and self.claiming.awaits_confirmation(owned)):
            return False
        row = None if owned.confirmation is None else owned.confirmation.row
        return row is None or owned.offset_to_mirror is not None

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
        if not (self.partitions.consumer.main_joined or self._topic_checks.waits_for_topics):
            return False
        if self.partitions:
            return all(o.answered for o in self.partitions.values())
        return self._topic_checks.store_answered

    # Called inside the client's callbacks

    def assigned(self, partitions: list[Partition]) -> Mapping[Partition, StartAt]:
        """Claim new partitions. Returns the start of each partition whose claim was answered in time."""
        self.joined = True
        self._recorder.begins(self.partitions)
        self._recorder.gains(partitions)
        new = {p: OwnedPartition(p, self._late_lanes.take_previous(p)) for p in partitions}
        self.partitions.update(new)
        self._read_membership()
        places = self.claiming.claim_new(new) if new else {}
        self._recorder.ends()
        return places

    def revoked(self, partitions: list[Partition]) -> None:
        """Give partitions up in order: stop their lanes, finish the records that run, commit, call the listeners."""
        budget = Deadline(self._budget if self._leaving is None else min(self._budget, self._leaving.left))
        leaving = self.partitions.among(partitions)
        if self._leaving is not None:
            self._recorder.expect("left")  # called in each callback, because a consumer may be two members
        self._recorder.begins(self.partitions.keys() - set(partitions))
        try:
            dropped = self._brake(leaving, "revoked")
            drained = self.drain(leaving, budget)
            late = [o.partition for o in leaving if o.is_running]
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
        leaving = self.partitions.among(partitions)
        self._recorder.begins(self.partitions.keys() - set(partitions))
        try:
            self._recorder.loses(partitions, self._brake(leaving, "lost"))
            self._listener_calls.call("lost", _known_to_listeners(leaving), self._recorder.so_far())
        finally:
            self._forget(leaving)
            self._read_membership()
        self._events.publish(PartitionsLost(sorted(partitions)))

    def drain(self, leaving: list[OwnedPartition], deadline: Deadline) -> int:
        """Let the running handlers of these partitions finish, then send their last offsets and outbox rows. Does not
        poll, because the client calls it back. Returns how many records were finished in this time.

        Args:
            leaving: partitions whose lanes were stopped.
            deadline: the time for this step and the steps after it.
        """
        before = sum(o.handled for o in leaving)
        self._await_handlers(leaving, deadline.part(REVOKED_HANDLERS_SHARE), _MOMENT)
        self.commits.hand_over(leaving, deadline)
        if self._relay is not None:
            kept = self._relay.finish([o.partition for o in leaving], deadline.part(REVOKED_OUTBOX_SHARE))
            self.unsent += kept if self._ends else 0
        self.check_is_due = True
        return sum(o.handled for o in leaving) - before

    # Called by the loop

    def claim_explicit(self, partitions: Iterable[Partition]) -> None:
        """Claim partitions that the user chose, without a group (`partitions=`)."""
        chosen = sorted(partitions)
        self.joined = True
        self.partitions.consumer.assign_explicitly(dict.fromkeys(chosen, PAUSED_AT_ZERO))
        self.partitions.update({p: OwnedPartition(p) for p in chosen})
        self._read_membership()
        self.claiming.claim_explicit(self.partitions)

    def step(self) -> None:
        """Continue claims, late lanes and held partitions. Cheap when there is nothing to do."""
        self.completion.step()
        self.claiming.step()
        if self._late_lanes:
            self._late_lanes.step(self.partitions)
        self.holds.step()

    def drain_all(self, deadline: Deadline, poll: Callable[[], None]) -> None:
        """Let running handlers finish, drop records that have not started, and commit finished records. Afterwards the
        consumer leaves its group; the partitions that this revokes are given up by the same deadline.

        Args:
            poll: calls the client, so that the member stays in its group.
        """
        self._ends = True
        self.partitions.consumer.pause(list(self.partitions))
        dropped = self._brake(list(self.partitions.values()), "stop")
        self._await_handlers(self.partitions.values(), deadline.part(DRAIN_SHARE), _POLL_EVERY, poll)
        self.abandoned.extend(o.partition for o in self.partitions.values() if o.is_running)
        self.commits.send_last(deadline.part(LAST_COMMIT_SHARE), poll)
        _log.info("drain ended", dropped=dropped, abandoned=len(self.abandoned))

    def leave(self, deadline: Deadline) -> None:
        """Prepare to leave the group now. The partitions that this revokes are given up by the deadline."""
        self._leaving = deadline

    def seek(self, offsets: Mapping[Partition, int]) -> None:
        """Continue at the offsets that the user chose."""
        chosen = {p: self.partitions[p] for p in offsets if p in self.partitions}
        for partition in sorted(offsets.keys() - chosen.keys()):
            _log.warning(
                "seek ignored",
                partition=partition,
                offset=offsets[partition],
                hint="this process does not have the partition: seek in the process that has it",
            )
        self.claiming.seek(chosen, offsets)

    def pause(self, partitions: Iterable[Partition]) -> None:
        """Pause partitions for the user. The pause outlives rebalances."""
        for partition in partitions:
            self.partitions.paused.add(partition)
            if (owned := self.partitions.get(partition)) is not None:
                self.partitions.add_pause(owned, "user")

    def resume(self, partitions: Iterable[Partition]) -> None:
        """End the user's pause. A held partition is tried again."""
        for partition in partitions:
            self.partitions.paused.discard(partition)
            if (owned := self.partitions.get(partition)) is not None:
                self.partitions.remove_pause(owned, "user")
                if owned.trouble is not None:
                    self.holds.try_again(owned, "resumed")

    # Steps of the methods above

    def _read_membership(self) -> None:
        self.claiming.read_membership(leaving=self._leaving is not None)

    def _brake(self, owned_partitions: list[OwnedPartition], reason: str) -> int:
        """Stop the lanes after their current record. Returns how many records were dropped before they had started."""
        return sum(owned.lane.request_stop(reason) for owned in owned_partitions if owned.lane is not None)

    def _await_handlers(
        self,
        owned_partitions: Iterable[OwnedPartition],
        deadline: Deadline,
        moment: float,
        poll: Callable[[], None] = lambda: None,
    ) -> None:
        """Take reports until no handler of these partitions runs, or until the deadline.

        Args:
            moment: seconds between two polls, at most.
        """
        while not deadline.passed and any(o.is_running for o in owned_partitions):
            poll()
            self.completion.wait(min(moment, deadline.left))
        self.completion.take_all()

    def _forget(self, owned_partitions: list[OwnedPartition]) -> None:
        for owned in owned_partitions:
            if owned.sought is not None:
                _log.warning(
                    "seek interrupted",
                    partition=owned.partition,
                    offset=owned.sought,
                    hint="the partition left before the store answered: check its offset, and seek again if needed",
                )
            self._late_lanes.keep(owned)
            if self.partitions.get(owned.partition) is owned:
                del self.partitions[owned.partition]
                self.claiming.forget(owned.partition)


def _known_to_listeners(owned_partitions: Iterable[OwnedPartition]) -> list[Partition]:
    return sorted(o.partition for o in owned_partitions if o.listeners_know)

"""The owner thread: poll → dispatch → complete → commit, and nothing else.

The loop owns the Kafka consumer. Other threads reach it by `request` (a callable, run between two polls) and read
`snapshot`. Handlers do not block polling, because workers run them. Only with `executor="inline"` the owner thread runs
the handler.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from kconsume._event_log import EventLog
from kconsume._kafka.fetched import Runs
from kconsume._kafka.join_errors import ClientError, RefusedMember
from kconsume._kafka.two_member_consumer import AnyConsumer
from kconsume._runtime.assignment.assignment import Assignment
from kconsume._runtime.assignment.committer import CommitEntries, CommitEntry, Committer, GroupCommitter
from kconsume._runtime.assignment.partition import OwnedPartition, State
from kconsume._runtime.assignment.partition_trouble import PartitionTrouble
from kconsume._runtime.assignment.topic_faults import TopicFaults
from kconsume._runtime.causes import flows, waits_for
from kconsume._runtime.deadlines import DRAIN_SHARE, LAST_COMMIT_SHARE, MIRROR_SHARE, REVOKED_HANDLERS_SHARE, Deadline
from kconsume._runtime.dispatch import Dispatcher
from kconsume._runtime.lanes.backpressure import Backpressure
from kconsume._runtime.lanes.lane import Chunk
from kconsume._runtime.lanes.reports import (
    Crashed,
    Failure,
    LaneReport,
    LaneReports,
    LettersFailed,
    MovedToLogEnd,
    Progress,
    StoreRefused,
    Unblocked,
)
from kconsume.errors import HandlerFailed, KconsumeError
from kconsume.records import Partition

_log = EventLog("loop")

T = TypeVar("T")

COMMIT_EVERY = 1.0
CHECKUP_EVERY = 15.0
"""Seconds between two checks of the topic ids."""
ASK_AGAIN_EVERY = 2.0
"""Seconds between two questions to the store, while a consumer without partitions starts."""
EMPTY_AFTER = 8.0
"""Seconds after which a member without an assignment counts as a member without partitions. Longer than the
heartbeat interval of the broker (5 s by default): the broker may answer a pattern only with the next heartbeat."""
POLL = 0.1
"""Seconds that a fetch waits for records."""
_UNSETTLED_POLL = 0.005
"""Seconds that a fetch waits for records while claims are pending."""
_MOMENT = 0.005
_ROOM_POLL = 0.05
"""Seconds that the loop waits for a lane to finish records before it polls again."""
_CONNECTION_LOG_EVERY = 10.0


def _ignore(_: object) -> None:
    """For checks whose result is not needed."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The state of a loop, for other threads. It is replaced as a whole."""

    state: str = "starting"
    assigned: tuple[Partition, ...] = ()
    stored: Mapping[Partition, int] = field(default_factory=dict)
    handled: int = 0
    skipped: int = 0
    abandoned: tuple[Partition, ...] = ()
    held: Mapping[Partition, PartitionTrouble] = field(default_factory=dict)
    """Partitions that are held, and why."""
    waits: Mapping[Partition, tuple[str, ...]] = field(default_factory=dict)
    """Partitions whose records are not delivered, each with the codes of what it waits for."""


class Loop:
    """One consumer of one group, from subscribe to close.

    Fields: the owner thread writes all of them. Other threads read `snapshot`, `failure`, `started` and
    `last_connection_error`, and put callables on `_requests`, which is a queue.
    """

    def __init__(
        self,
        consumer: AnyConsumer,
        assignment: Assignment,
        reports: LaneReports,
        committer: Committer,
        mirror: GroupCommitter | None,
        *,
        memory: int,
        shutdown: float,
        checkup: Callable[[Mapping[str, str]], Future[dict[str, KconsumeError]]],
        has_had: Callable[[str], bool],
        explain: Callable[[ClientError], Future[None]],
    ) -> None:
        """consumer: the Kafka consumer.

        Args:
            assignment: the partitions of this consumer.
            reports: collects the reports of the lanes.
            committer: stores the offsets.
            mirror: also commits the offsets to the Kafka group, if they are kept in another store.
            memory: bytes that all lanes together may hold.
            shutdown: seconds for a drain without a deadline: after a failure, or when everything is read.
            checkup: checks topics in the background. Its argument is the ids of the topics that we have.
            has_had: whether a topic existed when this consumer surveyed the topics.
            explain: finds out in the background why the group refuses this member; fails with the reason.
        """
        self.snapshot = Snapshot()
        self.failure: BaseException | None = None
        self.started = threading.Event()
        """Set when the first claim was answered."""
        self.last_connection_error: str | None = None
        """The last error that the client reported about its connections and its group."""
        self.dispatcher = Dispatcher(assignment, memory, consumer.batch)
        self._consumer = consumer
        self._assignment = assignment
        self._reports = reports
        self._committer = committer
        self._mirror = mirror
        self._shutdown = shutdown
        self._checkup = checkup
        self._topic_faults = TopicFaults(assignment, has_had)
        self._explain = explain
        self._refused_member = RefusedMember()
        self._checkup_at = time.monotonic() + CHECKUP_EVERY
        self._asked_again_at = 0.0
        self._member_since = time.monotonic()
        self._polled_at = 0.0
        self._requests: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._stop: Deadline | None = None
        self._idle_for: float | None = None
        self._last_record = time.monotonic()
        self._commit_at = 0.0
        self._handled = 0
        self._skipped = 0
        self._connection_logged_at = -60.0
        self._watched: list[tuple[Future[Any], Callable[[Any], None]]] = []

    # From other threads

    def request(self, action: Callable[[], None]) -> None:
        """Run `action` on the owner thread, between polls."""
        self._requests.put(action)

    def stop(self, deadline: Deadline) -> None:
        """Drain, commit and leave by the deadline. Only the first call counts."""
        self.request(lambda: self._set_stop(deadline))

    def stop_when_idle(self, seconds: float) -> None:
        """Stop once every partition was read to its end and no record came for this many seconds."""
        self.request(lambda: self._set_idle(seconds))

    # On the owner thread

    @property
    def waits(self) -> dict[Partition, tuple[str, ...]]:
        """The partitions whose records are not delivered, each with the codes of what it waits for."""
        assignment = self._assignment
        return {
            p: waits_for(o, is_claimed=assignment.has_pending_claim(o), can_be_confirmed=self._can_be_confirmed(o))
            for p, o in assignment.partitions.items()
            if not flows(o)
        }

    def _can_be_confirmed(self, owned: OwnedPartition) -> bool:
        if self._mirror is None or not self._assignment.awaits_confirmation(owned):
            return False
        row = None if owned.confirmation is None else owned.confirmation.row
        return row is None or _to_mirror(owned) is not None

    def watch(self, check: Future[T], then: Callable[[T], None] = _ignore) -> None:
        """Wait for a check without blocking. If it fails, the loop fails with its error.

        Args:
            then: called with the result, on the owner thread.
        """
        self._watched.append((check, then))

    def await_survey(self, survey: Future[None], then: Callable[[], None]) -> None:
        """`watch` a survey of the topics. Topic faults that the survey may explain are handled after the answer.

        Args:
            then: called after the answer.
        """

        def answered(_: None) -> None:
            self.hold_topics(self._topic_faults.survey_answered(survey))
            then()

        self._topic_faults.survey_sent(survey)
        self.watch(survey, answered)

    def hold_topics(self, faults: Mapping[str, KconsumeError]) -> None:
        """Hold the partitions of these topics, or raise an error of the configuration."""
        self._topic_faults.hold(faults, has_read=bool(self._handled or self._consumer.ends))

    def run(self, begin: Callable[[], None]) -> None:
        """Consume until stopped or failed. The error is in `failure`.

        Args:
            begin: subscribes, or claims explicit partitions.
        """
        try:
            begin()
            while self._stop is None:
                self._turn()
        except BaseException as error:  # noqa: BLE001  (kept in `failure`, raised by the supervisor)
            self._fail(error)
        self._end()

    def _end(self) -> None:
        deadline = self._stop or Deadline(self._shutdown)
        try:
            self._drain(deadline)
        except BaseException as error:  # noqa: BLE001  (as above; the member still leaves the group)
            self._fail(error)
        self._assignment.leave(deadline)
        try:
            self._consumer.close(deadline.left)
        except BaseException as error:  # noqa: BLE001  (as above)
            self._fail(error)
        self._publish("stopped")

    def _turn(self) -> None:
        self._take_requests()
        if self._watched:
            self._take_results()
        self._complete()
        if self._consumer.has_faults:
            self._take_faults()
        self._assignment.step()
        now = time.monotonic()
        if not (self._assignment.joined and self._consumer.joined):
            self._check_membership(now)
        if not self.started.is_set():
            self._check_start(now)
        if now >= self._commit_at or self._assignment.asks_for_commit:
            self._commit(now)
        self._collect()
        self._log_connection_errors(now)
        if now >= self._checkup_at:
            self._check_topics(now)
        if self.dispatcher.has_batches:
            self.dispatcher.deliver_batches(now)
        self._fetch(now)

    def _fetch(self, now: float) -> None:
        dispatcher = self.dispatcher
        is_full = dispatcher.has_full_lanes and dispatcher.apply_backpressure(now)
        runs = self._await_room() if is_full else self._consumer.fetch(self._fetch_timeout(), dispatcher.fetch_size)
        if runs:
            self._last_record = time.monotonic()  # not `now`, because the fetch may have waited for the records
            dispatcher.dispatch(runs, self._last_record)
        elif self._idle_for is not None and self._nothing_comes(now):
            if dispatcher.has_batches:
                dispatcher.deliver_batches(math.inf)  # the log has no more records for these batches
            elif all(_is_done(o) for o in self._assignment.partitions.values()):
                self._fail_for_held()
                self._set_stop(Deadline(self._shutdown))

    def _check_membership(self, now: float) -> None:
        if not self._consumer.is_member:
            self._member_since = now
        elif now - self._member_since >= EMPTY_AFTER:
            self._consumer.assume_joined()
            self._assignment.note_empty_assignment()

    def _check_start(self, now: float) -> None:
        assignment = self._assignment
        if assignment.started:
            self.started.set()
        elif assignment.joined and not assignment.partitions and now >= self._asked_again_at:
            self._asked_again_at = now + ASK_AGAIN_EVERY
            # Without partitions, no claim shows whether the store answers.
            self.watch(self._checkup({}), self.hold_topics)

    def _fetch_timeout(self) -> float:
        if not self._settled:
            return _UNSETTLED_POLL
        return min(POLL, self.dispatcher.seconds_until_batch()) if self.dispatcher.has_batches else POLL

    # Reports of lanes

    def _complete(self) -> None:
        reports = self._reports
        while not reports.empty():
            self._settle(reports.get())

    def _settle(self, report: LaneReport) -> None:
        owned = self._assignment.current(report.lane.partition, report.lane)
        if owned is None:
            return
        if isinstance(report, Progress):
            self._advance(owned, report)
        elif isinstance(report, Unblocked):
            report.lane.count_finished(report.records)
        elif isinstance(report, MovedToLogEnd):
            owned.progress.ended(report.offset)
            owned.stored = report.offset
        elif isinstance(report, StoreRefused):
            self._assignment.store_refused(owned, report.error, holds=report.holds_partition)
        elif isinstance(report, LettersFailed):
            # Submitted later, because this may run inside the client's callback, and the lane may work on this thread.
            self.request(partial(report.lane.lanes.submit, report.lane, Chunk([], 0, -1)))
        elif isinstance(report, Crashed):
            raise report.error
        else:
            self._failed(owned, report)

    def _failed(self, owned: OwnedPartition, failure: Failure) -> None:
        place = f"{failure.lane.partition}@{failure.message.offset()}"
        error = HandlerFailed(failure.handler, place, failure.error)
        if failure.holds_partition:
            return self._assignment.put_on_hold(owned, error, drains=False)
        self._fail(error)
        return self._set_stop(Deadline(self._shutdown))

    def _advance(self, owned: OwnedPartition, progress: Progress) -> None:
        lane, count = progress.lane, progress.handled + progress.skipped
        owned.progress.finished(progress.first, progress.upto)
        owned.leader_epoch = progress.leader_epoch
        owned.claim_tries = 0
        owned.handled += count
        if owned.trouble is not None:
            self._assignment.note_progress(owned)
        if progress.stored:
            owned.stored = progress.upto
        elif progress.upto - (owned.stored or 0) > Backpressure.MOST_RECORDS:
            self._commit_at = 0.0  # commit now, so that a crash repeats at most one window
        if not progress.waited_for_letters:
            lane.count_finished(count)
        self._handled += progress.handled
        self._skipped += progress.skipped

    # Commits

    def _commit(self, now: float) -> None:
        self._commit_at = now + COMMIT_EVERY
        self._assignment.asks_for_commit = False
        owned_partitions = list(self._assignment.partitions.values())
        for lane in [o.lane for o in owned_partitions if o.lane is not None]:
            lane.skip_log.flush()
        for partition in self._consumer.ends:
            self._pass_the_end(partition)
        if not self._committer.busy and (entries := _unsaved(owned_partitions)):
            self._committer.send(entries)
        if self._mirror is not None and not self._mirror.busy:
            behind = {
                o.partition: CommitEntry(o, offset, o.token)
                for o in owned_partitions
                if (offset := _to_mirror(o)) is not None
            }
            if behind:
                self._mirror.send(behind)
        self._publish("running" if self._stop is None else "stopping")

    def _collect(self) -> None:
        self._collect_saved()
        self._collect_mirrored()

    def _collect_saved(self) -> None:
        receipt = self._committer.collect()
        if receipt is not None:
            for partition, entry in receipt.kept.items():
                if (owned := self._assignment.current(partition, entry.token)) is not None:
                    self._assignment.offset_stored(owned, entry.offset)
            for partition, (entry, error) in receipt.fenced.items():
                if (owned := self._assignment.current(partition, entry.token)) is not None:
                    self._assignment.store_refused(owned, error)
            for partition, (entry, fault) in receipt.faults.items():
                if (owned := self._assignment.current(partition, entry.token)) is not None:
                    self._assignment.put_on_hold(owned, fault)

    def _collect_mirrored(self) -> None:
        if self._mirror is not None and (mirrored := self._mirror.collect()) is not None:
            generation, confirmed = mirrored.generation or 0, list[OwnedPartition]()
            for partition, entry in mirrored.kept.items():
                if (owned := self._assignment.current(partition, entry.token)) is None:
                    continue
                if owned.state is not State.FENCED:
                    owned.mirrored = entry.offset
                elif generation > 0:
                    confirmed.append(owned)
            if confirmed:
                self._assignment.claim_confirmed(confirmed, generation)

    def _pass_the_end(self, partition: Partition) -> None:
        """If all delivered records are finished, move the offset to the end of the log. Otherwise a transaction marker
        after the last record would show as lag for ever. A lane that stores its own offset does this itself."""
        owned = self._assignment.partitions.get(partition)
        if owned is None or owned.lane is None or owned.lane.stop_reasons or self.dispatcher.waits_for_batch(owned):
            return
        if owned.trouble is not None:
            self._assignment.note_progress(owned)
        progress, lane, end = owned.progress, owned.lane, self._consumer.end_of(partition)
        if not progress.idle or end <= progress.watermark:
            return
        if not lane.commits_itself:
            progress.ended(end)
        elif not lane.busy:
            lane.lanes.submit(lane, Chunk([], end, end - 1, end))

    def finish_revoked(self, leaving: list[OwnedPartition], budget: Deadline) -> int:
        """Give the running handlers of revoked partitions their share of the budget, then send the last offsets. Runs
        inside the client's callback, so it does not poll. Returns how many records were finished in this time.

        Args:
            leaving: partitions whose lanes were stopped.
            budget: the time for this step and the steps after it.
        """
        before = sum(o.handled for o in leaving)
        running = budget.part(REVOKED_HANDLERS_SHARE)
        while not running.passed and any(o.lane is not None and o.lane.unfinished for o in leaving):
            # Each wait is short: a lane stops running just after its last report, and reports nothing more.
            self._await_report(min(_MOMENT, running.left))
        self._complete()
        self._committer.settle(budget)
        self._collect_saved()
        if entries := _unsaved(leaving):
            self._committer.hand_over(entries, budget)
        return sum(o.handled for o in leaving) - before

    def _await_room(self) -> Runs:
        """Leave records in the client's queue until a lane reports, but still call the client's callbacks."""
        self._await_report(_ROOM_POLL)
        now = time.monotonic()
        if now - self._polled_at < _ROOM_POLL:
            return []
        self._polled_at = now
        return self._consumer.poll()

    # Stopping

    def _drain(self, deadline: Deadline) -> None:
        """Let running handlers finish, drop records that have not started, commit finished records."""
        self._publish("draining")
        assignment = self._assignment
        self._consumer.pause(list(assignment.partitions))
        dropped = assignment.brake_all("stop")
        running = deadline.part(DRAIN_SHARE)
        owned_partitions = assignment.partitions
        while not running.passed and any(o.lane is not None and o.lane.unfinished for o in owned_partitions.values()):
            self._serve()
            self._await_report(min(_ROOM_POLL, running.left))
        self._complete()
        for owned in assignment.partitions.values():
            if owned.lane is not None and owned.lane.unfinished:
                assignment.abandoned.append(owned.partition)
        self._commit_last(deadline.part(LAST_COMMIT_SHARE))
        self._publish("leaving")
        _log.info("drain ended", dropped=dropped, abandoned=len(assignment.abandoned))

    def _await_report(self, seconds: float) -> None:
        try:
            self._settle(self._reports.get(timeout=seconds))
        except Empty:
            return

    def _commit_last(self, deadline: Deadline) -> None:
        """Commit until nothing is unsaved, or until the deadline."""
        pause, mirror_deadline = Deadline(0.0), deadline.part(MIRROR_SHARE)
        while True:
            self._collect()
            unsaved = [o for o in self._assignment.partitions.values() if o.unsaved]
            # Lag tools should see the last offset, but the loop does not wait for a mirror that is refused.
            behind = not mirror_deadline.passed and self._mirror is not None and self._mirror_is_behind
            busy = self._committer.busy or (self._mirror is not None and self._mirror.busy)
            if not unsaved and not behind and not busy:
                break
            if deadline.passed:
                _log.error("offsets not committed", partitions=sorted(o.partition for o in unsaved))
                break
            if (unsaved or behind) and not self._committer.busy and pause.passed:
                pause = Deadline(_ROOM_POLL)
                self._commit(time.monotonic())
            self._serve()
            time.sleep(0.002)

    @property
    def _mirror_is_behind(self) -> bool:
        return any(o.state is State.OPEN and _to_mirror(o) is not None for o in self._assignment.partitions.values())

    def _serve(self) -> None:
        """Poll, so that the client's callbacks are called. An error of the client does not end the drain."""
        try:
            self._consumer.poll()
        except BaseException as error:  # noqa: BLE001  (kept in `failure`, raised by the supervisor)
            self._fail(error)

    @property
    def _settled(self) -> bool:
        """Whether the assignment is known, and every partition is open or held."""
        return self._consumer.joined and self._assignment.settled

    def _nothing_comes(self, now: float) -> bool:
        assignment = self._assignment
        return (
            self._idle_for is not None
            and now - self._last_record >= self._idle_for
            and self._settled
            and self._consumer.ends.issuperset(
                p for p, o in assignment.partitions.items() if p not in assignment.paused and o.trouble is None
            )
        )

    def _take_faults(self) -> None:
        """Hold the partitions and topics for which the client reported errors."""
        partitions, topics = self._consumer.take_faults()
        for partition, fault in partitions.items():
            owned = self._assignment.partitions.get(partition)
            if owned is not None:
                self._assignment.put_on_hold(owned, fault)
        self.hold_topics(topics)

    def _fail_for_held(self) -> None:
        """Let `catch_up` fail because of a held partition, after all other partitions were read to their end."""
        for _, trouble in sorted(self._assignment.troubles.items()):
            self._fail(trouble.error)

    # Small steps

    def _check_topics(self, now: float) -> None:
        """Check the topic ids. The client does not notice that a topic was deleted and made again, and continues in the
        new topic."""
        self._checkup_at = now + CHECKUP_EVERY
        known = {o.partition.topic: o.topic_id for o in self._assignment.partitions.values() if o.topic_id is not None}
        if known:
            self.watch(self._checkup(known), self.hold_topics)

    def _take_requests(self) -> None:
        while not self._requests.empty():
            self._requests.get()()

    def _take_results(self) -> None:
        done = [watched for watched in self._watched if watched[0].done()]
        for check, then in done:
            self._watched.remove((check, then))
            then(check.result())

    def _set_stop(self, deadline: Deadline) -> None:
        self._stop = self._stop or deadline

    def _set_idle(self, seconds: float) -> None:
        self._idle_for = seconds

    def _fail(self, error: BaseException) -> None:
        self.failure = self.failure or error

    def _publish(self, state: str) -> None:
        owned_partitions = self._assignment.partitions
        self.snapshot = Snapshot(
            state,
            tuple(sorted(owned_partitions)),
            {p: o.stored for p, o in owned_partitions.items() if o.stored is not None} or self.snapshot.stored,
            self._handled,
            self._skipped,
            tuple(self._assignment.abandoned),
            self._assignment.troubles or (self.snapshot.held if state == "stopped" else {}),
            self.waits,
        )

    def _log_connection_errors(self, now: float) -> None:
        errors = self._consumer.take_connection_errors()
        for error in errors:
            if self._refused_member.lasts(error.code(), self._consumer.joins, now):
                self.watch(self._explain(error))
                break
        if errors:
            self.last_connection_error = errors[-1].str()
        if errors and now - self._connection_logged_at >= _CONNECTION_LOG_EVERY:
            self._connection_logged_at = now
            _log.warning("broker trouble", times=len(errors), last=errors[-1].str(), effect="the client tries again")


def _is_done(owned: OwnedPartition) -> bool:
    """Whether all delivered records are finished. For a held partition: all records that can still be finished."""
    if owned.trouble is None:
        return owned.progress.idle
    return owned.lane is None or not owned.lane.unfinished


def _unsaved(owned_partitions: Iterable[OwnedPartition]) -> CommitEntries:
    return {o.partition: CommitEntry(o, o.progress.watermark, o.token) for o in owned_partitions if o.unsaved}


def _to_mirror(owned: OwnedPartition) -> int | None:
    """The offset to commit to the Kafka group, because the store is ahead of the mirror or to confirm our membership.

    None while a claim is pending, because our copy of the row may be behind the offset of the group.
    """
    if owned.state is State.FENCED:
        row = None if owned.confirmation is None else owned.confirmation.row
        return None if row is None else row.next_offset
    if owned.state is not State.OPEN or owned.stored == owned.mirrored:
        return None
    return owned.stored

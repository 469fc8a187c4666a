"""The owner thread: poll → dispatch → take reports → commit, and nothing else.

The loop owns the Kafka consumer. Other threads reach it by `request` (a callable, run between two polls) and read
`snapshot`. Handlers do not block polling, because workers run them. Only with `executor="inline"` the owner thread runs
the handler.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar

from kconsume._event_log import EventLog
from kconsume._kafka.fetched import Runs
from kconsume._kafka.join_errors import ClientError, RefusedMember
from kconsume._kafka.two_member_consumer import AnyConsumer
from kconsume._runtime.assignment.assignment import Assignment
from kconsume._runtime.assignment.topic_faults import TopicFaults
from kconsume._runtime.deadlines import Deadline
from kconsume._runtime.dispatch import Dispatcher
from kconsume._runtime.lanes.lane import Chunk
from kconsume._runtime.observation.events import BrokerTrouble, Events
from kconsume._runtime.observation.snapshot import Snapshot
from kconsume._runtime.observation.standstill import StandstillWatch
from kconsume.errors import KconsumeError
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
_ROOM_POLL = 0.05
"""Seconds that the loop waits for a lane to finish records before it polls again."""
_CONNECTION_LOG_EVERY = 10.0
CONNECTION_ERROR_COUNTS = 12.0
"""Seconds for which the brokers count as unreachable after an error: the client tries again at least every 10 s."""


def _ignore(_: object) -> None:
    """For checks whose result is not needed."""


class Loop:
    """One consumer of one group, from subscribe to close.

    Fields: the owner thread writes all of them. Other threads read `snapshot`, `failure`, `started` and
    `last_connection_error`, and put callables on `_requests`, which is a queue.
    """

    def __init__(
        self,
        consumer: AnyConsumer,
        assignment: Assignment,
        events: Events,
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
            events: gets what happens.
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
        self.last_connection_error = ""
        """The last error that the client reported about its connections and its group."""
        self.dispatcher = Dispatcher(assignment.partitions, memory, consumer.batch)
        self._standstill = StandstillWatch(assignment, self.dispatcher, consumer, events)
        self._consumer = consumer
        self._assignment = assignment
        self._events = events
        self._completion = assignment.completion
        self._shutdown = shutdown
        self._checkup = checkup
        self._topic_faults = TopicFaults(assignment.partitions, assignment.holds, has_had)
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
        self._connection_logged_at = self._connection_error_at = -60.0
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
        self._topic_faults.hold(faults, has_read=bool(self._completion.handled or self._consumer.ends))

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
        self._publish("draining")
        try:
            self._assignment.drain_all(deadline, self._serve)
        except BaseException as error:  # noqa: BLE001  (as above; the member still leaves the group)
            self._fail(error)
        self._publish("leaving")
        self._assignment.leave(deadline)
        try:
            self._consumer.close(deadline.left)
        except BaseException as error:  # noqa: BLE001  (as above)
            self._fail(error)
        self._take_failure()
        self._publish("stopped")

    def _turn(self) -> None:
        self._take_requests()
        if self._watched:
            self._take_results()
        self._completion.take_all()
        self._take_failure()
        if self._consumer.has_faults:
            self._take_faults()
        self._assignment.step()
        now = time.monotonic()
        if not (self._assignment.joined and self._consumer.joined):
            self._check_membership(now)
        if not self.started.is_set():
            self._check_start(now)
        if now >= self._commit_at or self._assignment.partitions.commit_is_due:
            self._commit(now)
        self._assignment.commits.collect()
        self._log_connection_errors(now)
        if now >= self._checkup_at or self._assignment.check_is_due:
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
            elif all(o.is_done for o in self._assignment.partitions.values()):
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

    # Commits

    def _commit(self, now: float) -> None:
        self._commit_at = now + COMMIT_EVERY
        self._assignment.partitions.commit_is_due = False
        for lane in [o.lane for o in self._assignment.partitions.values() if o.lane is not None]:
            lane.skip_log.flush()
        for partition in self._consumer.ends:
            self._pass_the_end(partition)
        self._assignment.commits.send()
        self._publish("running" if self._stop is None else "stopping")

    def _pass_the_end(self, partition: Partition) -> None:
        """If all delivered records are finished, move the offset to the end of the log. Otherwise a transaction marker
        after the last record would show as lag for ever. A lane that stores its own offset does this itself."""
        owned = self._assignment.partitions.get(partition)
        if owned is None or owned.lane is None or owned.lane.stop_reasons or self.dispatcher.waits_for_batch(owned):
            return
        if owned.trouble is not None:
            self._assignment.holds.note_progress(owned)
        progress, lane, end = owned.progress, owned.lane, self._consumer.end_of(partition)
        if not progress.idle or end <= progress.watermark:
            return
        if not lane.commits_itself:
            progress.ended(end)
        elif not lane.busy:
            lane.lanes.submit(lane, Chunk([], end, end - 1, end))

    def _await_room(self) -> Runs:
        """Leave records in the client's queue until a lane reports, but still call the client's callbacks."""
        self._completion.wait(_ROOM_POLL)
        now = time.monotonic()
        if now - self._polled_at < _ROOM_POLL:
            return []
        self._polled_at = now
        return self._consumer.poll()

    # Stopping

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
        partitions = self._assignment.partitions
        return (
            self._idle_for is not None
            and now - self._last_record >= self._idle_for
            and self._settled
            and self._consumer.ends.issuperset(
                p for p, o in partitions.items() if p not in partitions.paused and o.trouble is None
            )
        )

    def _take_faults(self) -> None:
        """Hold the partitions and topics for which the client reported errors."""
        partitions, topics = self._consumer.take_faults()
        for partition, fault in partitions.items():
            owned = self._assignment.partitions.get(partition)
            if owned is not None:
                self._assignment.holds.put_on_hold(owned, fault)
        self.hold_topics(topics)

    def _fail_for_held(self) -> None:
        """Let `catch_up` fail because of a held partition, after all other partitions were read to their end."""
        for _, trouble in sorted(self._assignment.partitions.troubles.items()):
            self._fail(trouble.error)

    # Small steps

    def _check_topics(self, now: float) -> None:
        """Check the topic ids. The client does not notice that a topic was deleted and made again, and continues in the
        new topic."""
        was_revoked, self._assignment.check_is_due = self._assignment.check_is_due, False
        self._checkup_at = now + CHECKUP_EVERY
        known = {o.partition.topic: o.topic_id for o in self._assignment.partitions.values() if o.topic_id is not None}
        if known or was_revoked:
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

    def _take_failure(self) -> None:
        """Stop if a record has failed for good."""
        failure = self._completion.failure
        if failure is not None:
            self._fail(failure)
            self._set_stop(Deadline(self._shutdown))

    def _fail(self, error: BaseException) -> None:
        self.failure = self.failure or self._completion.failure or error

    def _publish(self, state: str) -> None:
        now = time.monotonic()
        is_recent = now - self._connection_error_at < CONNECTION_ERROR_COUNTS
        owned_partitions = self._assignment.partitions
        self.snapshot = Snapshot(
            state,
            tuple(sorted(owned_partitions)),
            {p: o.stored for p, o in owned_partitions.items() if o.stored is not None} or self.snapshot.stored,
            self._completion.handled,
            self._completion.skipped,
            tuple(self._assignment.abandoned),
            self._assignment.partitions.troubles or (self.snapshot.held if state == "stopped" else {}),
            self._standstill.look(now, self.last_connection_error if is_recent else ""),
        )

    def _log_connection_errors(self, now: float) -> None:
        errors = self._consumer.take_connection_errors()
        for error in errors:
            if self._refused_member.lasts(error.code(), self._consumer.joins, now):
                self.watch(self._explain(error))
                break
        if errors:
            self.last_connection_error, self._connection_error_at = errors[-1].str(), now
        if errors and now - self._connection_logged_at >= _CONNECTION_LOG_EVERY:
            self._connection_logged_at = now
            self._events.publish(BrokerTrouble(len(errors), errors[-1].str()))

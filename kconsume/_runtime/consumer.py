"""One running consumer: makes its parts and connects them. Each part runs on one of these threads:

    owner thread       Loop, SplitConsumer, Assignment, committers
    background thread  questions to the store and the cluster, which may block
    save thread        saves of offsets to a store, so that no slow question delays them
    worker threads     handlers that are plain functions
    event loop         handlers that are async; all consumers of the app share one loop

The plan says what to run. This module makes no decisions.
"""

from __future__ import annotations

import os
import socket
import threading
import uuid
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from datetime import UTC, datetime
from functools import partial
from queue import SimpleQueue

from kconsume._kafka.commit_metadata import KAFKA
from kconsume._kafka.join_errors import ClientError, why
from kconsume._kafka.topic_limits import TopicLimits
from kconsume._kafka.two_member_consumer import SplitConsumer
from kconsume._runtime.assignment.assignment import Assignment
from kconsume._runtime.assignment.claims import Claims
from kconsume._runtime.assignment.committer import Committer, GroupCommitter, StoreCommitter
from kconsume._runtime.assignment.listener_calls import ListenerCalls
from kconsume._runtime.assignment.rebalance_recorder import RebalanceRecorder
from kconsume._runtime.assignment.topic_checks import TopicChecks
from kconsume._runtime.background import BackgroundThread
from kconsume._runtime.build import BATCH, lanes_for, pace_of, tried_before, work_for
from kconsume._runtime.deadlines import LAST_SAVE_SHARE, Deadline
from kconsume._runtime.lanes.batching import BatchBuffer
from kconsume._runtime.lanes.lane import Lane
from kconsume._runtime.lanes.reports import LaneReports
from kconsume._runtime.loop import Loop
from kconsume._runtime.observation.event_lines import log_events
from kconsume._runtime.observation.events import Events, RebalanceEnded
from kconsume._runtime.output.outbox_relay import OutboxRelay
from kconsume._runtime.plan import ConsumerPlan, HandlerPlan, SharedParts
from kconsume._runtime.routing import Routes, Wanted
from kconsume.backends.base import OffsetStore, Position
from kconsume.backends.capabilities import capabilities_of
from kconsume.backends.kafka import KafkaStore
from kconsume.errors import ConfigurationError, KconsumeError, StartTimeout
from kconsume.rebalance.events import History
from kconsume.records import Partition

_LATE_CHECK = 60.0
"""Seconds between two checks whether an owner thread that was given up has ended."""


class RunningConsumer:
    """A consumer that runs.

    Fields: set in the constructor, except `_has_subscribed` (owner thread), `wanted` (written by `subscribe` on the
    caller's thread and by the owner thread; read by both), `_left_in_outbox` (written by `close`, after the owner
    thread has ended) and `_over` (set by the owner thread once its loop has ended; others wait for it).
    """

    def __init__(self, plan: ConsumerPlan, shared: SharedParts, ended: Callable[[], None]) -> None:
        """plan: what to run.

        Args:
            shared: what the consumers of the app share.
            ended: called after the loop has ended, on its thread.
        """
        self.plan = plan
        self._left_in_outbox = 0
        self._ended = ended
        self._over = threading.Event()
        self._background = BackgroundThread(f"kconsume-background-{plan.group}")
        self._saves = None if isinstance(plan.store, KafkaStore) else BackgroundThread(f"kconsume-saves-{plan.group}")
        reports: LaneReports = SimpleQueue()
        owner = f"{socket.gethostname()}:{os.getpid()}:{uuid.uuid4().hex[:8]}"
        self._relay = _relay_of(plan, shared, owner)
        self._lanes = {h: lanes_for(h, plan.store, reports, shared) for h in plan.handlers}
        self._works = {h: work_for(h, plan.store, plan.group, shared, self._relay) for h in plan.handlers}
        self.routes = Routes((h, h.wanted) for h in plan.handlers)
        self.wanted = {h: h.wanted for h in plan.handlers}
        """The topics that each handler was given last. The owner thread changes the routes later."""
        self._has_subscribed = False
        self._claims = Claims(
            plan.store, plan.cluster, plan.group, owner, lambda topic: self._handler(topic).begin(topic)
        )
        self._topic_checks = TopicChecks(plan.cluster, plan.group, self._claims)
        self.history = History(datetime.now(UTC))
        """The rebalances of this consumer."""
        self._events = Events()
        log_events(self._events)
        self._events.subscribe(RebalanceEnded, lambda event: self.history.add(event.rebalance))
        self._recorder = RebalanceRecorder(str(plan.protocol), self._events)
        self._listener_calls = ListenerCalls(plan.listeners, shared.handler_loop, f"kconsume-listeners-{plan.group}")
        self.assignment = Assignment(
            self._claims,
            self._topic_checks,
            self._background,
            self._make_lane,
            self._listener_calls,
            self._recorder,
            reports,
            self._events,
            self._relay,
            budget=plan.budget,
            shutdown=plan.shutdown,
            grouped=plan.partitions is None,
            may_be_left=partial(_may_be_left, plan.store),
        )
        try:
            self.kafka_consumer = SplitConsumer(plan.settings, self.assignment, batch=BATCH)
        except BaseException:
            self._close_threads(Deadline(0.0))
            raise
        self.assignment.attach(self.kafka_consumer, *self._committers())
        self.loop = Loop(
            self.kafka_consumer,
            self.assignment,
            self._events,
            memory=plan.memory,
            shutdown=plan.shutdown,
            checkup=self._check_topics,
            has_had=lambda topic: topic in self._topic_checks.seen,
            explain=self._explain,
        )

    def _committers(self) -> tuple[Committer, GroupCommitter | None]:
        """The committer that stores the offsets, and the committer of the mirror in the Kafka group if the offsets are
        kept in another store."""
        if self._saves is None:
            return GroupCommitter(self.kafka_consumer, name=lambda: KAFKA), None
        mirror = GroupCommitter(self.kafka_consumer, advisory=True, name=lambda: self._claims.store_check.name)
        return StoreCommitter(self.plan.store, self.plan.group, self._saves), mirror

    def start(self) -> None:
        """Start the owner thread."""
        if self._relay is not None:
            self._relay.start()
        threading.Thread(target=self._run, name=f"kconsume-{self.plan.group}", daemon=True).start()

    def _run(self) -> None:
        self.loop.run(self._begin)
        self._over.set()
        self._ended()

    def start_timeout(self, seconds: float) -> StartTimeout:
        """The error of a consumer whose first claim was not answered within this time, with the reason."""
        cause = self.assignment.claiming.last_error or self._topic_checks.last_error
        last = self.loop.last_connection_error
        if cause is not None:
            why = str(cause)
        elif not self.kafka_consumer.main_joined:
            why = f"the group has not given it an assignment yet{f' (the client says: {last})' if last else ''}"
        else:
            why = f"{self.plan.store.address} has not answered the claim of {_names(self.assignment.partitions)} yet"
        error = StartTimeout(
            f"the consumer of group {self.plan.group!r} was not ready {seconds:g} s after its start: {why}. If "
            f"it needs longer, say App(startup=...)"
        )
        error.__cause__ = cause
        return error

    @property
    def unsent(self) -> int:
        """How many rows were still in the outbox when the consumer ended."""
        return self.assignment.unsent + self._left_in_outbox

    def join(self, seconds: float) -> bool:
        """Wait for the end of the loop. Returns whether it has ended."""
        return self._over.wait(seconds)

    def close_lanes(self) -> None:
        """Start no more chunks, and cancel async handlers that still run. Works while the owner thread hangs."""
        for lanes in self._lanes.values():
            lanes.close()

    def close(self, deadline: Deadline) -> None:
        """Close the store and the threads, after the owner thread has ended."""
        if self._relay is not None:
            self._left_in_outbox = self._relay.close(deadline)
        self._listener_calls.close(deadline.left)
        if self._saves is not None:
            self._saves.close(deadline.part(LAST_SAVE_SHARE).left)  # before the store is closed
        self._background.send(self.plan.store.close)
        self._close_threads(deadline)

    def close_late(self) -> None:
        """Close the threads later, when the owner thread has ended. Called instead of `close` if the owner thread did
        not end in time. The store stays open, because another run may use it already."""
        threading.Thread(target=self._close_late, name=f"kconsume-late-{self.plan.group}", daemon=True).start()

    def _close_late(self) -> None:
        while not self._over.wait(_LATE_CHECK):
            pass
        if self._relay is not None:
            self._relay.close(Deadline(0.0))
        self._listener_calls.close(0.0)
        self._close_threads(Deadline(0.0))

    def _close_threads(self, deadline: Deadline) -> None:
        self._background.close(deadline.left)
        if self._saves is not None:
            self._saves.close(deadline.left)

    def pause(self, partitions: list[Partition]) -> None:
        self.loop.request(lambda: self.assignment.pause(partitions))

    def resume(self, partitions: list[Partition]) -> None:
        self.loop.request(lambda: self.assignment.resume(partitions))

    def seek(self, offsets: Mapping[Partition, int]) -> None:
        self.loop.request(lambda: self.assignment.seek(offsets))

    def subscribe(self, handler: HandlerPlan, wanted: Wanted) -> None:
        """Give a handler other topics while the consumer runs. The retry topics and redrive topics of the handler stay
        subscribed, because they may still have records."""
        before = self.wanted[handler]
        wanted = wanted._replace(retries=before.retries, redrives=before.redrives)
        self.wanted[handler] = wanted
        self.loop.request(lambda: self._change_routes(handler, wanted))

    def _change_routes(self, handler: HandlerPlan, wanted: Wanted) -> None:
        self.routes.change(handler, wanted)
        if self._has_subscribed:  # else the first subscription, after the retry topics are made, has the change
            if self.assignment.joined:
                self._recorder.expect("subscription")
            self._subscribe()

    def _subscribe(self) -> None:
        self._has_subscribed = True
        self._survey_topics(self._find_redrive_topics)
        self.kafka_consumer.subscribe(self.routes.subscription, self.routes.side_subscription)

    def _find_redrive_topics(self) -> None:
        """Subscribe to the topics to which dead letters are sent back, as soon as those topics exist."""
        wanted = {name: h for h in self.plan.handlers for name in h.redrive_topics(self.plan.group)}
        new = [name for name in wanted if not self.wanted[wanted[name]].takes(name)]

        def found(there: Future[list[str]]) -> None:
            if there.exception() is None and (names := there.result()):
                self.loop.request(lambda: self._add_redrive_topics({name: wanted[name] for name in names}))

        if new and self.plan.partitions is None:
            self._background.send(lambda: self.plan.cluster.those_there(new)).add_done_callback(found)

    def _add_redrive_topics(self, found: Mapping[str, HandlerPlan]) -> None:
        for name, handler in found.items():
            wanted = self.wanted[handler]
            if not wanted.takes(name):
                self.wanted[handler] = wanted._replace(redrives=(*wanted.redrives, name))
                self._change_routes(handler, self.wanted[handler])

    def _survey_topics(self, then: Callable[[], None]) -> None:
        """Survey the topics in the background.

        Args:
            then: called after the answer; it may ask the cluster more. A cluster that does not answer is asked nothing
                else, because another question would take as long again.
        """
        topics = self.routes.topics
        matches = None if topics else lambda topic: self.routes.handler_of(topic) is not None
        surveyed = self._background.send(lambda: self._topic_checks.survey(topics, matches))
        self.loop.await_survey(surveyed, then)

    def _begin(self) -> None:
        if self._retry_topics:
            self._make_retry_topics()
        elif self.plan.partitions is None:
            self._subscribe()
        else:
            chosen = self.plan.partitions
            self._survey_topics(lambda: self._claim_explicit(chosen))

    @property
    def _retry_topics(self) -> dict[str, str]:
        return {name: topic for handler in self.plan.handlers for name, topic in handler.retry_topics.items()}

    def _make_retry_topics(self) -> None:
        """Make the retry topics, then subscribe: a topic that is subscribed by name must exist."""

        def subscribe(made: Future[None]) -> None:
            if made.exception() is None:
                self.loop.request(self._subscribe)

        made = self._background.send(lambda: self._topic_checks.make_topics(self._retry_topics))
        self.loop.watch(made)
        made.add_done_callback(subscribe)

    def _claim_explicit(self, partitions: tuple[Partition, ...]) -> None:
        """Claim the partitions that the user chose. Before that, check that the group has no members, because the claim
        would fence them."""

        def claim(alone: Future[None]) -> None:
            if alone.exception() is None:
                self.loop.request(lambda: self.assignment.claim_explicit(partitions))

        alone = self._background.send(self._topic_checks.must_be_alone)
        self.loop.watch(alone)
        alone.add_done_callback(claim)

    def _check_topics(self, known: Mapping[str, str]) -> Future[dict[str, KconsumeError]]:
        """Check the topics in the background.

        Args:
            known: the ids of the topics that we have.
        """
        topics = self.routes.topics
        self._find_redrive_topics()
        return self._background.send(lambda: self._topic_checks.check_topics(known, topics))

    def _explain(self, error: ClientError) -> Future[None]:
        """Find out in the background why the group refuses this member. The future fails with the reason."""
        plan = self.plan

        def explain() -> None:
            try:
                group = plan.cluster.group(plan.group)
            except KconsumeError:
                group = None
            raise why(error, plan.group, plan.settings, group)

        return self._background.send(explain)

    def _handler(self, topic: str) -> HandlerPlan:
        handler, takers = self.routes.handler_of(topic), self.routes.takers(topic)
        if len(takers) > 1:
            raise ConfigurationError(
                f"the patterns of {takers[0].binding.name} and {takers[1].binding.name} both match topic {topic!r}, "
                f"and in a group each record has one handler: make one of them narrower, or give one its own group="
            )
        if handler is None:
            raise ConfigurationError(
                f"the broker assigned topic {topic!r}, which matches no handler's pattern: the broker reads the "
                f"pattern differently than Python's re.fullmatch; write it with plain characters, '.', '*', '+', '?', "
                f"'[...]' and '|'"
            )
        return handler

    def _make_lane(self, partition: Partition, position: Position) -> Lane:
        handler = self._handler(partition.topic)
        if self._relay is not None:
            self._relay.open(partition, position.epoch)
        return Lane(
            partition,
            self._lanes[handler],
            self._works[handler],
            epoch=position.epoch,
            start=position.next_offset,
            scope=f"{self.plan.group}:{position.topic_id or partition.topic}",
            pace=pace_of(handler, self.plan.store),
            batch_buffer=None if handler.batching is None else BatchBuffer(handler.batching),
            earlier_attempts=tried_before(position.metadata),
            commits_itself=handler.in_transactions,
            leader_epoch=position.leader_epoch,
            reset_epoch=position.reset_epoch,
        )


def _names(partitions: Iterable[Partition]) -> str:
    return ", ".join(map(str, sorted(partitions)))


def _may_be_left(store: OffsetStore, lane: Lane) -> bool:
    """Whether the next lane of a partition may open while the handler of this lane still runs. The fence keeps the
    writes of that handler out. But an open transaction on an SQLite file also keeps all other writers out."""
    offers = capabilities_of(store)
    if offers.fenced is None:
        return False
    return not (lane.commits_itself and offers.transactional is not None and offers.transactional.parallel == 1)


def _relay_of(plan: ConsumerPlan, shared: SharedParts, owner: str) -> OutboxRelay | None:
    producer, outbox = shared.relay_producer, capabilities_of(plan.store).outbox
    if producer is None or outbox is None:
        return None
    return OutboxRelay(outbox, plan.group, producer, owner, TopicLimits(plan.cluster, producer.largest_batch))

"""From start to stop: consumers, signals, one deadline for all phases of the shutdown, and the report at the end.

Runs on the caller's thread and never calls a Kafka consumer. The signal handler only puts the signal on a queue,
because an exception or a lock in a signal handler could lose records or deadlock.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from types import FrameType

from kconsume._event_log import EventLog
from kconsume._kafka.producer import Producer, RelayProducer
from kconsume._runtime.background import BackgroundThread
from kconsume._runtime.consumer import RunningConsumer
from kconsume._runtime.deadlines import LEAST_CLOSE_SECONDS, SECOND_SIGNAL_SECONDS, TASKS_END_SECONDS, Deadline
from kconsume._runtime.exit_guard import Guard, exit_code
from kconsume._runtime.handler_loop import HandlerLoop
from kconsume._runtime.plan import ConsumerPlan, HandlerPlan, SharedParts
from kconsume._runtime.resource_scope import ResourceScope
from kconsume.errors import KconsumeError, ResourceFailed, ShutdownTimeout
from kconsume.records import Partition

_log = EventLog()

_LOOK_EVERY = 0.05


@dataclass(frozen=True, slots=True)
class Report:
    """How a run ended: which records were drained and committed, and what was left behind."""

    handled: int
    skipped: int
    committed: Mapping[Partition, int]
    abandoned: Sequence[Partition]
    """Partitions whose handler still ran at the deadline."""
    hung: Sequence[str]
    """Groups whose client did not close in time."""
    seconds: float
    """Seconds from the request to stop until the end."""
    failure: BaseException | None = field(default=None)
    signal: int | None = None
    """The second signal, if one cut the drain short."""
    resources_hang: bool = False
    """Whether a resource was not closed at the deadline."""
    held: Mapping[Partition, KconsumeError] = field(default_factory=dict)
    """Partitions that were held, and why."""
    unsent: int = 0
    """Upper limit of the records that are still in the outbox. The next owners of their partitions send them."""

    @property
    def exit_code(self) -> int:
        if self.signal is not None:
            return 128 + self.signal
        if self.failure is not None:
            return exit_code(self.failure)
        return ShutdownTimeout.exit_code if self.abandoned or self.hung else 0

    @property
    def unclean(self) -> bool:
        """Whether threads were left behind. Only the end of the process removes them."""
        return bool(self.abandoned or self.hung or self.signal or self.resources_hang)


@dataclass(frozen=True, slots=True)
class AppParts:
    """The objects that an app makes for its consumers. The supervisor closes them."""

    handler_loop: HandlerLoop
    resource_scope: ResourceScope
    producer: Producer
    letter_producer: Producer
    """Sends letters for which no handler waits."""
    relay_producer: RelayProducer
    """Sends the rows of an outbox."""
    most_bytes: int
    """The largest message that may be sent."""

    def producer_for(self, handler: HandlerPlan) -> Producer:
        """The producer for the records that a handler sends."""
        if handler.outbox:
            return self.relay_producer
        return self.letter_producer if handler.hands_letters_over else self.producer


class Supervisor:
    """Runs the consumers of an app.

    Fields: `_wakeups` is a queue, filled by the signal handler and by any thread. `_deadline` and `_asked_at` are
    written once by the first thread that calls `stop`, and read by the supervisor's thread. `_signals` is written by
    the signal handler only. All other fields are written by the supervisor's thread; `consumers` and `failure` are read
    by any thread.
    """

    def __init__(
        self,
        plans: Sequence[ConsumerPlan],
        shutdown: float,
        shared: AppParts,
        guard: Guard | None = None,
    ) -> None:
        """
        Args:
            plans: one for each consumer.
            shutdown: seconds from the request to stop until the end.
            shared: the objects that the consumers share. The supervisor closes them.
            guard: the guard of the user's `with` block. It is called when the app has failed.
        """
        self._plans = plans
        self._shutdown = shutdown
        self._shared = shared
        self._wakeups: SimpleQueue[int | None] = SimpleQueue()
        self._signals = 0
        self._deadline: Deadline | None = None
        self._asked_at = time.monotonic()
        self._hard_signal: int | None = None
        self._guard = guard
        self._close_error: BaseException | None = None
        self.consumers: list[RunningConsumer] = []

    def start(self) -> None:
        """Build the resources, then start the consumers. If a resource cannot be built, nothing is consumed."""
        # Built in the order in which handlers name them, so that the order is the same at every start.
        wanted = dict.fromkeys(
            hint for plan in self._plans for h in plan.handlers for hint in h.binding.resources.values()
        )
        try:
            shared = self._shared
            resources = self._build(wanted)
            producing = [handler for plan in self._plans for handler in plan.handlers if handler.produces]
            for producer in set(map(shared.producer_for, producing)):
                producer.open()  # wrong settings of a producer are reported before the first record
            parts = SharedParts(
                shared.handler_loop,
                shared.producer,
                resources,
                shared.most_bytes,
                letter_producer=shared.letter_producer,
                relay_producer=shared.relay_producer,
            )
            for plan in self._plans:
                self.consumers.append(RunningConsumer(plan, parts, self._consumer_ended))
        except BaseException:
            closing = self._deadline or Deadline(self._shutdown)
            for consumer in self.consumers:
                consumer.close(closing)
            self._close_shared(closing)
            raise
        for consumer in self.consumers:
            consumer.start()
            if self._deadline is not None:  # `stop` was called while the resources were built
                consumer.loop.stop(self._deadline)

    def _build(self, wanted: Iterable[object]) -> Mapping[object, object]:
        """Build the resources. There is no time limit until `stop` is called."""
        resource_scope = self._shared.resource_scope
        building = resource_scope.begin(wanted)
        building.add_done_callback(lambda _: self._wakeups.put(None))
        while not building.done():
            self._await_wakeup(0.1)
            if self._deadline is not None and self._deadline.passed:
                resource_scope.hangs = True
                raise ResourceFailed(
                    f"the resource {resource_scope.at} was still not built {self._shutdown:.1f} s after the request "
                    f"to stop"
                )
        return building.result()

    def await_start(self, seconds: float) -> None:
        """Wait until every consumer has joined its group and its first claim was answered, or until the app has failed
        or must stop. Raises `StartTimeout` if this takes longer than `seconds`.

        Args:
            seconds: the limit. With 0, the method does not wait.
        """
        if not seconds:
            return
        deadline = Deadline(seconds)
        for consumer in self.consumers:
            while not consumer.loop.started.wait(_LOOK_EVERY):
                if self.failure is not None or self._deadline is not None:
                    return
                if deadline.passed:
                    raise consumer.start_timeout(seconds)

    def serves(self, guard: Guard) -> bool:
        """Whether this guard belongs to the block that the app runs for."""
        return self._guard is guard

    def stop(self) -> None:
        """Ask all consumers to drain and leave. May be called on any thread. Only the first call counts."""
        if self._deadline is None:
            self._asked_at = time.monotonic()
            self._deadline = Deadline(self._shutdown)
            for consumer in self.consumers:
                consumer.loop.stop(self._deadline)
        self._wakeups.put(None)

    def stop_when_idle(self, seconds: float) -> None:
        for consumer in self.consumers:
            consumer.loop.stop_when_idle(seconds)

    @property
    def failure(self) -> BaseException | None:
        return next((e.loop.failure for e in self.consumers if e.loop.failure is not None), self._close_error)

    def finish(self) -> Report:
        """Wait until the consumers end by themselves or by `stop`, then close everything within the deadline."""
        running = list(self.consumers)
        while running:
            if self._hard_signal is not None or (self._deadline is not None and self._deadline.passed):
                break
            self._await_wakeup(0.5 if self._deadline is None else min(0.1, self._deadline.left))
            running = [consumer for consumer in running if not consumer.join(0)]
            if self.failure is not None and self._deadline is None:
                self.stop()
        if self._hard_signal is not None and running:
            running = [consumer for consumer in running if not consumer.join(SECOND_SIGNAL_SECONDS / len(running))]
        self._close(running)
        return self._report(running)

    @contextmanager
    def signals(self) -> Iterator[None]:
        """In the block, the first SIGTERM or SIGINT stops the app. The second one ends the drain at once."""
        previous = {s: signal.signal(s, self._on_signal) for s in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def _close(self, running: Sequence[RunningConsumer]) -> None:
        """Close everything on another thread, so that a second signal can still end the wait at once."""
        closing = Deadline(max(LEAST_CLOSE_SECONDS, self._shutdown if self._deadline is None else self._deadline.left))
        closer = BackgroundThread("kconsume-closing")
        closed = closer.send(lambda: self._close_all(running, closing))
        closed.add_done_callback(lambda _: self._wakeups.put(None))
        while not closed.done() and self._hard_signal is None:
            self._await_wakeup(0.5)
        closer.close(LEAST_CLOSE_SECONDS)
        if self._hard_signal is None:
            closed.result()

    def _close_all(self, running: Sequence[RunningConsumer], deadline: Deadline) -> None:
        for consumer in self.consumers:
            consumer.close_lanes()
        self._shared.handler_loop.rest(min(TASKS_END_SECONDS, max(LEAST_CLOSE_SECONDS, deadline.left)))
        for consumer in self.consumers:
            if consumer in running:
                consumer.close_late()
            else:
                consumer.close(deadline)
        self._close_shared(deadline)

    def _close_shared(self, deadline: Deadline) -> None:
        """Close the shared objects after the drain. Only threads that were given up may still use them."""
        self._close_error = self._shared.resource_scope.close(max(LEAST_CLOSE_SECONDS, deadline.left))
        self._shared.relay_producer.close(LEAST_CLOSE_SECONDS)  # unsent rows stay in the outbox
        self._shared.letter_producer.close(max(LEAST_CLOSE_SECONDS, deadline.left))
        self._shared.producer.close(max(LEAST_CLOSE_SECONDS, deadline.left))
        self._shared.handler_loop.close(deadline.left)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002
        self._signals += 1
        self._wakeups.put(number)

    def _consumer_ended(self) -> None:
        self._wakeups.put(None)
        if self.failure is not None and self._guard is not None:
            self._guard.failed(self.failure)

    def _await_wakeup(self, seconds: float) -> None:
        try:
            number = self._wakeups.get(timeout=seconds)
        except Empty:
            return
        if number is not None and self._signals > 1:
            self._hard_signal = number
        elif number is not None:
            _log.info("drain started", signal=signal.Signals(number).name, within_seconds=self._shutdown)
            self.stop()

    def _report(self, running: Sequence[RunningConsumer]) -> Report:
        snapshots = [consumer.loop.snapshot for consumer in self.consumers]
        return Report(
            handled=sum(s.handled for s in snapshots),
            skipped=sum(s.skipped for s in snapshots),
            committed={p: offset for s in snapshots for p, offset in s.stored.items()},
            abandoned=[p for s in snapshots for p in s.abandoned],
            hung=[consumer.plan.group for consumer in running],
            seconds=time.monotonic() - self._asked_at,
            failure=self.failure,
            signal=self._hard_signal,
            resources_hang=self._shared.resource_scope.hangs,
            held={p: trouble.error for s in snapshots for p, trouble in s.held.items()},
            unsent=sum(consumer.unsent for consumer in self.consumers),
        )

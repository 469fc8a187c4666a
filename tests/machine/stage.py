"""The stage: the real consumer on strings. One thread, a clock that stands, and answers that come when they are let.

Each part that has a thread of its own in a real process (the owner of the consumer, the background threads, a lane's
worker) is an `Actor` here. An actor runs until it pauses: where it would wait, and before and after each question to
the store. What goes on next is for the state machine to say.

This is the only file of the state machine that knows how the runtime is built inside.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future
from queue import Empty
from types import SimpleNamespace
from typing import Any, NamedTuple, TypeVar

import pytest
from greenlet import getcurrent, greenlet

from kconsume._kafka import consumer as source
from kconsume._kafka import fetch_wakeup
from kconsume._kafka.cluster import Committed
from kconsume._runtime import consumer, deadlines, dispatch, loop
from kconsume._runtime.assignment import claiming, commits, committer, partition, partition_trouble
from kconsume._runtime.consumer import RunningConsumer
from kconsume._runtime.handler_loop import EventLoopThread
from kconsume._runtime.lanes.lane import Lane
from kconsume._runtime.lanes.reports import LaneReport
from kconsume._runtime.lanes.threads import ThreadLanes
from kconsume._runtime.observation.causes import Facts, flows, waits_for
from kconsume._runtime.plan import ConsumerPlan, SharedParts
from kconsume._runtime.processing import transactional
from kconsume.failures.retry_topics import Moment
from kconsume.records import Partition

T = TypeVar("T")

_TIMED = (loop, dispatch, claiming, commits, transactional, source, partition, partition_trouble)
"""Modules that ask `time` themselves."""


class Abandoned(BaseException):
    """The run is over: whoever still waits goes no further."""


class Question(NamedTuple):
    """Something that the store is asked."""

    name: str
    partitions: frozenset[Partition]
    answered: bool = False
    """Whether the store has done it, and only the answer is missing."""
    moves: Mapping[Partition, int] = {}
    """How often each partition had come or gone when it was asked."""


class Call(NamedTuple):
    """A handler call."""

    partition: Partition
    offset: int


class Wait(NamedTuple):
    """Something that the owner thread waits for inside a callback."""

    seconds: float


Place = str | Question | Call | Wait


class Strand(greenlet):
    """What an actor runs on."""

    actor: Actor


class Actor:
    """Something that runs until it pauses."""

    def __init__(self, name: str, stage: Stage, run: Callable[[], object]) -> None:
        self.name = name
        self.at: Place | None = None
        """Where it has paused; None once it has ended."""
        self._stage = stage
        self._greenlet = Strand(run)
        self._greenlet.actor = self

    def go(self, how: str = "on") -> None:
        """Until the next pause. `how`: what comes of the one where it is."""
        assert getcurrent() is self._stage.main
        self._greenlet.switch() if self.at is None else self._greenlet.switch(how)
        if self._greenlet.dead:
            self.at = None

    @property
    def ended(self) -> bool:
        return bool(self._greenlet.dead)


class Stage:
    """One run of the state machine."""

    def __init__(self) -> None:
        self.main = getcurrent()
        self.now = 1000.0
        self.over = False
        self.owner: Actor | None = None
        self.threads: list[Thread] = []
        self.workers: dict[Lane, Actor] = {}
        self.ready = _Ready()
        """Lanes with something to do, and no worker yet."""
        self.asleep: list[tuple[float, Lane]] = []
        self.accepts: Callable[[Partition, Committed], None] = lambda *_: None
        """Told of each offset that the broker accepts."""

    def pause(self, place: Place) -> str:
        """On an actor: stop here until it is let go on. What is set up or looked at from outside does not pause."""
        current = getcurrent()
        if current is self.main:
            return "on"
        if self.over:
            raise Abandoned
        assert isinstance(current, Strand)
        current.actor.at = place
        how = self.main.switch()
        if self.over:
            raise Abandoned
        return str(how)

    def close(self) -> None:
        """Whoever waits is told that it is over."""
        self.over = True
        actors = [self.owner, *(thread.actor for thread in self.threads), *self.workers.values()]
        for actor in [each for each in actors if each is not None]:
            for _ in range(100):
                if actor.ended or actor.at is None:
                    break
                actor.go()

    # What stands for the clock

    @property
    def clock(self) -> SimpleNamespace:
        def sleep(seconds: float) -> None:
            self.pause(Wait(seconds))

        return SimpleNamespace(monotonic=lambda: self.now, perf_counter=lambda: self.now, sleep=sleep)


class Thread:
    """Stands for `BackgroundThread`: does one thing after the other."""

    def __init__(self, stage: Stage, name: str) -> None:
        self.name = name
        self.actor: Actor | None = None
        """What it does now."""
        self.waiting: deque[Callable[[], None]] = deque()
        self._stage = stage
        stage.threads.append(self)

    def send(self, call: Callable[[], T]) -> Future[T]:
        future: Future[T] = Future()

        def run() -> None:
            try:
                future.set_result(call())
            except BaseException as error:  # noqa: BLE001  (raised where the future is read)
                future.set_exception(error)

        self.waiting.append(run)
        return future

    def close(self, within: float) -> bool:
        return True

    @property
    def busy(self) -> bool:
        return self.actor is not None or bool(self.waiting)

    def go(self, how: str = "on") -> None:
        """Go on with what it does, or begin the next."""
        if self.actor is None:
            self.actor = Actor(self.name, self._stage, self.waiting.popleft())
        self.actor.go(how)
        if self.actor.ended:
            self.actor = None


class Reports:
    """Stands for the queue of what lanes report."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._reports: deque[LaneReport] = deque()

    def put(self, report: LaneReport) -> None:
        self._reports.append(report)

    def empty(self) -> bool:
        return not self._reports

    def get(self, block: bool = True, timeout: float = 0.0) -> LaneReport:
        if not self._reports:
            self._stage.pause(Wait(timeout))
        if not self._reports:
            raise Empty
        return self._reports.popleft()


class Lanes(ThreadLanes):
    """Lanes whose workers are actors."""

    def __init__(self, stage: Stage, outcomes: Any) -> None:
        super().__init__(outcomes, "lanes", 8)
        self._ready = stage.ready  # type: ignore[assignment]
        self._timer = _Alarm(stage)  # type: ignore[assignment]

    def _start_workers(self) -> None:
        """Workers come when there is something to do."""


class _Ready(deque[Lane]):
    def put(self, lane: Lane) -> None:
        self.append(lane)


class _Alarm:
    """Stands for the timer of lanes that go on later."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage

    def wake(self, lane: Lane, seconds: float) -> None:
        self._stage.asleep.append((self._stage.now + seconds, lane))


def begin_work(stage: Stage) -> Actor:
    """A worker takes the next lane that is ready."""
    lane = stage.ready.popleft()
    lanes = lane.lanes
    assert isinstance(lanes, Lanes)

    def run() -> None:
        with lane.lock:
            chunk = lane.chunks.popleft() if lane.chunks and lane.suspended is None else None
        lanes._handle(lane, chunk)

    worker = stage.workers[lane] = Actor(f"worker of {lane.partition}", stage, run)
    return worker


def wake_lanes(stage: Stage) -> None:
    due = [lane for at, lane in stage.asleep if at <= stage.now]
    stage.asleep = [(at, lane) for at, lane in stage.asleep if at > stage.now]
    stage.ready.extend(due)


def patched(stage: Stage, patch: pytest.MonkeyPatch, client: Callable[[Mapping[str, Any]], object]) -> None:
    """Put the stage's parts in the places of threads, queues, clocks and the client."""
    clock = stage.clock
    for module in _TIMED:
        if hasattr(module, "time"):
            patch.setattr(module, "time", clock)
    patch.setattr(Moment, "now", lambda: Moment(clock.monotonic(), clock.monotonic()))
    patch.setattr(deadlines.Deadline.__init__, "__defaults__", (clock.monotonic,))
    patch.setattr(consumer, "BackgroundThread", lambda name: Thread(stage, name))
    patch.setattr(consumer, "SimpleQueue", lambda: Reports(stage))

    def lanes_for(handler: Any, store: Any, outcomes: Any, shared: Any) -> Lanes:
        return Lanes(stage, outcomes)

    patch.setattr(consumer, "lanes_for", lanes_for)

    def wait(futures: Collection[Future[Any]], timeout: float) -> SimpleNamespace:
        if not all(future.done() for future in futures):
            stage.pause(Wait(timeout))
        return SimpleNamespace(not_done=[future for future in futures if not future.done()])

    patch.setattr(claiming, "wait", wait)
    patch.setattr(committer, "wait", wait)
    patch.setattr(source, "Consumer", lambda config, logger: client(config))
    patch.setattr(source.KafkaConsumer, "__del__", lambda self: None)
    patch.setattr(fetch_wakeup.FetchWakeup, "due", lambda self: False)


class Run:
    """The consumer that is on stage."""

    def __init__(self, stage: Stage, plan: ConsumerPlan) -> None:
        shared = SharedParts(EventLoopThread("machine"), None, {})  # type: ignore[arg-type]
        self._engine = RunningConsumer(plan, shared, lambda: None)
        self._loop = self._engine.loop
        stage.owner = Actor("owner", stage, lambda: self._loop.run(self._engine._begin))

    @property
    def failure(self) -> BaseException | None:
        return self._loop.failure

    @property
    def waits(self) -> Mapping[Partition, tuple[str, ...]]:
        """What partitions that do not flow wait for, by the function that gives them their cause."""
        ours = self._engine.assignment
        return {
            p: tuple(
                waits_for(o, Facts(is_claimed=ours.claiming.has_pending(o), can_be_confirmed=ours.can_be_confirmed(o)))
            )
            for p, o in ours.partitions.items()
            if not flows(o)
        }

    @property
    def assigned(self) -> set[Partition]:
        return set(self._engine.assignment.partitions)

    def has_lane(self, lane: Lane) -> bool:
        """Whether its partition is with this lane now."""
        owned = self._engine.assignment.partitions.get(lane.partition)
        return owned is not None and owned.lane is lane

    def pause(self, partitions: list[Partition]) -> None:
        self._engine.pause(partitions)

    def resume(self, partitions: list[Partition]) -> None:
        self._engine.resume(partitions)

    def seek(self, offsets: Mapping[Partition, int]) -> None:
        self._engine.seek(offsets)

"""One running consumer, put together: which parts there are and which thread each lives on.

    owner thread     Loop, Source, Tenancy, ledgers
    errand thread    store and cluster questions that may block
    worker threads   handlers that are plain functions
    event loop       handlers that are async, shared by all consumers of the app

A plan says what to run; nothing is decided here.
"""

from __future__ import annotations

import os
import socket
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from queue import SimpleQueue

from kconsume.backends.abc import OffsetStore, Position, TransactionalStore
from kconsume.backends.kafka import KafkaStore
from kconsume.batches import Batching
from kconsume.cluster import Cluster
from kconsume.failures.policy import Policy
from kconsume.handler import MOST_BYTES, Binding
from kconsume.rate import Limiter, Rate
from kconsume.records import Partition
from kconsume.runtime.async_lanes import AsyncLanes
from kconsume.runtime.budget import Deadline, Pace
from kconsume.runtime.claims import Begin, Claims
from kconsume.runtime.commits import GroupLedger, StoreLedger
from kconsume.runtime.course import Course
from kconsume.runtime.errands import Errands
from kconsume.runtime.gathering import Gathering
from kconsume.runtime.home import Home
from kconsume.runtime.lanes import InlineLanes, Lane, Lanes, Outcomes, ThreadLanes, Work
from kconsume.runtime.loop import Loop
from kconsume.runtime.ownership import Ownership
from kconsume.runtime.source import Source
from kconsume.runtime.tenancy import Tenancy
from kconsume.runtime.work import (
    Delivers,
    InTransactions,
    InTransactionsAsync,
    LoopWork,
    Plainly,
    PlainlyAsync,
    ThreadWork,
)
from kconsume.settings import ClientValue
from kconsume.wrapping import Wrap

BATCH = 1000
DEFAULT_WORKERS = 8
LOOP_SLICE = 0.01
"""Seconds that a handler may keep an event loop to itself; others live there too."""


@dataclass(frozen=True, slots=True, eq=False)
class HandlerPlan:
    """How one handler is run."""

    binding: Binding
    topics: tuple[str, ...]
    policy: Policy
    start: Begin
    executor: str
    concurrency: int | None
    chunk: int | None
    batching: Batching | None = None
    rate: Rate | None = None
    wraps: tuple[Wrap, ...] = ()

    @property
    def waits(self) -> bool:
        """Whether it waits for something beside its own work, so that no time of its own says how fast it is."""
        return self.binding.sends or self.binding.is_async or self.rate is not None


@dataclass(frozen=True, slots=True)
class Equipment:
    """What the handlers of an app share while it runs."""

    home: Home
    outlet: Delivers
    resources: Mapping[object, object]
    most_bytes: int = MOST_BYTES
    """Of a message that is sent."""


@dataclass(frozen=True, slots=True)
class ConsumerPlan:
    """One consumer: the handlers that share a group and a store."""

    group: str
    store: OffsetStore
    handlers: tuple[HandlerPlan, ...]
    partitions: tuple[Partition, ...] | None
    """Explicit partitions, or None for the group's own assignment."""
    settings: Mapping[str, ClientValue]
    cluster: Cluster
    shutdown: float
    memory: int

    @property
    def topics(self) -> list[str]:
        return sorted({topic for handler in self.handlers for topic in handler.topics})


class Engine:
    """A consumer that runs."""

    def __init__(self, plan: ConsumerPlan, equipment: Equipment, ended: Callable[[], None]) -> None:
        self.plan = plan
        self._ownership = Ownership(f"kconsume-{plan.group}", ended)
        self._errands = Errands(f"kconsume-errands-{plan.group}")
        outcomes: Outcomes = SimpleQueue()
        self._lanes = {h: _lanes_for(h, plan.store, outcomes, self._ownership, equipment) for h in plan.handlers}
        self._works = {h: work_for(h, plan.store, plan.group, equipment) for h in plan.handlers}
        self._handlers = {topic: h for h in plan.handlers for topic in h.topics}
        begin = {topic: h.start for topic, h in self._handlers.items()}
        owner = f"{socket.gethostname()}:{os.getpid()}:{uuid.uuid4().hex[:8]}"
        claims = Claims(plan.store, plan.cluster, plan.group, owner, begin)
        self.tenancy = Tenancy(
            claims, self._errands, self._make_lane, shutdown=plan.shutdown, grouped=plan.partitions is None
        )
        try:
            self.source = Source(plan.settings, self.tenancy, batch=BATCH)
        except BaseException:
            self._errands.close(0.0)
            raise
        in_group = isinstance(plan.store, KafkaStore)
        group = GroupLedger(self.source)
        ledger = group if in_group else StoreLedger(plan.store, plan.group, self._errands)
        mirror = None if in_group else group
        self.loop = Loop(
            self.source,
            self.tenancy,
            outcomes,
            ledger,
            mirror,
            memory=plan.memory,
            shutdown=plan.shutdown,
            checkup=lambda known: self._errands.send(lambda: claims.check_topics(known)),
        )
        self.tenancy.attach(self.source, self.loop.see_off)

    def start(self) -> None:
        self._ownership.start(lambda: self.loop.run(self._begin), self.loop.resume)

    def join(self, seconds: float) -> bool:
        """Whether the loop has ended."""
        return self._ownership.wait(seconds)

    def give_up(self) -> None:
        """No chunk will follow; an `async def` that still runs is cancelled. Also while the owner thread hangs."""
        for lanes in self._lanes.values():
            lanes.close()

    def close(self, deadline: Deadline) -> None:
        """Let go of the store, after the owner thread has ended."""
        self._errands.send(self.plan.store.close)
        self._errands.close(deadline.left)

    def pause(self, partitions: list[Partition]) -> None:
        self.loop.request(lambda: self.tenancy.pause(partitions))

    def resume(self, partitions: list[Partition]) -> None:
        self.loop.request(lambda: self.tenancy.resume(partitions))

    def seek(self, offsets: Mapping[Partition, int]) -> None:
        self.loop.request(lambda: self.tenancy.restart(offsets))

    def _begin(self) -> None:
        plan = self.plan
        self.loop.watch(self._errands.send(lambda: plan.cluster.topics(plan.topics)))
        if plan.partitions is None:
            self.source.subscribe(plan.topics)
        else:
            self.tenancy.take(plan.partitions)

    def _make_lane(self, partition: Partition, position: Position) -> Lane:
        handler = self._handlers[partition.topic]
        return Lane(
            partition,
            self._lanes[handler],
            self._works[handler],
            epoch=position.epoch,
            start=position.next_offset,
            scope=f"{self.plan.group}:{position.topic_id or partition.topic}",
            pace=_pace_of(handler),
            gathering=None if handler.batching is None else Gathering(handler.batching),
        )


def _pace_of(handler: HandlerPlan) -> Pace:
    limit = handler.chunk or BATCH
    if handler.binding.is_async:
        return Pace(limit, waits=True, target=LOOP_SLICE)
    return Pace(limit, waits=handler.waits)


def _lanes_for(
    handler: HandlerPlan, store: OffsetStore, outcomes: Outcomes, ownership: Ownership, equipment: Equipment
) -> Lanes:
    name, most = f"kconsume-{handler.binding.name}", most_workers(handler, store)
    if handler.executor == "inline":
        return InlineLanes(outcomes)
    if handler.executor == "async":
        return AsyncLanes(outcomes, name, most, equipment.home)
    return ThreadLanes(outcomes, name, most, ownership)


def most_workers(handler: HandlerPlan, store: OffsetStore) -> int:
    """As many as asked for; by default as many as can do something side by side."""
    useful = DEFAULT_WORKERS
    if handler.binding.transaction is not None and isinstance(store, TransactionalStore):
        useful = min(useful, store.parallel or useful)
    return handler.concurrency or useful


def work_for(handler: HandlerPlan, store: OffsetStore, group: str, equipment: Equipment) -> Work:
    """What is done with the chunks of a handler: plainly or in transactions, on threads or on the event loop."""
    binding, batched = handler.binding, handler.binding.batched
    limiter = None if handler.rate is None else Limiter(handler.rate)
    course = Course(binding, handler.policy, limiter, stores=binding.transaction is not None)
    outlet = equipment.outlet if binding.sends else None
    furnished = (equipment.resources, handler.wraps, equipment.most_bytes)
    if binding.transaction is None:
        if binding.is_async:
            return LoopWork(course, PlainlyAsync(binding.async_runner(*furnished), batched, outlet))
        return ThreadWork(course, Plainly(binding.runner(*furnished), batched, outlet))
    assert isinstance(store, TransactionalStore)  # checked when the handler was decorated
    if binding.is_async:
        runner, hands = binding.async_runner(*furnished), equipment.home.hands
        return LoopWork(course, InTransactionsAsync(runner, batched, store, group, outlet, hands))
    return ThreadWork(course, InTransactions(binding.runner(*furnished), batched, store, group, outlet))

"""One running consumer, put together: which parts there are and which thread each lives on.

    owner thread     Loop, Source, Tenancy, ledgers
    errand thread    store and cluster questions that may block
    worker threads   handlers

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
from kconsume.cluster import Cluster
from kconsume.failures.policy import Policy
from kconsume.handler import Binding
from kconsume.records import Partition
from kconsume.runtime.budget import Deadline
from kconsume.runtime.claims import Begin, Claims
from kconsume.runtime.commits import GroupLedger, StoreLedger
from kconsume.runtime.errands import Errands
from kconsume.runtime.lanes import InlineLanes, Lane, Lanes, Outcomes, ThreadLanes, Work
from kconsume.runtime.loop import Loop
from kconsume.runtime.ownership import Ownership
from kconsume.runtime.source import Source
from kconsume.runtime.tenancy import Tenancy
from kconsume.runtime.work import PlainWork, TransactionalWork
from kconsume.settings import ClientValue

BATCH = 1000
DEFAULT_WORKERS = 8


@dataclass(frozen=True, slots=True)
class HandlerPlan:
    """How one handler is run."""

    binding: Binding
    topics: tuple[str, ...]
    policy: Policy
    start: Begin
    executor: str
    concurrency: int | None
    chunk: int | None


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

    def __init__(self, plan: ConsumerPlan, ended: Callable[[], None]) -> None:
        self.plan = plan
        self._ownership = Ownership(f"kconsume-{plan.group}", ended)
        self._errands = Errands(f"kconsume-errands-{plan.group}")
        outcomes: Outcomes = SimpleQueue()
        self._lanes = {h: _lanes_for(h, plan.store, outcomes, self._ownership) for h in plan.handlers}
        self._works = {h: _work_for(h, plan) for h in plan.handlers}
        self._handlers = {topic: h for h in plan.handlers for topic in h.topics}
        begin = {topic: h.start for topic, h in self._handlers.items()}
        owner = f"{socket.gethostname()}:{os.getpid()}:{uuid.uuid4().hex[:8]}"
        claims = Claims(plan.store, plan.cluster, plan.group, owner, begin)
        self.tenancy = Tenancy(
            claims, self._errands, self._make_lane, shutdown=plan.shutdown, grouped=plan.partitions is None
        )
        self.source = Source(plan.settings, self.tenancy, batch=BATCH)
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

    def close(self, deadline: Deadline) -> None:
        """Let go of the store, after the owner thread has ended."""
        for lanes in self._lanes.values():
            lanes.close()
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
            chunk=handler.chunk or BATCH,
        )


def _lanes_for(handler: HandlerPlan, store: OffsetStore, outcomes: Outcomes, ownership: Ownership) -> Lanes:
    if handler.executor == "inline":
        return InlineLanes(outcomes)
    return ThreadLanes(outcomes, f"kconsume-{handler.binding.name}", most_workers(handler, store), ownership)


def most_workers(handler: HandlerPlan, store: OffsetStore) -> int:
    """As many as asked for; by default as many as can do something side by side."""
    useful = DEFAULT_WORKERS
    if handler.binding.transaction is not None and isinstance(store, TransactionalStore):
        useful = min(useful, store.parallel or useful)
    return handler.concurrency or useful


def _work_for(handler: HandlerPlan, plan: ConsumerPlan) -> Work:
    if handler.binding.transaction is None:
        return PlainWork(handler.binding, handler.policy)
    assert isinstance(plan.store, TransactionalStore)  # checked when the handler was decorated
    return TransactionalWork(handler.binding, handler.policy, plan.store, plan.group)

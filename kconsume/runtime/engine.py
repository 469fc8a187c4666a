"""One running consumer, put together: which parts there are and which thread each lives on.

    owner thread     Loop, SplitSource, Tenancy, ledgers
    errand thread    store and cluster questions that may block
    save thread      offsets on their way to a store, so that no such question delays them
    worker threads   handlers that are plain functions
    event loop       handlers that are async, shared by all consumers of the app

A plan says what to run; nothing is decided here.
"""

from __future__ import annotations

import os
import socket
import threading
import uuid
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from functools import partial
from queue import SimpleQueue

from confluent_kafka import KafkaError

from kconsume.backends.abc import FencedStore, OffsetStore, OutboxStore, Position, TransactionalStore
from kconsume.backends.commit_note import KAFKA
from kconsume.backends.kafka import KafkaStore
from kconsume.errors import ConfigurationError, KconsumeError, StartTimeout
from kconsume.records import Partition
from kconsume.runtime.audience import Audience
from kconsume.runtime.budget import Deadline
from kconsume.runtime.chronicle import Chronicle
from kconsume.runtime.claims import Claims
from kconsume.runtime.commits import GroupLedger, StoreLedger
from kconsume.runtime.errands import Errands
from kconsume.runtime.fitting import BATCH, lanes_for, pace_of, tried_before, work_for
from kconsume.runtime.gathering import Gathering
from kconsume.runtime.holding import Holding
from kconsume.runtime.lanes import Lane, Outcomes
from kconsume.runtime.limits import Limits
from kconsume.runtime.loop import Loop
from kconsume.runtime.ownership import Ownership
from kconsume.runtime.plans import ConsumerPlan, Equipment, HandlerPlan
from kconsume.runtime.refusals import why
from kconsume.runtime.relay import Relay
from kconsume.runtime.routes import Routes, Wanted
from kconsume.runtime.split_source import SplitSource
from kconsume.runtime.tenancy import Tenancy

_LATE = 60.0
"""Seconds between two looks at an owner thread that was given up."""


class Engine:
    """A consumer that runs."""

    def __init__(self, plan: ConsumerPlan, equipment: Equipment, ended: Callable[[], None]) -> None:
        self.plan = plan
        self.unsent = 0
        """Rows that stayed in the outbox when it left its partitions in the end."""
        self._home = equipment.home
        self._ownership = Ownership(f"kconsume-{plan.group}", ended)
        self._errands = Errands(f"kconsume-errands-{plan.group}")
        in_group = isinstance(plan.store, KafkaStore)
        self._saves = None if in_group else Errands(f"kconsume-saves-{plan.group}")
        outcomes: Outcomes = SimpleQueue()
        owner = f"{socket.gethostname()}:{os.getpid()}:{uuid.uuid4().hex[:8]}"
        self._relay = _relay_of(plan, equipment, owner)
        self._lanes = {h: lanes_for(h, plan.store, outcomes, self._ownership, equipment) for h in plan.handlers}
        self._works = {h: work_for(h, plan.store, plan.group, equipment, self._relay) for h in plan.handlers}
        self.routes = Routes((h, h.wanted) for h in plan.handlers)
        self.wanted = {h: h.wanted for h in plan.handlers}
        """What was asked for last; the routes follow on the owner thread."""
        self._has_subscribed = False
        self._claims = Claims(
            plan.store, plan.cluster, plan.group, owner, lambda topic: self._handler(topic).begin(topic)
        )
        self.chronicle = Chronicle(str(plan.protocol))
        self._audience = Audience(plan.listeners, equipment.home, f"kconsume-listeners-{plan.group}")
        self.tenancy = Tenancy(
            self._claims,
            self._errands,
            self._make_lane,
            self._audience,
            self.chronicle,
            budget=plan.budget,
            shutdown=plan.shutdown,
            grouped=plan.partitions is None,
            may_be_left=partial(_may_be_left, plan.store),
        )
        try:
            self.source = SplitSource(plan.settings, self.tenancy, batch=BATCH)
        except BaseException:
            self._close_threads(Deadline(0.0))
            raise
        group = GroupLedger(self.source, advisory=not in_group, name=lambda: KAFKA if in_group else self._claims.name)
        ledger = group if self._saves is None else StoreLedger(plan.store, plan.group, self._saves)
        mirror = None if in_group else group
        self.loop = Loop(
            self.source,
            self.tenancy,
            outcomes,
            ledger,
            mirror,
            memory=plan.memory,
            shutdown=plan.shutdown,
            checkup=self._check_topics,
            has_had=lambda topic: topic in self._claims.seen,
            explain=self._explain,
            home=equipment.home if _may_be_lent(plan) else None,
        )
        self.tenancy.attach(self.source, self._see_off)

    def start(self) -> None:
        if self._relay is not None:
            self._relay.start()
        self._ownership.start(lambda: self.loop.run(self._begin), self.loop.resume)

    def start_timeout(self, seconds: float) -> StartTimeout:
        """Why the first claim is not in after this time."""
        cause = self.tenancy.unanswered or self._claims.unanswered
        last = self.loop.last_trouble
        if cause is not None:
            why = str(cause)
        elif not self.tenancy.joined:
            why = f"the group has not given it an assignment yet{f' (the client says: {last})' if last else ''}"
        else:
            why = f"{self.plan.store.address} has not answered the claim of {_names(self.tenancy.holdings)} yet"
        error = StartTimeout(
            f"the consumer of group {self.plan.group!r} was not ready {seconds:g} s after its start: {why}. If "
            f"it needs longer, say App(startup=...)"
        )
        error.__cause__ = cause
        return error

    def join(self, seconds: float) -> bool:
        """Whether the loop has ended."""
        return self._ownership.wait(seconds)

    def give_up(self) -> None:
        """No chunk will follow; an `async def` that still runs is cancelled. Also while the owner thread hangs."""
        for lanes in self._lanes.values():
            lanes.close()

    def close(self, deadline: Deadline) -> None:
        """Let go of the store, after the owner thread has ended."""
        if self._relay is not None:
            self.unsent += self._relay.close(deadline)
        self._audience.close(deadline.left)
        if self._saves is not None:
            self._saves.close(deadline.part(0.5).left)  # the store is closed behind the last save
        self._errands.send(self.plan.store.close)
        self._close_threads(deadline)

    def close_late(self) -> None:
        """The owner thread was given up and may still end: then nothing of ours stays behind it. The store is let be,
        for another run may have it by then."""
        threading.Thread(target=self._close_late, name=f"kconsume-late-{self.plan.group}", daemon=True).start()

    def _close_late(self) -> None:
        while not self._ownership.wait(_LATE):
            pass
        if self._relay is not None:
            self._relay.close(Deadline(0.0))
        self._audience.close(0.0)
        self._close_threads(Deadline(0.0))

    def _close_threads(self, deadline: Deadline) -> None:
        self._errands.close(deadline.left)
        if self._saves is not None:
            self._saves.close(deadline.left)

    def pause(self, partitions: list[Partition]) -> None:
        self.loop.request(lambda: self.tenancy.pause(partitions))

    def resume(self, partitions: list[Partition]) -> None:
        self.loop.request(lambda: self.tenancy.resume(partitions))

    def seek(self, offsets: Mapping[Partition, int]) -> None:
        self.loop.request(lambda: self.tenancy.restart(offsets))

    def subscribe(self, handler: HandlerPlan, wanted: Wanted) -> None:
        """Give a handler other topics, while it runs. Topics of its failed records stay: they may not be empty."""
        before = self.wanted[handler]
        wanted = wanted._replace(retries=before.retries, redrives=before.redrives)
        self.wanted[handler] = wanted
        self.loop.request(lambda: self._change(handler, wanted))

    def _change(self, handler: HandlerPlan, wanted: Wanted) -> None:
        self.routes.change(handler, wanted)
        if self._has_subscribed:  # else the retry topics are not made yet, and the first subscription has it too
            if self.tenancy.joined:
                self.chronicle.expect("subscription")
            self._subscribe()

    def _subscribe(self) -> None:
        self._has_subscribed = True
        self._look_around(self._look_for_redrives)
        self.source.subscribe(self.routes.subscription, self.routes.side_subscription)

    def _look_for_redrives(self) -> None:
        """Topics that a person has sent dead letters back to: read from when they are there."""
        wanted = {name: h for h in self.plan.handlers for name in h.redrive_topics(self.plan.group)}
        new = [name for name in wanted if not self.wanted[wanted[name]].takes(name)]

        def found(there: Future[list[str]]) -> None:
            if there.exception() is None and (names := there.result()):
                self.loop.request(lambda: self._add_redrives({name: wanted[name] for name in names}))

        if new and self.plan.partitions is None:
            self._errands.send(lambda: self.plan.cluster.those_there(new)).add_done_callback(found)

    def _add_redrives(self, found: Mapping[str, HandlerPlan]) -> None:
        for name, handler in found.items():
            wanted = self.wanted[handler]
            if not wanted.takes(name):
                self.wanted[handler] = wanted._replace(redrives=(*wanted.redrives, name))
                self._change(handler, self.wanted[handler])

    def _look_around(self, then: Callable[[], None]) -> None:
        """`then` asks the cluster more, once it has answered: of one that is silent nothing else is asked, for that
        would take as long again."""
        topics = self.routes.topics
        matches = None if topics else lambda topic: self.routes.handler_of(topic) is not None
        surveyed = self._errands.send(lambda: self._claims.survey(topics, matches))
        self.loop.watch(surveyed, lambda _: then())

    def _begin(self) -> None:
        if self._retry_topics:
            self._make_retry_topics()
        elif self.plan.partitions is None:
            self._subscribe()
        else:
            chosen = self.plan.partitions
            self._look_around(lambda: self._take(chosen))

    @property
    def _retry_topics(self) -> dict[str, str]:
        return {name: topic for handler in self.plan.handlers for name, topic in handler.retry_topics.items()}

    def _make_retry_topics(self) -> None:
        """They must be there before they are subscribed to."""

        def subscribe(made: Future[None]) -> None:
            if made.exception() is None:
                self.loop.request(self._subscribe)

        made = self._errands.send(lambda: self._claims.make_topics(self._retry_topics))
        self.loop.watch(made)
        made.add_done_callback(subscribe)

    def _take(self, partitions: tuple[Partition, ...]) -> None:
        """The partitions that the person chose, once it is known that they are nobody else's: a claim would put the
        members of a shared group out."""

        def taken(alone: Future[None]) -> None:
            if alone.exception() is None:
                self.loop.request(lambda: self.tenancy.take(partitions))

        alone = self._errands.send(self._claims.must_be_alone)
        self.loop.watch(alone)
        alone.add_done_callback(taken)

    def _see_off(self, leaving: list[Holding], budget: Deadline) -> int:
        finished = self.loop.see_off(leaving, budget)
        kept = 0
        if self._relay is not None:
            kept = self._relay.finish([holding.partition for holding in leaving], budget.part(0.5))
        if self.loop.snapshot.state in ("starting", "running"):
            # Under KIP-848 the partitions of a topic that was deleted are taken away, and nothing is said.
            self.loop.watch(self._check_topics({}), self.loop.hold_topics)
        else:
            self.unsent += kept
        return finished

    def _check_topics(self, known: Mapping[str, str]) -> Future[dict[str, KconsumeError]]:
        """`known`: the ids of those that we have."""
        topics = self.routes.topics
        self._look_for_redrives()
        return self._errands.send(lambda: self._claims.check_topics(known, topics))

    def _explain(self, error: KafkaError) -> Future[None]:
        """Why the group does not take us: fails with that."""
        plan = self.plan

        def explain() -> None:
            try:
                group = plan.cluster.group(plan.group)
            except KconsumeError:
                group = None
            raise why(error, plan.group, plan.settings, group)

        return self._errands.send(explain)

    def _handler(self, topic: str) -> HandlerPlan:
        handler, takers = self.routes.handler_of(topic), self.routes.takers(topic)
        if len(takers) > 1:
            raise ConfigurationError(
                f"the patterns of {takers[0].binding.name} and {takers[1].binding.name} both match topic {topic!r}, "
                f"and in a group each record has one handler: make one of them narrower, or give one its own group="
            )
        if handler is None:
            raise ConfigurationError(
                f"the broker assigned topic {topic!r}, which no handler takes: it reads a pattern in another way than "
                f"Python's re.fullmatch; write it with plain characters, '.', '*', '+', '?', '[...]' and '|'"
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
            pace=pace_of(handler, self.plan.store, self._home),
            gathering=None if handler.batching is None else Gathering(handler.batching),
            tried=tried_before(position.metadata),
            commits_itself=handler.in_transactions,
            leader_epoch=position.leader_epoch,
            reset_epoch=position.reset_epoch,
        )


def _names(partitions: Iterable[Partition]) -> str:
    return ", ".join(map(str, sorted(partitions)))


def _may_be_left(store: OffsetStore, lane: Lane) -> bool:
    """Whether the next lane of a partition may open while the handler of this one still runs: the fence keeps its
    writes out, unless it keeps everybody else out meanwhile, as an open transaction on an SQLite file does."""
    if not isinstance(store, FencedStore):
        return False
    return not (lane.commits_itself and isinstance(store, TransactionalStore) and store.parallel == 1)


def _may_be_lent(plan: ConsumerPlan) -> bool:
    """Whether bursts on the event loop make sense. An async listener would be waited for on its own loop."""
    return all(h.plainly_async for h in plan.handlers) and not any(listener.is_async for listener in plan.listeners)


def _relay_of(plan: ConsumerPlan, equipment: Equipment, owner: str) -> Relay | None:
    if equipment.relay_outlet is None or not isinstance(plan.store, OutboxStore):
        return None
    outlet = equipment.relay_outlet
    return Relay(plan.store, plan.group, outlet, owner, Limits(plan.cluster, outlet.largest_batch))

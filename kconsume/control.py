"""Control of a running app: pause, resume, seek, subscribe, and callbacks for rebalances.

Each request is queued for the thread that polls the consumer. That thread carries it out between polls; the caller does
not wait.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import TypeVar

from kconsume._declared import Declarations, topic_shared
from kconsume._handlers.registration import Registration
from kconsume._runtime.consumer import RunningConsumer
from kconsume._runtime.plan import HandlerPlan
from kconsume._runtime.routing import Wanted
from kconsume._runtime.supervisor import Supervisor
from kconsume.errors import ConfigurationError
from kconsume.ops.health import NOT_RUNNING, Health, health_of
from kconsume.rebalance.events import Rebalance, Statistics
from kconsume.rebalance.listeners import Event, Listener, listeners_of, read_listener
from kconsume.records import Partition

Callback = TypeVar("Callback", bound=Callable[..., object])


class RunningControl:
    """The methods of an app that control its run."""

    declared: Declarations

    def __init__(self) -> None:
        super().__init__()
        self.listeners: list[Listener] = []
        self._supervisor: Supervisor | None = None

    @property
    def registrations(self) -> list[Registration]:
        """The handlers, in the order of their declaration."""
        return self.declared.registrations

    def pause(self, *partitions: Partition | str) -> None:
        """Stop fetching these partitions until `resume`. Records in flight are handled.

        Args:
            partitions: `Partition` values, or texts such as `"orders/3"`.
        """
        self._for_each_consumer(partitions, lambda consumer, chosen: consumer.pause(chosen))

    def resume(self, *partitions: Partition | str) -> None:
        """Fetch these partitions again.

        Args:
            partitions: `Partition` values, or texts such as `"orders/3"`.
        """
        self._for_each_consumer(partitions, lambda consumer, chosen: consumer.resume(chosen))

    def seek(self, partition: Partition | str, offset: int) -> None:
        """Continue at another offset: an explicit reset, stored under a new epoch.

        Args:
            partition: a `Partition`, or a text such as `"orders/3"`.
            offset: the offset of the next record to handle.
        """
        if offset < 0:
            raise ConfigurationError(f"offset {offset} is below zero: name the offset of the next record to handle")
        self._for_each_consumer([partition], lambda consumer, chosen: consumer.seek(dict.fromkeys(chosen, offset)))

    def subscribe(self, *topics: str, handler: Callable[..., object] | str | None = None) -> None:
        """Give a handler of the running app other topics.

        The group rebalances. Partitions of topics that are left out are given up, after their running handlers have
        ended. New partitions are claimed in the offset store.

        Args:
            topics: all topics of the handler from now on.
            handler: the function or its name; optional if the app has only one handler.
        """
        supervisor = self._running_supervisor("subscribe")
        registration = self._registration_of(handler)
        if registration.retry_chain is not None:
            raise ConfigurationError(
                f"{registration.name} has RetryTopics, which are created for its topics when the app starts: name all "
                f"of its topics in @app.consume"
            )
        if not topics:
            raise ConfigurationError(
                f"subscribe needs the topics of {registration.name}, and got none: name them, or call stop()"
            )
        dataclasses.replace(registration.options, topics=topics, pattern=None, partitions=None).check()
        if registration.partitions is not None:
            raise ConfigurationError(
                f"{registration.name} has partitions=, which no group assigns, so its topics cannot change: stop the "
                f"app instead"
            )
        for consumer in supervisor.consumers:
            for plan in consumer.plan.handlers:
                if plan.binding is registration.binding:
                    _must_be_free(consumer, plan, topics)
                    consumer.subscribe(plan, Wanted(topics))

    def health(self) -> Health:
        """Return whether the app is healthy, and the one cause of each partition of this process.

        May be called on any thread. The answer is about a second old at most.
        """
        if self._supervisor is None:
            return NOT_RUNNING
        return health_of((c.plan.group, c.loop.snapshot, c.loop.failure) for c in self._supervisor.consumers)

    # Rebalances

    def on_assigned(self, function: Callback) -> Callback:
        """Call the decorated function with newly assigned partitions, before their first record."""
        return self._add_listener(function, "assigned")

    def on_revoked(self, function: Callback) -> Callback:
        """Call the decorated function with revoked partitions, after their handlers have ended and the last commit."""
        return self._add_listener(function, "revoked")

    def on_lost(self, function: Callback) -> Callback:
        """Call the decorated function with lost partitions. Other members own them, so nothing can be committed."""
        return self._add_listener(function, "lost")

    def listen(self, listener: object) -> None:
        """Call the methods of an object in each rebalance.

        Args:
            listener: a `kconsume.rebalance.RebalanceListener`, or an object with some of its methods.
        """
        self.listeners.extend(listeners_of(listener))

    def rebalances(self) -> tuple[Rebalance, ...]:
        """Return the last rebalances of the running app, the newest last."""
        consumers = self._running_supervisor("rebalances").consumers
        return tuple(sorted((r for e in consumers for r in e.history.recent), key=lambda r: r.began))

    def rebalance_statistics(self) -> dict[str, Statistics]:
        """Return, by group, how often and how long the running app rebalanced in the last hour."""
        now = datetime.now(UTC)
        consumers = self._running_supervisor("rebalance_statistics").consumers
        return {consumer.plan.group: consumer.history.statistics(now) for consumer in consumers}

    def _add_listener(self, function: Callback, event: Event) -> Callback:
        self.listeners.append(read_listener(function, event))
        return function

    def _for_each_consumer(
        self, partitions: Sequence[Partition | str], act: Callable[[RunningConsumer, list[Partition]], None]
    ) -> None:
        supervisor = self._running_supervisor("pause, resume and seek")
        chosen = [p if isinstance(p, Partition) else Partition.parse(p) for p in partitions]
        for consumer in supervisor.consumers:
            mine = [p for p in chosen if consumer.routes.handler_of(p.topic) is not None]
            if mine:
                act(consumer, mine)

    def _running_supervisor(self, what: str) -> Supervisor:
        if self._supervisor is None:
            raise ConfigurationError(f"the app is not running, and {what} needs a running app: use it inside running()")
        return self._supervisor

    def _registration_of(self, handler: Callable[..., object] | str | None) -> Registration:
        matching = [r for r in self.registrations if handler in (None, r.name, r.binding.signature.function)]
        if len(matching) == 1:
            return matching[0]
        names = ", ".join(registration.name for registration in self.registrations)
        fix = "give each a name of its own" if handler is not None and matching else f"set handler= to one of {names}"
        raise ConfigurationError(f"subscribe needs one handler, and handler={handler!r} matches {len(matching)}: {fix}")


def _must_be_free(consumer: RunningConsumer, handler: HandlerPlan, topics: Sequence[str]) -> None:
    for other, wanted in consumer.wanted.items():
        if other is not handler and (shared := [topic for topic in topics if wanted.takes(topic)]):
            raise topic_shared(other.binding.name, handler.binding.name, shared, consumer.plan.group)

"""What people do to an app that runs: pause, seek, subscribe to other topics, and hear of its rebalances.

Everything is asked of the owner threads and done there, between polls; nothing here waits.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import TypeVar

from kconsume.errors import ConfigurationError
from kconsume.rebalance.listeners import Event, Listener, listeners_of, read_listener
from kconsume.rebalance.record import Rebalance, Statistics
from kconsume.records import Partition
from kconsume.registration import Registration
from kconsume.runtime.engine import Engine
from kconsume.runtime.plans import HandlerPlan
from kconsume.runtime.routes import Wanted
from kconsume.runtime.supervisor import Supervisor

Heard = TypeVar("Heard", bound=Callable[..., object])


class Steering:
    """The part of an app that steers what runs."""

    def __init__(self) -> None:
        super().__init__()
        self.registrations: list[Registration] = []
        self.listeners: list[Listener] = []
        self._supervisor: Supervisor | None = None

    def pause(self, *partitions: Partition | str) -> None:
        """Stop fetching these partitions until `resume`; what is in flight is finished."""
        self._steer(partitions, lambda engine, chosen: engine.pause(chosen))

    def resume(self, *partitions: Partition | str) -> None:
        self._steer(partitions, lambda engine, chosen: engine.resume(chosen))

    def seek(self, partition: Partition | str, offset: int) -> None:
        """Go on at this offset: an explicit reset, stored under a new epoch."""
        if offset < 0:
            raise ConfigurationError(f"offset {offset} is below zero: name the offset of the next record to handle")
        self._steer([partition], lambda engine, chosen: engine.seek(dict.fromkeys(chosen, offset)))

    def subscribe(self, *topics: str, handler: Callable[..., object] | str | None = None) -> None:
        """Give a handler of the running app other topics than it has. `handler` may be left out if there is only one.

        The group rebalances: what is no longer wanted is finished with and given up, what is new is claimed.
        """
        supervisor = self._running_supervisor("subscribe")
        registration = self._registration_of(handler)
        if registration.ladder is not None:
            raise ConfigurationError(
                f"{registration.name} has RetryTopics, which are made for its topics when the app starts: name all of "
                f"its topics in @app.consume"
            )
        if not topics:
            raise ConfigurationError(f"subscribe needs the topics that {registration.name} is to have; to end, stop()")
        dataclasses.replace(registration.options, topics=topics, pattern=None, partitions=None).check()
        if registration.partitions is not None:
            raise ConfigurationError(f"{registration.name} has partitions=, which no group hands out: stop it instead")
        for engine in supervisor.engines:
            for plan in engine.plan.handlers:
                if plan.binding is registration.binding:
                    _must_be_free(engine, plan, topics)
                    engine.subscribe(plan, Wanted(topics))

    # Rebalances

    def on_assigned(self, function: Heard) -> Heard:
        """Have the decorated function called with partitions that are ours now, before their records flow."""
        return self._listens(function, "assigned")

    def on_revoked(self, function: Heard) -> Heard:
        """… with partitions that are given up, when what ran of them has ended and is committed."""
        return self._listens(function, "revoked")

    def on_lost(self, function: Heard) -> Heard:
        """… with partitions that others have already. Nothing of them can be committed any more."""
        return self._listens(function, "lost")

    def listen(self, listener: object) -> None:
        """Tell a `kconsume.rebalance.RebalanceListener`, or an object with some of its methods."""
        self.listeners.extend(listeners_of(listener))

    def rebalances(self) -> tuple[Rebalance, ...]:
        """The last rebalances of the running app, the newest last."""
        engines = self._running_supervisor("rebalances").engines
        return tuple(sorted((r for e in engines for r in e.chronicle.history.recent), key=lambda r: r.began))

    def rebalance_statistics(self) -> dict[str, Statistics]:
        """By group: how often and how long the running app rebalanced in the last hour."""
        now = datetime.now(UTC)
        engines = self._running_supervisor("rebalance_statistics").engines
        return {engine.plan.group: engine.chronicle.history.statistics(now) for engine in engines}

    def _listens(self, function: Heard, event: Event) -> Heard:
        self.listeners.append(read_listener(function, event))
        return function

    def _steer(self, partitions: Sequence[Partition | str], act: Callable[[Engine, list[Partition]], None]) -> None:
        supervisor = self._running_supervisor("pause, resume and seek")
        chosen = [p if isinstance(p, Partition) else Partition.parse(p) for p in partitions]
        for engine in supervisor.engines:
            mine = [p for p in chosen if engine.routes.handler_of(p.topic) is not None]
            if mine:
                act(engine, mine)

    def _running_supervisor(self, what: str) -> Supervisor:
        if self._supervisor is None:
            raise ConfigurationError(
                f"the app is not running, and {what} is for one that does: use it inside running()"
            )
        return self._supervisor

    def _registration_of(self, handler: Callable[..., object] | str | None) -> Registration:
        meant = [r for r in self.registrations if handler in (None, r.name, r.binding.signature.function)]
        if len(meant) == 1:
            return meant[0]
        names = ", ".join(registration.name for registration in self.registrations)
        fix = "give each a name of its own" if handler is not None and meant else f"say handler= one of {names}"
        raise ConfigurationError(
            f"subscribe needs to know which handler is meant, and handler={handler!r} fits {len(meant)}: {fix}"
        )


def _must_be_free(engine: Engine, handler: HandlerPlan, topics: Sequence[str]) -> None:
    for other, wanted in engine.wanted.items():
        if other is not handler and (shared := [topic for topic in topics if wanted.takes(topic)]):
            raise _shared(other.binding.name, handler.binding.name, shared, engine.plan.group)


def must_not_share(old: Registration, new: Registration, topics: Sequence[str]) -> None:
    shared = [topic for topic in topics if old.wanted.takes(topic)]
    if new.pattern is not None:
        shared += [topic for topic in old.topics if new.wanted.takes(topic)]
        shared += [new.pattern] if old.pattern == new.pattern else []
    if shared and old.group == new.group:
        raise _shared(old.name, new.name, shared, new.group)


def must_not_go_round(registrations: Sequence[Registration]) -> None:
    """Dead letters of one handler may be read by another, and so on; but not come back to the first."""
    dead = {r: letter.topic for r in registrations if (letter := r.policy.dead_letter) is not None and letter.topic}
    # By name, by pattern, or as one of its retry topics: whatever reads it may write it on.
    after = {topic: {dead[r] for r in dead if r.wanted.takes(topic)} for topic in set(dead.values())}
    for start in sorted(after):
        reached, ahead = set[str](), list(after[start])
        while ahead:
            topic = ahead.pop()
            if topic == start:
                raise ConfigurationError(
                    f"a record of {start!r} that fails again and again would come back there by way of dead-letter "
                    f"topics, for ever: let the last handler of that circle stop, skip, or write to a topic that "
                    f"nobody here reads"
                )
            if topic not in reached:
                reached.add(topic)
                ahead += after.get(topic, ())


def _shared(old: str, new: str, topics: Sequence[str], group: str) -> ConfigurationError:
    return ConfigurationError(
        f"{old} and {new} both handle {min(topics)!r} in group {group!r}, where each record has one handler: give one "
        f"of them its own group=, or call one from the other"
    )

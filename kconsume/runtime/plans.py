"""What is to be run: one handler, one consumer, and what the handlers of an app share. Values only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kconsume.backends.abc import (
    FencedStore,
    OffsetStore,
)
from kconsume.batches import Batching
from kconsume.cluster import Cluster
from kconsume.failures.letters import redrive_topic
from kconsume.failures.policy import Policy
from kconsume.failures.retry_topics import Ladder
from kconsume.handler import MOST_BYTES, Binding
from kconsume.outlet import Outlet, RelayOutlet
from kconsume.protocols import GroupProtocol, protocol_of
from kconsume.rate import Rate
from kconsume.rebalance.listeners import Listener
from kconsume.records import Partition
from kconsume.runtime.budget import revoke_budget
from kconsume.runtime.claims import Begin
from kconsume.runtime.home import Home
from kconsume.runtime.mail import Delivers
from kconsume.runtime.routes import Wanted
from kconsume.settings import ClientValue
from kconsume.spark.sink import is_session
from kconsume.wrapping import Wrap


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
    pattern: str | None = None
    outbox: bool = False
    """Whether what it sends is kept by the store until it is confirmed."""
    ladder: Ladder | None = None
    """Of records that are tried again later."""
    drops_repeats: bool = False
    timeout: float | None = None
    """Seconds that one call may take."""

    @property
    def wanted(self) -> Wanted:
        return Wanted(self.topics, self.pattern, tuple(self.retry_topics))

    @property
    def retry_topics(self) -> Mapping[str, str]:
        """The names, each with the topic that it belongs to."""
        return {} if self.ladder is None else self.ladder.rungs

    def redrive_topics(self, group: str) -> list[str]:
        """Where a person sends its dead letters back to, if they are there."""
        return [] if self.policy.dead_letter is None else [redrive_topic(topic, group) for topic in self.topics]

    def begin(self, topic: str) -> Begin:
        """Where a partition without a stored offset begins: of topics that are its own, nothing is passed over."""
        return self.start if Wanted(self.topics, self.pattern).takes(topic) else "earliest"

    @property
    def waits(self) -> bool:
        """Whether it waits for something beside its own work, so that no time of its own says how fast it is."""
        waits_for_its_sends = self.binding.sends and not self.outbox
        # What it does in Spark is done in the JVM: the interpreter is free meanwhile, to fetch and for other lanes.
        waits_for_spark = any(map(is_session, self.binding.resources.values()))
        waits = waits_for_its_sends or waits_for_spark or self.rate is not None or self.timeout is not None
        return waits or (self.binding.is_async and not self.plainly_async)

    @property
    def produces(self) -> bool:
        """Whether something of it may leave by a topic."""
        dead_letter = self.policy.dead_letter
        is_sent = dead_letter is not None and dead_letter.topic is not None
        return self.binding.sends or is_sent or self.ladder is not None

    @property
    def in_transactions(self) -> bool:
        """Whether it is run in transactions of the store: it asks for them, or what leaves by it is kept in one."""
        dead_letter = self.policy.dead_letter
        is_kept = dead_letter is not None and dead_letter.table is not None
        is_asked = self.binding.transaction is not None or self.drops_repeats
        return is_asked or is_kept or (self.outbox and self.produces)

    @property
    def hands_letters_over(self) -> bool:
        """Whether it goes on while its letters are on their way: with no record that fails, others are undone."""
        return not self.in_transactions and not self.binding.sends

    @property
    def plainly_async(self) -> bool:
        """Whether it is awaited, and nothing else."""
        return self.binding.is_async and not self.in_transactions


@dataclass(frozen=True, slots=True)
class Equipment:
    """What the handlers of an app share while it runs."""

    home: Home
    outlet: Delivers
    resources: Mapping[object, object]
    most_bytes: int = MOST_BYTES
    """Of a message that is sent."""
    dead: Delivers | None = None
    """Where dead letters go when nothing really leaves, as in `trial.py`."""
    letter_outlet: Outlet | None = None
    """The way out of letters that are not waited for."""
    relay_outlet: RelayOutlet | None = None
    """The way out of what an outbox keeps."""


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
    listeners: tuple[Listener, ...] = ()

    @property
    def protocol(self) -> GroupProtocol:
        return protocol_of(self.settings)

    @property
    def budget(self) -> float:
        """Seconds in which revoked partitions are given up."""
        return budget_for(self.settings, self.store, self.shutdown)


def budget_for(settings: Mapping[str, ClientValue], store: OffsetStore, shutdown: float) -> float:
    return revoke_budget(
        protocol_of(settings),
        fenced=isinstance(store, FencedStore),
        poll_interval=float(settings["max.poll.interval.ms"]) / 1000,
        shutdown=shutdown,
    )

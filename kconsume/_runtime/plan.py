"""What to run: one handler, one consumer, and what the handlers of an app share. Values only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kconsume._config.client_settings import ClientValue
from kconsume._config.group_protocol import GroupProtocol, protocol_of
from kconsume._config.options import HandlerOptions, StartPolicy
from kconsume._handlers.batches import Batching
from kconsume._handlers.binding import MOST_BYTES, Binding
from kconsume._handlers.type_providers import default_resource
from kconsume._handlers.wraps import Wrap
from kconsume._kafka.cluster import Cluster
from kconsume._kafka.producer import Producer, RelayProducer
from kconsume._runtime.deadlines import revoke_budget
from kconsume._runtime.handler_loop import HandlerLoop
from kconsume._runtime.output.publisher import Delivers
from kconsume._runtime.routing import Wanted
from kconsume.backends.base import OffsetStore
from kconsume.backends.capabilities import capabilities_of
from kconsume.failures.letter_headers import redrive_topic
from kconsume.failures.policy import Policy
from kconsume.failures.retry_topics import RetryChain
from kconsume.rebalance.listeners import Listener
from kconsume.records import Partition


@dataclass(frozen=True, slots=True, eq=False)
class HandlerPlan:
    """How one handler is run."""

    binding: Binding
    options: HandlerOptions
    policy: Policy
    executor: str
    batching: Batching | None = None
    wraps: tuple[Wrap, ...] = ()
    outbox: bool = False
    """Whether the store keeps the records that the handler sends until Kafka has confirmed them."""
    retry_chain: RetryChain | None = None
    """The retry topics of records that failed."""

    @property
    def drops_repeats(self) -> bool:
        """Whether a record is skipped if a record with the same `kconsume-origin` was handled before."""
        return self.options.repeats == "drop"

    @property
    def wanted(self) -> Wanted:
        return Wanted(self.options.topics, self.options.pattern, tuple(self.retry_topics))

    @property
    def retry_topics(self) -> Mapping[str, str]:
        """The names of the retry topics, each with the topic that it belongs to."""
        return {} if self.retry_chain is None else self.retry_chain.retry_topics

    def redrive_topics(self, group: str) -> list[str]:
        """The topics to which `dlq redrive` sends the dead letters of the handler back. They need not exist."""
        return [] if self.policy.dead_letter is None else [redrive_topic(topic, group) for topic in self.options.topics]

    def begin(self, topic: str) -> StartPolicy:
        """Where a partition without a stored offset begins. Retry and redrive topics are always read from the start."""
        return self.options.start if Wanted(self.options.topics, self.options.pattern).takes(topic) else "earliest"

    @property
    def waits(self) -> bool:
        """Whether a call waits for something, so that its duration says nothing about the work of the handler."""
        waits_for_its_sends = self.binding.sends and not self.outbox
        # Spark works in the JVM. The interpreter is free in this time, to fetch and to run other lanes.
        waits_for_spark = any(map(default_resource, self.binding.resources.values()))
        is_limited = self.options.rate is not None or self.options.timeout is not None
        return waits_for_its_sends or waits_for_spark or is_limited or self.binding.is_async

    @property
    def produces(self) -> bool:
        """Whether the handler may produce to a topic: its output, its dead letters or its retries."""
        dead_letter = self.policy.dead_letter
        is_sent = dead_letter is not None and dead_letter.topic is not None
        return self.binding.sends or is_sent or self.retry_chain is not None

    @property
    def in_transactions(self) -> bool:
        """Whether the handler runs in transactions of the store: it asks for them, or the store keeps its output."""
        dead_letter = self.policy.dead_letter
        is_kept = dead_letter is not None and dead_letter.table is not None
        is_asked = self.binding.transaction is not None or self.drops_repeats
        return is_asked or is_kept or (self.outbox and self.produces)

    @property
    def hands_letters_over(self) -> bool:
        """Whether the handler continues while its dead letters are in flight. Possible if a failed record rolls back no
        other record."""
        return not self.in_transactions and not self.binding.sends


@dataclass(frozen=True, slots=True)
class SharedParts:
    """What the handlers of an app share while the app runs."""

    handler_loop: HandlerLoop
    producer: Delivers
    resources: Mapping[object, object]
    most_bytes: int = MOST_BYTES
    """The largest message that may be sent."""
    dead: Delivers | None = None
    """Collects the dead letters of a dry run, which sends nothing."""
    letter_producer: Producer | None = None
    """Sends letters for which no handler waits."""
    relay_producer: RelayProducer | None = None
    """Sends the rows of an outbox."""


@dataclass(frozen=True, slots=True)
class ConsumerPlan:
    """One consumer: the handlers that share a group and a store."""

    group: str
    store: OffsetStore
    handlers: tuple[HandlerPlan, ...]
    partitions: tuple[Partition, ...] | None
    """Explicit partitions; None if the group assigns them."""
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
        """Seconds within which revoked partitions are given up."""
        return budget_for(self.settings, self.store, self.shutdown)


def budget_for(settings: Mapping[str, ClientValue], store: OffsetStore, shutdown: float) -> float:
    """Seconds within which revoked partitions are given up.

    Args:
        settings: the settings of the Kafka client.
        store: where the offsets are kept.
        shutdown: seconds of the whole shutdown.
    """
    return revoke_budget(
        protocol_of(settings),
        fenced=capabilities_of(store).fenced is not None,
        poll_interval=float(settings["max.poll.interval.ms"]) / 1000,
        shutdown=shutdown,
    )

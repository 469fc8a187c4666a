"""The settings of the one-node test broker, the same for a local process and for a container.

Pure: values in, text out. What differs between the two ways is only where the broker listens and where
it keeps its data.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

HEAP = "-Xms256m -Xmx512m"

CLUSTER_ID = "kconsumeTestServices00"  # KRaft wants 22 characters of base64

_ONE_NODE = {
    "process.roles": "broker,controller",
    "node.id": "1",
    "controller.listener.names": "CONTROLLER",
    "default.replication.factor": "1",
    "offsets.topic.replication.factor": "1",
    "transaction.state.log.replication.factor": "1",
    "transaction.state.log.min.isr": "1",
    "share.coordinator.state.topic.replication.factor": "1",
    "share.coordinator.state.topic.min.isr": "1",
}

_SMALL = {
    "offsets.topic.num.partitions": "4",
    "transaction.state.log.num.partitions": "4",
    "share.coordinator.state.topic.num.partitions": "4",
    "num.network.threads": "2",
    "num.io.threads": "4",
    "log.cleaner.dedupe.buffer.size": "16777216",  # 128 MB by default, of a heap of 512
}

_PROMPT = {
    # A topic that springs up because of a misspelt name hides the fault that a test is there to find.
    "auto.create.topics.enable": "false",
    # After a kill -9 the controller, started anew, waits for the session of the broker that died.
    "broker.session.timeout.ms": "3000",
    "broker.heartbeat.interval.ms": "500",
    "group.initial.rebalance.delay.ms": "0",
    "group.min.session.timeout.ms": "1000",
    # KIP-848: the broker, not the consumer, sets these. The session is short enough to wait for an
    # eviction and long enough for two busy cores; a test that wants another passes it to LocalKafka.
    "group.consumer.min.session.timeout.ms": "1000",
    "group.consumer.session.timeout.ms": "6000",
    "group.consumer.min.heartbeat.interval.ms": "100",
    "group.consumer.heartbeat.interval.ms": "500",
    # Records that retention or compaction should remove are gone in seconds, not in minutes.
    "log.initial.task.delay.ms": "500",
    "log.retention.check.interval.ms": "1000",
    "log.segment.delete.delay.ms": "1000",
    "log.cleaner.backoff.ms": "1000",
    "transaction.abort.timed.out.transaction.cleanup.interval.ms": "1000",
}


@dataclass(frozen=True)
class Listeners:
    """Where the broker is reached. `between` is the name of the listener that it calls itself on."""

    bind: str
    advertise: str
    protocols: str
    between: str
    controller: str


def local_listeners(port: int, controller_port: int) -> Listeners:
    return Listeners(
        bind=f"CLIENT://127.0.0.1:{port},CONTROLLER://127.0.0.1:{controller_port}",
        advertise=f"CLIENT://127.0.0.1:{port}",
        protocols="CLIENT:PLAINTEXT,CONTROLLER:PLAINTEXT",
        between="CLIENT",
        controller=f"127.0.0.1:{controller_port}",
    )


def broker_settings(listeners: Listeners, data: str, overrides: Mapping[str, str] | None = None) -> dict[str, str]:
    where = {
        "listeners": listeners.bind,
        "advertised.listeners": listeners.advertise,
        "listener.security.protocol.map": listeners.protocols,
        "inter.broker.listener.name": listeners.between,
        "controller.quorum.voters": f"1@{listeners.controller}",
        "log.dirs": data,
    }
    return {**_ONE_NODE, **where, **_SMALL, **_PROMPT, **(overrides or {})}


def as_properties(settings: Mapping[str, str]) -> str:
    return "".join(f"{name}={value}\n" for name, value in settings.items())


def as_environment(settings: Mapping[str, str]) -> dict[str, str]:
    """The variables that the `apache/kafka` image turns back into settings."""
    escapes = str.maketrans({"-": "___", "_": "__", ".": "_"})
    return {f"KAFKA_{name.translate(escapes).upper()}": value for name, value in settings.items()}

"""The settings of the one-node test broker, the same for a local process and for a container.

Pure: values in, text out. The process and the container differ only in where the broker listens and where it keeps its
data.
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
    "log.cleaner.dedupe.buffer.size": "16777216",  # the default is 128 MB, and the heap has 512 MB
}

_PROMPT = {
    # A topic that is created because of a misspelt name would hide the fault that a test should find.
    "auto.create.topics.enable": "false",
    # After a kill -9 and a restart, the controller waits until the session of the dead broker has expired.
    "broker.session.timeout.ms": "3000",
    "broker.heartbeat.interval.ms": "500",
    "group.initial.rebalance.delay.ms": "0",
    "group.min.session.timeout.ms": "1000",
    # KIP-848: the broker, not the consumer, sets these. The session is short enough that a test can wait for an
    # eviction, and long enough for two busy cores. A test that needs another session passes it to LocalKafka.
    "group.consumer.min.session.timeout.ms": "1000",
    "group.consumer.session.timeout.ms": "6000",
    "group.consumer.min.heartbeat.interval.ms": "100",
    "group.consumer.heartbeat.interval.ms": "500",
    # Retention and compaction remove records within seconds, not minutes.
    "log.initial.task.delay.ms": "500",
    "log.retention.check.interval.ms": "1000",
    "log.segment.delete.delay.ms": "1000",
    "log.cleaner.backoff.ms": "1000",
    "transaction.abort.timed.out.transaction.cleanup.interval.ms": "1000",
}


@dataclass(frozen=True)
class Listeners:
    """Where the broker is reached.

    Args:
        bind: the addresses that it listens on, by listener name.
        advertise: the addresses that it gives to clients, by listener name.
        protocols: the security protocol of each listener.
        inter_broker: the name of the listener on which brokers connect to each other.
        controller: the address of the controller.
    """

    bind: str
    advertise: str
    protocols: str
    inter_broker: str
    controller: str


def local_listeners(port: int, controller_port: int) -> Listeners:
    """Return the listeners of a broker on the loopback interface."""
    return Listeners(
        bind=f"CLIENT://127.0.0.1:{port},CONTROLLER://127.0.0.1:{controller_port}",
        advertise=f"CLIENT://127.0.0.1:{port}",
        protocols="CLIENT:PLAINTEXT,CONTROLLER:PLAINTEXT",
        inter_broker="CLIENT",
        controller=f"127.0.0.1:{controller_port}",
    )


def broker_settings(listeners: Listeners, data: str, overrides: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return all settings of the broker.

    Args:
        listeners: where it is reached.
        data: the folder of its logs.
        overrides: settings that replace the others.
    """
    where = {
        "listeners": listeners.bind,
        "advertised.listeners": listeners.advertise,
        "listener.security.protocol.map": listeners.protocols,
        "inter.broker.listener.name": listeners.inter_broker,
        "controller.quorum.voters": f"1@{listeners.controller}",
        "log.dirs": data,
    }
    return {**_ONE_NODE, **where, **_SMALL, **_PROMPT, **(overrides or {})}


def as_properties(settings: Mapping[str, str]) -> str:
    """Return the text of a properties file."""
    return "".join(f"{name}={value}\n" for name, value in settings.items())


def as_environment(settings: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that the `apache/kafka` image turns back into settings."""
    escapes = str.maketrans({"-": "___", "_": "__", ".": "_"})
    return {f"KAFKA_{name.translate(escapes).upper()}": value for name, value in settings.items()}

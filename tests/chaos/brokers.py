"""Several real brokers in one cluster: the first has the controller, so it is one of the others that a test kills."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager

from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from kconsume.testing.services import LocalKafka
from kconsume.testing.services.ports import free_port
from tests.fix_kafka import await_partitions


def another(first: LocalKafka, number: int = 2, overrides: Mapping[str, str] | None = None) -> LocalKafka:
    """Another broker of the same cluster, which has no controller of its own."""
    port = free_port()
    return LocalKafka(
        port=port,
        overrides={
            "process.roles": "broker",
            "node.id": str(number),
            "listeners": f"CLIENT://127.0.0.1:{port}",
            "controller.quorum.voters": f"1@127.0.0.1:{first._controller_port}",
            **(overrides or {}),
        },
    )


@contextmanager
def three_brokers() -> Iterator[dict[int, LocalKafka]]:
    """By their numbers. Groups are replicated to all of them, so that each can be lost."""
    replicated = {"offsets.topic.replication.factor": "3", "offsets.topic.num.partitions": "6"}
    first = LocalKafka(overrides=replicated)
    brokers = {1: first, **{number: another(first, number, replicated) for number in (2, 3)}}
    with ExitStack() as stack, ThreadPoolExecutor(3) as together:
        for broker in brokers.values():
            stack.callback(broker.close)
        list(together.map(LocalKafka.start, brokers.values()))
        yield brokers


def create(admin: AdminClient, name: str, replicas: list[list[int]], config: dict[str, str] | None = None) -> None:
    """A topic whose partitions are on these brokers."""
    admin.create_topics([NewTopic(name, len(replicas), replica_assignment=replicas, config=config or {})])[name].result(
        20
    )
    await_partitions(admin, name, len(replicas))

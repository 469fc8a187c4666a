"""Provides the broker and the topics for one run of an example. Only the commands that run examples use this file."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from kconsume._embedded.named_broker import attach

PARTITIONS = 4


def new_stage() -> str:
    """Return a unique name for a run."""
    return f"run-{uuid.uuid4().hex[:8]}"


@contextmanager
def topics(brokers: str | None, stage: str, names: Sequence[str]) -> Iterator[str]:
    """Yield the address of brokers that have these topics.

    brokers: the address of a Kafka, on which the topics are created and removed afterwards. None starts an embedded
        broker that all processes of this run share.
    """
    if brokers is None:
        broker = attach(stage, until_exit=True)
        for name in names:
            broker.create_topic(name, PARTITIONS)
        yield broker.bootstrap
        return  # the embedded broker ends when this process ends
    admin = AdminClient({"bootstrap.servers": brokers})
    for made in admin.create_topics([NewTopic(name, num_partitions=PARTITIONS) for name in names]).values():
        made.result(30)
    try:
        yield brokers
    finally:
        for gone in admin.delete_topics(list(names)).values():
            gone.result(30)


def clean_environment() -> dict[str, str]:
    """Return the environment without the settings of the user's own apps."""
    return {name: value for name, value in os.environ.items() if not name.startswith("KCONSUME_")}

"""Creates a topic to which a side writes in one run, and counts its records."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from confluent_kafka import Consumer, TopicPartition
from confluent_kafka.admin import AdminClient

from tests.fix_kafka import create_topic, delete_topics, unique


@contextmanager
def target_topic(bootstrap: str) -> Iterator[str]:
    admin, name = AdminClient({"bootstrap.servers": bootstrap, "log_level": 0}), unique("bench-target")
    create_topic(admin, name, 1)
    try:
        yield name
    finally:
        delete_topics(admin, [name])


def records_in(bootstrap: str, topic: str) -> int:
    reader = Consumer({"bootstrap.servers": bootstrap, "group.id": unique("bench"), "log_level": 0})
    try:
        first, end = reader.get_watermark_offsets(TopicPartition(topic, 0), timeout=20)
        return end - first
    finally:
        reader.close()

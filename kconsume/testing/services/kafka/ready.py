"""Decide whether a broker is ready: the broker answers, and each of its partitions has a leader.

An open port is not enough: after a kill -9 the broker listens before its partitions have leaders again.
"""

from __future__ import annotations

import socket

from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient


def answers(bootstrap: str) -> str | None:
    """Return None if the broker is ready, else the reason why it is not. As `ready.Answers`."""
    # The port is checked first: a Kafka client that finds the port closed writes to standard error and waits before it
    # tries again.
    if not any(_is_open(address) for address in bootstrap.split(",")):
        return "the port is closed"
    admin = AdminClient({"bootstrap.servers": bootstrap, "log_level": 0})
    try:
        cluster = admin.list_topics(timeout=5)
    except KafkaException as error:
        return f"the port is open, but the request for metadata failed: {error.args[0]}"
    if not cluster.brokers:
        return "the cluster has no broker"
    partitions = (partition for topic in cluster.topics.values() for partition in topic.partitions.values())
    if any(partition.leader < 0 for partition in partitions):
        return "a partition has no leader"
    return None


def _is_open(address: str) -> bool:
    host, _, port = address.strip().rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=1):
            return True
    except (OSError, ValueError):
        return False

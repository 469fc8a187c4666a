"""Decide whether a broker can be worked with: it answers, and every partition it has is led by someone.

An open port is not enough: after a kill -9 the broker listens before its partitions have leaders again.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable

from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient

from kconsume.errors import ServiceUnavailable

_LOOK_EVERY_SECONDS = 0.1


def wait_until_ready(bootstrap: str, *, within: float, still_there: Callable[[], None] | None = None) -> None:
    """Return when the broker is ready. `still_there` may raise to end the waiting early."""
    deadline = time.monotonic() + within
    while not is_ready(bootstrap):
        if still_there is not None:
            still_there()
        if time.monotonic() > deadline:
            raise ServiceUnavailable(
                f"No Kafka broker was ready at {bootstrap} within {within:g} s; check the address and the broker's log."
            )
        time.sleep(_LOOK_EVERY_SECONDS)


def is_ready(bootstrap: str) -> bool:
    # The port first: a Kafka client that finds it closed writes to standard error and waits to try again.
    return any(_is_open(address) for address in bootstrap.split(",")) and _is_led(bootstrap)


def _is_open(address: str) -> bool:
    host, _, port = address.strip().rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=1):
            return True
    except (OSError, ValueError):
        return False


def _is_led(bootstrap: str) -> bool:
    admin = AdminClient({"bootstrap.servers": bootstrap, "log_level": 0})
    try:
        cluster = admin.list_topics(timeout=5)
    except KafkaException:
        return False
    partitions = (partition for topic in cluster.topics.values() for partition in topic.partitions.values())
    return bool(cluster.brokers) and all(partition.leader >= 0 for partition in partitions)

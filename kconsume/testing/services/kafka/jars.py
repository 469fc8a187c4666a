"""Which jars the test broker runs on: Apache Kafka's own, at one pinned version."""

from __future__ import annotations

from pathlib import Path

from kconsume.testing.services.jars import fetched_jars

KAFKA_VERSION = "4.1.1"

# slf4j-simple: Kafka's published jars log through SLF4J 1.7 and bring no logger. Without a logger the broker cannot
# report why it did not start.
COORDINATES = (f"org.apache.kafka:kafka_2.13:{KAFKA_VERSION}", "org.slf4j:slf4j-simple:1.7.36")

NAME = f"kafka-{KAFKA_VERSION}"


def kafka_jars() -> Path:
    """Return the folder with the broker's jars. They are fetched on first use."""
    return fetched_jars(COORDINATES, NAME)

"""One Kafka for the tests: at `KCONSUME_TEST_KAFKA`, else in Docker, else as a local process (`choose.ServiceChoice`).

Docker and the local process run Apache Kafka with the same settings. Only a local process can be killed and frozen, so
tests that do so start a `LocalKafka` of their own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

from kconsume.testing.services.choose import ServiceChoice
from kconsume.testing.services.containers import engine_answers
from kconsume.testing.services.java import find_java
from kconsume.testing.services.kafka.docker import docker_kafka
from kconsume.testing.services.kafka.jars import kafka_jars
from kconsume.testing.services.kafka.jvm_class_cache import archive_of, make_archive
from kconsume.testing.services.kafka.local import LocalKafka
from kconsume.testing.services.kafka.ready import answers

ADDRESS = "KCONSUME_TEST_KAFKA"


@dataclass(frozen=True)
class KafkaService:
    """A broker that is ready.

    Args:
        bootstrap: its address, for the client property `bootstrap.servers`.
        way: how it was found: "address", "docker" or "process".
    """

    bootstrap: str
    way: str


@contextmanager
def kafka_service(*, lasting: bool = True) -> Iterator[KafkaService]:
    """A broker for as long as the block lasts. Raises ServiceUnavailable with the reason why each way failed.

    Args:
        lasting: True for a broker that works for minutes or is measured, see `LocalKafka`. With False a local broker
            starts faster. Use False for a broker that has little work, even if it runs for long.
    """
    with kafka_choice(lasting).take() as found:
        yield KafkaService(found.url, found.way)


def prepare_kafka() -> None:
    """Fetch what a local broker needs, and write its class archive, unless the tests will use another broker."""
    if not kafka_choice().given and not engine_answers():
        archive = archive_of(find_java().executable, kafka_jars())
        make_archive(archive, lambda written: LocalKafka(recorded=written))


def kafka_choice(lasting: bool = True) -> ServiceChoice:
    """Return the ways to get a broker."""
    return ServiceChoice("Kafka", ADDRESS, answers, docker_kafka, partial(_process, lasting))


@contextmanager
def _process(lasting: bool) -> Iterator[str]:
    with LocalKafka(lasting=lasting) as kafka:
        yield kafka.bootstrap

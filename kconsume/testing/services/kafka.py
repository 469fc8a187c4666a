"""One Kafka for the tests, had in the first way that is there.

`KCONSUME_TEST_KAFKA` is a person's word: when it is set, nothing else is tried. Otherwise Docker, then a
process of this machine. Both are Apache Kafka with the same settings; only a local process can be killed
and frozen, so tests that do so make a `LocalKafka` of their own.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial

from kconsume.errors import ServiceUnavailable
from kconsume.testing.services.class_archive import archive_of, make_archive
from kconsume.testing.services.jars import kafka_jars
from kconsume.testing.services.java import find_java
from kconsume.testing.services.kafka_docker import docker_kafka, engine_answers
from kconsume.testing.services.kafka_local import LocalKafka
from kconsume.testing.services.kafka_ready import wait_until_ready

__all__ = ["ADDRESS", "KafkaService", "LocalKafka", "kafka_service", "prepare_kafka"]

ADDRESS = "KCONSUME_TEST_KAFKA"

_ANSWER_SECONDS = 30

_log = logging.getLogger(__name__)

Way = Callable[[], AbstractContextManager[str]]


@dataclass(frozen=True)
class KafkaService:
    """A broker that is ready. `way` is "address", "docker" or "process"."""

    bootstrap: str
    way: str


@contextmanager
def kafka_service(*, lasting: bool = True) -> Iterator[KafkaService]:
    """A broker for as long as the block lasts; `ServiceUnavailable` says why each way was closed.

    `lasting`: see `LocalKafka`. A broker that has little to do is better off without it, however long it lives.
    """
    with ExitStack() as stack:
        yield _first_there(stack, _ways(lasting))


def prepare_kafka() -> None:
    """Fetch what a local broker needs, and have it start quickly, unless the tests will use another."""
    if not os.environ.get(ADDRESS) and not engine_answers():
        archive = archive_of(find_java().executable, kafka_jars())
        make_archive(archive, lambda written: LocalKafka(recorded=written))


def _ways(lasting: bool = True) -> dict[str, Way]:
    if os.environ.get(ADDRESS):
        return {"address": _given_kafka}
    return {"docker": docker_kafka, "process": partial(_process_kafka, lasting)}


def _first_there(stack: ExitStack, ways: dict[str, Way]) -> KafkaService:
    refusals: list[str] = []
    for name, way in ways.items():
        try:
            service = KafkaService(stack.enter_context(way()), name)
        except ServiceUnavailable as refusal:
            refusals.append(f"{name}: {refusal}")
        else:
            _log.info("kafka for tests way=%s bootstrap=%s", service.way, service.bootstrap)
            return service
    raise ServiceUnavailable(
        f"No Kafka for the tests can be had; give a broker's address in {ADDRESS}, or mend one of these: "
        + "; ".join(refusals)
    )


@contextmanager
def _given_kafka() -> Iterator[str]:
    address = os.environ[ADDRESS]
    wait_until_ready(address, within=_ANSWER_SECONDS)
    yield address


@contextmanager
def _process_kafka(lasting: bool) -> Iterator[str]:
    with LocalKafka(lasting=lasting) as kafka:
        yield kafka.bootstrap

"""The pytest plugin: fixtures for tests of handlers. Installed with kconsume, and loaded by pytest itself.

It is loaded in every pytest run of the environment, so nothing is imported here that a test has not asked for.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import pytest

if TYPE_CHECKING:
    from kconsume.app import App
    from kconsume.backends.abc import OffsetStore
    from kconsume.settings import ClientValue
    from kconsume.testing.embedded import EmbeddedKafka
    from kconsume.testing.feeding import Fakes
    from kconsume.testing.services import KafkaService, PostgresService, RedisService

Service = TypeVar("Service")


class Override(Protocol):
    """`kconsume.testing.override`, put back when the test ends."""

    def __call__(
        self,
        app: App,
        *,
        brokers: str | None = None,
        offsets: str | OffsetStore | None = None,
        group: str | None = None,
        kafka: Mapping[str, ClientValue] | None = None,
        resources: Fakes | None = None,
    ) -> App: ...


@pytest.fixture
def kconsume_embedded() -> Iterator[EmbeddedKafka]:
    """An embedded Kafka of this test's own; see `kconsume.testing.EmbeddedKafka`."""
    from kconsume.testing.embedded import EmbeddedKafka

    with EmbeddedKafka() as kafka:
        yield kafka


@pytest.fixture(scope="session")
def kconsume_kafka() -> Iterator[KafkaService]:
    """A real Kafka, one for the whole run: at KCONSUME_TEST_KAFKA, or in Docker, or as a process of this machine.

    If none can be had the test is an error, and never skipped.
    """
    from kconsume.testing.services import kafka_service

    with ExitStack() as stack:
        yield _had(stack, kafka_service())


@pytest.fixture(scope="session")
def kconsume_postgres() -> Iterator[PostgresService]:
    """A real PostgreSQL, one for the whole run: at KCONSUME_TEST_POSTGRES, or in Docker, or as a local process.

    If none can be had the test is an error, and never skipped.
    """
    from kconsume.testing.services import postgres_service

    with ExitStack() as stack:
        yield _had(stack, postgres_service())


@pytest.fixture(scope="session")
def kconsume_redis() -> Iterator[RedisService]:
    """A real Redis, one for the whole run: at KCONSUME_TEST_REDIS, or in Docker, or as a local process.

    If none can be had the test is an error, and never skipped.
    """
    from kconsume.testing.services import redis_service

    with ExitStack() as stack:
        yield _had(stack, redis_service())


@pytest.fixture
def kconsume_override() -> Iterator[Override]:
    """`kconsume_override(app, brokers=..., offsets=...)`: another broker or store for an app, until the test ends."""
    from kconsume.testing.overriding import override

    with ExitStack() as stack:

        def enter(app: App, **replaced: Any) -> App:
            return stack.enter_context(override(app, **replaced))

        yield enter


def _had(stack: ExitStack, service: AbstractContextManager[Service]) -> Service:
    from kconsume.errors import ServiceUnavailable

    try:
        return stack.enter_context(service)
    except ServiceUnavailable as missing:
        pytest.fail(str(missing), pytrace=False)

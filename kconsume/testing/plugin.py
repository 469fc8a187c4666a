"""The pytest plugin: fixtures for tests of handlers. It is installed with kconsume, and pytest loads it.

Every pytest run of the environment loads it, so a module is imported only when a test asks for a fixture that needs it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import pytest

if TYPE_CHECKING:
    from kconsume._config.client_settings import ClientValue
    from kconsume._embedded.mock_cluster import EmbeddedKafka
    from kconsume.app import App
    from kconsume.backends.base import OffsetStore
    from kconsume.testing._feed import Fakes
    from kconsume.testing.services import KafkaService, PostgresService, RedisService

Service = TypeVar("Service")


class Override(Protocol):
    """The fixture `kconsume_override`: `kconsume.testing.override` until the test ends."""

    def __call__(
        self,
        app: App,
        *,
        brokers: str | None = None,
        offsets: str | OffsetStore | None = None,
        group: str | None = None,
        kafka: Mapping[str, ClientValue] | None = None,
        resources: Fakes | None = None,
    ) -> App:
        """Let the app use other settings until the test ends. None keeps the app's own setting.

        Args:
            app: the app. The same object is returned.
            brokers: the address of the brokers.
            offsets: the offset store, for all handlers that do not name their own. An address opens a new store.
            group: the consumer group, for all handlers that do not name their own.
            kafka: client properties that replace all of the app's. `{}` leaves none.
            resources: ready objects by type, in place of those that the app declares.
        """
        ...


@pytest.fixture
def kconsume_embedded() -> Iterator[EmbeddedKafka]:
    """An embedded Kafka of this test's own, already started: `kconsume.testing.EmbeddedKafka`.

    Its address is `kconsume_embedded.bootstrap`, and `kconsume_embedded.create_topic("orders", 2)` makes a topic.
    """
    from kconsume._embedded.mock_cluster import EmbeddedKafka

    with EmbeddedKafka() as kafka:
        yield kafka


@pytest.fixture(scope="session")
def kconsume_kafka() -> Iterator[KafkaService]:
    """A real Kafka for the whole run: at KCONSUME_TEST_KAFKA, or in Docker, or as a process on this machine.

    Its address is `kconsume_kafka.bootstrap`. If no Kafka can be started, the test fails with the reason: it is not
    skipped.
    """
    from kconsume.testing.services import kafka_service

    with ExitStack() as stack:
        yield _started(stack, kafka_service())


@pytest.fixture(scope="session")
def kconsume_postgres() -> Iterator[PostgresService]:
    """A real PostgreSQL for the whole run: at KCONSUME_TEST_POSTGRES, or in Docker, or as a process on this machine.

    Its address is `kconsume_postgres.url`. If no PostgreSQL can be started, the test fails with the reason: it is not
    skipped.
    """
    from kconsume.testing.services import postgres_service

    with ExitStack() as stack:
        yield _started(stack, postgres_service())


@pytest.fixture(scope="session")
def kconsume_redis() -> Iterator[RedisService]:
    """A real Redis for the whole run: at KCONSUME_TEST_REDIS, or in Docker, or as a process on this machine.

    Its address is `kconsume_redis.url`. If no Redis can be started, the test fails with the reason: it is not skipped.
    """
    from kconsume.testing.services import redis_service

    with ExitStack() as stack:
        yield _started(stack, redis_service())


@pytest.fixture
def kconsume_override() -> Iterator[Override]:
    """`kconsume_override(app, brokers=..., offsets=...)`: other settings for an app until the test ends.

    The parameters are those of `kconsume.testing.override`.
    """
    from kconsume.testing._override import override

    with ExitStack() as stack:

        def enter(app: App, **replaced: Any) -> App:
            return stack.enter_context(override(app, **replaced))

        yield enter


def _started(stack: ExitStack, service: AbstractContextManager[Service]) -> Service:
    from kconsume.errors import ServiceUnavailable

    try:
        return stack.enter_context(service)
    except ServiceUnavailable as missing:
        pytest.fail(str(missing), pytrace=False)

"""One Redis for the tests: at `KCONSUME_TEST_REDIS`, else in Docker, else as a local process.

`choose.ServiceChoice` tries the ways in this order. Only a local process can be killed and frozen, so tests that do so
start a `LocalRedis` of their own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

from kconsume.testing.services.choose import ServiceChoice
from kconsume.testing.services.containers import Image, container, engine_answers
from kconsume.testing.services.redis.local import SETTINGS, LocalRedis, find_server
from kconsume.testing.services.redis.ready import answers

ADDRESS = "KCONSUME_TEST_REDIS"

IMAGE = Image(
    "redis:7.2",
    port=6379,
    command=["redis-server", *(part for name, value in SETTINGS.items() for part in (f"--{name}", value))],
)


@dataclass(frozen=True)
class RedisService:
    """A server that is ready.

    Args:
        url: its address, `redis://host:port/0`.
        way: how it was found: "address", "docker" or "process".
    """

    url: str
    way: str


@contextmanager
def redis_service() -> Iterator[RedisService]:
    """A Redis for as long as the block lasts. Raises ServiceUnavailable with the reason why each way failed."""
    with _choice().take() as found:
        yield RedisService(found.url, found.way)


def prepare_redis() -> None:
    """Check that the program of a local server is there, unless the tests will use another server."""
    if not _choice().given and not engine_answers():
        find_server()


def _choice() -> ServiceChoice:
    return ServiceChoice("Redis", ADDRESS, answers, _docker, _process)


def _docker() -> AbstractContextManager[str]:
    return container(IMAGE, lambda address: f"redis://{address}/0", answers)


@contextmanager
def _process() -> Iterator[str]:
    with LocalRedis() as server:
        yield server.url

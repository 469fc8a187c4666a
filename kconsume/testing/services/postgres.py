"""One PostgreSQL for the tests, had in the first way that is there.

`KCONSUME_TEST_POSTGRES` first, then Docker, then a process of this machine: see `ways.py`. Only a local process can
be killed and frozen, so tests that do so make a `LocalPostgres` of their own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

from kconsume.testing.services.containers import Image, container
from kconsume.testing.services.kafka_docker import engine_answers
from kconsume.testing.services.postgres_local import SETTINGS, USER, LocalPostgres, find_programs
from kconsume.testing.services.postgres_ready import answers
from kconsume.testing.services.ways import Choice

__all__ = ["ADDRESS", "LocalPostgres", "PostgresService", "postgres_service", "prepare_postgres"]

ADDRESS = "KCONSUME_TEST_POSTGRES"

IMAGE = Image(
    "postgres:18",
    port=5432,
    command=["postgres", *(part for name, value in SETTINGS.items() for part in ("-c", f"{name}={value}"))],
    environment={"POSTGRES_HOST_AUTH_METHOD": "trust"},
)


@dataclass(frozen=True)
class PostgresService:
    """A server that is ready. `way` is "address", "docker" or "process"."""

    url: str
    way: str


@contextmanager
def postgres_service() -> Iterator[PostgresService]:
    """A PostgreSQL for as long as the block lasts; `ServiceUnavailable` says why each way was closed."""
    with _choice().take() as found:
        yield PostgresService(found.url, found.way)


def prepare_postgres() -> None:
    """See that a local server is there, unless the tests will use another."""
    if not _choice().given and not engine_answers():
        find_programs()


def _choice() -> Choice:
    return Choice("PostgreSQL", ADDRESS, answers, _docker, _process)


def _docker() -> AbstractContextManager[str]:
    return container(IMAGE, lambda address: f"postgresql://{USER}@{address}/{USER}", answers)


@contextmanager
def _process() -> Iterator[str]:
    with LocalPostgres() as server:
        yield server.url

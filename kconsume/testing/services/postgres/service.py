"""One PostgreSQL for the tests: at `KCONSUME_TEST_POSTGRES`, else in Docker, else as a local process.

`choose.ServiceChoice` tries the ways in this order. Only a local process can be killed and frozen, so tests that do so
start a `LocalPostgres` of their own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

from kconsume.testing.services.choose import ServiceChoice
from kconsume.testing.services.containers import Image, container, engine_answers
from kconsume.testing.services.postgres.local import SETTINGS, USER, LocalPostgres
from kconsume.testing.services.postgres.programs import find_programs
from kconsume.testing.services.postgres.ready import answers

ADDRESS = "KCONSUME_TEST_POSTGRES"

IMAGE = Image(
    "postgres:18",
    port=5432,
    command=["postgres", *(part for name, value in SETTINGS.items() for part in ("-c", f"{name}={value}"))],
    environment={"POSTGRES_HOST_AUTH_METHOD": "trust"},
)


@dataclass(frozen=True)
class PostgresService:
    """A server that is ready.

    Args:
        url: its address, `postgresql://user@host:port/database`.
        way: how it was found: "address", "docker" or "process".
    """

    url: str
    way: str


@contextmanager
def postgres_service() -> Iterator[PostgresService]:
    """A PostgreSQL for as long as the block lasts. Raises ServiceUnavailable with the reason why each way failed."""
    with _choice().take() as found:
        yield PostgresService(found.url, found.way)


def prepare_postgres() -> None:
    """Check that the programs of a local server are there, unless the tests will use another server."""
    if not _choice().given and not engine_answers():
        find_programs()


def _choice() -> ServiceChoice:
    return ServiceChoice("PostgreSQL", ADDRESS, answers, _docker, _process)


def _docker() -> AbstractContextManager[str]:
    return container(IMAGE, lambda address: f"postgresql://{USER}@{address}/{USER}", answers)


@contextmanager
def _process() -> Iterator[str]:
    with LocalPostgres() as server:
        yield server.url

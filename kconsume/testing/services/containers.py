"""A server in a container, for machines where a Docker engine answers.

For servers that need not know their address outside; Kafka does, and has `kafka_docker.py`. testcontainers' own
reaper removes the container when this process dies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kconsume.errors import ServiceUnavailable
from kconsume.testing.services.kafka_docker import _deaf_to_warnings as deaf_to_warnings
from kconsume.testing.services.kafka_docker import engine_answers
from kconsume.testing.services.ready import Answers, wait_for_answer

if TYPE_CHECKING:
    from testcontainers.core.container import DockerContainer

_START_SECONDS = 90


@dataclass(frozen=True)
class Image:
    name: str
    port: int
    command: list[str]
    environment: Mapping[str, str] = field(default_factory=dict)


@contextmanager
def container(image: Image, url: Callable[[str], str], answers: Answers) -> Iterator[str]:
    """The URL of a server that answers; `url` makes it of "host:port"."""
    if not engine_answers():
        raise ServiceUnavailable("no Docker engine answers, or testcontainers is not installed")
    started = _start(image)
    try:
        yield _await_answer(image, started, url, answers)
    finally:
        started.stop()


def _start(image: Image) -> DockerContainer:
    with deaf_to_warnings(), _docker_named(image):
        from testcontainers.core.container import DockerContainer

        new = DockerContainer(image.name).with_exposed_ports(image.port).with_command(image.command)
        for name, value in image.environment.items():
            new = new.with_env(name, value)
        try:
            return new.start()
        except BaseException:
            new.stop()
            raise


def _await_answer(image: Image, started: DockerContainer, url: Callable[[str], str], answers: Answers) -> str:
    with deaf_to_warnings(), _docker_named(image):
        host = started.get_container_host_ip().replace("localhost", "127.0.0.1")
        address = url(f"{host}:{started.get_exposed_port(image.port)}")

    def check_running() -> None:
        started.reload()
        if started.status == "exited":
            said = b"".join(started.get_logs()).decode(errors="replace").splitlines()
            raise ServiceUnavailable(f"{image.name} ended while starting: {' | '.join(said[-3:])}")

    with _docker_named(image):
        wait_for_answer(answers, address, within=_START_SECONDS, still_there=check_running)
    return address


@contextmanager
def _docker_named(image: Image) -> Iterator[None]:
    """What Docker, its client or testcontainers raise, as the error that lets another way be tried."""
    from docker.errors import DockerException

    try:
        yield
    except (DockerException, OSError, RuntimeError) as failed:
        raise ServiceUnavailable(f"Docker did not start {image.name}: {failed}") from failed

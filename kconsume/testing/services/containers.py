"""A server in a container, for machines where a Docker engine answers.

testcontainers' own reaper removes the container when this process dies.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kconsume.errors import ServiceUnavailable
from kconsume.testing.services.ready import Answers, wait_for_answer

if TYPE_CHECKING:
    from testcontainers.core.container import DockerContainer

_ANSWER_SECONDS = 5
_START_SECONDS = 90


@dataclass(frozen=True)
class Image:
    """What to run.

    Args:
        name: the image with its tag.
        port: the port inside the container on which clients connect.
        command: the command that the container runs.
        environment: the environment variables of the container.
    """

    name: str
    port: int
    command: list[str]
    environment: Mapping[str, str] = field(default_factory=dict)


@contextmanager
def container(
    image: Image,
    url: Callable[[str], str],
    answers: Answers,
    started: Callable[[DockerContainer, str], None] | None = None,
) -> Iterator[str]:
    """Run a server in a container. Yield its URL when it answers.

    Args:
        image: what to run.
        url: makes the URL of "host:port", the address on this machine.
        answers: asks the server whether it is ready.
        started: called with the container and "host:port" when the container runs, before the server is asked.
    """
    if not engine_answers():
        raise ServiceUnavailable("no Docker engine answers, or testcontainers is not installed")
    running = _start(image)
    try:
        with _no_library_warnings(), _docker_errors(image):
            host = running.get_container_host_ip().replace("localhost", "127.0.0.1")
            address = f"{host}:{running.get_exposed_port(image.port)}"
            if started is not None:
                started(running, address)
        _await_answer(image, running, url(address), answers)
        yield url(address)
    finally:
        running.stop()


def engine_answers() -> bool:
    """Return whether a Docker engine answers. Fast without a `DOCKER_HOST`; a wrong one takes a few seconds."""
    with _no_library_warnings():
        try:
            from docker.errors import DockerException
            from testcontainers.core.docker_client import DockerClient
        except ImportError:
            return False
        try:
            engine = DockerClient(timeout=_ANSWER_SECONDS).client
            engine.ping()
            engine.close()
        except (DockerException, OSError):
            answers = False
        else:
            answers = True
        # A client that finds no engine leaves its socket open. A garbage collection here frees the socket without a
        # warning. A later garbage collection would raise a ResourceWarning in a test that has no use for Docker.
        gc.collect()
        return answers


def _start(image: Image) -> DockerContainer:
    with _no_library_warnings(), _docker_errors(image):
        from testcontainers.core.container import DockerContainer

        new = DockerContainer(image.name).with_exposed_ports(image.port).with_command(image.command)
        for name, value in image.environment.items():
            new = new.with_env(name, value)
        try:
            return new.start()
        except BaseException:
            new.stop()
            raise


def _await_answer(image: Image, running: DockerContainer, url: str, answers: Answers) -> None:
    def check_running() -> None:
        running.reload()
        if running.status == "exited":
            output = b"".join(running.get_logs()).decode(errors="replace").splitlines()
            raise ServiceUnavailable(f"{image.name} ended while starting: {' | '.join(output[-3:])}")

    with _docker_errors(image):
        wait_for_answer(answers, url, within=_START_SECONDS, check_running=check_running)


@contextmanager
def _no_library_warnings() -> Iterator[None]:
    """Ignore deprecation warnings of testcontainers and of its imports, because this project cannot correct them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@contextmanager
def _docker_errors(image: Image) -> Iterator[None]:
    """Turn an error of Docker, its client or testcontainers into ServiceUnavailable, so that the next way is tried."""
    from docker.errors import DockerException

    try:
        yield
    except (DockerException, OSError, RuntimeError) as failed:
        raise ServiceUnavailable(f"Docker did not start {image.name}: {failed}") from failed

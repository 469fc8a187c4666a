"""The same Kafka broker in a container, for machines where a Docker engine answers.

The container listens before its address on this machine is known, so it waits for a small script that is
copied in afterwards and says under which address clients reach it. testcontainers' own reaper removes the
container when this process dies.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from kconsume.errors import ServiceUnavailable
from kconsume.testing.services import kafka_settings
from kconsume.testing.services.jars import KAFKA_VERSION
from kconsume.testing.services.kafka_ready import wait_until_ready

if TYPE_CHECKING:
    from testcontainers.core.container import DockerContainer

IMAGE = f"apache/kafka:{KAFKA_VERSION}"

_PORT = 9092
_DATA = "/tmp/kconsume"
_SCRIPT = "/tmp/kconsume-start.sh"
_ANSWER_SECONDS = 5
_START_SECONDS = 90


@contextmanager
def docker_kafka() -> Iterator[str]:
    """The address of a broker in a container; `ServiceUnavailable` when it cannot be had."""
    container = _start()
    try:
        yield _await_broker(container)
    finally:
        container.stop()


def listeners(advertised: str) -> kafka_settings.Listeners:
    """Clients come from outside by `advertised`, which the broker itself cannot reach: it needs its own."""
    return kafka_settings.Listeners(
        bind=f"CLIENT://0.0.0.0:{_PORT},BROKER://127.0.0.1:19092,CONTROLLER://127.0.0.1:9093",
        advertise=f"CLIENT://{advertised},BROKER://127.0.0.1:19092",
        protocols="CLIENT:PLAINTEXT,BROKER:PLAINTEXT,CONTROLLER:PLAINTEXT",
        between="BROKER",
        controller="127.0.0.1:9093",
    )


def start_script(advertised: str) -> str:
    settings = kafka_settings.broker_settings(listeners(advertised), _DATA)
    variables = {
        **kafka_settings.as_environment(settings),
        "CLUSTER_ID": kafka_settings.CLUSTER_ID,
        "KAFKA_HEAP_OPTS": kafka_settings.HEAP,
    }
    exports = [f"export {name}='{value}'" for name, value in variables.items()]
    return "\n".join([*exports, "exec /etc/kafka/docker/run", ""])


def engine_answers() -> bool:
    """Whether a Docker engine is there; a wrong `DOCKER_HOST` costs a few seconds, none costs nothing."""
    with _deaf_to_warnings():
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
        # A client that finds no engine leaves its socket open. Collected here it is silent; later it
        # would be a ResourceWarning in a test that has nothing to do with it.
        gc.collect()
        return answers


def _start() -> DockerContainer:
    if not engine_answers():
        raise ServiceUnavailable("no Docker engine answers, or testcontainers is not installed")
    with _deaf_to_warnings(), _docker_named():
        from testcontainers.core.container import DockerContainer

        wait = f"while [ ! -s {_SCRIPT} ]; do sleep 0.1; done; exec sh {_SCRIPT}"
        container = DockerContainer(IMAGE).with_exposed_ports(_PORT).with_command(["sh", "-c", wait])
        try:
            return container.start()
        except BaseException:
            container.stop()
            raise


@contextmanager
def _deaf_to_warnings() -> Iterator[None]:
    """testcontainers, and what it imports, warn of deprecations that are not this project's to fail on."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@contextmanager
def _docker_named() -> Iterator[None]:
    """What Docker, its client or testcontainers raise, as the error that lets another way be tried."""
    from docker.errors import DockerException

    try:
        yield
    except (DockerException, OSError, RuntimeError) as failed:
        raise ServiceUnavailable(f"Docker did not start {IMAGE}: {failed}") from failed


def _await_broker(container: DockerContainer) -> str:
    with _deaf_to_warnings(), _docker_named():
        host = container.get_container_host_ip().replace("localhost", "127.0.0.1")
        bootstrap = f"{host}:{container.get_exposed_port(_PORT)}"
        container.copy_into_container(start_script(bootstrap).encode(), _SCRIPT)

    def check_running() -> None:
        container.reload()
        if container.status == "exited":
            said = b"".join(container.get_logs()).decode(errors="replace").splitlines()
            raise ServiceUnavailable(f"the broker in {IMAGE} ended while starting: {' | '.join(said[-3:])}")

    with _docker_named():
        wait_until_ready(bootstrap, within=_START_SECONDS, still_there=check_running)
    return bootstrap

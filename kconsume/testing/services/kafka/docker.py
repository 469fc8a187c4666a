"""The test broker in a container.

A broker tells its clients the address at which they reach it. Docker chooses the port of that address when it starts
the container. So the container starts no broker at first: it waits for a small script, which is copied into the running
container, and which starts the broker with the address.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from kconsume.testing.services.containers import Image, container
from kconsume.testing.services.kafka import settings
from kconsume.testing.services.kafka.jars import KAFKA_VERSION
from kconsume.testing.services.kafka.ready import answers

if TYPE_CHECKING:
    from testcontainers.core.container import DockerContainer

_PORT = 9092
_DATA = "/tmp/kconsume"
_SCRIPT = "/tmp/kconsume-start.sh"

IMAGE = Image(
    f"apache/kafka:{KAFKA_VERSION}",
    port=_PORT,
    command=["sh", "-c", f"while [ ! -s {_SCRIPT} ]; do sleep 0.1; done; exec sh {_SCRIPT}"],
)


@contextmanager
def docker_kafka() -> Iterator[str]:
    """The address of a broker in a container. Raises ServiceUnavailable if it cannot be started."""
    with container(IMAGE, str, answers, _copy_start_script) as bootstrap:
        yield bootstrap


def _copy_start_script(running: DockerContainer, address: str) -> None:
    running.copy_into_container(start_script(address).encode(), _SCRIPT)


def listeners(advertised: str) -> settings.Listeners:
    """Clients outside connect to `advertised`. The broker cannot reach that address, and has one of its own."""
    return settings.Listeners(
        bind=f"CLIENT://0.0.0.0:{_PORT},BROKER://127.0.0.1:19092,CONTROLLER://127.0.0.1:9093",
        advertise=f"CLIENT://{advertised},BROKER://127.0.0.1:19092",
        protocols="CLIENT:PLAINTEXT,BROKER:PLAINTEXT,CONTROLLER:PLAINTEXT",
        inter_broker="BROKER",
        controller="127.0.0.1:9093",
    )


def start_script(advertised: str) -> str:
    """Return the script that starts the broker. Clients reach it at `advertised`."""
    variables = {
        **settings.as_environment(settings.broker_settings(listeners(advertised), _DATA)),
        "CLUSTER_ID": settings.CLUSTER_ID,
        "KAFKA_HEAP_OPTS": settings.HEAP,
    }
    exports = [f"export {name}='{value}'" for name, value in variables.items()]
    return "\n".join([*exports, "exec /etc/kafka/docker/run", ""])

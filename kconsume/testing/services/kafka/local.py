"""A real Kafka broker as a process on this machine, which tests may stop, kill, freeze and restart.

One KRaft node on the loopback interface. It never outlives this process (`child_guard`).
"""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from pathlib import Path

from kconsume.errors import ServiceUnavailable
from kconsume.testing.services.java import find_java
from kconsume.testing.services.kafka import ready, settings
from kconsume.testing.services.kafka.jars import kafka_jars
from kconsume.testing.services.kafka.jvm_class_cache import archive_of, read_options, write_options
from kconsume.testing.services.local_process import LocalProcess
from kconsume.testing.services.ports import free_port

# With UsePerfData a killed JVM would leave a file in the machine's temporary folder.
_JVM = [*settings.HEAP.split(), "-XX:-UsePerfData", "-Djava.awt.headless=true"]
# For a JVM that runs for seconds: with these options a start costs 5 s of CPU instead of 8, but the JVM works slower.
_QUICK = ["-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC"]
_LOGGING = ["-Dorg.slf4j.simpleLogger.defaultLogLevel=warn"]


class LocalKafka(LocalProcess):
    """A broker at `kafka.bootstrap`, started by `with LocalKafka() as kafka:`.

    Args:
        folder: where the broker keeps its data. They survive `stop`, `kill` and `restart`. Without it the broker gets a
            temporary folder, which `close` removes.
        port: the port on 127.0.0.1. Without it a free one is reserved.
        overrides: broker settings that replace those of the tests, by name.
        lasting: True for a broker that works for minutes or is measured. Such a broker starts slower and runs faster.
        recorded: the file into which the broker writes its classes when it is stopped (`jvm_class_cache`).
    """

    name = "Kafka"
    start_seconds = 90

    def __init__(
        self,
        *,
        folder: Path | None = None,
        port: int | None = None,
        overrides: Mapping[str, str] | None = None,
        lasting: bool = False,
        recorded: Path | None = None,
    ) -> None:
        super().__init__(folder=folder, port=port)
        self._lasting = lasting
        self._recorded = recorded
        self._controller_port = free_port()
        self._overrides = dict(overrides or {})

    @property
    def bootstrap(self) -> str:
        """The address for the client property `bootstrap.servers`."""
        return self.address

    @property
    def url(self) -> str:
        return self.address

    @property
    def log(self) -> Path:
        return self.folder / "broker.log"

    def _answers(self, url: str) -> str | None:
        return ready.answers(url)

    def _command(self) -> list[str]:
        program, jars = find_java().executable, kafka_jars()
        java = [str(program), *_JVM]
        kafka = [*_LOGGING, "-cp", f"{jars}/*"]
        archive = read_options(archive_of(program, jars))
        properties = self._write_settings()
        if not (self._data / "meta.properties").exists():
            self._format([*java, *_QUICK, *archive, *kafka], properties)
        if self._recorded is not None:
            archive = write_options(self._recorded)
        return [*java, *(() if self._lasting else _QUICK), *archive, *kafka, "kafka.Kafka", str(properties)]

    @property
    def _data(self) -> Path:
        return self.folder / "data"

    def _write_settings(self) -> Path:
        self._data.mkdir(parents=True, exist_ok=True)
        listeners = settings.local_listeners(self.port, self._controller_port)
        properties = self.folder / "server.properties"
        properties.write_text(
            settings.as_properties(settings.broker_settings(listeners, str(self._data), self._overrides))
        )
        return properties

    def _format(self, java: list[str], properties: Path) -> None:
        tool = ["kafka.tools.StorageTool", "format", "-t", settings.CLUSTER_ID, "-c", str(properties)]
        done = subprocess.run([*java, *tool], capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise ServiceUnavailable(
                f"Kafka could not prepare its data in {self._data}: {(done.stdout + done.stderr).strip()}"
            )

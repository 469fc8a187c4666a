"""A real Kafka broker as a process of this machine, that tests may stop, kill, freeze and restart.

One KRaft node on the loopback interface. Its data survive `stop`, `kill` and `restart`, and are removed
by `close` unless the caller named the folder. It never outlives this process: see `leash.py`.
"""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from pathlib import Path

from kconsume.errors import ServiceUnavailable
from kconsume.testing.services import kafka_settings
from kconsume.testing.services.class_archive import archive_of, reading, writing
from kconsume.testing.services.jars import kafka_jars
from kconsume.testing.services.java import find_java
from kconsume.testing.services.kafka_ready import wait_until_ready
from kconsume.testing.services.local_process import LocalProcess
from kconsume.testing.services.ports import free_port

_START_SECONDS = 90

# UsePerfData off: with it, a JVM that is killed leaves a file behind in the machine's temporary folder.
_JVM = [*kafka_settings.HEAP.split(), "-XX:-UsePerfData", "-Djava.awt.headless=true"]
# For what lives for seconds: a start costs 5 s of CPU instead of 8, and runs slower ever after.
_QUICK = ["-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC"]
_LOGGING = ["-Dorg.slf4j.simpleLogger.defaultLogLevel=warn"]


class LocalKafka(LocalProcess):
    """`with LocalKafka() as kafka:` starts a broker at `kafka.bootstrap`; `overrides` are broker settings.

    `lasting`: it is to serve for minutes, or to be measured, so that its start may cost more.
    `recorded`: where it leaves an archive of its classes when it is stopped (`class_archive.py`).
    """

    name = "Kafka"

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
        return self.address

    @property
    def url(self) -> str:
        return self.address

    @property
    def log(self) -> Path:
        return self.folder / "broker.log"

    def _command(self) -> list[str]:
        program, jars = find_java().executable, kafka_jars()
        java = [str(program), *_JVM]
        kafka = [*_LOGGING, "-cp", f"{jars}/*"]
        shared = reading(archive_of(program, jars))
        properties = self._write_settings()
        if not (self._data / "meta.properties").exists():
            self._format([*java, *_QUICK, *shared, *kafka], properties)
        archive = shared if self._recorded is None else writing(self._recorded)
        return [*java, *(() if self._lasting else _QUICK), *archive, *kafka, "kafka.Kafka", str(properties)]

    def _await_answer(self) -> None:
        wait_until_ready(self.bootstrap, within=_START_SECONDS, still_there=self._check_running)

    @property
    def _data(self) -> Path:
        return self.folder / "data"

    def _write_settings(self) -> Path:
        self._data.mkdir(parents=True, exist_ok=True)
        listeners = kafka_settings.local_listeners(self.port, self._controller_port)
        settings = kafka_settings.broker_settings(listeners, str(self._data), self._overrides)
        properties = self.folder / "server.properties"
        properties.write_text(kafka_settings.as_properties(settings))
        return properties

    def _format(self, java: list[str], properties: Path) -> None:
        tool = ["kafka.tools.StorageTool", "format", "-t", kafka_settings.CLUSTER_ID, "-c", str(properties)]
        done = subprocess.run([*java, *tool], capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise ServiceUnavailable(
                f"Kafka could not prepare its data in {self._data}: {(done.stdout + done.stderr).strip()}"
            )

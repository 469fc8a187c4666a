"""A real Kafka broker as a process of this machine, that tests may stop, kill, freeze and restart.

One KRaft node on the loopback interface. Its data survive `stop`, `kill` and `restart`, and are removed
by `close` unless the caller named the folder. It never outlives this process: see `leash.py`.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

from kconsume.errors import ServiceUnavailable
from kconsume.testing.services import kafka_settings, leash
from kconsume.testing.services.jars import kafka_jars
from kconsume.testing.services.java import find_java
from kconsume.testing.services.kafka_ready import wait_until_ready

_START_SECONDS = 90
_STOP_SECONDS = 20

# UsePerfData off: with it, a JVM that is killed leaves a file behind in the machine's temporary folder.
_JVM = [*kafka_settings.HEAP.split(), "-XX:-UsePerfData", "-Djava.awt.headless=true"]
_LOGGING = ["-Dorg.slf4j.simpleLogger.defaultLogLevel=warn"]


class LocalKafka:
    """`with LocalKafka() as kafka:` starts a broker at `kafka.bootstrap`; `overrides` are broker settings."""

    def __init__(
        self,
        *,
        folder: Path | None = None,
        port: int | None = None,
        overrides: Mapping[str, str] | None = None,
    ) -> None:
        self._owns_folder = folder is None
        self.folder = folder or Path(tempfile.mkdtemp(prefix="kconsume-kafka-"))
        self._port = port or free_port()
        self._controller_port = free_port()
        self._overrides = dict(overrides or {})
        self._leash: subprocess.Popen[bytes] | None = None
        self._pid: int | None = None

    @property
    def bootstrap(self) -> str:
        return f"127.0.0.1:{self._port}"

    @property
    def log(self) -> Path:
        return self.folder / "broker.log"

    @property
    def running(self) -> bool:
        return self._leash is not None and self._leash.poll() is None

    @property
    def pid(self) -> int:
        """The broker's process id."""
        if self._pid is None or not self.running:
            raise ServiceUnavailable(f"The broker at {self.bootstrap} is not running; call start() first.")
        return self._pid

    def start(self) -> Self:
        """Start on the data that are there, and return when the broker can be worked with."""
        if self.running:
            return self
        if not _is_free(self._port):  # or another broker's answer would be taken for this one's
            raise ServiceUnavailable(f"{self.bootstrap} is taken; end what listens there, or choose another port.")
        java = [str(find_java().executable), *_JVM, *_LOGGING, "-cp", f"{kafka_jars()}/*"]
        properties = self._write_settings()
        if not (self._data / "meta.properties").exists():
            self._format(java, properties)
        self._spawn([*java, "kafka.Kafka", str(properties)])
        try:
            wait_until_ready(self.bootstrap, within=_START_SECONDS, still_there=self._check_running)
        except BaseException:
            self.kill()
            raise
        return self

    def stop(self) -> None:
        """End it in good order (SIGTERM); its data stay."""
        try:
            # In this order: a frozen process sees SIGTERM only when it is thawed.
            self._end(signal.SIGTERM, signal.SIGCONT)
        except subprocess.TimeoutExpired:
            self.kill()

    def kill(self) -> None:
        """End it as a power cut would (SIGKILL); its data stay."""
        self._end(signal.SIGKILL)

    def restart(self) -> None:
        """Stop if running, then start on the same port and data."""
        self.stop()
        self.start()

    def freeze(self) -> None:
        """SIGSTOP: connections stay open, nothing is answered."""
        os.kill(self.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def close(self) -> None:
        self.stop()
        if self._owns_folder:
            shutil.rmtree(self.folder, ignore_errors=True)

    def __enter__(self) -> Self:
        try:
            return self.start()
        except BaseException:
            self.close()
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def _data(self) -> Path:
        return self.folder / "data"

    def _write_settings(self) -> Path:
        self._data.mkdir(parents=True, exist_ok=True)
        listeners = kafka_settings.local_listeners(self._port, self._controller_port)
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

    def _spawn(self, command: list[str]) -> None:
        remove = str(self.folder) if self._owns_folder else "-"
        with self.log.open("ab") as log:
            self._leash = subprocess.Popen(
                [sys.executable, "-I", leash.__file__, str(os.getpid()), remove, *command],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,  # Ctrl-C in the terminal is for pytest, which then stops the broker
            )
        assert self._leash.stdout is not None
        with self._leash.stdout as said:
            answer = said.readline()
        if not answer:
            self._leash.wait()
            self._check_running()
        self._pid = int(answer)

    def _check_running(self) -> None:
        if not self.running:
            raise ServiceUnavailable(f"The broker at {self.bootstrap} ended while starting: {self._last_words()}")

    def _last_words(self) -> str:
        lines = self.log.read_text(errors="replace").splitlines() if self.log.exists() else []
        telling = [line.strip() for line in lines if "ERROR" in line or "Exception" in line] or lines
        return " | ".join(telling[-3:]) or "it wrote nothing to its log."

    def _end(self, *signals: signal.Signals) -> None:
        if self._leash is None or not self.running:
            return
        with contextlib.suppress(ProcessLookupError):  # it may have ended by itself a moment ago
            for number in signals:
                os.kill(self.pid, number)
        self._leash.wait(_STOP_SECONDS)


def free_port() -> int:
    """A free port outside the range that the kernel gives to outgoing connections.

    Inside that range another connection could take the port while the broker is down, and a client that
    tries the closed port again and again can even be connected to itself.
    """
    for port in random.sample(range(20_000, 32_000), k=200):
        if _is_free(port):
            return port
    raise ServiceUnavailable("No free port between 20000 and 32000 on 127.0.0.1; end what listens there.")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        # As the broker will: a port whose last connections are in TIME_WAIT is free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True

"""A server as a process of this machine, that tests may stop, kill, freeze and restart.

What the servers have in common: a folder, a port, the leash that ends them with this process, and signals. Which
command starts a server and how to ask whether it answers is its own file's affair.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import ClassVar, Self

from kconsume.errors import ServiceUnavailable
from kconsume.testing.services import leash
from kconsume.testing.services.ports import free_port, is_free
from kconsume.testing.services.ready import wait_for_answer

_START_SECONDS = 30
_STOP_SECONDS = 20
_FREEZE_SECONDS = 20
_TELLING = re.compile("FATAL|ERROR|rror|Exception")


class LocalProcess:
    """`with … as server:` starts it at `server.url`. Its data stay until `close`, or for good in a folder given."""

    name: ClassVar[str]
    stop_signal: ClassVar[signal.Signals] = signal.SIGTERM

    def __init__(self, *, folder: Path | None = None, port: int | None = None) -> None:
        self._owns_folder = folder is None
        self.folder = folder or Path(tempfile.mkdtemp(prefix=f"kconsume-{self.name.lower()}-"))
        if self._owns_folder:
            self.folder.chmod(0o755)  # what is in it may belong to another user: see accounts.py
        self.port = port or free_port()
        self._leash: subprocess.Popen[bytes] | None = None
        self._pid: int | None = None

    @property
    def url(self) -> str:
        raise NotImplementedError

    def _command(self) -> list[str]:
        """Prepare the folder and say how the server is started."""
        raise NotImplementedError

    def _answers(self, url: str) -> str | None:
        """As `ready.Answers`."""
        raise NotImplementedError

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def log(self) -> Path:
        return self.folder / "server.log"

    @property
    def running(self) -> bool:
        return self._leash is not None and self._leash.poll() is None

    @property
    def pid(self) -> int:
        if self._pid is None or not self.running:
            raise ServiceUnavailable(f"{self.name} at {self.address} is not running; call start() first.")
        return self._pid

    def start(self) -> Self:
        """Start on the data that are there, and return when the server answers."""
        if self.running:
            return self
        if not is_free(self.port):  # or another server's answer would be taken for this one's
            raise ServiceUnavailable(f"{self.address} is taken; end what listens there, or choose another port.")
        self._spawn(self._command())
        try:
            self._await_answer()
        except BaseException:
            self.kill()
            raise
        return self

    def stop(self) -> None:
        """End it in good order; its data stay."""
        try:
            # In this order: a frozen process sees the signal only when it is thawed.
            self._end(self.stop_signal, signal.SIGCONT)
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
        """SIGSTOP: connections stay open, nothing is answered from the moment when this returns."""
        pid = self.pid
        os.kill(pid, signal.SIGSTOP)
        deadline = time.monotonic() + _FREEZE_SECONDS  # on a busy machine its threads go on for a while
        while not _is_stopped(pid):
            if time.monotonic() > deadline:
                raise ServiceUnavailable(f"{self.name} at {self.address} does not stop.")
            time.sleep(0.001)

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

    def _await_answer(self) -> None:
        wait_for_answer(self._answers, self.url, within=_START_SECONDS, still_there=self._check_running)

    def _spawn(self, command: list[str]) -> None:
        remove = str(self.folder) if self._owns_folder else "-"
        with self.log.open("ab") as log:
            self._leash = subprocess.Popen(
                [sys.executable, "-I", leash.__file__, str(os.getpid()), remove, *command],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,  # Ctrl-C in the terminal is for pytest, which then stops the server
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
            raise ServiceUnavailable(f"{self.name} at {self.address} ended while starting: {self._last_words()}")

    def _last_words(self) -> str:
        lines = self.log.read_text(errors="replace").splitlines() if self.log.exists() else []
        telling = [line.strip() for line in lines if _TELLING.search(line)] or lines
        return " | ".join(line.strip() for line in telling[-3:]) or "it wrote nothing to its log."

    def _end(self, *signals: signal.Signals) -> None:
        if self._leash is None or self._pid is None or not self.running:
            return
        with contextlib.suppress(ProcessLookupError):  # it may have ended by itself, or by the first of them
            for number in signals:
                os.kill(self._pid, number)
        self._leash.wait(_STOP_SECONDS)


def _is_stopped(pid: int) -> bool:
    """Every thread of it; where there is no /proc, it is taken for granted."""
    tasks = Path(f"/proc/{pid}/task")
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # a thread has ended, or does while it is read
        states = {(task / "stat").read_text().rpartition(")")[2].split()[0] for task in tasks.iterdir()}
        return states <= {"T", "t", "Z", "X"}
    return not tasks.exists()

"""A server as a process on this machine, which tests may stop, kill, freeze and restart.

All servers share this: a folder, a port, the guard that ends the server with this process, and signals. A subclass
knows the command that starts its server and how to ask whether the server answers.
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
from kconsume.testing.services import child_guard
from kconsume.testing.services.ports import free_port, is_free
from kconsume.testing.services.ready import wait_for_answer

_STOP_SECONDS = 20
_FREEZE_SECONDS = 20
_LOOKS_LIKE_A_REASON = re.compile("FATAL|ERROR|rror|Exception")


class LocalProcess:
    """The base class of a server at `server.url`, started by `with … as server:`.

    Args:
        folder: where the server keeps its data and its log. The data survive `stop`, `kill` and `restart`. Without it
            the server gets a temporary folder, which `close` removes.
        port: the port on 127.0.0.1. Without it a free one is reserved.
    """

    name: ClassVar[str]
    start_seconds: ClassVar[float] = 30
    stop_signal: ClassVar[signal.Signals] = signal.SIGTERM

    def __init__(self, *, folder: Path | None = None, port: int | None = None) -> None:
        self.owns_folder = folder is None
        self.folder = folder or Path(tempfile.mkdtemp(prefix=f"kconsume-{self.name.lower()}-"))
        if self.owns_folder:
            self.folder.chmod(0o755)  # its files may belong to another user: see `server_account`
        self.port = port or free_port()
        self._guard: subprocess.Popen[bytes] | None = None
        self._pid: int | None = None

    @property
    def url(self) -> str:
        """Where clients connect to the server."""
        raise NotImplementedError

    def _command(self) -> list[str]:
        """Prepare the folder and return the command that starts the server."""
        raise NotImplementedError

    def _answers(self, url: str) -> str | None:
        """Ask the server whether it answers. Returns None if it does, else the reason why not."""
        raise NotImplementedError

    @property
    def address(self) -> str:
        """The server's "host:port"."""
        return f"127.0.0.1:{self.port}"

    @property
    def log(self) -> Path:
        """The file with what the server wrote to its standard output and error."""
        return self.folder / "server.log"

    @property
    def running(self) -> bool:
        """True from `start` until the server has ended. A frozen server is running."""
        return self._guard is not None and self._guard.poll() is None

    @property
    def pid(self) -> int:
        """The server's process id. Raises ServiceUnavailable if it is not running."""
        if self._pid is None or not self.running:
            raise ServiceUnavailable(f"{self.name} at {self.address} is not running; call start() first.")
        return self._pid

    def start(self) -> Self:
        """Start the server on the data in its folder, and return when it answers."""
        if self.running:
            return self
        if not is_free(self.port):  # otherwise another server could answer in place of this one
            raise ServiceUnavailable(
                f"{self.address} is in use; end the process that listens there, or choose another port."
            )
        self._spawn(self._command())
        try:
            wait_for_answer(self._answers, self.url, within=self.start_seconds, check_running=self._check_running)
        except BaseException:
            self.kill()
            raise
        return self

    def stop(self) -> None:
        """End the server in an orderly way. Its data stay."""
        try:
            # Thaw after the signal: a frozen process receives the signal only when it is thawed.
            self._end(self.stop_signal, signal.SIGCONT)
        except subprocess.TimeoutExpired:
            self.kill()

    def kill(self) -> None:
        """End the server with SIGKILL, so that it cannot clean up. Its data stay."""
        self._end(signal.SIGKILL)

    def restart(self) -> None:
        """Stop the server if it is running, then start it on the same port and data."""
        self.stop()
        self.start()

    def freeze(self) -> None:
        """Send SIGSTOP: connections stay open, and nothing is answered after this returns."""
        pid = self.pid
        os.kill(pid, signal.SIGSTOP)
        deadline = time.monotonic() + _FREEZE_SECONDS  # on a busy machine the server's threads run on for a while
        while not _is_stopped(pid):
            if time.monotonic() > deadline:
                raise ServiceUnavailable(
                    f"{self.name} at {self.address} still runs {_FREEZE_SECONDS} s after SIGSTOP; run the tests again "
                    f"when this machine is less busy."
                )
            time.sleep(0.001)

    def thaw(self) -> None:
        """Send SIGCONT: a frozen server continues."""
        os.kill(self.pid, signal.SIGCONT)

    def close(self) -> None:
        """Stop the server, and remove its folder if it is a temporary one."""
        self.stop()
        if self.owns_folder:
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

    def _spawn(self, command: list[str]) -> None:
        folder_to_remove = str(self.folder) if self.owns_folder else "-"
        with self.log.open("ab") as log:
            self._guard = subprocess.Popen(
                [sys.executable, "-I", child_guard.__file__, str(os.getpid()), folder_to_remove, *command],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,  # Ctrl-C in the terminal is for pytest, which then stops the server
            )
        assert self._guard.stdout is not None
        with self._guard.stdout as output:
            pid = output.readline()
        if not pid:
            self._guard.wait()
            self._check_running()
        self._pid = int(pid)

    def _check_running(self) -> None:
        if not self.running:
            raise ServiceUnavailable(f"{self.name} at {self.address} ended while starting: {self._end_of_log()}")

    def _end_of_log(self) -> str:
        lines = self.log.read_text(errors="replace").splitlines() if self.log.exists() else []
        reasons = [line.strip() for line in lines if _LOOKS_LIKE_A_REASON.search(line)] or lines
        return " | ".join(line.strip() for line in reasons[-3:]) or "it wrote nothing to its log."

    def _end(self, *signals: signal.Signals) -> None:
        if self._guard is None or self._pid is None or not self.running:
            return
        with contextlib.suppress(ProcessLookupError):  # the process ended before the signals, or at the first signal
            for number in signals:
                os.kill(self._pid, number)
        self._guard.wait(_STOP_SECONDS)


def _is_stopped(pid: int) -> bool:
    """Return whether every thread of the process is stopped. Without /proc the result is always True."""
    tasks = Path(f"/proc/{pid}/task")
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # a thread has ended, or ends while it is read
        states = {(task / "stat").read_text().rpartition(")")[2].split()[0] for task in tasks.iterdir()}
        return states <= {"T", "t", "Z", "X"}
    return not tasks.exists()

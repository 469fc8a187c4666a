"""Starts one process of an example, kills it with kill -9, starts it again, and stops it at the end.

The output of the process goes to a log file. If the process ends by itself, the error shows the end of that file.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parents[1]
_STOP_SECONDS = 60


class Ended(Exception):
    """A process ended by itself, or it ended with a failure when it was stopped."""


class Ship:
    """One service process, started again after each kill."""

    def __init__(self, name: str, command: list[str], environment: Mapping[str, str], log: Path) -> None:
        self.name = name
        self._command = [sys.executable, "-m", *command]
        self._environment = dict(environment)
        self._log = log
        self.start()

    def start(self) -> None:
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command, cwd=ROOT, env=self._environment, stdout=log, stderr=log, stdin=subprocess.DEVNULL
            )

    def must_run(self) -> None:
        code = self._process.poll()
        if code is not None:
            raise Ended(f"{self.name} ended with exit code {code}; the end of its log:\n{self.end_of_log()}")

    def kill(self) -> None:
        self._process.kill()
        self._process.wait(_STOP_SECONDS)

    def stop(self) -> None:
        """Send SIGTERM and wait. Raises `Ended` if the exit code shows a failure."""
        self._process.send_signal(signal.SIGTERM)
        code = self._process.wait(_STOP_SECONDS)
        if code not in (0, -signal.SIGTERM):  # uvicorn raises the signal again after its shutdown
            raise Ended(
                f"{self.name} was stopped, and ended with exit code {code}; the end of its log:\n{self.end_of_log()}"
            )

    def end_of_log(self) -> str:
        return "\n".join(self._log.read_text(errors="replace").splitlines()[-25:])

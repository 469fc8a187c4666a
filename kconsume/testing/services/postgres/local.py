"""A real PostgreSQL as a process on this machine, which tests may stop, kill, freeze and restart.

It listens on the loopback interface only, and accepts anyone without a password. PostgreSQL runs a process for each
connection, so all of its processes are killed or frozen together. It never outlives this process (`child_guard`).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path

from kconsume.errors import ServiceUnavailable
from kconsume.testing.services import server_account
from kconsume.testing.services.local_process import LocalProcess
from kconsume.testing.services.postgres import ready
from kconsume.testing.services.postgres.programs import find_programs, parts_of, place_in_copy

USER = "postgres"

SETTINGS = {
    "max_connections": "200",
    "shared_buffers": "64MB",
    # Without fsync a killed server loses nothing, because the kernel has the written data. A power cut would lose data.
    "fsync": "off",
    "full_page_writes": "off",
    "log_lock_waits": "on",  # helps to read the log of a test that hung
}

_GONE_SECONDS = 20
_CHECK_INTERVAL = 0.01
_IPC_RMID = 0

# When a server dies, its frozen child processes do not notice, and would never end. This script kills them.
_KILL_AFTER_SERVER = 'server=$1; shift; while [ -e "/proc/$server/exe" ]; do sleep 0.2; done; kill -9 "$@"'


class LocalPostgres(LocalProcess):
    """A server at `postgres.url`, started by `with LocalPostgres() as postgres:`.

    Args:
        folder: where the server keeps its data. They survive `stop`, `kill` and `restart`. Without it the server gets a
            temporary folder, which `close` removes.
        port: the port on 127.0.0.1. Without it a free one is reserved.
        overrides: server settings that replace those of the tests, by name.
    """

    name = "PostgreSQL"
    stop_signal = signal.SIGINT  # SIGTERM would wait until all clients have disconnected

    def __init__(
        self,
        *,
        folder: Path | None = None,
        port: int | None = None,
        overrides: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(folder=folder, port=port)
        self._overrides = dict(overrides or {})
        self._freeze_guard: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"postgresql://{USER}@{self.address}/{USER}"

    @property
    def data(self) -> Path:
        """The server's data directory."""
        return self.folder / "data"

    def stop(self) -> None:
        if self.running:
            self.thaw()
        super().stop()

    def kill(self) -> None:
        """Send SIGKILL to the server and to the process of every connection, so that none of them can clean up."""
        if not self.running:
            return
        os.kill(self.pid, signal.SIGSTOP)  # a stopped server starts no further child processes
        children = children_of(self.pid)
        super().kill()
        for child in children:
            _signal(child, signal.SIGKILL)
        _await_end(children)
        self._end_freeze_guard()

    def freeze(self) -> None:
        """Send SIGSTOP to all of its processes: connections stay open, and nothing is answered."""
        os.kill(self.pid, signal.SIGSTOP)
        children = children_of(self.pid)
        for child in children:
            _signal(child, signal.SIGSTOP)
        self._end_freeze_guard()
        self._freeze_guard = subprocess.Popen(
            ["/bin/sh", "-c", _KILL_AFTER_SERVER, "sh", str(self.pid), *map(str, children)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def thaw(self) -> None:
        """Send SIGCONT to all of its processes: a frozen server continues."""
        for process in [*children_of(self.pid), self.pid]:
            _signal(process, signal.SIGCONT)
        self._end_freeze_guard()

    def close(self) -> None:
        self.stop()
        if self.owns_folder:
            remove_shared_memory(self.data)
        super().close()

    def _answers(self, url: str) -> str | None:
        return ready.answers(url)

    def _command(self) -> list[str]:
        account = server_account.lesser_account()
        programs = find_programs()
        if account is not None:
            programs = self._reachable(programs)
        if not (self.data / "PG_VERSION").exists():
            self._make_data(programs, account)
        command = [str(programs / "postgres"), "-D", str(self.data), *self._options()]
        return command if account is None else account.command(command)

    def _options(self) -> list[str]:
        where = {"listen_addresses": "127.0.0.1", "port": str(self.port), "unix_socket_directories": ""}
        settings = {**SETTINGS, **where, **self._overrides}
        return [part for name, value in settings.items() for part in ("-c", f"{name}={value}")]

    def _reachable(self, programs: Path) -> Path:
        if server_account.can_reach(programs / "postgres"):
            return programs
        copy = self.folder / "programs"
        if not copy.exists():
            server_account.copy_for_all(parts_of(programs), copy)
        return copy / place_in_copy(programs)

    def _make_data(self, programs: Path, account: server_account.Account | None) -> None:
        self.data.mkdir(mode=0o700, parents=True, exist_ok=True)
        if account is not None:
            account.own(self.data)
        command = [str(programs / "initdb"), "-D", str(self.data), "-U", USER, "--auth=trust", "--no-sync"]
        command += ["--encoding=UTF8", "--locale=C"]
        done = subprocess.run(
            command,
            cwd="/",  # the account may have no access to this process's folder
            user=None if account is None else account.uid,
            group=None if account is None else account.gid,
            extra_groups=None if account is None else [],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            output = " | ".join((done.stdout + done.stderr).strip().splitlines()[-3:])
            raise ServiceUnavailable(f"PostgreSQL could not prepare its data in {self.data}: {output}")

    def _end_freeze_guard(self) -> None:
        if self._freeze_guard is not None:
            self._freeze_guard.kill()
            self._freeze_guard.wait()
            self._freeze_guard = None


def children_of(parent: int) -> list[int]:
    """Return the ids of the processes that a process has started."""
    return [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if _stat(pid)[1] == str(parent)]


def remove_shared_memory(data: Path) -> None:
    """Remove the small block of shared memory that a killed server leaves. The number of such blocks is limited."""
    lock = data / "postmaster.pid"
    if not lock.exists():
        return
    lines = lock.read_text().splitlines()
    if len(lines) > 6 and (block := lines[6].split()):
        ctypes.CDLL(None).shmctl(int(block[-1]), _IPC_RMID, None)


def _await_end(pids: list[int]) -> None:
    """Wait until the processes have ended, because the next server refuses the data while one of them runs."""
    deadline = time.monotonic() + _GONE_SECONDS
    while left := [pid for pid in pids if _stat(pid)[0] not in ("", "Z")]:
        if time.monotonic() > deadline:
            raise ServiceUnavailable(
                f"Processes {left} of the killed PostgreSQL still run after {_GONE_SECONDS} s; end them."
            )
        time.sleep(_CHECK_INTERVAL)


def _stat(pid: int) -> tuple[str, str]:
    """Return the state and the parent of a process; empty texts if it is gone. Its name, which may have any text, comes
    before the last parenthesis."""
    try:
        state, parent, *_ = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (OSError, ValueError):
        return "", ""
    return state, parent


def _signal(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)

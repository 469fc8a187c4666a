"""Which user a server runs as when the tests run as root and the server refuses to.

It is an account that every machine has; none is created, because two test runs that begin at once would both
try to, and because a machine's users are not a test's to change. For the same reason no folder on the way to a
file is opened for others: what the account cannot reach is copied to where it can.
"""

from __future__ import annotations

import os
import pwd
import shutil
import stat
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from kconsume.errors import ServiceUnavailable
from kconsume.testing.services import lowered

_NAMES = ("nobody", "daemon", "postgres")


@dataclass(frozen=True)
class Account:
    name: str
    uid: int
    gid: int

    def command(self, command: list[str]) -> list[str]:
        """The same command, run as this account; for a root process to start."""
        return [sys.executable, "-I", lowered.__file__, str(self.uid), str(self.gid), *command]

    def own(self, folder: Path) -> None:
        """Make `folder`, which must be where the account can reach it, the account's own."""
        if not can_reach(folder):
            raise ServiceUnavailable(
                f"As root the server runs as the user {self.name}, who cannot reach {folder}; choose a folder whose "
                "parents others may enter, such as one in /tmp."
            )
        os.chown(folder, self.uid, self.gid)


def lesser_account() -> Account | None:
    """None unless this process is root's, for then the server can run as the same user."""
    if os.geteuid() != 0:
        return None
    for name in _NAMES:
        try:
            found = pwd.getpwnam(name)
        except KeyError:
            continue
        return Account(name, found.pw_uid, found.pw_gid)
    raise ServiceUnavailable(
        f"The server refuses to run as root, and this machine has none of the users {', '.join(_NAMES)}; run the "
        "tests as another user."
    )


def can_reach(path: Path) -> bool:
    """Whether any user may enter every folder on the way to `path`."""
    return all(folder.stat().st_mode & stat.S_IXOTH for folder in path.resolve().parents)


def copy_for_all(trees: Mapping[Path, Path], into: Path) -> Path:
    """Copy folders to where others can reach them, each to its place below `into`, and let others read them."""
    for tree, place in trees.items():
        shutil.copytree(tree, into / place, dirs_exist_ok=True)
    for path in [into, *into.rglob("*")]:
        mode = path.stat().st_mode
        path.chmod(mode | stat.S_IROTH | (stat.S_IXOTH if mode & stat.S_IXUSR else 0))
    return into

"""The user account of a server that refuses to run as root, for tests that run as root.

The account is one that every machine has. No account is created: two test runs that begin at once would both try to
create it, and tests must not change the users of a machine. For the same reason the permissions of folders are not
changed: files that the account cannot reach are copied to a folder that it can reach.
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
from kconsume.testing.services import drop_privileges

_NAMES = ("nobody", "daemon", "postgres")


@dataclass(frozen=True)
class Account:
    """A user of this machine."""

    name: str
    uid: int
    gid: int

    def command(self, command: list[str]) -> list[str]:
        """Return the command that a root process starts to run `command` as this account."""
        return [sys.executable, "-I", drop_privileges.__file__, str(self.uid), str(self.gid), *command]

    def own(self, folder: Path) -> None:
        """Make the account the owner of `folder`. Raises ServiceUnavailable if the account cannot reach it."""
        if not can_reach(folder):
            raise ServiceUnavailable(
                f"As root the server runs as the user {self.name}, who cannot reach {folder}; choose a folder whose "
                "parents others may enter, such as one in /tmp."
            )
        os.chown(folder, self.uid, self.gid)


def lesser_account() -> Account | None:
    """Return the account for the server. None if this process is not root: then the server runs as the same user."""
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
    """Return whether any user may enter every folder on the path to `path`."""
    return all(folder.stat().st_mode & stat.S_IXOTH for folder in path.resolve().parents)


def copy_for_all(trees: Mapping[Path, Path], into: Path) -> Path:
    """Copy folders to where other users can read them.

    Args:
        trees: each folder, and the path of its copy below `into`.
        into: the folder with the copies. It is also returned.
    """
    for tree, place in trees.items():
        shutil.copytree(tree, into / place, dirs_exist_ok=True)
    for path in [into, *into.rglob("*")]:
        mode = path.stat().st_mode
        path.chmod(mode | stat.S_IROTH | (stat.S_IXOTH if mode & stat.S_IXUSR else 0))
    return into

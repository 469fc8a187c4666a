"""Become another user and then the command. A program of its own, for servers that refuse to run as root.

    python lowered.py UID GID COMMAND…

It stands between `leash.py` and the server, and becomes the server, so the leash holds the right process. The
process under test never changes its own user: that would hold for all its threads.

It runs as a file, not as a module: importing kconsume would cost a second and is not needed.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main(uid: int, gid: int, command: list[str]) -> None:
    leash = os.getppid()
    os.setgroups([])
    os.setgid(gid)
    os.setuid(uid)
    if sys.platform == "linux":
        # The leash has asked for this already, but Linux forgets it when a process changes its user.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != leash:  # it died in between
        sys.exit(1)
    os.execv(command[0], command)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])

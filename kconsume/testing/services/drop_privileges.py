"""Run a command as another user. This file is a program of its own, for servers that refuse to run as root.

    python drop_privileges.py UID GID COMMAND…

`child_guard.py` starts this program. This program changes its user and then executes the server in its own process, so
the guard's child is the server. The test process never changes its own user, because all its threads would change.

This program runs as a file, not as a module: importing kconsume would cost a second, and is not needed.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main(uid: int, gid: int, command: list[str]) -> None:
    guard = os.getppid()
    os.setgroups([])
    os.setgid(gid)
    os.setuid(uid)
    if sys.platform == "linux":
        # The guard has set this already, but Linux clears the setting when a process changes its user.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != guard:  # the guard died before the setting was made
        sys.exit(1)
    os.execv(command[0], command)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])

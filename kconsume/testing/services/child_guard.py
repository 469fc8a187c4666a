"""Run a command that must not outlive the process that started it. This file is a program of its own.

    python child_guard.py PARENT_PID FOLDER COMMAND…

Prints the command's process id, then waits. When the command ends, the guard ends. When the parent is gone, for any
reason (Ctrl-C, SIGTERM, kill -9, a crash), the guard kills the command, also if the command is frozen, and removes
FOLDER unless it is "-".

The guard is a process between the parent and the command, because the shorter solutions have faults:

- `atexit` and signal handlers do not run on kill -9 or on a crash in a C library, and handlers would change the
  signals of the program under test;
- `preexec_fn` forks Python in a process that has librdkafka's threads, which may deadlock;
- PR_SET_PDEATHSIG on the broker itself fires when the *thread* that started the broker ends, so a broker started from
  a worker thread would die with that thread;
- the end of a pipe is not seen while any forked child of the parent still holds the other end.

The guard watches its parent id, which has none of these faults. The guard has one thread for all its life, so
`preexec_fn` and PR_SET_PDEATHSIG are safe in the guard. With them the command ends if the guard dies by kill -9.

The guard runs as a file, not as a module: importing kconsume would cost a second, and the guard does not need it.
"""

from __future__ import annotations

import ctypes
import os
import select
import shutil
import signal
import subprocess
import sys

_CHECK_INTERVAL = 0.2
_PR_SET_PDEATHSIG = 1


def main(parent: int, folder: str, command: list[str]) -> int:
    child_ended = _child_end_pipe()
    # Standard output is the pipe to the parent. The command writes to the log, which is standard error.
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=sys.stderr, preexec_fn=_die_with_guard)
    os.write(sys.stdout.fileno(), b"%d\n" % child.pid)
    while os.getppid() == parent:
        if (code := child.poll()) is not None:
            return code
        if select.select([child_ended], [], [], _CHECK_INTERVAL)[0]:
            os.read(child_ended, 100)  # SIGCHLD also comes when the command is frozen, so the loop checks again
    child.kill()
    child.wait()
    if folder != "-":
        shutil.rmtree(folder, ignore_errors=True)
    return 1


def _child_end_pipe() -> int:
    """Return a file descriptor that becomes readable when a child has ended.

    `Popen.wait` with a timeout would check fifty times a second, and a test run has a dozen guards for half an hour.
    """
    ended, write = os.pipe()
    os.set_blocking(write, False)
    signal.set_wakeup_fd(write)
    signal.signal(signal.SIGCHLD, lambda *_: None)  # without a handler Python does not write to the pipe
    return ended


def _die_with_guard() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2], sys.argv[3:]))

"""Run a command that must not outlive the process that asked for it. A program of its own.

    python leash.py PARENT_PID FOLDER COMMAND…

Prints the command's process id, then waits. When the command ends, so does this. When the parent is
gone, in whatever way (Ctrl-C, SIGTERM, kill -9, a crash), the command is killed, also when it is frozen,
and FOLDER, unless it is "-", is removed.

Why a process between, and not one of the shorter ways:

- `atexit` and signal handlers do not run on kill -9 or on a crash in a C library, and handlers would
  change the signals of the program under test;
- `preexec_fn` forks Python in a process that has librdkafka's threads, which may deadlock;
- PR_SET_PDEATHSIG on the broker itself fires when the *thread* that started it ends, so a broker started
  from a worker thread would die with that thread;
- the end of a pipe is not seen while any forked child of the parent still holds the other end.

A changed parent id has none of these faults. This process has one thread for all its life, so here
PR_SET_PDEATHSIG and `preexec_fn` are safe, and they cover its own death by kill -9.

It runs as a file, not as a module: importing kconsume would cost a second and is not needed.
"""

from __future__ import annotations

import ctypes
import os
import select
import shutil
import signal
import subprocess
import sys

_LOOK_EVERY_SECONDS = 0.2
_PR_SET_PDEATHSIG = 1


def main(parent: int, folder: str, command: list[str]) -> int:
    ended = _end_of_children()
    # Standard output is the pipe to the parent; the command writes to the log, which is standard error.
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=sys.stderr, preexec_fn=_die_with_me)
    os.write(sys.stdout.fileno(), b"%d\n" % child.pid)
    while os.getppid() == parent:
        if (code := child.poll()) is not None:
            return code
        if select.select([ended], [], [], _LOOK_EVERY_SECONDS)[0]:
            os.read(ended, 100)  # also of a command that was frozen, and has not ended
    child.kill()
    child.wait()
    if folder != "-":
        shutil.rmtree(folder, ignore_errors=True)
    return 1


def _end_of_children() -> int:
    """What can be read from when a child has ended. `Popen.wait` with a timeout would look fifty times a second, and a
    run of tests has a dozen of these for half an hour."""
    ended, write = os.pipe()
    os.set_blocking(write, False)
    signal.set_wakeup_fd(write)
    signal.signal(signal.SIGCHLD, lambda *_: None)  # without a handler the wakeup is not written
    return ended


def _die_with_me() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2], sys.argv[3:]))

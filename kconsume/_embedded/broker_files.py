"""What a named broker and its clients share: a folder, the files of each name, and the messages on its socket.

The folder is `$XDG_RUNTIME_DIR/kconsume`, or `kconsume-UID` in the temporary folder. Only its owner may use it.
There is no other access control. For each name the folder has a socket, a file with the broker's process id, and its
log. All names share one lock.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from kconsume.errors import ConfigurationError, EmbeddedBrokerError

START_DEADLINE = 20
"""Seconds in which a new broker must be ready."""
LONGEST_LINE = 64 * 1024
"""The limit of a request or reply, in bytes."""

_NAME = re.compile(r"[a-z0-9-]{1,40}")
_SOCKET_PATH_LIMIT = 100  # the kernel's limit is 108 bytes on Linux, 104 on macOS


class About(msgspec.Struct, frozen=True):
    """A named broker.

    Attributes:
        name: the name in `embedded://NAME`.
        bootstrap: the address for clients.
        pid: the process id of the broker.
        started: when it started, in seconds since 1970.
    """

    name: str
    bootstrap: str
    pid: int
    started: float


class Request(msgspec.Struct):
    """One line to a broker.

    Attributes:
        call: "info", "stop", or one of `librdkafka.CONTROLS`.
        arguments: the arguments of the control.
        pid: the process that the request is for. None for any process that has the name.
    """

    call: str
    arguments: list[int | str | list[int]] = []
    pid: int | None = None


class Reply(msgspec.Struct):
    """One line from a broker.

    Attributes:
        about: the broker that replied.
        code: a Kafka error code, 0 for success.
        error: why the request failed, or an empty text.
    """

    about: About
    code: int = 0
    error: str = ""


def folder() -> Path:
    """Return the folder, and make it if it is missing. Raises EmbeddedBrokerError if other users can use it."""
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    if runtime and os.access(runtime, os.W_OK | os.X_OK):
        shared = Path(runtime, "kconsume")
    else:
        shared = Path(tempfile.gettempdir(), f"kconsume-{os.getuid()}")
    with contextlib.suppress(FileExistsError):
        shared.mkdir(mode=0o700)
    status = shared.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise EmbeddedBrokerError(
            f"{shared} must be a folder that only user {os.getuid()} can use, and is not: "
            "remove it, or set XDG_RUNTIME_DIR to a folder of yours"
        )
    return shared


def file_of(name: str, kind: str) -> Path:
    """Return the path of a broker's file.

    Args:
        name: the name of the broker.
        kind: "sock", "pid" or "log".
    """
    if not _NAME.fullmatch(name):
        raise ConfigurationError(f"{name!r} cannot name an embedded broker: use up to 40 of a-z, 0-9 and -")
    path = folder() / f"{name}.{kind}"
    if len(os.fsencode(path)) > _SOCKET_PATH_LIMIT:
        raise ConfigurationError(f"{path} is too long for a socket: set XDG_RUNTIME_DIR to a shorter folder")
    return path


def remove_files(name: str) -> None:
    """Remove the files of a name, the socket last: without a socket, the name is free for the next broker."""
    for kind in ("pid", "log", "sock"):
        file_of(name, kind).unlink(missing_ok=True)


@contextlib.contextmanager
def start_lock() -> Iterator[int]:
    """Hold the lock that only the starter of a broker has. Yields its file descriptor."""
    lock = os.open(folder() / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        deadline = time.monotonic() + 1.5 * START_DEADLINE
        while not _locked(lock):
            if time.monotonic() > deadline:
                raise EmbeddedBrokerError(
                    f"another process has been starting an embedded broker for {1.5 * START_DEADLINE:g} s: "
                    f"find it with `fuser {folder() / 'lock'}` and end it"
                )
            time.sleep(0.02)
        yield lock
    finally:
        os.close(lock)


def _locked(lock: int) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True

"""Ports that servers of the tests listen on.

Several processes start servers at the same time, and a server that is down for a moment must find its port again. So
a port is the process's own from when it is given until that process ends: it holds a lock on the byte with the port's
number, in a file that all of them know.
"""

from __future__ import annotations

import fcntl
import os
import random
import socket
import tempfile
from functools import cache
from pathlib import Path

from kconsume.errors import ServiceUnavailable

_ours: set[int] = set()


def free_port() -> int:
    """A free port outside the range that the kernel gives to outgoing connections; nobody is given it twice.

    Inside that range another connection could take the port while the server is down, and a client that
    tries the closed port again and again can even be connected to itself.
    """
    for port in random.sample(range(20_000, 32_000), k=200):
        if reserve(port):
            return port
    raise ServiceUnavailable("No free port between 20000 and 32000 on 127.0.0.1; end what listens there.")


def reserve(port: int) -> bool:
    """Whether the port is free, and now ours."""
    if port in _ours:
        return False  # a process is not kept out by its own locks
    try:
        fcntl.lockf(_register(), fcntl.LOCK_EX | fcntl.LOCK_NB, 1, port)
    except BlockingIOError:  # any other error is of the file, and says so
        return False
    _ours.add(port)
    return is_free(port)


@cache
def _register() -> int:
    """Never closed: that would give every lock back."""
    return os.open(Path(tempfile.gettempdir(), f"kconsume-ports-{os.getuid()}"), os.O_RDWR | os.O_CREAT, 0o600)


def is_free(port: int) -> bool:
    with socket.socket() as probe:
        # As the server will: a port whose last connections are in TIME_WAIT is free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True

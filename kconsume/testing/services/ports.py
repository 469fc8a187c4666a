"""Ports that servers of the tests listen on.

Several processes start servers at the same time, and a server that restarts must get its port again. So a port belongs
to the process that reserved it until that process ends. The process holds a lock on one byte of a file that all these
processes open: the byte at the position of the port's number.
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

_reserved: set[int] = set()


def free_port() -> int:
    """Reserve a free port outside the range that the kernel uses for outgoing connections. No port is reserved twice.

    Inside that range another connection could take the port while the server is down, and a client that repeatedly
    tries the closed port can even be connected to itself.
    """
    for port in random.sample(range(20_000, 32_000), k=200):
        if reserve(port):
            return port
    raise ServiceUnavailable("No free port between 20000 and 32000 on 127.0.0.1; end a process that listens there.")


def reserve(port: int) -> bool:
    """Reserve the port for this process. Return False if it is not free."""
    if port in _reserved:
        return False  # a lock does not exclude the process that holds it
    try:
        fcntl.lockf(_lock_file(), fcntl.LOCK_EX | fcntl.LOCK_NB, 1, port)
    except BlockingIOError:  # any other error is about the file, and is raised
        return False
    _reserved.add(port)
    return is_free(port)


@cache
def _lock_file() -> int:
    """The file with the locks. It is never closed, because closing it would release every lock."""
    return os.open(Path(tempfile.gettempdir(), f"kconsume-ports-{os.getuid()}"), os.O_RDWR | os.O_CREAT, 0o600)


def is_free(port: int) -> bool:
    """Return whether a server could listen on the port now."""
    with socket.socket() as probe:
        # The servers set this option too: a port whose last connections are in TIME_WAIT is free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True

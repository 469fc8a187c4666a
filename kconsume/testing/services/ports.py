"""Ports that servers of the tests listen on."""

from __future__ import annotations

import random
import socket

from kconsume.errors import ServiceUnavailable


def free_port() -> int:
    """A free port outside the range that the kernel gives to outgoing connections.

    Inside that range another connection could take the port while the server is down, and a client that
    tries the closed port again and again can even be connected to itself.
    """
    for port in random.sample(range(20_000, 32_000), k=200):
        if is_free(port):
            return port
    raise ServiceUnavailable("No free port between 20000 and 32000 on 127.0.0.1; end what listens there.")


def is_free(port: int) -> bool:
    with socket.socket() as probe:
        # As the server will: a port whose last connections are in TIME_WAIT is free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True

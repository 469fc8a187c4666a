"""Waits for a server that does not answer come to an end: whoever waits for too long has its connection cut.

A server, or a machine between, can take what is sent and never answer; the socket is then as alive as ever. One thread
looks after all connections that are in use. In statements of kconsume's own, silence is cut after `LIMIT`. In a
handler's transaction nobody knows how long its statements may take, so the server is asked over a second connection
whether it is there at all.

Only sockets are touched here, from outside: the thread that waits gets the error of a connection that was closed, in
whatever it does, sync or not. What that means is for `postgres_faults.py`.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import psycopg
from psycopg import pq

_log = logging.getLogger("kconsume.stores")

LIMIT = 30.0
ANSWER_WITHIN = 5.0
LOOK_EVERY = 1.0
_ARE_YOU_THERE = bytes.fromhex("0000000804d2162f")
"""SSLRequest: the one message that any server answers before it knows who is asking."""


@dataclass(slots=True)
class _Use:
    pgconn: pq.abc.PGconn
    address: str
    fd: int
    due: float
    ours: bool


class Watch:
    """Over the connections of this process that wait for an answer."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """In a process that was forked: it has neither the thread, nor any business with the sockets of its parent."""
        self._lock = threading.Lock()
        self._by_id: dict[int, _Use] = {}
        self._thread: threading.Thread | None = None

    @contextmanager
    def over(self, pgconn: pq.abc.PGconn, address: str, *, ours: bool) -> Iterator[None]:
        """`ours`: nothing but statements of kconsume's is sent in the block, which takes `LIMIT` at most."""
        use = _Use(pgconn, address, pgconn.socket, time.monotonic() + LIMIT, ours)
        with self._lock:
            self._by_id[id(use)] = use
            if self._thread is None:
                self._thread = threading.Thread(target=self._look, name="kconsume-postgres-watch", daemon=True)
                self._thread.start()
        try:
            yield
        finally:
            with self._lock:
                del self._by_id[id(use)]

    def _look(self) -> None:
        quiet = 0
        while quiet < 10:
            time.sleep(LOOK_EVERY)
            with self._lock:
                now = time.monotonic()
                due = [use for use in self._by_id.values() if use.due <= now]
                quiet = 0 if self._by_id else quiet + 1
                if quiet >= 10:
                    self._thread = None
            for use in due:
                self._judge(use)

    def _judge(self, use: _Use) -> None:
        if not use.ours and _answers(use.pgconn):
            use.due = time.monotonic() + LIMIT
            return
        with self._lock:  # under it, who has the connection does not give it back
            if id(use) in self._by_id and _has_still(use):
                use.due = float("inf")
                cut(use.fd)
                _log.warning("cut connection store=%s because nothing was answered for %g s", use.address, LIMIT)


def _has_still(use: _Use) -> bool:
    """Whether the number means that socket. A connection that broke by itself has let go of it."""
    try:
        return use.pgconn.socket == use.fd
    except psycopg.Error:
        return False


def _answers(pgconn: pq.abc.PGconn) -> bool:
    try:
        with _connected(pgconn) as probe:
            probe.sendall(_ARE_YOU_THERE)
            return bool(probe.recv(1))
    except (OSError, psycopg.Error):
        return False


def _connected(pgconn: pq.abc.PGconn) -> socket.socket:
    """To where the connection leads."""
    host, port = (pgconn.hostaddr or pgconn.host).decode(), int(pgconn.port or b"5432")
    if not host.startswith("/"):
        return socket.create_connection((host or "localhost", port), ANSWER_WITHIN)
    probe = socket.socket(socket.AF_UNIX)
    probe.settimeout(ANSWER_WITHIN)
    try:
        probe.connect(f"{host}/.s.PGSQL.{port}")
    except OSError:
        probe.close()
        raise
    return probe


def cut(fd: int) -> None:
    """The socket, and not the number, which belongs to the client's library."""
    with suppress(OSError), socket.socket(fileno=os.dup(fd)) as double:
        double.shutdown(socket.SHUT_RDWR)


watch = Watch()
os.register_at_fork(after_in_child=watch.forget)

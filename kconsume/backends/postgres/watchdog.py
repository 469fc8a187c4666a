"""Cuts connections on which a thread has waited too long, because the server does not answer.

A server, or a proxy in between, can accept data and never answer, while the socket stays open. One thread watches all
connections that are in use. For statements of kconsume, the connection is cut after `LIMIT` without an answer. A
handler's statements may take any time, so the watchdog first tests over a second connection whether the server answers
at all.

The watchdog only shuts sockets down. The waiting thread then gets the error of a closed connection, in blocking code
and in async code. `errors` decides what that error means.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import psycopg
from psycopg import pq

from kconsume._event_log import EventLog

_log = EventLog("stores")

LIMIT = 30.0
"""Seconds that a connection may wait without an answer."""
ANSWER_WITHIN = 5.0
"""Seconds in which a working server answers the probe."""
CHECK_EVERY = 1.0
_IDLE_ROUNDS = 10
"""The watchdog thread ends after this many checks without a connection in use."""
_SSL_REQUEST = bytes.fromhex("0000000804d2162f")
"""The only message that every server answers before a login."""


@dataclass(slots=True)
class _Use:
    """A connection in use. The watchdog checks it when the monotonic clock reaches `due`."""

    pgconn: pq.abc.PGconn
    address: str
    fd: int
    due: float
    own: bool


class Watchdog:
    """Watches the connections of this process that wait for an answer.

    `_lock` guards `_by_id` and `_thread`. While a thread holds `_lock`, no watched connection returns to its pool.
    """

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Forget all connections. A forked process has no watchdog thread, and must not touch its parent's sockets."""
        self._lock = threading.Lock()
        self._by_id: dict[int, _Use] = {}
        self._thread: threading.Thread | None = None

    @contextmanager
    def over(self, pgconn: pq.abc.PGconn, address: str, *, own: bool) -> Iterator[None]:
        """Watch a connection while the block runs.

        Args:
            pgconn: libpq's connection.
            address: the store's address, for the log.
            own: True if the block sends only statements of kconsume, none of which may take longer than `LIMIT`.
        """
        use = _Use(pgconn, address, pgconn.socket, time.monotonic() + LIMIT, own)
        with self._lock:
            self._by_id[id(use)] = use
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="kconsume-postgres-watch", daemon=True)
                self._thread.start()
        try:
            yield
        finally:
            with self._lock:
                del self._by_id[id(use)]

    def _run(self) -> None:
        idle_rounds = 0
        while idle_rounds < _IDLE_ROUNDS:
            time.sleep(CHECK_EVERY)
            with self._lock:
                now = time.monotonic()
                due = [use for use in self._by_id.values() if use.due <= now]
                idle_rounds = 0 if self._by_id else idle_rounds + 1
                if idle_rounds >= _IDLE_ROUNDS:
                    self._thread = None
            for use in due:
                self._check(use)

    def _check(self, use: _Use) -> None:
        if not use.own and _answers(use.pgconn):
            use.due = time.monotonic() + LIMIT
            return
        with self._lock:
            if id(use) in self._by_id and _has_same_socket(use):
                use.due = float("inf")
                cut(use.fd)
                _log.warning("connection cut", store=use.address, silent_s=LIMIT)


def _has_same_socket(use: _Use) -> bool:
    """False if the connection was already broken: then the descriptor's number may belong to another socket."""
    try:
        return use.pgconn.socket == use.fd
    except psycopg.Error:
        return False


def _answers(pgconn: pq.abc.PGconn) -> bool:
    try:
        with _probe_socket(pgconn) as probe:
            probe.sendall(_SSL_REQUEST)
            return bool(probe.recv(1))
    except (OSError, psycopg.Error):
        return False


def _probe_socket(pgconn: pq.abc.PGconn) -> socket.socket:
    """A second connection to the same server."""
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
    """Shut the socket down without closing the descriptor, which belongs to libpq."""
    with suppress(OSError), socket.socket(fileno=os.dup(fd)) as duplicate:
        duplicate.shutdown(socket.SHUT_RDWR)


watch = Watchdog()
os.register_at_fork(after_in_child=watch.forget)

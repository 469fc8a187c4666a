"""A proxy before a PostgreSQL that cuts connections at the one moment that matters: around a COMMIT.

It reads the frames of the wire protocol, because a COMMIT may stand behind other messages in one segment, and may be
text in a simple query or a statement that was prepared long before. What is not a COMMIT it passes on as it came.

The two kinds of cut look the same to the client, which is the point: after `BEFORE` nothing was committed, after
`AFTER` everything was. The client's connection ends only when the server has rolled back or has confirmed, so a test
that sees the error may look at once. Nothing that the server said after it got the COMMIT reaches the client.

Its threads are threads of the test. A call into a C library that waits and keeps the interpreter lock, such as
psycopg's bare `PGconn.get_result`, waits for ever through it; drivers' own waiting does not.
"""

from __future__ import annotations

import contextlib
import enum
import re
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import NamedTuple, Self
from urllib.parse import urlsplit

from kconsume.testing.services.ports import free_port

_CHUNK = 65_536
_SSL_REQUEST, _GSS_REQUEST, _CANCEL_REQUEST = 80877103, 80877104, 80877102
_ENDS_ROUND = (b"Q", b"S", b"F")  # the server answers each of these with one ReadyForQuery
_READY = b"Z"
_SYNC = b"S\0\0\0\x04"
_COMMENTS = re.compile(rb"\s+|/\*.*?\*/|--[^\n]*(?:\n|$)", re.DOTALL)
_COMMIT = re.compile(rb"(?:commit|end)(?:\s+(?:work|transaction))?(?:\s+and\s+(?:no\s+)?chain)?\s*$", re.IGNORECASE)


class Cut(enum.Enum):
    PASS = "pass"
    BEFORE = "the COMMIT never reaches the server"
    AFTER = "the COMMIT is done, its reply never reaches the client"


Decide = Callable[[int], Cut]
"""What becomes of the COMMIT with this number; the first one that the proxy sees is 1."""


class Frame(NamedTuple):
    kind: bytes
    body: bytes
    raw: bytes


def pass_all(number: int) -> Cut:
    return Cut.PASS


def is_commit(query: bytes) -> bool:
    """Whether one of the statements is a COMMIT. A semicolon inside a literal is taken for the end of a statement."""
    return any(_COMMIT.match(_without_opening_comments(statement)) for statement in query.rstrip(b"\0").split(b";"))


def _without_opening_comments(statement: bytes) -> bytes:
    start = 0
    while found := _COMMENTS.match(statement, start):
        start = found.end()
    return statement[start:]


class Statements:
    """Which Execute of one connection is a COMMIT: names of prepared statements and of portals are remembered."""

    def __init__(self) -> None:
        self._prepared: dict[bytes, bool] = {}
        self._portals: dict[bytes, bool] = {}

    def commits(self, frame: Frame) -> bool:
        """To be called with every frame of the client, in order."""
        if frame.kind == b"Q":
            return is_commit(frame.body)
        if frame.kind == b"P":
            name, query = frame.body.split(b"\0")[:2]
            self._prepared[name] = is_commit(query)
        elif frame.kind == b"B":
            portal, name = frame.body.split(b"\0", 2)[:2]
            self._portals[portal] = self._prepared.get(name, False)
        elif frame.kind == b"E":
            return self._portals.get(frame.body.split(b"\0", 1)[0], False)
        return False


class Rounds:
    """How many rounds a server has ended, read from its bytes as they come. The first is the opening of the session."""

    def __init__(self) -> None:
        self.ended = 0
        self._buffer = b""

    def read(self, data: bytes) -> None:
        self._buffer += data
        start = 0
        while len(self._buffer) >= start + 5:
            (length,) = struct.unpack_from("!I", self._buffer, start + 1)
            end = start + 1 + length
            if len(self._buffer) < end:
                break
            self.ended += self._buffer[start : start + 1] == _READY
            start = end
        self._buffer = self._buffer[start:]


class CuttingProxy:
    """`with CuttingProxy(postgres_url) as proxy:` and give `proxy.url` to the code under test.

    `decide` may be replaced at any time; `down()` ends all connections and refuses new ones until `up()`.
    """

    def __init__(self, url: str, decide: Decide = pass_all) -> None:
        self._behind = urlsplit(url)
        self.decide = decide
        self.commits = 0
        self.cut_before = 0
        self.cut_after = 0
        self._port = free_port()
        self._lock = threading.Lock()
        self._connections: set[_Connection] = set()
        self._listener: socket.socket | None = None
        self._listening: threading.Thread | None = None

    @property
    def url(self) -> str:
        """The URL that was given, by way of the proxy."""
        user, at, _ = self._behind.netloc.rpartition("@")
        return self._behind._replace(netloc=f"{user}{at}127.0.0.1:{self._port}").geturl()

    @property
    def target(self) -> tuple[str, int]:
        return self._behind.hostname or "127.0.0.1", self._behind.port or 5432

    def up(self) -> Self:
        """Listen; nothing happens if it does already."""
        if self._listener is None:
            self._listener = socket.create_server(("127.0.0.1", self._port), backlog=128)
            self._listening = threading.Thread(target=self._listen, args=(self._listener,), daemon=True)
            self._listening.start()
        return self

    def down(self) -> None:
        """As if the server were gone: connections end, new ones are refused."""
        if self._listener is None:
            return
        _hang_up(self._listener)
        assert self._listening is not None
        self._listening.join()
        self._listener = None
        self.drop_all()

    def drop_all(self) -> None:
        """End all connections; new ones are welcome."""
        with self._lock:
            connections = list(self._connections)
        for connection in connections:
            connection.drop()
        for connection in connections:
            connection.join()

    def __enter__(self) -> Self:
        return self.up()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.down()

    def judge(self) -> Cut:
        """Count one COMMIT and say what becomes of it."""
        with self._lock:
            self.commits += 1
            cut = self.decide(self.commits)
            self.cut_before += cut is Cut.BEFORE
            self.cut_after += cut is Cut.AFTER
        return cut

    def forget(self, connection: _Connection) -> None:
        with self._lock:
            self._connections.discard(connection)

    def _listen(self, listener: socket.socket) -> None:
        with listener:
            while True:
                try:
                    client, _ = listener.accept()
                except OSError:  # down()
                    return
                try:
                    server = socket.create_connection(self.target)
                except OSError:  # the server itself is down; the client sees its connection end
                    client.close()
                    continue
                connection = _Connection(self, client, server)
                with self._lock:
                    self._connections.add(connection)
                connection.start()


class _Connection:
    """Two threads, one a direction. Each reads one socket; only `drop` ends them."""

    def __init__(self, proxy: CuttingProxy, client: socket.socket, server: socket.socket) -> None:
        self._proxy = proxy
        self._client = client
        self._server = server
        self._statements = Statements()
        # Set before the COMMIT is sent on: the server cannot have answered it any earlier.
        self._muted = threading.Event()
        self._asked = 1  # rounds; the server ends a first one when the session is open
        self._awaited = 0
        self._answering = threading.Thread(target=self._pump, args=(self._from_server,), daemon=True)
        self._threads = [threading.Thread(target=self._pump, args=(self._from_client,), daemon=True), self._answering]
        self._open = len(self._threads)
        self._lock = threading.Lock()
        for end in (client, server):
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def drop(self) -> None:
        _hang_up(self._client)
        _hang_up(self._server)

    def join(self) -> None:
        for thread in self._threads:
            thread.join()

    def _pump(self, way: Callable[[], None]) -> None:
        with contextlib.suppress(OSError):  # either end went away: the other is to see the same
            way()
        self.drop()
        with self._lock:
            self._open -= 1
            last = self._open == 0
        if last:
            self._client.close()
            self._server.close()
            self._proxy.forget(self)

    def _from_client(self) -> None:
        received = _Received(self._client)
        if not self._open_session(received):
            return
        for frame in received.frames():
            cut = self._proxy.judge() if self._statements.commits(frame) else Cut.PASS
            if cut is not Cut.PASS:
                self._cut(cut, frame)
                return
            self._asked += frame.kind in _ENDS_ROUND
            self._server.sendall(frame.raw)

    def _cut(self, cut: Cut, commit: Frame) -> None:
        """Nothing more of the client is sent on, and its connection ends when the server is done with what was."""
        if cut is Cut.BEFORE:
            # Not both directions at once: that could take from the server what it has not read yet.
            self._server.shutdown(socket.SHUT_WR)
        else:
            self._awaited = self._asked + 1
            self._muted.set()
            self._server.sendall(commit.raw + (b"" if commit.kind in _ENDS_ROUND else _SYNC))
        self._answering.join()

    def _open_session(self, received: _Received) -> bool:
        """The messages before the session have no kind. Encryption is declined: nothing could be read through it."""
        while (opening := received.opening()) is not None:
            (code,) = struct.unpack_from("!I", opening, 4)
            if code not in (_SSL_REQUEST, _GSS_REQUEST):
                self._server.sendall(opening)
                return bool(code != _CANCEL_REQUEST)
            self._client.sendall(b"N")
        return False

    def _from_server(self) -> None:
        rounds = Rounds()
        while data := self._server.recv(_CHUNK):
            rounds.read(data)
            if not self._muted.is_set():
                self._client.sendall(data)
            elif rounds.ended >= self._awaited:
                return


class _Received:
    """The bytes of one socket, cut into messages."""

    def __init__(self, source: socket.socket) -> None:
        self._source = source
        self._buffer = b""

    def opening(self) -> bytes | None:
        if not self._fill(4):
            return None
        (length,) = struct.unpack_from("!I", self._buffer)
        return self._take(length) if self._fill(length) else None

    def frames(self) -> Iterator[Frame]:
        while self._fill(5):
            (length,) = struct.unpack_from("!I", self._buffer, 1)
            if not self._fill(1 + length):
                return
            raw = self._take(1 + length)
            yield Frame(raw[:1], raw[5:], raw)

    def _fill(self, size: int) -> bool:
        while len(self._buffer) < size:
            if not (data := self._source.recv(_CHUNK)):
                return False
            self._buffer += data
        return True

    def _take(self, size: int) -> bytes:
        taken, self._buffer = self._buffer[:size], self._buffer[size:]
        return taken


def _hang_up(end: socket.socket) -> None:
    """Wake the thread that reads it; `close` alone would not."""
    with contextlib.suppress(OSError):
        end.shutdown(socket.SHUT_RDWR)

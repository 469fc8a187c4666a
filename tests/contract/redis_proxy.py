"""A proxy before a Redis, that loses the line at the one moment that matters: around a script.

The two cuts look the same to the client, which is the point: after `BEFORE` nothing was applied, after `AFTER` all of
it was, and only the answer is lost.
"""

from __future__ import annotations

import contextlib
import enum
import socket
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Self

_CHUNK = 65_536


class Cut(enum.Enum):
    PASS = "everything goes through"
    BEFORE = "the script never reaches the server"
    AFTER = "the script is run, its answer never reaches the client"
    AWAY = "nobody is there"


class RedisProxy:
    """`with RedisProxy(port, marker) as proxy:`; `proxy.cut` decides about the next request that holds the marker, or
    `proxy.decide`, asked anew for each. `down()` ends all connections and refuses new ones until `up()`."""

    def __init__(self, port: int, marker: bytes) -> None:
        self.cut = Cut.PASS
        self.decide: Callable[[], Cut] = lambda: self.cut
        self.cut_before = 0
        self.cut_after = 0
        self.requests = 0
        """How often something was asked: what comes in pieces is one question until it is answered."""
        self._target = port
        self._marker = marker
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._open: list[socket.socket] = []
        self._lock = threading.Lock()

    @property
    def behind(self) -> str:
        """The address of the server itself."""
        return f"redis://127.0.0.1:{self._target}/0"

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self._listener.getsockname()[1]}/0?socket_timeout=5"

    def __enter__(self) -> Self:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.hang_up()

    @property
    def cuts(self) -> int:
        return self.cut_before + self.cut_after

    def down(self) -> None:
        """As if the server were gone."""
        self.cut = Cut.AWAY
        self.hang_up()

    def up(self) -> None:
        self.cut = Cut.PASS

    def hang_up(self) -> None:
        """End every connection that is open."""
        for each in self._open:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()
        self._open.clear()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            if self.cut is Cut.AWAY:
                client.close()
                continue
            try:
                server = socket.create_connection(("127.0.0.1", self._target))
            except OSError:  # the server itself is gone; the client sees its connection end
                client.close()
                continue
            self._open += [client, server]
            threading.Thread(target=self._serve, args=(client, server), daemon=True).start()

    def _serve(self, client: socket.socket, server: socket.socket) -> None:
        """Question, answer, question: redis-py does not send the next one before it has the answer."""
        with contextlib.suppress(OSError):
            answered = threading.Event()
            answered.set()
            answers = threading.Thread(target=self._pump, args=(server, client, answered), daemon=True)
            answers.start()
            while data := client.recv(_CHUNK):
                self.requests += answered.is_set()
                answered.clear()
                cut = self._judged(data)
                if cut is Cut.PASS:
                    server.sendall(data)
                    continue
                if cut is Cut.AFTER:
                    self._run_alone(data)
                break
        for each in (client, server):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def _judged(self, data: bytes) -> Cut:
        """What becomes of a request; counted."""
        if self._marker not in data:
            return Cut.PASS
        with self._lock:
            cut = self.decide()
            self.cut_before += cut is Cut.BEFORE
            self.cut_after += cut is Cut.AFTER
        return cut

    def _run_alone(self, data: bytes) -> None:
        """On a connection of its own, so that the answer cannot reach the client."""
        with socket.create_connection(("127.0.0.1", self._target)) as server:
            server.sendall(data)
            server.recv(_CHUNK)

    def _pump(self, source: socket.socket, sink: socket.socket, answered: threading.Event) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(_CHUNK):
                answered.set()  # before the client can ask again
                sink.sendall(data)

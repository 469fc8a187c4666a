"""A wire to a server, which is cut, or goes silent, in one direction or in both.

`cut` is a cable that is pulled out and noticed: connections end, new ones are refused. `silence` is one that nobody
notices: connections stay open, new ones are accepted, and nothing passes until `mend`. `hold_answers` lets questions
through, so that the server does what it was asked, and who asked learns of it when the answers are let go.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from types import TracebackType
from typing import Self
from urllib.parse import urlsplit

from kconsume.testing.services.ports import free_port

_CHUNK = 65_536
_LOOPBACK = "127.0.0.1"


class Wire:
    """`with Wire(server.port) as wire:` and give `wire.port`, or `wire.by_it(url)`, to the code under test.

    `target` may be changed: connections that are made from then on go there.
    """

    def __init__(self, target: int) -> None:
        self.target = target
        self.port = free_port()
        self._asks, self._answers = threading.Event(), threading.Event()
        self._lock = threading.Lock()
        self._ends: set[socket.socket] = set()
        self._listener: socket.socket | None = None

    def by_it(self, url: str) -> str:
        """The URL that was given, by way of the wire."""
        user, at, _ = urlsplit(url).netloc.rpartition("@")
        return urlsplit(url)._replace(netloc=f"{user}{at}{_LOOPBACK}:{self.port}").geturl()

    def cut(self) -> None:
        if self._listener is not None:
            _hang_up(self._listener)
            self._listener.close()
            self._listener = None
        with self._lock:
            ends = list(self._ends)
        for end in ends:
            _hang_up(end)
        self._pass_on()  # who waits there is to see that its connection is gone

    def silence(self) -> None:
        self._asks.clear()
        self._answers.clear()

    def hold_answers(self) -> None:
        self._answers.clear()

    def mend(self) -> None:
        """Whatever was done to it; what was held goes on its way."""
        self._pass_on()
        if self._listener is None:
            self._listener = socket.create_server((_LOOPBACK, self.port), backlog=128)
            threading.Thread(target=self._listen, args=(self._listener,), daemon=True).start()

    def __enter__(self) -> Self:
        self.mend()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cut()

    def _pass_on(self) -> None:
        self._asks.set()
        self._answers.set()

    def _listen(self, listener: socket.socket) -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:  # it was cut
                return
            try:
                server = socket.create_connection((_LOOPBACK, self.target))
            except OSError:  # the server itself is gone; the client sees its connection end
                client.close()
                continue
            for source, sink, gate in ((client, server, self._asks), (server, client, self._answers)):
                source.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                with self._lock:
                    self._ends.add(source)
                threading.Thread(target=self._pump, args=(source, sink, gate), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket, gate: threading.Event) -> None:
        with contextlib.suppress(OSError):  # either end went away: the other is to see the same
            while data := source.recv(_CHUNK):
                gate.wait()
                sink.sendall(data)
        _hang_up(sink)
        with self._lock:
            self._ends.discard(source)
        source.close()


def _hang_up(end: socket.socket) -> None:
    """Wake the thread that reads it; `close` alone would not."""
    with contextlib.suppress(OSError):
        end.shutdown(socket.SHUT_RDWR)

"""The process of a named broker: an `EmbeddedKafka`, and the socket on which other processes control it.

`named_broker` starts it as `python -m kconsume._embedded.broker_process`. Users do not run this command.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import selectors
import signal
import socket
import sys
import time
from collections.abc import Iterator, Sequence

import msgspec

from kconsume._embedded.broker_files import (
    LONGEST_LINE,
    START_DEADLINE,
    About,
    Reply,
    Request,
    file_of,
    remove_files,
)
from kconsume._embedded.mock_cluster import EmbeddedKafka
from kconsume.errors import EmbeddedBrokerError

_TICK = 5.0


class _ControlServer:
    """Serves the socket of one broker, one request at a time, until the broker has to end.

    Args:
        about: the description of the broker, sent with each reply.
        kafka: the broker.
        listener: the socket that clients connect to.
        idle: seconds without a Kafka request after which the broker ends.
    """

    def __init__(self, about: About, kafka: EmbeddedKafka, listener: socket.socket, idle: float) -> None:
        self._about = about
        self._kafka = kafka
        self._listener = listener
        self._idle = idle
        self._last_use = time.monotonic()
        self._stop_requested = False

    def serve(self, *ends: socket.socket | int) -> None:
        """Return when one of `ends` becomes readable, on a request to stop, or when no client uses the broker."""
        with selectors.DefaultSelector() as waiting:
            waiting.register(self._listener, selectors.EVENT_READ)
            for end in ends:
                waiting.register(end, selectors.EVENT_READ)
            while not self._stop_requested and not self._is_unused():
                ready = [key.fileobj for key, _ in waiting.select(min(_TICK, self._idle / 4))]
                if any(end in ready for end in ends):
                    return
                if self._listener in ready:
                    self._serve_one()

    def _is_unused(self) -> bool:
        if self._kafka.count_requests():
            self._last_use = time.monotonic()
        return time.monotonic() - self._last_use > self._idle

    def _serve_one(self) -> None:
        self._last_use = time.monotonic()
        connection, _ = self._listener.accept()
        connection.settimeout(1.0)
        try:
            with connection.makefile("rb") as received:
                reply = self._perform(received.readline(LONGEST_LINE))
            connection.sendall(msgspec.json.encode(reply) + b"\n")
        except OSError as error:
            print(f"request failed cause={error!r}", file=sys.stderr, flush=True)  # noqa: T201 - its log
        if self._stop_requested:
            connection.detach()  # only the end of the process closes the connection, and the client waits for that
        connection.close()

    def _perform(self, line: bytes) -> Reply:
        reply = Reply(self._about)
        try:
            request = msgspec.json.decode(line, type=Request)
            if request.pid not in (None, self._about.pid):
                return reply  # the request is for an earlier broker; the client sees that by the process id
            if request.call == "stop":
                self._stop_requested = True
            elif request.call != "info":
                reply.code = self._kafka.control(request.call, *request.arguments)
        except EmbeddedBrokerError as error:
            reply.error = str(error)
        except (msgspec.MsgspecError, ctypes.ArgumentError) as error:
            reply.error = f"the request could not be read: {error}"
        return reply


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the broker until it has to end. The starter reads "ready" from standard output."""
    parser = argparse.ArgumentParser(prog="python -m kconsume._embedded.broker_process", description=__doc__)
    parser.add_argument("name")
    parser.add_argument("--lock", type=int, required=True)
    parser.add_argument("--brokers", type=int, required=True)
    parser.add_argument("--idle", type=float, required=True)
    parser.add_argument("--until-stdin-closes", action="store_true")
    options = parser.parse_args(arguments)
    if os.fork():
        os._exit(0)  # the broker then has no living parent, and no starter has to wait for it
    signal.alarm(START_DEADLINE)  # a start that hangs must not hold the lock for ever
    os.chdir("/")
    with EmbeddedKafka(brokers=options.brokers) as kafka, _signals() as signals:
        about = About(options.name, kafka.bootstrap, os.getpid(), time.time())
        with _listening(options.name) as listener:
            _report_ready(options.lock)
            ends = [signals, sys.stdin.fileno()] if options.until_stdin_closes else [signals]
            _ControlServer(about, kafka, listener, options.idle).serve(*ends)


@contextlib.contextmanager
def _listening(name: str) -> Iterator[socket.socket]:
    file_of(name, "pid").write_text(str(os.getpid()))
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(file_of(name, "sock")))
        listener.listen(128)
        try:
            yield listener
        finally:
            remove_files(name)


@contextlib.contextmanager
def _signals() -> Iterator[socket.socket]:
    """Yield a socket that becomes readable when a signal asks this process to end."""
    signal.pthread_sigmask(signal.SIG_SETMASK, [])  # the thread that started this process may have blocked some signals
    readable, written = socket.socketpair()
    written.setblocking(False)
    signal.set_wakeup_fd(written.fileno())
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: None)
    with readable, written:
        yield readable
        signal.set_wakeup_fd(-1)


def _report_ready(lock: int) -> None:
    signal.alarm(0)
    with contextlib.suppress(BrokenPipeError):  # the starter was killed; other starters wait for the lock
        os.write(1, b"ready")
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), 1)  # the starter reads standard output until it is closed
    os.close(lock)


if __name__ == "__main__":
    main()

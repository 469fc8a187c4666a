"""Named embedded brokers: `embedded://NAME` is one process that all programs of this user share.

The life of a broker, from start to end. `attach(NAME)` sends a request to the broker's socket. If there is no answer,
`attach` takes the folder's lock, sends the request again, and starts `python -m kconsume._embedded.broker_process NAME`
with the open lock. That process leaves the session of its starter, listens, reports "ready" and only then releases the
lock. So each name has one broker, even if the starter is killed halfway. Other programs find the broker by its socket,
where each request and each reply is one line of JSON. The broker ends on request (`stop`, SIGTERM, SIGINT), together
with the process that started it (if `until_exit` is set), or after eight hours without a Kafka request. A broker
removes its files at its end. The next `attach` removes the files of a broker that was killed.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

import msgspec

from kconsume._embedded.broker_files import (
    LONGEST_LINE,
    START_DEADLINE,
    About,
    Reply,
    Request,
    file_of,
    folder,
    remove_files,
    start_lock,
)
from kconsume._embedded.controls import Argument, KafkaControls
from kconsume.errors import EmbeddedBrokerError

IDLE_SECONDS = 8 * 3600.0
"""How long a broker lives without a Kafka request, unless `attach` says otherwise."""

_REPLY_DEADLINE = 5.0


class _BrokerEnded(Exception):
    """The process that the request was for has ended."""


class NamedBroker(KafkaControls):
    """A broker in another process, found by its name, with all the controls of `EmbeddedKafka`."""

    def __init__(self, about: About) -> None:
        self.about = about

    @property
    def name(self) -> str:
        """The name in `embedded://NAME`."""
        return self.about.name

    @property
    def bootstrap(self) -> str:
        return self.about.bootstrap

    def stop(self) -> None:
        """End the process and wait until it has ended. Does nothing if it has ended already."""
        with contextlib.suppress(_BrokerEnded):
            _request(self.name, Request("stop", pid=self.about.pid), until_exit=True)

    def control(self, function: str, *arguments: Argument) -> int:
        sent = [a if isinstance(a, int | str) else list(a) for a in arguments]
        try:
            return _request(self.name, Request(function, sent, self.about.pid)).code
        except _BrokerEnded:
            raise EmbeddedBrokerError(
                f"embedded broker {self.name!r} (process {self.about.pid}) is gone: attach again for a new one"
            ) from None


def attach(name: str, *, brokers: int = 1, until_exit: bool = False, idle: float = IDLE_SECONDS) -> NamedBroker:
    """Return the broker of this name. If it is not running, it is started with these options.

    Args:
        name: up to 40 of a-z, 0-9 and -.
        brokers: how many brokers its cluster has.
        until_exit: True if the broker ends with this process and the processes forked from it.
        idle: seconds without a Kafka request after which the broker ends.
    """
    found = find(name)
    if found is not None:
        return found
    with start_lock() as lock:
        found = find(name)  # another process may have started the broker while this process waited
        if found is None:
            with _lifeline(until_exit) as stdin:
                _start(name, lock, stdin, ["--brokers", str(brokers), "--idle", str(idle)])
            found = find(name)
    if found is None:
        raise EmbeddedBrokerError(f"embedded broker {name!r} ended right after its start: {_end_of_log(name)}")
    return found


def find(name: str) -> NamedBroker | None:
    """Return the running broker of this name, or None."""
    try:
        return NamedBroker(_request(name, Request("info")).about)
    except _BrokerEnded:
        return None


def names() -> list[str]:
    """Return the names in use. A broker that was killed keeps its name until the next `attach`."""
    return sorted(path.stem for path in folder().glob("*.sock"))


def _request(name: str, request: Request, *, until_exit: bool = False) -> Reply:
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(_REPLY_DEADLINE)
            connection.connect(str(file_of(name, "sock")))
            connection.sendall(msgspec.json.encode(request) + b"\n")
            with connection.makefile("rb") as received:
                reply = _read_reply(received)
                if until_exit:
                    received.read()  # the broker's end of the connection stays open until its process has ended
    except (FileNotFoundError, ConnectionError):
        raise _BrokerEnded(name) from None
    except (TimeoutError, BlockingIOError):
        raise EmbeddedBrokerError(
            f"embedded broker {name!r} gave no answer in {_REPLY_DEADLINE:g} s: it is frozen or hangs; "
            f"`kill -9 {_pid(name)}` ends it"
        ) from None
    if request.pid not in (None, reply.about.pid):
        raise _BrokerEnded(name)
    if reply.error:
        raise EmbeddedBrokerError(reply.error)
    return reply


def _read_reply(received: BinaryIO) -> Reply:
    line = received.readline(LONGEST_LINE)
    if not line:
        raise ConnectionResetError  # the broker ended between the connection and the reply
    return msgspec.json.decode(line, type=Reply)


def _pid(name: str) -> str:
    with contextlib.suppress(FileNotFoundError):
        return file_of(name, "pid").read_text()
    return "PID"


@contextlib.contextmanager
def _lifeline(wanted: bool) -> Iterator[int]:
    """Yield the standard input of the new process. If wanted, it is a pipe that closes when this process ends.

    The new process does not watch a process id: that id may belong to a zombie, or later to another process.
    """
    if not wanted:
        yield subprocess.DEVNULL
        return
    theirs, ours = os.pipe()
    try:
        yield theirs
    except BaseException:
        os.close(ours)
        raise
    finally:
        os.close(theirs)


def _start(name: str, lock: int, stdin: int, options: Sequence[str]) -> None:
    remove_files(name)
    command = [sys.executable, "-P", "-m", "kconsume._embedded.broker_process", name, "--lock", str(lock), *options]
    if stdin != subprocess.DEVNULL:
        command.append("--until-stdin-closes")
    try:
        with file_of(name, "log").open("wb") as log:
            started = subprocess.run(
                command,
                stdin=stdin,
                stdout=subprocess.PIPE,
                stderr=log,
                env=_environment(),
                pass_fds=[lock],
                start_new_session=True,
                timeout=START_DEADLINE,
                check=False,
            )
    except subprocess.TimeoutExpired:
        raise EmbeddedBrokerError(
            f"embedded broker {name!r} was not ready in {START_DEADLINE} s: {_end_of_log(name)}"
        ) from None
    if started.stdout != b"ready":
        raise EmbeddedBrokerError(f"embedded broker {name!r} could not start: {_end_of_log(name)}")


def _environment() -> dict[str, str]:
    """Return this environment, with the path of the kconsume that this process runs."""
    package_path = str(Path(__file__).parents[2])
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), package_path]))}


def _end_of_log(name: str) -> str:
    log = file_of(name, "log")
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    return f"{lines[-1]} (the whole log is in {log})" if lines else f"it wrote nothing to {log}"

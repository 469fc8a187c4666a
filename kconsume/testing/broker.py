"""Named embedded brokers: `embedded://NAME` is one process that all of this user's programs share.

How it goes, from start to end. `attach(NAME)` asks the control socket; if nobody answers, it takes the
folder's lock, looks again, and starts `python -m kconsume.testing.broker NAME`, handing it the open lock.
That process leaves its starter's session, listens, says "ready" and only then lets go of the lock: so there
is one broker a name, even if the starter is killed halfway. Others find it by its socket, on which they send
one JSON line and get one back. It ends when told to (`stop`, SIGTERM, SIGINT), with the process that started
it if that was asked for (`until_exit`), or after eight hours without a Kafka request; it takes its files
with it. Files that a killed broker left behind are removed by the next `attach`.

The folder is `$XDG_RUNTIME_DIR/kconsume`, or `kconsume-UID` in the temporary folder; it must be its owner's
only, which is all the access control there is. Nothing here knows what a broker can do: a request names one
of `embedded.CONTROLS`.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import fcntl
import os
import re
import selectors
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

import msgspec

from kconsume.errors import ConfigurationError, EmbeddedBrokerError
from kconsume.testing.embedded import Argument, EmbeddedKafka, KafkaControls

_NAME = re.compile(r"[a-z0-9-]{1,40}")
_SOCKET_PATH_LIMIT = 100  # the kernel's is 108 bytes on Linux, 104 on macOS
_START_DEADLINE = 20
_ASK_DEADLINE = 5.0
_IDLE = 8 * 3600.0
_TICK = 5.0
_LONGEST_LINE = 64 * 1024


class About(msgspec.Struct, frozen=True):
    """Who a named broker is. `started` is in seconds since 1970."""

    name: str
    bootstrap: str
    pid: int
    started: float


class _Request(msgspec.Struct):
    call: str
    arguments: list[int | str | list[int]] = []
    pid: int | None = None


class _Reply(msgspec.Struct):
    about: About
    code: int = 0
    error: str = ""


class _Gone(Exception):
    """The process that was asked is no more."""


class NamedBroker(KafkaControls):
    """A broker in another process, found by its name. Everything `EmbeddedKafka` can do, it can."""

    def __init__(self, about: About) -> None:
        self.about = about

    @property
    def name(self) -> str:
        return self.about.name

    @property
    def bootstrap(self) -> str:
        return self.about.bootstrap

    def stop(self) -> None:
        """End the process and wait for its end. Does nothing if it has ended."""
        with contextlib.suppress(_Gone):
            _ask(self.name, _Request("stop", pid=self.about.pid), to_the_end=True)

    def _tell(self, function: str, *arguments: Argument) -> int:
        sent = [a if isinstance(a, int | str) else list(a) for a in arguments]
        try:
            return _ask(self.name, _Request(function, sent, self.about.pid)).code
        except _Gone:
            raise EmbeddedBrokerError(
                f"embedded broker {self.name!r} (process {self.about.pid}) is gone: attach again for a new one"
            ) from None


def attach(name: str, *, brokers: int = 1, until_exit: bool = False, idle: float = _IDLE) -> NamedBroker:
    """The broker of this name; started if it is not running.

    The options are for a broker that this call starts: how many brokers its cluster has, whether it ends
    with this process (and those forked from it), and after how many seconds without a Kafka request.
    """
    found = find(name)
    if found is not None:
        return found
    with _start_lock() as lock:
        found = find(name)  # another process may have started it while this one waited
        if found is None:
            with _lifeline(until_exit) as stdin:
                _start(name, lock, stdin, ["--brokers", str(brokers), "--idle", str(idle)])
            found = find(name)
    if found is None:
        raise EmbeddedBrokerError(f"embedded broker {name!r} ended right after its start: {_last_words(name)}")
    return found


def find(name: str) -> NamedBroker | None:
    """The running broker of this name, if there is one."""
    try:
        return NamedBroker(_ask(name, _Request("info")).about)
    except _Gone:
        return None


def names() -> list[str]:
    """The names in use; a broker that was killed keeps its name until somebody attaches."""
    return sorted(path.stem for path in _folder().glob("*.sock"))


# What the processes share: a folder, and four files.


def _folder() -> Path:
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    if runtime and os.access(runtime, os.W_OK | os.X_OK):
        folder = Path(runtime, "kconsume")
    else:
        folder = Path(tempfile.gettempdir(), f"kconsume-{os.getuid()}")
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise EmbeddedBrokerError(
            f"{folder} must be a folder that only user {os.getuid()} can use, and is not: "
            "remove it, or set XDG_RUNTIME_DIR to a folder of yours"
        )
    return folder


def _file(name: str, kind: str) -> Path:
    if not _NAME.fullmatch(name):
        raise ConfigurationError(f"{name!r} cannot name an embedded broker: use up to 40 of a-z, 0-9 and -")
    path = _folder() / f"{name}.{kind}"
    if len(os.fsencode(path)) > _SOCKET_PATH_LIMIT:
        raise ConfigurationError(f"{path} is too long for a socket: set XDG_RUNTIME_DIR to a shorter folder")
    return path


def _forget(name: str) -> None:
    """Remove the files of this name, the socket last: once it is gone, they are the next broker's."""
    for kind in ("pid", "log", "sock"):
        _file(name, kind).unlink(missing_ok=True)


@contextlib.contextmanager
def _start_lock() -> Iterator[int]:
    lock = os.open(_folder() / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        give_up = time.monotonic() + 1.5 * _START_DEADLINE
        while not _locked(lock):
            if time.monotonic() > give_up:
                raise EmbeddedBrokerError(
                    f"another process has been starting an embedded broker for {1.5 * _START_DEADLINE:g} s: "
                    f"find it with `fuser {_folder() / 'lock'}` and end it"
                )
            time.sleep(0.02)
        yield lock
    finally:
        os.close(lock)


def _locked(lock: int) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


# The asking side.


def _ask(name: str, request: _Request, *, to_the_end: bool = False) -> _Reply:
    try:
        with socket.socket(socket.AF_UNIX) as line:
            line.settimeout(_ASK_DEADLINE)
            line.connect(str(_file(name, "sock")))
            line.sendall(msgspec.json.encode(request) + b"\n")
            answer = line.makefile("rb")
            reply = _read_reply(answer)
            if to_the_end:
                answer.read()  # the process holds its end open until it is no more
    except (FileNotFoundError, ConnectionError):
        raise _Gone(name) from None
    except (TimeoutError, BlockingIOError):
        raise EmbeddedBrokerError(
            f"embedded broker {name!r} gave no answer in {_ASK_DEADLINE:g} s: it is frozen or hangs; "
            f"`kill -9 {_pid(name)}` ends it"
        ) from None
    if request.pid not in (None, reply.about.pid):
        raise _Gone(name)
    if reply.error:
        raise EmbeddedBrokerError(reply.error)
    return reply


def _read_reply(answer: BinaryIO) -> _Reply:
    line = answer.readline(_LONGEST_LINE)
    if not line:
        raise ConnectionResetError  # it ended between our connecting and its answering
    return msgspec.json.decode(line, type=_Reply)


def _pid(name: str) -> str:
    with contextlib.suppress(FileNotFoundError):
        return _file(name, "pid").read_text()
    return "PID"


@contextlib.contextmanager
def _lifeline(wanted: bool) -> Iterator[int]:
    """What the new process gets as stdin; when wanted, a pipe whose other end closes when this process ends.

    A pipe and not a process id to watch: an id can be a zombie's, or somebody else's by then.
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
    _forget(name)
    command = [sys.executable, "-P", "-m", "kconsume.testing.broker", name, "--lock", str(lock), *options]
    if stdin != subprocess.DEVNULL:
        command.append("--until-stdin-closes")
    try:
        with _file(name, "log").open("wb") as log:
            started = subprocess.run(
                command,
                stdin=stdin,
                stdout=subprocess.PIPE,
                stderr=log,
                env=_environment(),
                pass_fds=[lock],
                start_new_session=True,
                timeout=_START_DEADLINE,
                check=False,
            )
    except subprocess.TimeoutExpired:
        raise EmbeddedBrokerError(
            f"embedded broker {name!r} was not ready in {_START_DEADLINE} s: {_last_words(name)}"
        ) from None
    if started.stdout != b"ready":
        raise EmbeddedBrokerError(f"embedded broker {name!r} could not start: {_last_words(name)}")


def _environment() -> dict[str, str]:
    """This environment, in which the new process finds the kconsume that this one runs."""
    here = str(Path(__file__).parents[2])
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), here]))}


def _last_words(name: str) -> str:
    log = _file(name, "log")
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    return f"{lines[-1]} (all of it is in {log})" if lines else f"it said nothing in {log}"


# The broker's own process.


class _Desk:
    """Serves the control socket of one broker, a request at a time, until there is a reason to end."""

    def __init__(self, about: About, kafka: EmbeddedKafka, listener: socket.socket, idle: float) -> None:
        self._about = about
        self._kafka = kafka
        self._listener = listener
        self._idle = idle
        self._last_use = time.monotonic()
        self._asked_to_stop = False

    def serve(self, *ends: socket.socket | int) -> None:
        """Return when one of `ends` becomes readable, when asked to stop, or when nobody uses the broker."""
        with selectors.DefaultSelector() as waiting:
            waiting.register(self._listener, selectors.EVENT_READ)
            for end in ends:
                waiting.register(end, selectors.EVENT_READ)
            while not self._asked_to_stop and not self._unused():
                ready = [key.fileobj for key, _ in waiting.select(min(_TICK, self._idle / 4))]
                if any(end in ready for end in ends):
                    return
                if self._listener in ready:
                    self._answer()

    def _unused(self) -> bool:
        if self._kafka.count_requests():
            self._last_use = time.monotonic()
        return time.monotonic() - self._last_use > self._idle

    def _answer(self) -> None:
        self._last_use = time.monotonic()
        line, _ = self._listener.accept()
        line.settimeout(1.0)
        try:
            with line.makefile("rb") as sent:
                reply = self._perform(sent.readline(_LONGEST_LINE))
            line.sendall(msgspec.json.encode(reply) + b"\n")
        except OSError as error:
            print(f"a request was given up: {error!r}", file=sys.stderr, flush=True)  # noqa: T201 - its log
        if self._asked_to_stop:
            line.detach()  # only the end of the process closes it: that is what the asker waits for
        line.close()

    def _perform(self, sent: bytes) -> _Reply:
        reply = _Reply(self._about)
        try:
            request = msgspec.json.decode(sent, type=_Request)
            if request.pid not in (None, self._about.pid):
                return reply  # meant for a predecessor of ours; the asker sees that by our id
            if request.call == "stop":
                self._asked_to_stop = True
            elif request.call != "info":
                reply.code = self._kafka._tell(request.call, *request.arguments)
        except EmbeddedBrokerError as error:
            reply.error = str(error)
        except (msgspec.MsgspecError, ctypes.ArgumentError) as error:
            reply.error = f"the request was not understood: {error}"
        return reply


def main(arguments: Sequence[str] | None = None) -> None:
    """The process that `attach` starts; not to be called by hand."""
    parser = argparse.ArgumentParser(prog="python -m kconsume.testing.broker", description=__doc__)
    parser.add_argument("name")
    parser.add_argument("--lock", type=int, required=True)
    parser.add_argument("--brokers", type=int, default=1)
    parser.add_argument("--idle", type=float, default=_IDLE)
    parser.add_argument("--until-stdin-closes", action="store_true")
    options = parser.parse_args(arguments)
    if os.fork():
        os._exit(0)  # so the broker is nobody's child, and no starter has to wait for it
    signal.alarm(_START_DEADLINE)  # a start that hangs must not hold the lock for ever
    os.chdir("/")
    with EmbeddedKafka(brokers=options.brokers) as kafka, _signals() as signals:
        about = About(options.name, kafka.bootstrap, os.getpid(), time.time())
        with _listening(options.name) as listener:
            _announce(options.lock)
            ends = [signals, sys.stdin.fileno()] if options.until_stdin_closes else [signals]
            _Desk(about, kafka, listener, options.idle).serve(*ends)


@contextlib.contextmanager
def _listening(name: str) -> Iterator[socket.socket]:
    _file(name, "pid").write_text(str(os.getpid()))
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(_file(name, "sock")))
        listener.listen(128)
        try:
            yield listener
        finally:
            _forget(name)


@contextlib.contextmanager
def _signals() -> Iterator[socket.socket]:
    """A socket that becomes readable when this process is asked to end."""
    signal.pthread_sigmask(signal.SIG_SETMASK, [])  # the thread that started us may have blocked some
    heard, said = socket.socketpair()
    said.setblocking(False)
    signal.set_wakeup_fd(said.fileno())
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: None)
    with heard, said:
        yield heard
        signal.set_wakeup_fd(-1)


def _announce(lock: int) -> None:
    signal.alarm(0)
    with contextlib.suppress(BrokenPipeError):  # the starter was killed; others wait for the lock
        os.write(1, b"ready")
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), 1)  # the starter reads to the end of our output
    os.close(lock)


if __name__ == "__main__":
    main()

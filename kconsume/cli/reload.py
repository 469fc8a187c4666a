"""`kconsume run --reload`: runs the app in a child process, and restarts the child when a Python file changes.

The parent does not import the app. Code that cannot be imported ends the child only, and the parent starts a new child
at the next change. The child has a process group of its own, so that a Ctrl-C in the terminal reaches the parent only,
and the parent passes it on. If the child got the signal twice, it would end at once, without draining. If the parent is
killed, its end of a pipe closes, and the child drains.
"""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from kconsume._event_log import EventLog

_BUDGET = 27.0
"""Seconds that a child has to end: the default of `App(shutdown=)`, which is 25, and two more."""
_TICK = 0.25
_SHOWN = 3
_SKIPPED_FOLDERS = {"__pycache__", "node_modules", "site-packages"}
_SIGNALS = (signal.SIGINT, signal.SIGTERM)

_log = EventLog("reload")

Snapshot = Mapping[str, tuple[int, int]]
"""The modification time and the size of each file, by its path."""


def run_and_reload(app: str, options: Sequence[str]) -> int:
    """Run `kconsume run APP`, again after each change, until a signal. Returns the exit code of the last child.

    Args:
        options: further options for each child.
    """
    # -B writes no bytecode cache. Python compares the cache with its source by size and second of modification, so it
    # would run old code if a file was changed twice in one second.
    command = [sys.executable, "-B", "-m", "kconsume", "run", app, *options]
    return Reloader(command, folders(app.partition(":")[0])).run()


def follow(lifeline: int) -> None:
    """Called in the child. When the parent process ends, send this process SIGTERM, so that the app drains.

    Args:
        lifeline: the read end of a pipe whose other end only the parent has.
    """

    def watch() -> None:
        os.read(lifeline, 1)  # nothing is ever written: `read` returns when the parent's end closes
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, name="kconsume-lifeline", daemon=True).start()


class Reloader:
    """Runs a command, and runs it again when a Python file in these folders changes."""

    def __init__(self, command: Sequence[str], folders: Sequence[Path], *, budget: float = _BUDGET) -> None:
        self._command = command
        self._folders = folders
        self._budget = budget
        self._child: subprocess.Popen[bytes] | None = None
        self._restarting = False
        """True if the child was asked to end because of a change."""
        self._signals: list[int] = []

    def run(self) -> int:
        with self._passing_signals_on(), _pipe() as lifeline:
            while True:
                files = snapshot(self._folders)  # before the start, so that a change during the start is noticed
                child = self._start(lifeline)
                if changed := self._await_change(child, files):
                    _log.info("restarting app", files=_listed(changed))
                code = self._end(child)
                if self._signals:
                    return code

    def _start(self, lifeline: int) -> subprocess.Popen[bytes]:
        self._restarting = False
        child = self._child = subprocess.Popen(
            [*self._command, "--lifeline", str(lifeline)], pass_fds=[lifeline], process_group=0
        )
        if self._signals:  # the signal came before this child
            child.send_signal(self._signals[0])
        return child

    def _await_change(self, child: subprocess.Popen[bytes], files: Snapshot) -> list[str]:
        """The files that changed; empty if a signal came first."""
        reported = False
        while not self._signals:
            began = time.monotonic()
            changed = differences(files, snapshot(self._folders))
            if changed:
                return changed
            if not reported and child.poll() is not None:
                reported = True
                _log.info("app ended", exit_code=_exit_code(child), hint="the app starts again when a file changes")
            time.sleep(max(_TICK, 10 * (time.monotonic() - began)))  # scan for a tenth of the time at most
        return []

    def _end(self, child: subprocess.Popen[bytes]) -> int:
        if self._signals:
            child.wait()  # no timeout: the child has its own deadline, and gets further signals
            return _exit_code(child)
        self._restarting = True
        child.terminate()
        try:
            child.wait(self._budget)
        except subprocess.TimeoutExpired:
            _log.warning(
                "app killed", seconds=self._budget, cause="not drained", hint="records in flight are handled again"
            )
            child.kill()
            child.wait()
        return _exit_code(child)

    @contextmanager
    def _passing_signals_on(self) -> Iterator[None]:
        before = {number: signal.signal(number, self._pass_on) for number in _SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _pass_on(self, number: int, _: FrameType | None) -> None:
        self._signals.append(number)
        child = self._child
        if child is None:
            return
        if len(self._signals) > 2:
            child.kill()
        elif not (self._restarting and len(self._signals) == 1):  # already draining; a second signal would end it
            child.send_signal(number)


# The watched files


def folders(module: str) -> list[Path]:
    """The current folder, and the folder of the app's package if it is elsewhere and not in site-packages."""
    here = Path.cwd()
    if str(here) not in sys.path:
        sys.path.insert(0, str(here))
    try:
        found = importlib.util.find_spec(module.partition(".")[0])  # for a top-level name, this imports nothing
    except (ImportError, ValueError):
        found = None
    origin = None if found is None or found.origin is None else Path(found.origin)
    if origin is None or origin.is_relative_to(here) or not origin.exists() or "site-packages" in origin.parts:
        return [here]
    return [here, origin.parent]


def snapshot(folders: Sequence[Path]) -> Snapshot:
    """The Python files of these folders as they are now."""
    return {entry.path: state for folder in folders for entry, state in _python_files(str(folder))}


def differences(before: Snapshot, after: Snapshot) -> list[str]:
    """The files that were added, changed or removed, as relative paths."""
    return sorted({os.path.relpath(path) for path, _ in set(before.items()) ^ set(after.items())})


def _python_files(folder: str) -> Iterator[tuple[os.DirEntry[str], tuple[int, int]]]:
    try:
        entries = list(os.scandir(folder))
    except OSError:
        return  # the folder was removed, or this user may not read it
    if any(entry.name == "pyvenv.cfg" for entry in entries):
        return
    for entry in entries:
        try:
            if entry.is_dir():
                if not entry.name.startswith(".") and entry.name not in _SKIPPED_FOLDERS and not entry.is_symlink():
                    yield from _python_files(entry.path)
            elif entry.name.endswith(".py"):
                state = entry.stat()
                yield entry, (state.st_mtime_ns, state.st_size)
        except OSError:
            continue  # the file was removed meanwhile


def _listed(files: Sequence[str]) -> str:
    more = f" and {len(files) - _SHOWN} more" if len(files) > _SHOWN else ""
    return ",".join(files[:_SHOWN]) + more


def _exit_code(child: subprocess.Popen[bytes]) -> int:
    """The exit code as a shell shows it: 128+n for a child that signal n ended."""
    code = child.returncode
    return 128 - code if code < 0 else code


@contextmanager
def _pipe() -> Iterator[int]:
    """Yield the read end of a pipe. Only this process has the other end, so that end closes when this process ends."""
    reading, writing = os.pipe()
    try:
        yield reading
    finally:
        os.close(reading)
        os.close(writing)

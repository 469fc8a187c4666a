"""`kconsume run --reload`: the app in a child process, started again when a Python file changes.

The parent never imports the app, so that code which cannot be imported ends a child and not the watching. A child that
ends by itself is not started again until something changes. Signals are passed on one for one: the child is in a
process group of its own, because a Ctrl-C that came from the terminal as well as from here would be its second signal,
which leaves at once. A child whose parent was killed notices by the pipe between them, and drains.
"""

from __future__ import annotations

import importlib.util
import logging
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

_BUDGET = 27.0
"""Seconds for a child to drain: the 25 that an app takes unless it says otherwise, and two to end."""
_TICK = 0.25
_SHOWN = 3
_NOT_OURS = {"__pycache__", "node_modules", "site-packages"}
_SIGNALS = (signal.SIGINT, signal.SIGTERM)

_log = logging.getLogger("kconsume.reload")

Snapshot = Mapping[str, tuple[int, int]]
"""Each file with its time of change and its size."""


def run_and_reload(app: str, options: Sequence[str]) -> int:
    """Run `kconsume run APP` with these options until a signal ends it; the exit code of the last child."""
    # -B: Python tells a file from its cached bytecode by its size and the second of its change, and takes old code for
    # new when a file is changed twice in a second.
    command = [sys.executable, "-B", "-m", "kconsume", "run", app, *options]
    return Reloader(command, folders(app.partition(":")[0])).run()


def follow(lifeline: int) -> None:
    """In the child: drain when the parent is gone, as after a SIGTERM."""

    def watch() -> None:
        os.read(lifeline, 1)  # nothing is ever written: it returns when the other end is closed
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, name="kconsume-lifeline", daemon=True).start()


class Reloader:
    """Runs a command, and runs it again when a Python file in these folders changes."""

    def __init__(self, command: Sequence[str], folders: Sequence[Path], *, budget: float = _BUDGET) -> None:
        self._command = command
        self._folders = folders
        self._budget = budget
        self._child: subprocess.Popen[bytes] | None = None
        self._told = False
        """Whether the child was told to end because of a change."""
        self._signals: list[int] = []

    def run(self) -> int:
        with self._passing_signals_on(), _pipe() as lifeline:
            while True:
                files = snapshot(self._folders)  # before the start, so that no change falls between the two
                child = self._start(lifeline)
                if changed := self._await_change(child, files):
                    _log.info("changed files=%s, starting again", _listed(changed))
                code = self._end(child)
                if self._signals:
                    return code

    def _start(self, lifeline: int) -> subprocess.Popen[bytes]:
        self._told = False
        child = self._child = subprocess.Popen(
            [*self._command, "--lifeline", str(lifeline)], pass_fds=[lifeline], process_group=0
        )
        if self._signals:  # it came before there was a child to pass it on to
            child.send_signal(self._signals[0])
        return child

    def _await_change(self, child: subprocess.Popen[bytes], files: Snapshot) -> list[str]:
        """What has changed; empty if a signal came first."""
        reported = False
        while not self._signals:
            began = time.monotonic()
            changed = differences(files, snapshot(self._folders))
            if changed:
                return changed
            if not reported and child.poll() is not None:
                reported = True
                _log.info("ended exit_code=%d, waiting for a change", _exit_code(child))
            time.sleep(max(_TICK, 10 * (time.monotonic() - began)))  # looking takes a tenth of the time at most
        return []

    def _end(self, child: subprocess.Popen[bytes]) -> int:
        if self._signals:
            child.wait()  # its own deadline; further signals are passed on
            return _exit_code(child)
        self._told = True
        child.terminate()
        try:
            child.wait(self._budget)
        except subprocess.TimeoutExpired:
            _log.warning("killed after=%gs, it had not drained; the records in flight are handled again", self._budget)
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
        elif not (self._told and len(self._signals) == 1):  # it is draining already
            child.send_signal(number)


# What is watched


def folders(module: str) -> list[Path]:
    """This folder, and that of the app's package if it is elsewhere and not among those that were installed."""
    here = Path.cwd()
    if str(here) not in sys.path:
        sys.path.insert(0, str(here))
    try:
        found = importlib.util.find_spec(module.partition(".")[0])  # of a top-level name: imports nothing
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
    """The files that were added, changed or removed, as a person in this folder would write them."""
    return sorted({os.path.relpath(path) for path, _ in set(before.items()) ^ set(after.items())})


def _python_files(folder: str) -> Iterator[tuple[os.DirEntry[str], tuple[int, int]]]:
    try:
        entries = list(os.scandir(folder))
    except OSError:
        return  # it went away, or is not ours to read
    if any(entry.name == "pyvenv.cfg" for entry in entries):
        return
    for entry in entries:
        try:
            if entry.is_dir():
                if not entry.name.startswith(".") and entry.name not in _NOT_OURS and not entry.is_symlink():
                    yield from _python_files(entry.path)
            elif entry.name.endswith(".py"):
                state = entry.stat()
                yield entry, (state.st_mtime_ns, state.st_size)
        except OSError:
            continue  # it went away meanwhile


def _listed(files: Sequence[str]) -> str:
    more = f" and {len(files) - _SHOWN} more" if len(files) > _SHOWN else ""
    return ",".join(files[:_SHOWN]) + more


def _exit_code(child: subprocess.Popen[bytes]) -> int:
    """As a shell tells it: 128+n for a child that signal n ended."""
    code = child.returncode
    return 128 - code if code < 0 else code


@contextmanager
def _pipe() -> Iterator[int]:
    """The end to read from. The other is this process's alone, and closed by its end, however it comes."""
    reading, writing = os.pipe()
    try:
        yield reading
    finally:
        os.close(reading)
        os.close(writing)

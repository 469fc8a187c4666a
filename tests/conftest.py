"""What every test may use. Fixtures live in `fix_….py` files, one for each service."""

from __future__ import annotations

import signal
import sys
import threading
from pathlib import Path

import pytest
import pytest_timeout
from hypothesis import settings

# The importlib import mode puts nothing on the path; the plugins and helpers are modules of `tests`.
sys.path.insert(0, str(Path(__file__).parent.parent))

from tests.memory import prefer_memory
from tests.patience import Alarm, Patience

prefer_memory()

# No test asserts a time: several of them run at once, and each may have to wait for its turn.
# One at a time: several are told as a group of errors, and a control that expects one would not know it.
settings.register_profile("kconsume", deadline=None, report_multiple_bugs=False)
settings.load_profile("kconsume")

# In the background of a shell, a run ignores Ctrl-C, and so would the programs that it starts and interrupts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_timeout_set_timer(item: pytest.Item, settings: pytest_timeout.Settings) -> bool | None:
    """A test that hangs is ended, and one that gets no CPU goes on."""
    if settings.method != "signal" or threading.current_thread() is not threading.main_thread():
        return None
    alarm = Alarm(Patience(settings.timeout), lambda: pytest_timeout.timeout_sigalrm(item, settings))
    item.cancel_timeout = alarm.cancel  # type: ignore[attr-defined]
    return True


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Spark's first: they take longest, and one worker that has them all has one JVM, where several would share two
    cores among theirs. Then the files of all folders in turn: the tests of some folders wait and those of others
    compute, and side by side each have what the others leave."""
    folders: dict[Path, dict[Path, None]] = {}
    for item in items:
        folders.setdefault(item.path.parent, {})[item.path] = None
    turns = {file: (n + 0.5) / len(files) for files in folders.values() for n, file in enumerate(files)}
    items.sort(key=lambda item: ("spark" not in item.path.parts, turns[item.path], item.path))


pytest_plugins = ["tests.fix_kafka", "tests.fix_services", "tests.fix_arena", "tests.fix_spark"]

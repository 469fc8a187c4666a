"""From the start of a process to the first call of the handler, against a bare consumer's first message.

The two programs are `first_call.py` and `first_message.py`. Each does what a user's program would do, and imports
nothing else. The clock is CLOCK_MONOTONIC, which all processes of a machine share.
"""

from __future__ import annotations

import subprocess
import sys
import time

from benchmarks import bare
from benchmarks.case import Case, Measured, Task, Unit
from benchmarks.ratios import Bar

_WITHIN = 60.0


class Start(Case):
    name = "start"
    about = "process start to the first handler call, against a bare consumer's first message"
    bar = Bar(1.5, at_least=False)
    unit = Unit("{:.3f} s", cpu="{:.0f} ms", cpu_scale=1e3)
    names = ("kconsume", "bare consumer")

    def ours(self, task: Task) -> Measured:
        return _first("benchmarks.first_call", [task.bootstrap, task.group, task.topic])

    def theirs(self, task: Task) -> Measured:
        settings = bare.same_settings(task.bootstrap, task.group) | {"enable.partition.eof": False}
        return _first("benchmarks.first_message", [task.topic, *(f"{k}={v}" for k, v in settings.items())])


def _first(module: str, arguments: list[str]) -> Measured:
    """Run the program. At its first record it prints one line with the time and its CPU time."""
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments], capture_output=True, text=True, timeout=_WITHIN, check=False
    )
    if done.returncode != 0 or not done.stdout:
        raise AssertionError(f"{module} ended with exit code {done.returncode}: {done.stderr[-2000:]}")
    moment, cpu = map(float, done.stdout.splitlines()[0].split())
    return Measured(moment - began, cpu, 1)

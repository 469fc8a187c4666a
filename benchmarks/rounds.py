"""Paired rounds: both sides one after the other, each in a new process. The side that runs first alternates.

Does not compare figures with bars. If a side fails, hangs or has wrong counts, the whole run ends, because the round
has no valid ratio.
"""

from __future__ import annotations

import subprocess
import sys
import uuid
from collections.abc import Callable
from pathlib import Path

import msgspec

from benchmarks.case import Case, Measured, Side, Task

ROOT = Path(__file__).parent.parent
HANGS_AFTER = 300.0

RunSide = Callable[[Case, Side, Task], Measured]
Say = Callable[[str], None]


class SideFailed(Exception):
    """A side ended with an error. The message has the end of its output."""


class Round(msgspec.Struct, frozen=True):
    """The results of both sides in one round."""

    ours: Measured
    theirs: Measured

    @property
    def pair(self) -> tuple[float, float]:
        return self.ours.figure, self.theirs.figure


def play(case: Case, tasks: tuple[Task, Task], rounds: int, say: Say, run: RunSide | None = None) -> list[Round]:
    """Run all rounds. Returns them without the warm-up.

    The other side uses the transaction size that kconsume had in its last run, so kconsume runs first in the warm-up.
    """
    run = run or run_side
    ours, theirs = tasks
    played: list[Round] = []
    count = min(rounds, case.most_rounds or rounds)
    for number in range(0 if case.warm_up else 1, count + 1):
        one = _round(case, ours, theirs, order(number), run)
        theirs = msgspec.structs.replace(theirs, transaction=one.ours.transaction)
        say(_line(case, one, f"round {number}/{count}" if number else "warm-up, does not count"))
        if number:
            played.append(one)
    return played


def order(number: int) -> tuple[Side, Side]:
    """Return the order of the sides: kconsume is first in the warm-up (0) and in even rounds."""
    return ("theirs", "ours") if number % 2 else ("ours", "theirs")


def _round(case: Case, ours: Task, theirs: Task, sides: tuple[Side, Side], run: RunSide) -> Round:
    measured: dict[Side, Measured] = {}
    for side in sides:
        task = ours if side == "ours" else theirs
        if side == "theirs" and "ours" in measured:
            task = msgspec.structs.replace(task, transaction=measured["ours"].transaction)
        measured[side] = run(case, side, task)
    return Round(measured["ours"], measured["theirs"])


def run_side(case: Case, side: Side, task: Task) -> Measured:
    """Run one side in its own process, with its own consumer group."""
    fresh = msgspec.structs.replace(task, group=f"bench-{case.name}-{side}-{uuid.uuid4().hex[:12]}")
    command = [sys.executable, "-m", "benchmarks.side", case.name, side]
    try:
        done = subprocess.run(
            command, input=msgspec.json.encode(fresh), capture_output=True, timeout=HANGS_AFTER, check=False, cwd=ROOT
        )
    except subprocess.TimeoutExpired as late:
        raise SideFailed(f"{case.name}, {side}: did not end within {HANGS_AFTER:.0f} s; {_tail(late.stderr)}") from None
    if done.returncode != 0:
        raise SideFailed(f"{case.name}, {side}: exit code {done.returncode}; {_tail(done.stderr)}")
    return msgspec.json.decode(done.stdout.splitlines()[-1], type=Measured)


def _line(case: Case, one: Round, which: str) -> str:
    sides = zip(case.names, (one.ours, one.theirs), strict=True)
    figures = "  ".join(f"{name} {case.unit.figure(measured)}" for name, measured in sides)
    compared = case.bar.text(case.bar.compare(*one.pair))
    return f"{case.name:<17} {which}: {figures}  {'ours' if case.bar.unit else 'ratio'} {compared}"


def _tail(output: bytes | None) -> str:
    return "the end of its output:\n" + (output or b"(none)").decode(errors="replace")[-3000:]

"""One side of a case, alone in its process: `python -m benchmarks.side CASE ours|theirs`.

Reads the task as JSON from standard input, and prints the measurement as one line of JSON. `rounds.py` starts it.
Started by hand, it can run under a profiler.
"""

from __future__ import annotations

import sys

import msgspec

from benchmarks.case import Task
from benchmarks.cases import CASES


def main(name: str, side: str) -> None:
    task = msgspec.json.decode(sys.stdin.buffer.read(), type=Task)
    case = CASES[name]
    measured = case.ours(task) if side == "ours" else case.theirs(task)
    print(msgspec.json.encode(measured).decode())


if __name__ == "__main__":
    main(*sys.argv[1:])

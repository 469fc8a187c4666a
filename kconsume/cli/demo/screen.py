"""Prints the demo: its progress, and the table at its end.

On a terminal it updates one picture; elsewhere it prints a line for each step. Counts nothing.
"""

from __future__ import annotations

import shlex
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, Protocol

import msgspec
from rich.console import Console, Group
from rich.live import Live
from rich.padding import Padding
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from kconsume.cli.demo import app

_LINE_EVERY = 2.0


class ScreenLine(NamedTuple):
    """One consumer and its state."""

    name: str
    pid: int
    killed: bool
    partitions: Sequence[int]
    rows: int


class View(NamedTuple):
    """The state that is shown."""

    now: str
    sent: int
    total: int
    consumers: Sequence[ScreenLine]

    @property
    def rows(self) -> int:
        return sum(line.rows for line in self.consumers)


class Result(msgspec.Struct):
    """The counts of the demo, which `--json` prints."""

    produced: int
    """Records in the topic, by its end offsets."""
    handled: int
    """Records whose offsets are passed, in `kconsume_offsets`."""
    rows: int
    distinct: int
    lost: int
    duplicated: int
    seconds: float
    """From the first row to the last."""
    take_over: float | None
    """Seconds from the kill until the first row of a partition of the killed consumer."""
    by_consumer: dict[str, int]
    file: str
    complaints: list[str]

    @property
    def ok(self) -> bool:
        return not self.complaints


class Screen(Protocol):
    def show(self, view: View) -> None: ...


@contextmanager
def screen(console: Console) -> Iterator[Screen]:
    """A picture on a terminal, lines elsewhere."""
    if not console.is_terminal:
        yield _ScreenLines(console)
        return
    with Live(console=console, auto_refresh=False) as live:
        yield _Picture(live)


class _Picture:
    def __init__(self, live: Live) -> None:
        self._live = live

    def show(self, view: View) -> None:
        self._live.update(_picture(view), refresh=True)


class _ScreenLines:
    def __init__(self, console: Console) -> None:
        self._console = console
        self._last = ""
        self._next = 0.0

    def show(self, view: View) -> None:
        if view.now == self._last and time.monotonic() < self._next:
            return
        self._last, self._next = view.now, time.monotonic() + _LINE_EVERY
        consumers = "  ".join(f"{line.name}: {_state(line)}, {line.rows:,} rows" for line in view.consumers)
        self._console.print(f"{view.now}\n    produced {view.sent:,} of {view.total:,}  {consumers}", soft_wrap=True)


def _picture(view: View) -> Group:
    bars = Table.grid(padding=(0, 2))
    for name, count in (("produced", view.sent), ("rows", view.rows)):
        bars.add_row(name, ProgressBar(view.total, count, width=40), f"{count:,} of {view.total:,}")
    consumers = Table.grid(padding=(0, 2))
    for line in view.consumers:
        style = "red" if line.killed else ""
        consumers.add_row(line.name, f"process {line.pid}", _state(line), f"{line.rows:,} rows", style=style)
    return Group(
        Text("kconsume demo", "bold"),
        Padding(bars, (1, 2, 0, 2)),
        Padding(consumers, (1, 2, 1, 2)),
        Text(f"▶ {view.now}", "bold"),
    )


def _state(line: ScreenLine) -> str:
    if line.killed:
        return "killed"
    return f"partitions {' '.join(map(str, line.partitions))}" if line.partitions else "joining the group"


# The end


def show_result(console: Console, result: Result) -> None:
    """Print the counts, and commands with which a user can check them."""
    console.print()
    console.print(Padding(_table(result), (0, 0, 0, 2)))
    console.print()
    if result.ok:
        console.print(Text("One consumer was killed in mid-stream: nothing was lost, nothing was done twice.", "green"))
    for complaint in result.complaints:
        console.print(Text(f"✗ {complaint}", "bold red"))
    console.print(_check_it_yourself(result), soft_wrap=True)


def _table(result: Result) -> Table:
    table = Table.grid(padding=(0, 3))
    table.add_column()
    table.add_column(justify="right")
    table.add_column(style="dim")
    good = "green" if result.ok else ""
    table.add_row("produced", f"{result.produced:,}", "the end offsets of the topic, from the broker")
    table.add_row("handled", f"{result.handled:,}", "offsets passed: sum(next_offset) in kconsume_offsets")
    table.add_row("rows", f"{result.rows:,}", f"count(*) in orders: {_by_consumer(result)}")
    table.add_row("distinct", f"{result.distinct:,}", "count(distinct id) in orders")
    table.add_row("lost", Text(f"{result.lost:,}", f"bold {good}"), "produced - distinct")
    table.add_row("duplicated", Text(f"{result.duplicated:,}", f"bold {good}"), "rows - distinct")
    if result.seconds:
        pace = f"over {result.seconds:.1f} s; the producer sets the pace"
        table.add_row("records/s", f"{result.rows / result.seconds:,.0f}", pace)
    if result.take_over is not None:
        until = "from kill -9 until the first new row of a partition of the killed consumer"
        table.add_row("take-over", f"{result.take_over:.1f} s", until)
    return table


def _by_consumer(result: Result) -> str:
    return ", ".join(f"{rows:,} by {name}" for name, rows in sorted(result.by_consumer.items()))


def _check_it_yourself(result: Result) -> Text:
    queries = (
        "select consumer, partition, count(*), count(distinct id) from orders group by 1, 2",
        "select partition, next_offset, epoch, owner from kconsume_offsets",
    )
    commands = "\n".join(f"  {_command(result.file, query)}" for query in queries)
    return Text.assemble(
        "\nRows and offsets are in one file, written in one transaction. Check it yourself:\n",
        (commands, "bold"),
        f"\nThe whole code of the consumer: {app.__file__}",
    )


def _command(file: str, query: str) -> str:
    if shutil.which("sqlite3"):
        return f'sqlite3 {shlex.quote(file)} "{query}"'
    python = Path(sys.executable).name
    return f"{python} -c \"import sqlite3; print(*sqlite3.connect('{file}').execute('{query}'), sep='\\n')\""

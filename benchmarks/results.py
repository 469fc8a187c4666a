"""The results of a run: the table for users, the file for programs, and whether every bar was met."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from statistics import median

import msgspec
from confluent_kafka import libversion
from rich import box
from rich.table import Table
from rich.text import Text

from benchmarks.case import Case, Measured
from benchmarks.ratios import Spread, spread
from benchmarks.rounds import Round
from kconsume import __version__


class Result:
    """The result of one case."""

    def __init__(self, case: Case, rounds: Sequence[Round]) -> None:
        self.case = case
        self.rounds = list(rounds)
        self.compared: Spread = spread([one.pair for one in rounds], case.bar)

    @property
    def met(self) -> bool:
        return self.case.bar.met_by(self.compared.median)

    @property
    def clear(self) -> bool:
        """True if every round is on the same side of the bar as the median."""
        return all(self.case.bar.met_by(round) is self.met for round in (self.compared.low, self.compared.high))

    @property
    def verdict(self) -> str:
        return ("met" if self.met else "MISSED") + ("" if self.clear else "\nunclear")

    @property
    def middle(self) -> tuple[Measured, Measured]:
        """The median figure and the median CPU time of each side, for the table. Not for comparison."""
        return _middle([one.ours for one in self.rounds]), _middle([one.theirs for one in self.rounds])


class Written(msgspec.Struct, frozen=True):
    """The result of one case, as it is written to the file."""

    case: str
    about: str
    sides: tuple[str, str]
    bar: str
    met: bool
    compared: Spread
    """Ratios, or differences if the bar is a difference."""
    rounds: list[Round]


class Run(msgspec.Struct, frozen=True):
    """The content of the file: the results, and the machine on which they were measured."""

    kconsume: str
    python: str
    confluent_kafka: str
    librdkafka: str
    machine: str
    cores: int
    broker: str
    records: int
    results: list[Written]


def table(results: Sequence[Result]) -> Table:
    """Return the table, with one line for each side of a case."""
    shown = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for column in ("case", "side", "figure", "CPU/record", "ratio", "bar", "verdict"):
        numbers = column in ("figure", "CPU/record", "ratio", "bar")
        shown.add_column(column, justify="right" if numbers else "left", no_wrap=True)
    for result in results:
        case, both = result.case, result.middle
        compared = result.compared
        shown.add_row(
            case.name,
            "\n".join(case.names),
            "\n".join(map(case.unit.figure, both)),
            "\n".join(map(case.unit.cost, both)),
            f"{case.bar.text(compared.median)}\n{case.bar.range(compared.low, compared.high)}",
            str(case.bar),
            Text(result.verdict, style="green" if result.met else "bold red"),
            end_section=True,
        )
    return shown


def write(path: Path, results: Sequence[Result], broker: str, records: int) -> None:
    run = Run(
        kconsume=__version__,
        python=platform.python_version(),
        confluent_kafka=version("confluent-kafka"),
        librdkafka=libversion()[0],
        machine=f"{sys.platform} {platform.machine()}",
        cores=len(os.sched_getaffinity(0)),
        broker=broker,
        records=records,
        results=[
            Written(r.case.name, r.case.about, r.case.names, str(r.case.bar), r.met, r.compared, r.rounds)
            for r in results
        ],
    )  # fmt: skip
    path.write_bytes(msgspec.json.format(msgspec.json.encode(run)) + b"\n")


def _middle(measured: Sequence[Measured]) -> Measured:
    return Measured(
        figure=median(one.figure for one in measured), cpu=median(one.cpu / one.records for one in measured), records=1
    )

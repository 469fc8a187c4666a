"""All cases, in the order of the table. A case that is not here is not run."""

from benchmarks.case import Case
from benchmarks.cases.batch import Batch
from benchmarks.cases.coroutine import Async
from benchmarks.cases.memory import Memory
from benchmarks.cases.noop import Defaults, Inline, Thread
from benchmarks.cases.resource import Resource
from benchmarks.cases.sqlite import Sqlite
from benchmarks.cases.start import Start
from benchmarks.cases.table import Table
from benchmarks.cases.typed import Typed

_ALL: tuple[Case, ...] = (
    Inline(), Thread(), Defaults(), Typed(), Batch(), Async(), Resource(), Table(), Sqlite(), Memory(), Start(),
)  # fmt: skip

CASES: dict[str, Case] = {case.name: case for case in _ALL}

__all__ = ["CASES"]

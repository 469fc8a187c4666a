"""All cases, in the order of the table. A case that is not here is not run."""

from benchmarks.case import Case
from benchmarks.cases.memory import Memory
from benchmarks.cases.noop import Defaults, Inline, Thread
from benchmarks.cases.sqlite import Sqlite
from benchmarks.cases.start import Start
from benchmarks.cases.typed import Typed

CASES: dict[str, Case] = {
    case.name: case for case in (Inline(), Thread(), Defaults(), Typed(), Sqlite(), Memory(), Start())
}

__all__ = ["CASES"]

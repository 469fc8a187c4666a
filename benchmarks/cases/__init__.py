"""All cases, in the order of the table. A case that is not in this list is not run."""

from benchmarks.case import Case
from benchmarks.cases.batch import Batch
from benchmarks.cases.coroutine import Async
from benchmarks.cases.failures import DeadLetters, Policies
from benchmarks.cases.memory import Memory
from benchmarks.cases.noop import Defaults, Inline, Thread
from benchmarks.cases.postgres import Postgres, PostgresCopy, PostgresLoop, PostgresOutbox, PostgresPipeline
from benchmarks.cases.redis import Redis
from benchmarks.cases.resource import Resource
from benchmarks.cases.spark_sink import SparkSink
from benchmarks.cases.spark_stream import SparkForeach, SparkLedger, SparkStream
from benchmarks.cases.sqlite import Sqlite
from benchmarks.cases.start import Start
from benchmarks.cases.table import Table
from benchmarks.cases.typed import Typed

_ALL: tuple[Case, ...] = (
    Inline(), Thread(), Defaults(), Typed(), Batch(), Async(), Resource(), Table(), Policies(), DeadLetters(), Sqlite(),
    Postgres(), PostgresPipeline(), PostgresCopy(), PostgresLoop(), PostgresOutbox(),
    Redis(), SparkSink(), SparkForeach(), SparkStream(), SparkLedger(), Memory(), Start(),
)  # fmt: skip

CASES: dict[str, Case] = {case.name: case for case in _ALL}

__all__ = ["CASES"]

"""Exactly once in SQLite, one insert for each record, against the same inserts in plain sqlite3 without Kafka.

The plain side has its values in memory, one connection, and no offsets. Its transactions have the size of kconsume's
transactions: a trigger on kconsume's offset row stores the size of each transaction. This costs only kconsume's side:
one more insert for each transaction.
"""

from __future__ import annotations

import sqlite3
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import msgspec

from benchmarks import orders
from benchmarks.case import Case, Measured, Task, Topics
from benchmarks.consumed import catch_up, rate
from benchmarks.marks import INSERT, insert
from benchmarks.orders import MARKS, PARTITIONS
from benchmarks.ratios import Bar
from kconsume import App
from kconsume.backends import open_store

_EFFECTS = "create table effects (value blob not null)"
_WITNESS = """
create table transactions (size integer not null);
create trigger witness after update of next_offset on kconsume_offsets
begin insert into transactions values (new.next_offset - old.next_offset); end;
"""


class Sqlite(Case):
    name = "sqlite"
    about = "exactly once in SQLite, one insert a record, against the same transactions in plain sqlite3"
    bar = Bar(0.75)
    names = ("kconsume", "plain sqlite3")

    def tasks(self, topics: Topics, records: int) -> tuple[Task, Task]:
        task = topics.orders(records * 3 // 10)
        return task, task

    def ours(self, task: Task) -> Measured:
        with _database() as path:
            address = f"sqlite:///{path}"
            _prepare_ours(address, path)
            app = App(task.bootstrap, group=task.group, offsets=address)
            app.consume(task.topic)(insert)
            catch_up(app, task)
            measured = rate(task, _effects(path), _between_marks(path))
            return msgspec.structs.replace(measured, transaction=_mean_transaction(path))

    def theirs(self, task: Task) -> Measured:
        assert task.transaction is not None  # known, because kconsume's side runs first in the warm-up
        values = [(v,) for p in range(PARTITIONS) for v in orders.values(p, task.records, "bytes")]
        with _database() as path:
            with closing(_connect(path)) as connection:
                connection.execute(_EFFECTS)
                wall, cpu = time.perf_counter(), time.process_time()
                _insert_all(connection, values, task.transaction)
                seconds, spent = time.perf_counter() - wall, time.process_time() - cpu
            count = _effects(path)
            assert count == len(values) == orders.total(task.records)
            return Measured(count / seconds, spent, count, task.transaction)


def _insert_all(connection: sqlite3.Connection, values: list[tuple[bytes]], size: int) -> None:
    for first in range(0, len(values), size):
        connection.execute("begin immediate")
        for value in values[first : first + size]:
            connection.execute(INSERT, value)
        connection.execute("commit")


@contextmanager
def _database() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="kconsume-bench-") as folder:
        yield Path(folder, "shop.db")


def _connect(path: Path) -> sqlite3.Connection:
    """Connect with the settings of kconsume's own connections."""
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute("pragma journal_mode = wal")
    connection.execute("pragma synchronous = normal")
    return connection


def _prepare_ours(address: str, path: Path) -> None:
    store = open_store(address)
    store.groups()  # creates kconsume's tables
    store.close()
    with closing(_connect(path)) as connection:
        connection.execute(_EFFECTS)
        connection.executescript(_WITNESS)


def _effects(path: Path) -> int:
    """Return the number of rows. Raises if a value was written twice. Only the marks have equal values."""
    with closing(_connect(path)) as connection:
        rows, distinct = connection.execute("select count(*), count(distinct value) from effects").fetchone()
    if rows - MARKS != distinct - 1:
        raise AssertionError(f"{rows} rows with {distinct} distinct values: a record had its effect twice")
    return int(rows)


def _between_marks(path: Path) -> int:
    """Return how many records were handled between the marks. SQLite has one writer, so rowids show the order."""
    with closing(_connect(path)) as connection:
        (count,) = connection.execute("select max(rowid) - min(rowid) from effects where length(value) = 0").fetchone()
    return int(count)


def _mean_transaction(path: Path) -> int:
    with closing(_connect(path)) as connection:
        (mean,) = connection.execute("select avg(size) from transactions").fetchone()
    return max(1, int(mean))

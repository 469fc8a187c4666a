"""Tasks of a stream that go wrong in executors: run twice at once, or dead after their COMMIT. Executors import it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import psycopg
import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql import DataFrame, Row

from kconsume.spark import for_each_partition
from tests.spark.shop import texts, write

Task = Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]

_TOGETHER = 60.0
"""Seconds that a task waits for its twin to be as far as it is."""


class Frame:
    """A frame whose tasks go wrong."""

    def __init__(self, df: DataFrame) -> None:
        self._df = df

    def __getattr__(self, name: str) -> Any:
        return getattr(self._df, name)


class Twice(Frame):
    """Each task is run by two jobs at once."""

    def mapInArrow(self, task: Task, schema: str) -> Twice:  # noqa: N802
        return Twice(self._df.mapInArrow(task, schema))

    def collect(self) -> list[Row]:
        rows: list[Row] = []
        jobs = [threading.Thread(target=lambda: rows.extend(self._df.collect())) for _ in range(2)]
        for job in jobs:
            job.start()
        for job in jobs:
            job.join()
        return rows


class Dying(Frame):
    """The first attempt of each task is lost when all that it did is committed."""

    def mapInArrow(self, task: Task, schema: str) -> DataFrame:  # noqa: N802
        return self._df.mapInArrow(DiesAtFirst(task), schema)


@dataclass(frozen=True)
class DiesAtFirst:
    task: Task

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        said = list(self.task(batches))
        context = TaskContext.get()
        assert context is not None
        if context.attemptNumber() == 0:
            raise RuntimeError("died after its COMMIT")
        yield from said


@dataclass(frozen=True)
class Bare:
    """What a person writes without ranges."""

    url: str

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        with psycopg.connect(self.url) as tx:
            write(tx, texts(batches))
        yield pa.RecordBatch.from_pydict({"done": [1]})


def loading_beside_a_twin(url: str) -> Callable[..., None]:
    """The first of two to come waits in its transaction, with all rows written, until the other is as far."""

    @for_each_partition
    def load(rows: Iterator[pa.RecordBatch], tx: psycopg.Connection) -> None:
        write(tx, texts(rows))
        with psycopg.connect(url, autocommit=True) as outside:
            (number,) = outside.execute("insert into calls default values returning number").fetchone() or (0,)
            deadline = time.monotonic() + _TOGETHER
            while number % 2 == 1 and outside.execute("select max(number) from calls").fetchone() == (number,):
                assert time.monotonic() < deadline, "no twin came"
                time.sleep(0.02)

    return load

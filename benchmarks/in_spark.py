"""A small Spark session with little log output, in a temporary folder. Both sides load the jars of the connector."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from benchmarks import orders
from benchmarks.case import Measured, Task
from kconsume.spark import open_session

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

MASTER = "local[2]"


@contextmanager
def spark_session() -> Iterator[tuple[SparkSession, Path]]:
    """Yield a session, and the folder for Spark's files."""
    os.environ.update(PYSPARK_PYTHON=sys.executable, SPARK_LOCAL_IP="127.0.0.1")
    with TemporaryDirectory(prefix="kconsume-bench-") as folder:
        settings = {
            "spark.driver.memory": "2g",
            "spark.driver.host": "127.0.0.1",
            "spark.local.dir": folder,
            "spark.sql.warehouse.dir": f"{folder}/warehouse",
            "spark.ui.enabled": "false",
            "spark.log.level": "ERROR",
        }
        spark = open_session("benchmark", master=MASTER, settings=settings, connector=True)
        try:
            yield spark, Path(folder)
        finally:
            spark.stop()


class NoopWrites:
    """Writes DataFrames with the noop format, lets Spark count their rows, and records the time of the last write.

    Can be called from any thread.
    """

    def __init__(self) -> None:
        self._rows: list[int] = []
        self.last = 0.0

    @property
    def rows(self) -> int:
        return sum(self._rows)

    def __call__(self, frame: DataFrame) -> None:
        from pyspark.sql import Observation
        from pyspark.sql import functions as f

        seen = Observation()
        frame.observe(seen, f.count(f.lit(1)).alias("rows")).write.format("noop").mode("overwrite").save()
        self._rows.append(seen.get["rows"])
        self.last = time.perf_counter()


def twice(task: Task, read: Callable[[str, NoopWrites], None]) -> Measured:
    """Read the topic twice, and measure the second time, from the call to the last written row.

    The first time lets the JVM compile the code that runs most.
    """
    wanted = orders.total(task.records)
    for name in ("first", "second"):
        writes, began, cpu = NoopWrites(), time.perf_counter(), time.process_time()
        read(name, writes)
        if writes.rows != wanted:
            raise AssertionError(f"{writes.rows} rows were written, and the topic has {wanted} records")
    return Measured(wanted / (writes.last - began), time.process_time() - cpu, wanted)

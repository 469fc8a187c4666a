"""Which Python the executors start, in a virtual environment that is not activated.

`python -m tests.spark.python_program MODE SCRATCH`: `ours` opens the session by kconsume and prints the executors'
Python; `theirs` opens it as a user does, and prints what is said of a handler that runs in executors.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
from pyspark.sql import SparkSession

from kconsume import App
from kconsume.errors import ConfigurationError
from kconsume.spark import foreach_batch, open_session, stream
from tests.fix_spark import spark_settings

MASTER = "local[1]"


def executable(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for _ in batches:
        yield pa.RecordBatch.from_pydict({"python": [sys.executable]})


def ours(scratch: Path) -> None:
    spark = open_session("ours", master=MASTER, settings=spark_settings(scratch))
    (row,) = spark.range(1, numPartitions=1).mapInArrow(executable, "python string").collect()
    sys.stdout.write(f"executors: {row.python}\n")


def theirs(scratch: Path) -> None:
    builder = SparkSession.builder.master(MASTER)
    for key, value in spark_settings(scratch).items():
        builder = builder.config(key, value)
    spark = builder.getOrCreate()
    app = App("nowhere:9092", group="shop", offsets="postgresql://nowhere/shop")

    @app.consume("orders")
    def load(table: pa.Table) -> None: ...

    try:
        stream(app, spark)
    except ConfigurationError as refusal:
        sys.stdout.write(f"stream: {refusal}\n")

    def load_rows(rows: Iterator[pa.RecordBatch]) -> None: ...

    batches = foreach_batch(load_rows, store="postgresql://nowhere/shop", group="shop")
    source = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", "1").load()
    query = source.writeStream.foreachBatch(batches).start()
    try:
        batches.wait(query)
    except ConfigurationError as refusal:
        sys.stdout.write(f"own: {refusal}\n")


if __name__ == "__main__":
    {"ours": ours, "theirs": theirs}[sys.argv[1]](Path(sys.argv[2]))

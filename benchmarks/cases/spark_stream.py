"""`foreach_batch`, `stream` and `for_each_partition` against bare foreachBatch with the same handler.

Each side reads the whole topic twice in one session. The second time is measured, from the start of the query until
the query has ended. So the time includes the commit of the last batch on both sides. A batch is a quarter of the
topic. The written rows are counted by Spark or in PostgreSQL.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from benchmarks import orders
from benchmarks.case import Case, Measured, Task, Topics
from benchmarks.in_spark import NoopWrites, spark_session
from benchmarks.ratios import Bar

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

BATCHES = 4
_NOW = {"availableNow": True}


def per_batch(task: Task) -> int:
    return orders.total(task.records) // BATCHES + 1


def source(spark: SparkSession, task: Task) -> DataFrame:
    """The Kafka source with Spark's default settings."""
    source = spark.readStream.format("kafka").option("kafka.bootstrap.servers", task.bootstrap)
    source = source.option("subscribe", task.topic).option("startingOffsets", "earliest")
    return source.option("maxOffsetsPerTrigger", str(per_batch(task))).load()


def whole(task: Task, read: Callable[[str], int]) -> Measured:
    """Call `read` twice, and measure the second call. `read` returns how many rows it wrote."""
    wanted = orders.total(task.records)
    for name in ("first", "second"):
        began, cpu = time.perf_counter(), time.process_time()
        rows = read(name)
        seconds = time.perf_counter() - began
        if rows != wanted:
            raise AssertionError(f"{rows} rows were written, and the topic has {wanted} records")
    return Measured(wanted / seconds, time.process_time() - cpu, wanted)


def by_a_bare_query(task: Task) -> Measured:
    with spark_session() as (spark, folder):

        def read(name: str) -> int:
            writes = NoopWrites()

            def write(frame: DataFrame, _: int) -> None:
                writes(frame)

            query = source(spark, task).writeStream.foreachBatch(write).option("checkpointLocation", f"{folder}/{name}")
            query.trigger(**_NOW).start().awaitTermination()
            return writes.rows

        return whole(task, read)


class SparkForeach(Case):
    name = "spark-foreach"
    about = "foreach_batch in a plain streaming query, noop write, against bare foreachBatch"
    bar = Bar(0.97)
    names = ("kconsume", "foreachBatch")
    needs = ("postgres",)

    def ours(self, task: Task) -> Measured:
        from benchmarks.in_postgres import _database
        from kconsume.spark import foreach_batch

        with spark_session() as (spark, folder), _database(task.postgres) as url:

            def read(name: str) -> int:
                writes = NoopWrites()

                def write(frame: Any) -> None:
                    writes(frame)

                write.__annotations__.clear()
                batches = foreach_batch(write, store=url, group=f"{task.group}-{name}")
                query = source(spark, task).writeStream.foreachBatch(batches)
                started = query.option("checkpointLocation", f"{folder}/{name}").trigger(**_NOW).start()
                started.awaitTermination()
                batches.close()
                return writes.rows

            return whole(task, read)

    def theirs(self, task: Task) -> Measured:
        return by_a_bare_query(task)


class SparkStream(Case):
    name = "spark-stream"
    about = "stream(app, spark) from start to end, noop write, against bare foreachBatch with Spark's fetch settings"
    bar = Bar(1.25)
    names = ("kconsume", "foreachBatch")
    needs = ("postgres",)

    def ours(self, task: Task) -> Measured:
        from benchmarks.in_postgres import _database
        from kconsume import App
        from kconsume.spark import stream

        with spark_session() as (spark, folder), _database(task.postgres) as url:

            def read(name: str) -> int:
                import pyspark.sql

                writes = NoopWrites()
                app = App(task.bootstrap, group=f"{task.group}-{name}", offsets=url)

                @app.consume(task.topic)
                def write(frame: pyspark.sql.DataFrame) -> None:
                    writes(frame)

                checkpoint = f"{folder}/{name}"
                stream(app, spark, trigger=_NOW, checkpoint=checkpoint, max_records=per_batch(task)).wait()
                return writes.rows

            return whole(task, read)

    def theirs(self, task: Task) -> Measured:
        return by_a_bare_query(task)


class SparkLedger(Case):
    name = "spark-ledger"
    about = "for_each_partition: a COPY to PostgreSQL in each task with its range, against the same without ranges"
    bar = Bar(0.9)
    names = ("kconsume", "without ranges")
    needs = ("postgres",)

    def tasks(self, topics: Topics, records: int) -> tuple[Task, Task]:
        task = topics.orders(records * 3 // 10)
        return task, task

    def ours(self, task: Task) -> Measured:
        from benchmarks import copied_rows
        from benchmarks.in_postgres import _database
        from kconsume.spark import foreach_batch

        with spark_session() as (spark, folder), _database(task.postgres) as url:

            def read(name: str) -> int:
                copied_rows.make_table(url)
                batches = foreach_batch(copied_rows.copy, store=url, group=f"{task.group}-{name}")
                query = source(spark, task).writeStream.foreachBatch(batches)
                started = query.option("checkpointLocation", f"{folder}/{name}").trigger(**_NOW).start()
                started.awaitTermination()
                batches.close()
                return copied_rows.count(url)

            return whole(task, read)

    def theirs(self, task: Task) -> Measured:
        from benchmarks import copied_rows
        from benchmarks.in_postgres import _database

        with spark_session() as (spark, folder), _database(task.postgres) as url:

            def read(name: str) -> int:
                copied_rows.make_table(url)
                bare = copied_rows.BareTask(url)

                def write(frame: DataFrame, _: int) -> None:
                    frame.mapInArrow(bare, "rows long").collect()

                query = source(spark, task).writeStream.foreachBatch(write)
                started = query.option("checkpointLocation", f"{folder}/{name}").trigger(**_NOW).start()
                started.awaitTermination()
                return copied_rows.count(url)

            return whole(task, read)

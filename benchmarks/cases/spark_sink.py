"""A handler that gets DataFrames and writes them to nowhere, against foreachBatch on Spark's own Kafka source.

Both read the whole topic, twice in one session, and the second time counts, from the call on: with its start, without
the JVM's. The other side is Spark as it comes: it reads by its own consumers, in the JVM, with its default settings.
What it does not do is keep an offset anywhere but in its checkpoint. CPU is that of the Python process alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchmarks.case import Case, Measured, Task
from benchmarks.in_spark import NoopWrites, spark_session, twice
from benchmarks.orders import PARTITIONS, total
from benchmarks.ratios import Bar
from kconsume import App, Batching

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

BATCHES = 2
"""Of each partition, and all of them full: one that is short of a record would wait until nothing more comes. (By four
the records of a partition cannot be divided.) The other side takes all partitions in one batch."""
MEMORY = 1 << 30
"""Of records in flight: batches as large as Spark likes them are not had with the default."""


def batching(task: Task) -> Batching:
    return Batching(records=-(-total(task.records) // (PARTITIONS * BATCHES)), wait=30.0)


class SparkSink(Case):
    name = "spark-sink"
    about = "a handler of DataFrames with a noop write, against bare foreachBatch on Spark's source with its defaults"
    bar = Bar(0.9)
    names = ("kconsume", "foreachBatch")

    def ours(self, task: Task) -> Measured:
        with spark_session():

            def read(name: str, writes: NoopWrites) -> None:
                import pyspark.sql  # here, because the other cases are measured without it

                app = App(task.bootstrap, group=f"{task.group}-{name}", memory=MEMORY)

                # Without a group's join, whose delay is the broker's: the other side has none.
                @app.consume(task.topic, batch=batching(task), partitions=range(PARTITIONS))
                def write(frame: pyspark.sql.DataFrame) -> None:
                    writes(frame)

                app.catch_up(idle=0.2)

            return twice(task, read)

    def theirs(self, task: Task) -> Measured:
        with spark_session() as (spark, folder):

            def read(name: str, writes: NoopWrites) -> None:
                source = spark.readStream.format("kafka").option("kafka.bootstrap.servers", task.bootstrap)
                stream = source.option("subscribe", task.topic).option("startingOffsets", "earliest").load()

                def write(frame: DataFrame, _: int) -> None:
                    writes(frame)

                query = stream.writeStream.foreachBatch(write).option("checkpointLocation", str(folder / name))
                query.trigger(availableNow=True).start().awaitTermination()

            return twice(task, read)

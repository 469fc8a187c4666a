"""A handler of DataFrames with a noop write, against foreachBatch on Spark's own Kafka source.

Both sides read the whole topic twice in one session. The second time is measured. It includes the start of
the app or query, but not the start of the JVM. The other side is Spark with its defaults: its own consumers in the
JVM read the topic, and it keeps offsets only in its checkpoint. The CPU time is that of the Python process alone.
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
"""Batches of each partition. Two, because the records of a partition are not divisible by four, and a batch that is not
full would wait for more records. The other side takes all partitions in one batch."""
MEMORY = 1 << 30
"""Bytes of records in flight. The default is too small for the large batches that Spark needs."""


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
                import pyspark.sql  # imported here, because the other cases are measured without it

                app = App(task.bootstrap, group=f"{task.group}-{name}", memory=MEMORY)

                # With `partitions=` no group is joined: a join takes time, and the other side joins no group.
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

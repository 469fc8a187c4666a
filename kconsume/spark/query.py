"""A running query, seen from inside its handler: whether it is still to run, its folder, its source, its thread.

The one place that reaches through py4j into Spark's streaming. Everything it asks for was seen on PySpark 4.2; what
another version does not have is an error that says so, never a guess.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, Any, cast

from kconsume.errors import ConfigurationError
from kconsume.spark.ranges import OffsetRange

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_QUERY_ID = "sql.streaming.queryId"
_DESCRIPTION = "spark.job.description"
_SOURCES = re.compile(r"\b(?:DataSourceRDD|KafkaSourceRDD)\b")
"""Of a stream, and of a batch."""
# What puts rows of one Kafka partition into several tasks, or those of several into one.
_MIXES = re.compile(r"\b(ShuffledRowRDD|ShuffledRDD|CoalescedRDD|UnionRDD|CartesianRDD|ZippedPartitions\w*)\b")

# Operators of a streaming plan, by their classes in Spark, and what users call them.
_STATEFUL = {
    "Aggregate": "groupBy with an aggregation",
    "Distinct": "distinct or dropDuplicates",
    "Deduplicate": "distinct or dropDuplicates",
    "DeduplicateWithinWatermark": "dropDuplicatesWithinWatermark",
    "Join": "a join of two streams",
    "GlobalLimit": "limit",
    "FlatMapGroupsWithState": "flatMapGroupsWithState",
    "FlatMapGroupsInPandasWithState": "applyInPandasWithState",
    "TransformWithState": "transformWithState",
    "TransformWithStateInPandas": "transformWithState",
    "TransformWithStateInPySpark": "transformWithState",
}


class Query:
    """The query whose batch is being handled on this thread."""

    def __init__(self, df: DataFrame) -> None:
        session = df.sparkSession
        self._context = session.sparkContext
        self._session = session
        number = self._context.getLocalProperty(_QUERY_ID)
        if number is None:
            raise ConfigurationError(
                "a batch was handed over outside of a streaming query: give what foreach_batch returns to "
                "writeStream.foreachBatch(…), and call it nowhere else"
            )
        self.id = number
        running = session._jsparkSession.sharedState().activeStreamingQueries()
        self._execution: Any = running.get(java_class(session, "java.util.UUID").fromString(number))
        if self._execution is None:
            raise ConfigurationError(f"Spark does not know of its own query {number}: it was stopped a moment ago")

    @property
    def active(self) -> bool:
        return bool(self._execution.isActive())

    @cached_property
    def run(self) -> str:
        """The id of this start of the query: one that goes on with a checkpoint keeps its id."""
        return str(self._execution.runId().toString())

    def is_handled_here(self) -> bool:
        """Whether the batch that is handled on this thread is one of this query, which runs."""
        return self._context.getLocalProperty(_QUERY_ID) == self.id and self.active

    @property
    def reported(self) -> int | None:
        """The last batch of which Spark has reported, which it does when its commit is written."""
        progress = self._execution.lastProgress()
        return None if progress is None else int(progress.batchId())

    def stop(self) -> None:
        self._execution.stop()

    @cached_property
    def kind(self) -> str:
        return str(self._execution.getClass().getSimpleName())

    @property
    def checkpoint(self) -> str:
        return str(self._execution.resolvedCheckpointRoot())

    def source_options(self, names: Sequence[str]) -> Mapping[str, str]:
        """Of its one source, those of these options that were given; none if this Spark does not tell. Each question
        goes to the JVM and back, so only what is wanted is asked for."""
        from py4j.protocol import Py4JError

        try:
            leaves = self._execution.logicalPlan().collectLeaves()
            found = [leaves.apply(index) for index in range(leaves.size())]
            (source,) = [leaf for leaf in found if leaf.getClass().getSimpleName().startswith("Streaming")]
            options = source.relation().options()
            given = {name: options.get(name) for name in names}  # whichever way it was spelt
            return {name: str(value) for name, value in given.items() if value is not None}
        except (Py4JError, ValueError):
            return {}

    def stateful_operators(self) -> list[str]:
        """The operators of its plan that keep rows from one batch to the next, as users write them."""
        return sorted(_stateful(self._execution.logicalPlan()))

    def doze(self, milliseconds: int) -> None:
        """On the JVM's thread of this query: what interrupts that comes out of here."""
        java_class(self._session, "java.lang.Thread").sleep(milliseconds)

    @contextmanager
    def described(self, text: str) -> Iterator[None]:
        """In the block, what the Spark UI says of the jobs of this batch."""
        before = self._context.getLocalProperty(_DESCRIPTION)
        self._context.setLocalProperty(_DESCRIPTION, text)
        try:
            yield
        finally:
            self._context.setLocalProperty(_DESCRIPTION, cast(str, before))


def _stateful(plan: Any) -> set[str]:
    if not plan.isStreaming():
        return set()  # a table: what is done with it is done anew in each batch
    seq = plan.children()
    children = [seq.apply(index) for index in range(seq.size())]
    found = set().union(*map(_stateful, children))
    name = str(plan.getClass().getSimpleName())
    if name in _STATEFUL and (name != "Join" or all(child.isStreaming() for child in children)):
        found.add(_STATEFUL[name])
    return found


def java_class(spark: SparkSession, name: str) -> Any:
    """A class of Java's by its full name. By `jvm.java.util.…` each part of the name would go to the JVM and back."""
    from py4j.java_gateway import JavaClass

    return JavaClass(name, cast(Any, spark._jvm)._gateway_client)


def must_be_one_to_one(df: DataFrame, ranges: Sequence[OffsetRange]) -> None:
    """Whether each task of the frame has the rows of exactly one of the ranges: by the lineage of its RDD, for the
    rows themselves do not show it."""
    rdd = df._jdf.queryExecution().toRdd()
    lineage = str(rdd.toDebugString())
    mixed = _MIXES.search(lineage)
    if mixed is None and len(_SOURCES.findall(lineage)) == 1 and rdd.getNumPartitions() == len(ranges):
        return
    why = f"it has a {mixed.group(1)}" if mixed else f"it has {rdd.getNumPartitions()} tasks for {len(ranges)} ranges"
    raise ConfigurationError(
        f"for_each_partition needs one task for each range of a partition, and {why}: hand it the frame as it came "
        f"from Kafka, without repartition, coalesce, union, join or aggregation, and without minPartitions and "
        f"maxRecordsPerPartition"
    )


def in_ranges(df: DataFrame, ranges: Sequence[OffsetRange]) -> DataFrame:
    """The rows of these ranges alone."""
    from pyspark.sql import functions

    wanted = functions.lit(False)
    for each in ranges:
        wanted = wanted | (
            (df["topic"] == each.partition.topic)
            & (df["partition"] == each.partition.number)
            & (df["offset"] >= each.first)
            & (df["offset"] < each.end)
        )
    return df.where(wanted)

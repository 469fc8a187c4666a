"""Selects the rows of some ranges from the frame of a micro-batch, and checks that each range has a task of its own."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from kconsume.errors import ConfigurationError
from kconsume.spark import jvm
from kconsume.spark._batch.ranges import OffsetRange

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_SOURCES = re.compile(r"\b(?:DataSourceRDD|KafkaSourceRDD)\b")
"""The RDDs of Spark's Kafka source, in a stream and in a batch read."""
# RDDs that put the rows of one Kafka partition into several tasks, or the rows of several partitions into one task.
_MIXING = re.compile(r"\b(ShuffledRowRDD|ShuffledRDD|CoalescedRDD|UnionRDD|CartesianRDD|ZippedPartitions\w*)\b")


def check_one_task_per_range(df: DataFrame, ranges: Sequence[OffsetRange]) -> None:
    """Raise unless each task of the frame has the rows of exactly one of the ranges.

    Reads the lineage of the frame's RDD, because the rows do not show how they are divided into tasks.
    """
    rdd = jvm.rdd_of(df)
    lineage = str(rdd.toDebugString())
    mixed = _MIXING.search(lineage)
    if mixed is None and len(_SOURCES.findall(lineage)) == 1 and rdd.getNumPartitions() == len(ranges):
        return
    why = f"it has a {mixed.group(1)}" if mixed else f"it has {rdd.getNumPartitions()} tasks for {len(ranges)} ranges"
    raise ConfigurationError(
        f"for_each_partition needs one task for each range of a partition, and {why}: give it the frame as it came "
        f"from Kafka, without repartition, coalesce, union, join or aggregation, and without minPartitions and "
        f"maxRecordsPerPartition"
    )


def rows_in_ranges(df: DataFrame, ranges: Sequence[OffsetRange]) -> DataFrame:
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

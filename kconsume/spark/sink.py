"""A handler's DataFrame: how it is told from its annotation, and made of a batch; and the session it is made in.

What reads annotations asks here by name, so that nobody imports PySpark who does not use it. The session is a resource
like others; if the app declares none, this one is opened for the run, and closed after it unless it was there before.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from kconsume.records import Message
from kconsume.resources import Resource

if TYPE_CHECKING:
    import pyarrow
    from pyspark.sql import DataFrame, SparkSession


def is_frame(hint: object) -> bool:
    """`pyspark.sql.DataFrame`, in each of its two forms; not that of pandas on Spark, which is another thing."""
    return isinstance(hint, type) and hint.__name__ == "DataFrame" and hint.__module__.startswith("pyspark.sql.")


def is_session(hint: object) -> bool:
    return isinstance(hint, type) and hint.__name__ == "SparkSession" and hint.__module__.startswith("pyspark.sql.")


def session_type() -> type[SparkSession]:
    """The type by which a session is asked for. PySpark is there: the handler's annotation is its DataFrame."""
    from pyspark.sql import SparkSession

    return SparkSession


def spare_session() -> Resource:
    """For apps that declare none."""
    return Resource("spark", session_type(), _session, {}, spare=True)


def _session() -> Iterator[SparkSession]:
    from kconsume.spark.session import current_session, open_session

    there = current_session()
    spark = there or open_session()
    yield spark
    if there is None:
        spark.stop()


def frame_of(spark: SparkSession, table: pyarrow.Table, messages: Sequence[Message]) -> DataFrame:
    """The table as a DataFrame; what is run with it on this thread is named after the batch in Spark's UI."""
    from kconsume.spark.frames import to_dataframe

    describe(spark, messages[0].topic(), messages[0].partition(), messages[0].offset(), messages[-1].offset())
    return to_dataframe(spark, table)


def describe(spark: SparkSession, topic: str, partition: int, first: int, last: int) -> None:
    from kconsume.spark.session import is_connect

    if not is_connect(spark):
        spark.sparkContext.setJobDescription(f"kconsume {topic}/{partition}@{first}-{last}")

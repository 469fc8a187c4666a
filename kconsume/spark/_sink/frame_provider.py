"""Provides handlers with a DataFrame for each batch, and with the Spark session of these DataFrames.

Recognises annotations by their names, so that importing this module does not import PySpark. The session is a resource
of the app. If the app declares no session, kconsume uses the session of this process. If there is none, kconsume opens
a session, and closes it after the run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from kconsume._handlers.resources import Resource
from kconsume._handlers.type_providers import FrameType, TypeProvider, register_provider
from kconsume.records import Message

if TYPE_CHECKING:
    import pyarrow
    from pyspark.sql import DataFrame, SparkSession


def frame_type(hint: object) -> FrameType | None:
    """Recognise `pyspark.sql.DataFrame`, classic or Spark Connect, but not a DataFrame of `pyspark.pandas`."""
    return FrameType(_session_type(), frame_of) if _is_spark_sql(hint, "DataFrame") else None


def default_session(hint: object) -> Resource | None:
    """Return the resource that is used if the app declares no session; None if the annotation is not a session's."""
    if not _is_spark_sql(hint, "SparkSession"):
        return None
    return Resource("spark", _session_type(), _session, {}, is_default=True)


def _is_spark_sql(hint: object, name: str) -> bool:
    return isinstance(hint, type) and hint.__name__ == name and hint.__module__.startswith("pyspark.sql.")


def _session_type() -> type[SparkSession]:
    """The session's class. PySpark is imported already, because an annotation of a handler is one of its types."""
    from pyspark.sql import SparkSession

    return SparkSession


def _session() -> Iterator[SparkSession]:
    from kconsume.spark.session import current_session, open_session

    there = current_session()
    spark = there or open_session()
    yield spark
    if there is None:
        spark.stop()


def frame_of(spark: SparkSession, table: pyarrow.Table, messages: Sequence[Message]) -> DataFrame:
    """Return the table as a DataFrame. In Spark's UI, this thread's jobs get a name that shows the batch."""
    from kconsume.spark._sink.dataframes import to_dataframe

    describe(spark, messages[0].topic(), messages[0].partition(), messages[0].offset(), messages[-1].offset())
    return to_dataframe(spark, table)


def describe(spark: SparkSession, topic: str, partition: int, first: int, last: int) -> None:
    """Set the name that this thread's jobs have in Spark's UI: the range of records."""
    from kconsume.spark.session import is_connect

    if not is_connect(spark):
        spark.sparkContext.setJobDescription(f"kconsume {topic}/{partition}@{first}-{last}")


register_provider("pyspark", TypeProvider(frame_type, default_session))

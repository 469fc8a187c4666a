"""Access to the driver's JVM through private names of PySpark. Other modules of this package must not use such names.

PySpark 4.2 and 4.3 have these names. With Spark Connect there is no JVM: only `is_started` may be called.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery


def is_started() -> bool:
    """True if this process has started a JVM for Spark."""
    from pyspark import SparkContext

    return SparkContext._gateway is not None


def java_class(spark: SparkSession, name: str) -> Any:
    """A Java class by its full name. The form `jvm.java.util.…` would call the JVM once for each part of the name."""
    from py4j.java_gateway import JavaClass

    return JavaClass(name, cast(Any, spark._jvm)._gateway_client)


def class_loader(spark: SparkSession) -> Any:
    """The class loader of the JVM thread that serves calls from Python. It has the jars of the session."""
    return spark._jvm.java.lang.Thread.currentThread().getContextClassLoader()  # type: ignore[union-attr]


def allow_callbacks(spark: SparkSession) -> None:
    """Start the server through which the JVM calls Python, if it does not run yet."""
    from pyspark import java_gateway

    cast(Any, java_gateway).ensure_callback_server_started(spark.sparkContext._gateway)


def hadoop_configuration(spark: SparkSession) -> Any:
    return spark._jsparkSession.sessionState().newHadoopConf()


def active_query(spark: SparkSession, query_id: str) -> Any:
    """Spark's `StreamExecution` of an active query, in any session of the application; None if it is not active."""
    running = spark._jsparkSession.sharedState().activeStreamingQueries()
    return running.get(java_class(spark, "java.util.UUID").fromString(query_id))


def last_progress(query: StreamingQuery) -> Any:
    """The last progress report of the query; None without one."""
    return query._jsq.lastProgress()


def rdd_of(df: DataFrame) -> Any:
    """The RDD that executes the frame."""
    return df._jdf.queryExecution().toRdd()

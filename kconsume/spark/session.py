"""Opens a Spark session, and checks what kconsume needs: PySpark, Java, the executors' Python, the connector.

An existing session is used as it is. Nothing here reads or writes data: the stream that checks the Kafka connector
reads no record.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from kconsume.errors import ConfigurationError
from kconsume.spark import jars, jvm
from kconsume.spark.java_home import home_of, spark_java

if TYPE_CHECKING:
    import pyarrow
    from pyspark.sql import SparkSession

STACK = "-Xss8m"
"""The JVM's stack size. When a query is stopped, Spark runs a regular expression over a long message. With the default
stack size this overflows the stack."""


def open_session(
    name: str = "kconsume",
    *,
    master: str | None = None,
    settings: Mapping[str, str] | None = None,
    connector: bool = False,
) -> SparkSession:
    """The session of this process, or a new one. The caller must close a session that this call opened.

    Args:
        name: the name of the application.
        master: the cluster, such as `"spark://host:7077"`.
        settings: more settings of Spark. An existing session keeps its own.
        connector: True to add the jars of Spark's Kafka source. They are downloaded on first use.
    """
    jars.pyspark_version()
    from pyspark.sql import SparkSession

    existing = current_session()
    if existing is not None:
        return existing
    builder = SparkSession.builder.appName(name)
    if master is not None:
        builder = builder.master(master)
    for key, value in _settings(settings or {}, connector).items():
        builder = builder.config(key, value)
    with _java():
        session = builder.getOrCreate()
    _use_driver_python(session)
    return session


def _use_driver_python(session: SparkSession) -> None:
    """Let executors on this machine run the driver's Python.

    By default PySpark starts `python3` of the PATH, which is another Python if the virtual environment is not
    activated. PySpark reads `spark.pyspark.python` only under spark-submit.
    """
    if is_connect(session) or "PYSPARK_PYTHON" in os.environ:
        return
    context = session.sparkContext
    if str(context.master).startswith("local"):
        context.pythonExec = context.getConf().get("spark.pyspark.python") or sys.executable


def current_session() -> SparkSession | None:
    """The session of this process, opened on any thread; None without one."""
    from pyspark.errors import PySparkRuntimeError
    from pyspark.sql import SparkSession

    try:
        return SparkSession.active()
    except PySparkRuntimeError:
        return None


def _settings(given: Mapping[str, str], connector: bool) -> dict[str, str]:
    settings = {"spark.ui.showConsoleProgress": "false", **given}
    options = settings.get("spark.driver.extraJavaOptions", "")
    if "-Xss" not in options:
        settings["spark.driver.extraJavaOptions"] = f"{options} {STACK}".strip()
    if connector:
        settings["spark.jars"] = ",".join(filter(None, [settings.get("spark.jars", ""), jars.spark_jars()]))
    return settings


@contextmanager
def _java() -> Iterator[None]:
    """Set `JAVA_HOME` during the block to a Java that Spark runs on. Does nothing if the block starts no JVM."""
    if jvm.is_started() or "SPARK_REMOTE" in os.environ:
        yield
        return
    before = os.environ.get("JAVA_HOME")
    os.environ["JAVA_HOME"] = str(home_of(spark_java()))
    try:
        yield
    finally:
        if before is None:
            del os.environ["JAVA_HOME"]
        else:
            os.environ["JAVA_HOME"] = before


def is_connect(spark: SparkSession) -> bool:
    """True for a session of Spark Connect: it talks to a server, and this process has no JVM."""
    return type(spark).__module__.startswith("pyspark.sql.connect")


# Spark's Kafka source


def check_connector(spark: SparkSession, bootstrap: str, topic: str, options: Mapping[str, str] | None = None) -> None:
    """Check that the session has the connector's jars and that they fit this PySpark. Reads no record.

    Opens a stream on the topic: a connector for another version of Spark works in a batch read, and fails only in a
    stream.

    Args:
        spark: the session.
        bootstrap: the brokers.
        topic: a topic that exists.
        options: more options of Spark's source, for brokers that require authentication.

    Raises `ConfigurationError` if a jar is missing or does not fit.
    """
    if not is_connect(spark):
        check_jars(spark)
    _open_stream(spark, {**(options or {}), "kafka.bootstrap.servers": bootstrap, "subscribe": topic})


def check_jars(spark: SparkSession) -> None:
    if missing := missing_jars(spark):
        raise ConfigurationError(
            f"Spark has no Kafka source: {', '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing for "
            f"PySpark {jars.pyspark_version()}; open the session with kconsume.spark.open_session(connector=True), or "
            f"set spark.jars to what `{jars.FETCH}` prints, before the session is opened"
        )


_checked_sources: set[str] = set()
"""The ids of the Spark applications whose Kafka source was checked."""


def check_source_once(spark: SparkSession, options: Mapping[str, str]) -> None:
    """Open a stream with these options, as `check_connector` does. Done once for each Spark application, because the
    jars of an application do not change."""
    application = spark.sparkContext.applicationId
    if application not in _checked_sources:
        _open_stream(spark, options)
        _checked_sources.add(application)


def _open_stream(spark: SparkSession, options: Mapping[str, str]) -> None:
    source = spark.readStream.format("kafka").options(**dict(options)).option("startingOffsets", "latest")
    try:
        with TemporaryDirectory(prefix="kconsume-check-") as checkpoint:
            writer = source.load().writeStream.format("noop").option("checkpointLocation", f"file:{checkpoint}")
            writer.trigger(availableNow=True).start().awaitTermination()
    except Exception as error:
        raise connector_mismatch(error) or error from error


def missing_jars(spark: SparkSession) -> list[str]:
    """The coordinates of the connector's jars that this session does not have."""
    from py4j.protocol import Py4JJavaError

    loader = jvm.class_loader(spark)
    missing = []
    for jar in jars.CONNECTOR:
        try:
            loader.loadClass(jar.class_name)
        except Py4JJavaError:
            missing.append(jar.coordinate)
    return missing


_LINKAGE_ERRORS = ("NoSuchMethodError", "NoClassDefFoundError", "ClassNotFoundException", "AbstractMethodError",
                   "IncompatibleClassChangeError", "Failed to find data source: kafka",
                   "DATA_SOURCE_NOT_FOUND")  # fmt: skip


def connector_mismatch(error: BaseException) -> ConfigurationError | None:
    """What to raise for an error of jars that do not fit together; None for any other error."""
    # The message of a failed query names the missing method. Only the stack trace says that the method is missing.
    text = f"{error}\n{getattr(error, '_stackTrace', None) or ''}"
    found = next((word for word in _LINKAGE_ERRORS if word in text), None)
    if found is None:
        return None
    line = next(line.strip(" :\t") for line in text.splitlines() if found in line).removeprefix("Caused by: ")
    return ConfigurationError(
        f"Spark's Kafka source does not fit PySpark {jars.pyspark_version()} ({line[:200]}): use exactly "
        f"{jars.all_coordinates()}, which `{jars.FETCH}` fetches, and no jar for another Spark or Scala beside them"
    )


# The Python of the executors

_checked_pythons: set[str] = set()
"""The ids of the Spark applications whose executors' Python was checked."""


def check_executor_python(spark: SparkSession) -> None:
    """Check that the executors' Python can import what a handler needs. Runs one Spark task, once for each application.

    Raises `ConfigurationError` if it cannot.
    """
    context = spark.sparkContext
    if context.applicationId in _checked_pythons:
        return
    try:
        spark.range(1, numPartitions=1).mapInArrow(_import_all, "id long").collect()
    except Exception as error:
        raise _python_mismatch(error, context.pythonExec) or error from error
    _checked_pythons.add(context.applicationId)


def _import_all(batches: Iterator[pyarrow.RecordBatch]) -> Iterator[pyarrow.RecordBatch]:
    """Import what a pickled task refers to, and what the task imports. Runs in an executor."""
    import kconsume.backends.postgres.store
    import kconsume.spark._batch.task  # noqa: F401

    return batches


_IMPORT_ERRORS = ("ModuleNotFoundError", "ImportError", "PYTHON_VERSION_MISMATCH", "Cannot run program")


def _python_mismatch(error: Exception, python: str) -> ConfigurationError | None:
    """What to raise for an error of the executors' Python; None for any other error."""
    lines = [line.strip() for line in str(error).splitlines() if any(word in line for word in _IMPORT_ERRORS)]
    if not lines:
        return None
    line = lines[-1].removeprefix("Caused by: ")
    return ConfigurationError(
        f"the Python of the executors, {python!r}, cannot run a handler ({line[:200]}): before the session is "
        f"opened, set PYSPARK_PYTHON={sys.executable}, or, if executors are on other machines, a Python there that "
        f"has kconsume[spark,postgres]; kconsume.spark.open_session sets it for executors on this machine"
    )

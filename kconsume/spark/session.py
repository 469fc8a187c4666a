"""A Spark session: opened once, with what has to be right for it checked first, in words that say what to do.

A session that is there is taken as it is. Nothing here reads or writes data; the one stream that is opened, to see
whether the Kafka connector fits, reads nothing.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from kconsume.errors import ConfigurationError
from kconsume.spark import jars
from kconsume.spark.java import home_of, spark_java

if TYPE_CHECKING:
    import pyarrow
    from pyspark.sql import SparkSession

STACK = "-Xss8m"
"""When a query is stopped, Spark runs a regular expression over a long message, and the usual stack overflows."""


def open_session(
    name: str = "kconsume",
    *,
    master: str | None = None,
    settings: Mapping[str, str] | None = None,
    connector: bool = False,
) -> SparkSession:
    """The session of this process, or a new one. `connector`: with the jars of Spark's Kafka source, fetched by name
    on first use. A session that is there keeps its settings; whoever opened it closes it."""
    jars.pyspark_version()
    from pyspark.sql import SparkSession

    there = current_session()
    if there is not None:
        return there
    builder = SparkSession.builder.appName(name)
    if master is not None:
        builder = builder.master(master)
    for key, value in _settings(settings or {}, connector).items():
        builder = builder.config(key, value)
    with _java():
        session = builder.getOrCreate()
    _share_python(session)
    return session


def _share_python(session: SparkSession) -> None:
    """Executors on this machine run the driver's Python. By default PySpark starts `python3` of the PATH, which is
    another one where the virtual environment is not activated; `spark.pyspark.python` it reads under spark-submit only.
    """
    if is_connect(session) or "PYSPARK_PYTHON" in os.environ:
        return
    context = session.sparkContext
    if str(context.master).startswith("local"):
        context.pythonExec = context.getConf().get("spark.pyspark.python") or sys.executable


def current_session() -> SparkSession | None:
    """That of this process, whichever thread has opened it."""
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
    """While Spark starts its Java, `JAVA_HOME` is one that will do."""
    from pyspark import SparkContext

    if SparkContext._gateway is not None or "SPARK_REMOTE" in os.environ:
        yield  # it runs already, or elsewhere
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
    """Whether it talks to a server, so that there is no JVM of ours to ask."""
    return type(spark).__module__.startswith("pyspark.sql.connect")


def check_connector(spark: SparkSession, bootstrap: str, topic: str, options: Mapping[str, str] | None = None) -> None:
    """Open a stream on the topic that reads nothing: a connector of another Spark passes in a batch, and only a stream
    shows that it does not fit. `options`: those of the source, for a broker that asks who is there."""
    if not is_connect(spark):
        must_have_jars(spark)
    _open_stream(spark, {**(options or {}), "kafka.bootstrap.servers": bootstrap, "subscribe": topic})


def must_have_jars(spark: SparkSession) -> None:
    if missing := missing_jars(spark):
        raise ConfigurationError(
            f"Spark has no Kafka source: {', '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing for "
            f"PySpark {jars.pyspark_version()}; open the session with kconsume.spark.open_session(connector=True), or "
            f"set spark.jars to what `{jars.FETCH}` prints, before the session is opened"
        )


_fits: set[str] = set()


def must_open_streams(spark: SparkSession, options: Mapping[str, str]) -> None:
    """The same of a source with these options, once in the life of an application: its jars do not change."""
    application = spark.sparkContext.applicationId
    if application not in _fits:
        _open_stream(spark, options)
        _fits.add(application)


def _open_stream(spark: SparkSession, options: Mapping[str, str]) -> None:
    source = spark.readStream.format("kafka").options(**dict(options)).option("startingOffsets", "latest")
    try:
        with TemporaryDirectory(prefix="kconsume-check-") as checkpoint:
            writer = source.load().writeStream.format("noop").option("checkpointLocation", f"file:{checkpoint}")
            writer.trigger(availableNow=True).start().awaitTermination()
    except Exception as error:
        raise unfit_connector(error) or error from error


_shared: set[str] = set()


def must_run_handlers(spark: SparkSession) -> None:
    """Whether the Python of the executors has what a handler needs there; asked once in the life of an application,
    with a job of one task."""
    context = spark.sparkContext
    if context.applicationId in _shared:
        return
    try:
        spark.range(1, numPartitions=1).mapInArrow(_import_all, "id long").collect()
    except Exception as error:
        raise _other_python(error, context.pythonExec) or error from error
    _shared.add(context.applicationId)


def _import_all(batches: Iterator[pyarrow.RecordBatch]) -> Iterator[pyarrow.RecordBatch]:
    """In an executor: what is pickled with a task, and what the task imports."""
    import kconsume.backends.postgres
    import kconsume.spark.tasks  # noqa: F401

    return batches


_NOT_OURS = ("ModuleNotFoundError", "ImportError", "PYTHON_VERSION_MISMATCH", "Cannot run program")


def _other_python(error: Exception, python: str) -> ConfigurationError | None:
    """What to say of an error that comes from the executors' Python; None if it comes from elsewhere."""
    lines = [line.strip() for line in str(error).splitlines() if any(word in line for word in _NOT_OURS)]
    if not lines:
        return None
    said = lines[-1].removeprefix("Caused by: ")
    return ConfigurationError(
        f"the Python of the executors, {python!r}, cannot run a handler ({said[:200]}): before the session is "
        f"opened, set PYSPARK_PYTHON={sys.executable}, or, where executors are on other machines, a Python there that "
        f"has kconsume[spark,postgres]; kconsume.spark.open_session sets it for executors on this machine"
    )


def missing_jars(spark: SparkSession) -> list[str]:
    """The coordinates of the connector's jars that this session does not have."""
    from py4j.protocol import Py4JJavaError

    loader = spark._jvm.java.lang.Thread.currentThread().getContextClassLoader()  # type: ignore[union-attr]
    missing = []
    for jar in jars.CONNECTOR:
        try:
            loader.loadClass(jar.holds)
        except Py4JJavaError:
            missing.append(jar.coordinate)
    return missing


_LINKAGE = ("NoSuchMethodError", "NoClassDefFoundError", "ClassNotFoundException", "AbstractMethodError",
            "IncompatibleClassChangeError", "Failed to find data source: kafka", "DATA_SOURCE_NOT_FOUND")  # fmt: skip


def unfit_connector(error: BaseException) -> ConfigurationError | None:
    """What to say of an error that comes from jars that do not go together; None if it comes from elsewhere."""
    # A query that failed says the method that is missing, and only its trace says that it is missing.
    said = f"{error}\n{getattr(error, '_stackTrace', None) or ''}"
    found = next((word for word in _LINKAGE if word in said), None)
    if found is None:
        return None
    line = next(line.strip(" :\t") for line in said.splitlines() if found in line).removeprefix("Caused by: ")
    return ConfigurationError(
        f"Spark's Kafka source does not fit PySpark {jars.pyspark_version()} ({line[:200]}): use exactly "
        f"{jars.all_coordinates()}, which `{jars.FETCH}` fetches, and no jar for another Spark or Scala beside them"
    )

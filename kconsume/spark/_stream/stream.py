"""`stream(app, spark)`: the handlers of an app as streaming queries on Spark's Kafka source, from the app's offsets.

Starts one `HandlerQuery` for each handler, and waits for, drains and stops all of them together.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kconsume._event_log import EventLog
from kconsume.errors import ConfigurationError
from kconsume.records import Partition
from kconsume.spark._stream.drain import on_jvm_shutdown, on_signals
from kconsume.spark._stream.handler_query import HandlerQuery
from kconsume.spark._stream.query_checks import check_trigger
from kconsume.spark.session import check_jars, is_connect

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

    from kconsume.app import App

_log = EventLog("spark")

Trigger = str | Mapping[str, Any] | None


def stream(
    app: App,
    spark: SparkSession,
    *,
    trigger: Trigger = None,
    checkpoint: str | None = None,
    max_records: int | None = None,
    options: Mapping[str, str] | None = None,
    mirror: bool = True,
) -> Stream:
    """Run the app's handlers of `DataFrame` (in the driver) and `pyarrow.Table` (in executors) as streaming queries.

    Args:
        app: the app; each of its handlers becomes a query.
        spark: a session in classic mode, with the connector's jars (`open_session(connector=True)`).
        trigger: the time between two batches, such as `"5 seconds"`, or the arguments of `DataStreamWriter.trigger`,
            such as `{"availableNow": True}`. By default a batch begins when the batch before has ended.
        checkpoint: a folder on any file system that the session reaches; a path without a scheme is on Spark's default
            file system. Without it a new temporary folder is used, which is safe, because the offsets are in the store.
        max_records: the largest number of offsets in a batch.
        options: more options of Spark's Kafka source.
        mirror: True to write the offsets to the Kafka group as well, so that lag tools see them.
    """
    if is_connect(spark):
        raise ConfigurationError(
            "stream() reads checkpoints and stops queries through Spark's own JVM, which is not here with Spark "
            "Connect: run the driver in classic mode (spark-submit, or SparkSession.builder.master(…)), or let an "
            "embedded app hand its batches to Spark: a handler of DataFrame under app.run()"
        )
    chosen: Mapping[str, Any] = {"processingTime": trigger} if isinstance(trigger, str) else dict(trigger or {})
    check_trigger(chosen)
    if not app.registrations:
        raise ConfigurationError("the app has no handler: decorate a function with @app.consume('topic')")
    check_jars(spark)
    more = dict(options or {})
    if max_records is not None:
        more.setdefault("maxOffsetsPerTrigger", str(max_records))
    queries = [HandlerQuery(app, registration, spark, more, mirror) for registration in app.registrations]
    try:
        for each in queries:
            each.prepare(_folder(checkpoint, each, alone=len(queries) == 1))
        for each in queries:
            each.start(chosen)
    except BaseException:
        for each in queries:
            each.abandon()
        raise
    return Stream(spark, queries, app.shutdown)


class Stream:
    """The running queries of an app. As a context manager it drains them at the end of the block, or stops them at once
    if the block raises."""

    def __init__(self, spark: SparkSession, queries: Sequence[HandlerQuery], shutdown: float) -> None:
        """shutdown: seconds that running batches have to end after a signal."""
        self._queries = queries
        self._shutdown = shutdown
        self._ending = threading.Lock()
        self._wakeup = threading.Event()
        """Set when a query has ended, and by a signal."""
        self._remove_hook = on_jvm_shutdown(spark, self._drain_for_jvm, shutdown)
        for each in queries:
            threading.Thread(target=self._watch, args=(each,), name=f"kconsume-watch-{each.name}", daemon=True).start()

    @property
    def queries(self) -> list[StreamingQuery]:
        """The queries, as Spark knows them."""
        return [each.query for each in self._queries]

    @property
    def active(self) -> bool:
        """True while a query runs."""
        return any(each.active for each in self._queries)

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until all queries have ended. SIGTERM and SIGINT drain them. Raises the error that ended a query.

        Args:
            timeout: seconds; None to wait without end.

        Returns False if a query still runs after that time.
        """
        asked = threading.Event()
        deadline = None if timeout is None else time.monotonic() + timeout

        def ask() -> None:
            asked.set()
            self._wakeup.set()

        with on_signals(ask):
            while self._keep_waiting():
                if asked.is_set():
                    _log.info("stop requested", by="signal", drain_seconds=self._shutdown)
                    self.drain(self._shutdown)
                elif not self._wakeup.wait(None if deadline is None else max(0.0, deadline - time.monotonic())):
                    return False
        self.stop()  # if one query failed, the others end with it
        for each in self._queries:
            each.raise_failure()
        return True

    def drain(self, timeout: float = 60.0) -> bool:
        """Stop the queries after their running batches, so that no batch is handled without a commit.

        Args:
            timeout: seconds for the running batches.

        Returns False if a batch took longer: the batch was interrupted, and is run again later.
        """
        deadline = time.monotonic() + timeout
        for each in self._queries:
            each.batches.gate.close()
        in_time = [each.drain(max(0.0, deadline - time.monotonic())) for each in self._queries]
        self._end()
        return all(in_time)

    def stop(self) -> None:
        """Stop at once. Running batches are interrupted, and are run again later."""
        for each in self._queries:
            if each.active:
                each.query.stop()
        self._end()

    def lag(self) -> dict[Partition, int]:
        """How many offsets each partition is behind the end of its log."""
        return {partition: behind for each in self._queries for partition, behind in each.batches.lag().items()}

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self.drain(self._shutdown) if error is None else self.stop()

    def _keep_waiting(self) -> bool:
        self._wakeup.clear()  # before the checks below, so that a query that ends after them wakes the wait
        return self.active and not any(each.failed for each in self._queries)

    def _watch(self, query: HandlerQuery) -> None:
        try:
            query.await_end()
        finally:
            self._wakeup.set()

    def _drain_for_jvm(self) -> None:
        _log.info("stop requested", by="jvm", drain_seconds=self._shutdown)
        for each in self._queries:
            each.batches.gate.close()
        for each in self._queries:
            each.drain(self._shutdown)

    def _end(self) -> None:
        with self._ending:
            remove, self._remove_hook = self._remove_hook, lambda: None
            remove()
            for each in self._queries:
                each.close()


def _folder(base: str | None, query: HandlerQuery, *, alone: bool) -> str | None:
    """The checkpoint folder of a query. If there are several queries, each has a folder of its own."""
    if base is None or alone:
        return base
    return f"{base.rstrip('/')}/{query.name}"

"""`stream(app, spark)`: the handlers of an app, run by Spark on the Kafka source, from the app's own offsets.

For each handler a query (`handler_query.py`). What happens to a batch is `work.py`'s; how a query is stopped
`drain.py`'s.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kconsume.errors import ConfigurationError
from kconsume.records import Partition
from kconsume.spark.drain import on_jvm_shutdown, on_signals
from kconsume.spark.handler_query import HandlerQuery
from kconsume.spark.refusals import check_trigger
from kconsume.spark.session import is_connect, must_have_jars

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

    from kconsume.app import App

_log = logging.getLogger("kconsume.spark")

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

    `trigger`: as for `DataStreamWriter.trigger`, such as `{"availableNow": True}`, or the time between two batches,
    such as `"5 seconds"`; by default a batch begins when the one before is done. `checkpoint`: a folder, on any file
    system that the session reaches; without a scheme, on Spark's default one. Without `checkpoint` a new temporary
    folder is used, which is safe, because the offsets are in the store. `max_records`: how many offsets a batch has at
    most. `options`: more options of Spark's Kafka source.
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
    must_have_jars(spark)
    more = dict(options or {})
    if max_records is not None:
        more.setdefault("maxOffsetsPerTrigger", str(max_records))
    runs = [HandlerQuery(app, registration, spark, more, mirror) for registration in app.registrations]
    begun: list[HandlerQuery] = []
    try:
        for run in runs:
            run.prepare(_folder(checkpoint, run, alone=len(runs) == 1))
            begun.append(run)
        for run in runs:
            run.start(chosen)
    except BaseException:
        for run in runs:
            run.abandon()
        raise
    return Stream(spark, runs, app.shutdown)


class Stream:
    """Queries that run."""

    def __init__(self, spark: SparkSession, runs: Sequence[HandlerQuery], shutdown: float) -> None:
        self._runs = runs
        self._shutdown = shutdown
        self._ending = threading.Lock()
        self._woken = threading.Event()
        """Set when a query has ended, and by a signal."""
        self._forget_hook = on_jvm_shutdown(spark, self._from_the_jvm, shutdown)
        for run in runs:
            threading.Thread(target=self._watch, args=(run,), name=f"kconsume-watch-{run.name}", daemon=True).start()

    @property
    def queries(self) -> list[StreamingQuery]:
        return [run.query for run in self._runs]

    @property
    def active(self) -> bool:
        return any(run.active for run in self._runs)

    def wait(self, timeout: float | None = None) -> bool:
        """Until all queries have ended; False if they have not in time. SIGTERM and SIGINT drain them. Raises what
        ended one."""
        asked = threading.Event()
        deadline = None if timeout is None else time.monotonic() + timeout

        def ask() -> None:
            asked.set()
            self._woken.set()

        with on_signals(ask):
            while self._goes_on():
                if asked.is_set():
                    _log.info("asked to stop by a signal: draining within=%.0fs", self._shutdown)
                    self.drain(self._shutdown)
                elif not self._woken.wait(None if deadline is None else max(0.0, deadline - time.monotonic())):
                    return False
        self.stop()  # of several, the others end with one that failed
        for run in self._runs:
            run.raise_failure()
        return True

    def drain(self, timeout: float = 60.0) -> bool:
        """Stop behind the batches that run: none is left handled and not committed. False if one took longer, and was
        interrupted: it comes again."""
        deadline = time.monotonic() + timeout
        for run in self._runs:
            run.batches.gate.close()
        in_time = [run.drain(max(0.0, deadline - time.monotonic())) for run in self._runs]
        self._end()
        return all(in_time)

    def stop(self) -> None:
        """Stop at once: batches that run are interrupted, and come again."""
        for run in self._runs:
            if run.active:
                run.query.stop()
        self._end()

    def lag(self) -> dict[Partition, int]:
        """How many offsets each partition is behind its end."""
        return {partition: behind for run in self._runs for partition, behind in run.batches.lag().items()}

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self.drain(self._shutdown) if error is None else self.stop()

    def _goes_on(self) -> bool:
        self._woken.clear()  # before the look: what happens after it wakes the wait
        return self.active and not any(run.failed for run in self._runs)

    def _watch(self, run: HandlerQuery) -> None:
        try:
            run.await_end()
        finally:
            self._woken.set()

    def _from_the_jvm(self) -> None:
        _log.info("asked to stop by the JVM: draining within=%.0fs", self._shutdown)
        for run in self._runs:
            run.batches.gate.close()
        for run in self._runs:
            run.drain(self._shutdown)

    def _end(self) -> None:
        with self._ending:
            forget, self._forget_hook = self._forget_hook, lambda: None
            forget()
            for run in self._runs:
                run.close()


def _folder(base: str | None, run: HandlerQuery, *, alone: bool) -> str | None:
    if base is None or alone:
        return base
    return f"{base.rstrip('/')}/{run.name}"

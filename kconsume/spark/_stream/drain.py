"""Stops a query so that no batch is handled without a commit.

`query.stop()` interrupts the running batch. If its handler had just succeeded, the batch gets no entry in Spark's
commit log, and is run again. So a drain first closes the `Gate`: no further handler is called. When the running batch
has ended and Spark has committed it, the drain stops the query. If Spark begins another batch before that, this batch
waits until Spark interrupts it, and raises the interrupt.

A signal reaches Python if the user started Python (`python app.py`). Under spark-submit the JVM is the parent and gets
the signal. Then a shutdown hook of the JVM drains the query, before Spark's own hook stops the context.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import TYPE_CHECKING, Protocol

from kconsume._event_log import EventLog
from kconsume.spark import jvm
from kconsume.spark._batch.interrupts import error_texts, interrupted, is_interrupt

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from kconsume.spark._stream.running_query import RunningQuery

_log = EventLog("spark")
_POLL_SECONDS = 0.02
_JVM_SLEEP_MILLISECONDS = 20
_INTERRUPT_PATIENCE = 300.0
"""Seconds that a batch waits at a closed gate for the interrupt."""
# Hadoop runs shutdown hooks one after the other, the highest priority first. Spark's own hook has 40.
_PRIORITY_BEFORE_SPARK = 1000


class Gate:
    """Lets batches run one at a time, until it is closed.

    The thread of the batches writes `running` and `last_handled`; the thread that drains reads them. `_guard` guards
    `running` and `_closed`.
    """

    def __init__(self) -> None:
        self._guard = threading.Condition()
        self._closed = False
        self.running = False
        """True while a batch runs."""
        self.last_handled: int | None = None
        """The last batch whose handler returned normally."""

    @property
    def closed(self) -> bool:
        return self._closed

    def close(self) -> None:
        with self._guard:
            self._closed = True
            self._guard.notify_all()

    @contextmanager
    def batch(self, number: int, query: RunningQuery) -> Iterator[None]:
        """Run a batch in the block. If the gate is closed, the block does not run: this call waits until Spark
        interrupts the batch, and raises the interrupt."""
        with self._guard:
            self.running = not self._closed
        if not self.running:
            await_interrupt(query)
        try:
            yield
            self.last_handled = number
        finally:
            with self._guard:
                self.running = False
                self._guard.notify_all()

    def pause(self, seconds: float) -> bool:
        """Wait; returns False if the gate was closed before the time was over."""
        with self._guard:
            return not self._guard.wait_for(lambda: self._closed, seconds)

    def await_batch_end(self, deadline: float) -> bool:
        """Wait until no batch runs; returns False if one still runs at the deadline."""
        with self._guard:
            return self._guard.wait_for(lambda: not self.running, max(0.0, deadline - time.monotonic()))


def await_interrupt(query: RunningQuery) -> None:
    """Wait until Spark interrupts the batch, then raise the interrupt.

    A batch that starts during a drain must not call its handler, because the query is about to be stopped. The batch
    must not return normally, because Spark would regard it as done.
    """
    deadline = time.monotonic() + _INTERRUPT_PATIENCE
    while time.monotonic() < deadline:
        try:
            query.sleep_in_jvm(_JVM_SLEEP_MILLISECONDS)
        except Exception as error:
            if is_interrupt(error_texts(error), active=query.active):
                break
            raise
    raise interrupted("the query was draining") from None


class StoppableQuery(Protocol):
    """The part of a query that a drain uses."""

    @property
    def id(self) -> str: ...

    @property
    def active(self) -> bool: ...

    @property
    def last_reported_batch(self) -> int | None:
        """The last batch with a progress report. Spark reports a batch after its entry in the commit log is written."""
        ...

    def stop(self) -> None: ...


def drain_query(query: StoppableQuery, gate: Gate, timeout: float) -> bool:
    """Stop the query after its running batch. Returns False if the batch took longer than `timeout` seconds: the batch
    was interrupted, and is run again later."""
    deadline = time.monotonic() + timeout
    gate.close()
    in_time = gate.await_batch_end(deadline)
    while in_time and not _is_committed(query, gate.last_handled):
        if time.monotonic() > deadline:
            in_time = False
        time.sleep(_POLL_SECONDS)
    if not in_time:
        _log.warning(
            "drain timed out",
            query=query.id,
            seconds=timeout,
            hint="the running batch is interrupted and will run again; allow more time if its handler needs it",
        )
    query.stop()
    return in_time


def _is_committed(query: StoppableQuery, batch: int | None) -> bool:
    if batch is None or not query.active:
        return True
    reported = query.last_reported_batch
    return reported is not None and reported >= batch


@contextmanager
def on_signals(stop: Callable[[], None]) -> Iterator[None]:
    """While the block runs, SIGTERM and SIGINT call `stop`, and have no other effect. Outside of the main thread this
    does nothing, because Python sets signal handlers only there."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def on_signal(number: int, frame: FrameType | None) -> None:  # noqa: ARG001
        stop()

    before = {each: signal.signal(each, on_signal) for each in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


class _Hook:
    """A `java.lang.Runnable` in Python."""

    def __init__(self, run: Callable[[], None]) -> None:
        self._run = run

    def run(self) -> None:
        self._run()

    class Java:
        implements = ("java.lang.Runnable",)


def on_jvm_shutdown(spark: SparkSession, run: Callable[[], None], within: float) -> Callable[[], None]:
    """Call `run` when the JVM is asked to end, before Spark's own hook.

    Args:
        within: seconds that Hadoop allows the hook.

    Returns a function that removes the hook.
    """
    jvm.allow_callbacks(spark)
    hooks = jvm.java_class(spark, "org.apache.hadoop.util.ShutdownHookManager").get()
    # The hook manager needs a Runnable with Java's own hashCode. A thread is one; it is never started.
    hook = jvm.java_class(spark, "java.lang.Thread")(_Hook(run))
    seconds = jvm.java_class(spark, "java.util.concurrent.TimeUnit").SECONDS
    hooks.addShutdownHook(hook, _PRIORITY_BEFORE_SPARK, max(1, int(within)), seconds)

    def remove() -> None:
        from py4j.protocol import Py4JError

        with suppress(Py4JError, OSError):  # the JVM is ending, or has ended
            hooks.removeShutdownHook(hook)

    return remove

"""Stopping a query so that no batch is left handled and not committed.

`query.stop()` interrupts: a handler that had just succeeded gets no entry in Spark's commit log, and its batch comes
again. So the gate is closed first: no batch begins any more. When the one that runs has ended, and Spark has committed
it, the query is stopped; a batch that Spark begins meanwhile waits at the gate for the interrupt, which it passes on.

A signal reaches Python where Python was started (`python app.py`). Under spark-submit the JVM is the parent and gets
it: there a hook of the JVM's shutdown drains, before Spark's own hook stops the context.
"""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import TYPE_CHECKING, Any, Protocol, cast

from kconsume.spark.interrupts import interrupted, is_interrupt, texts_of
from kconsume.spark.query import java_class

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from kconsume.spark.query import Query

_log = logging.getLogger("kconsume.spark")
_LOOK_EVERY = 0.02
_DOZE = 20
_GIVE_UP = 300.0
"""Seconds that a batch waits at a closed gate for the interrupt that must come."""
# Hadoop runs hooks one after the other, the highest first; Spark's own has 40.
_BEFORE_SPARK = 1000


class Gate:
    """Which batch is inside, and whether the next may enter."""

    def __init__(self) -> None:
        self._guard = threading.Condition()
        self._closed = False
        self.inside = False
        self.handled: int | None = None
        """The last batch that was handled to its end."""

    @property
    def closed(self) -> bool:
        return self._closed

    def close(self) -> None:
        with self._guard:
            self._closed = True
            self._guard.notify_all()

    @contextmanager
    def batch(self, number: int, query: Query) -> Iterator[None]:
        with self._guard:
            self.inside = not self._closed
        if not self.inside:
            await_interrupt(query)
        try:
            yield
            self.handled = number
        finally:
            with self._guard:
                self.inside = False
                self._guard.notify_all()

    def pause(self, seconds: float) -> bool:
        """Wait; False if the gate was closed meanwhile."""
        with self._guard:
            return not self._guard.wait_for(lambda: self._closed, seconds)

    def await_empty(self, deadline: float) -> bool:
        with self._guard:
            return self._guard.wait_for(lambda: not self.inside, max(0.0, deadline - time.monotonic()))


def await_interrupt(query: Query) -> None:
    """Neither work nor return: the first would be undone, the second would tell Spark that the batch is done."""
    deadline = time.monotonic() + _GIVE_UP
    while time.monotonic() < deadline:
        try:
            query.doze(_DOZE)
        except Exception as error:
            if is_interrupt(texts_of(error), active=query.active):
                break
            raise
    raise interrupted("it was draining") from None


class Stoppable(Protocol):
    """A query, for who stops it."""

    @property
    def id(self) -> str: ...

    @property
    def active(self) -> bool: ...

    @property
    def reported(self) -> int | None:
        """The last batch of which Spark has reported, which it does when its commit is written."""
        ...

    def stop(self) -> None: ...


def drain(query: Stoppable, gate: Gate, timeout: float) -> bool:
    """Stop the query behind its running batch. False if that had not ended in time, and was interrupted."""
    deadline = time.monotonic() + timeout
    gate.close()
    in_time = gate.await_empty(deadline)
    while in_time and not _is_committed(query, gate.handled):
        if time.monotonic() > deadline:
            in_time = False
        time.sleep(_LOOK_EVERY)
    if not in_time:
        _log.warning("drain gave up after=%.0fs query=%s: its batch is interrupted, and comes again", timeout, query.id)
    query.stop()
    return in_time


def _is_committed(query: Stoppable, handled: int | None) -> bool:
    if handled is None or not query.active:
        return True
    reported = query.reported
    return reported is not None and reported >= handled


@contextmanager
def on_signals(stop: Callable[[], None]) -> Iterator[None]:
    """While the block runs, SIGTERM and SIGINT only ask for a stop. In the main thread; elsewhere signals are left."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def asked(number: int, frame: FrameType | None) -> None:  # noqa: ARG001
        stop()

    before = {each: signal.signal(each, asked) for each in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


class _Hook:
    """A java.lang.Runnable."""

    def __init__(self, run: Callable[[], None]) -> None:
        self._run = run

    def run(self) -> None:
        self._run()

    class Java:
        implements = ("java.lang.Runnable",)


def on_jvm_shutdown(spark: SparkSession, run: Callable[[], None], within: float) -> Callable[[], None]:
    """Call `run` when the JVM is asked to end, before Spark's own hook; answers with what takes that back."""
    from pyspark import java_gateway

    cast(Any, java_gateway).ensure_callback_server_started(spark.sparkContext._gateway)
    hooks = java_class(spark, "org.apache.hadoop.util.ShutdownHookManager").get()
    # Never started: it is a Runnable that has Java's own hashCode.
    hook = java_class(spark, "java.lang.Thread")(_Hook(run))
    seconds = java_class(spark, "java.util.concurrent.TimeUnit").SECONDS
    hooks.addShutdownHook(hook, _BEFORE_SPARK, max(1, int(within)), seconds)

    def forget() -> None:
        from py4j.protocol import Py4JError

        with suppress(Py4JError, OSError):  # of a JVM that is ending, or has ended
            hooks.removeShutdownHook(hook)

    return forget

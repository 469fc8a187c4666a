"""A running query, seen from inside its handler: its state, its checkpoint folder, its source, its thread.

Calls internals of Spark's streaming through py4j, as they are in PySpark 4.2.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, Any, cast

from kconsume.errors import ConfigurationError
from kconsume.spark import jvm

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_QUERY_ID = "sql.streaming.queryId"
_DESCRIPTION = "spark.job.description"
# Operators of a streaming plan, by their classes in Spark, and what users call them.
_STATEFUL = {
    "Aggregate": "groupBy with an aggregation",
    "Distinct": "distinct or dropDuplicates",
    "Deduplicate": "distinct or dropDuplicates",
    "DeduplicateWithinWatermark": "dropDuplicatesWithinWatermark",
    "Join": "a join of two streams",
    "GlobalLimit": "limit",
    "FlatMapGroupsWithState": "flatMapGroupsWithState",
    "FlatMapGroupsInPandasWithState": "applyInPandasWithState",
    "TransformWithState": "transformWithState",
    "TransformWithStateInPandas": "transformWithState",
    "TransformWithStateInPySpark": "transformWithState",
}


class RunningQuery:
    """The query whose batch is being handled on this thread."""

    def __init__(self, df: DataFrame) -> None:
        session = df.sparkSession
        self._context = session.sparkContext
        self._session = session
        number = self._context.getLocalProperty(_QUERY_ID)
        if number is None:
            raise ConfigurationError(
                "the function that foreach_batch returns was called outside of a streaming query: give it to "
                "writeStream.foreachBatch(…), and do not call it yourself"
            )
        self.id = number
        self._execution: Any = jvm.active_query(session, number)
        if self._execution is None:
            raise ConfigurationError(f"Spark has no active query {number}: it was stopped")

    @property
    def active(self) -> bool:
        return bool(self._execution.isActive())

    @cached_property
    def run(self) -> str:
        """The id of this run. A query that continues a checkpoint keeps `id` and has another `run`."""
        return str(self._execution.runId().toString())

    def is_handled_here(self) -> bool:
        """True if the query is active and this thread handles one of its batches."""
        return self._context.getLocalProperty(_QUERY_ID) == self.id and self.active

    @property
    def last_reported_batch(self) -> int | None:
        """The last batch with a progress report. Spark reports a batch after its entry in the commit log is written."""
        progress = self._execution.lastProgress()
        return None if progress is None else int(progress.batchId())

    def stop(self) -> None:
        self._execution.stop()

    @cached_property
    def kind(self) -> str:
        return str(self._execution.getClass().getSimpleName())

    @property
    def checkpoint(self) -> str:
        return str(self._execution.resolvedCheckpointRoot())

    def source_options(self, names: Sequence[str]) -> Mapping[str, str]:
        """The given options of the query's only source; empty if this version of Spark does not show them.

        Args:
            names: the options to look up. Other options are not read, because each takes a call to the JVM.
        """
        from py4j.protocol import Py4JError

        try:
            leaves = self._execution.logicalPlan().collectLeaves()
            found = [leaves.apply(index) for index in range(leaves.size())]
            (source,) = [leaf for leaf in found if leaf.getClass().getSimpleName().startswith("Streaming")]
            options = source.relation().options()
            given = {name: options.get(name) for name in names}  # Spark ignores the case of names
            return {name: str(value) for name, value in given.items() if value is not None}
        except (Py4JError, ValueError):
            return {}

    def stateful_operators(self) -> list[str]:
        """The operators of the plan that keep rows from one batch to the next, by their names in the DataFrame API."""
        return sorted(_stateful(self._execution.logicalPlan()))

    def sleep_in_jvm(self, milliseconds: int) -> None:
        """Sleep on the JVM's thread of this query. Raises when Spark interrupts that thread."""
        jvm.java_class(self._session, "java.lang.Thread").sleep(milliseconds)

    @contextmanager
    def job_description(self, text: str) -> Iterator[None]:
        """In the block, the Spark UI shows this text for the jobs of the batch."""
        before = self._context.getLocalProperty(_DESCRIPTION)
        self._context.setLocalProperty(_DESCRIPTION, text)
        try:
            yield
        finally:
            self._context.setLocalProperty(_DESCRIPTION, cast(str, before))


def _stateful(plan: Any) -> set[str]:
    if not plan.isStreaming():
        return set()  # this part of the plan is static: each batch computes it again
    seq = plan.children()
    children = [seq.apply(index) for index in range(seq.size())]
    found = set().union(*map(_stateful, children))
    name = str(plan.getClass().getSimpleName())
    if name in _STATEFUL and (name != "Join" or all(child.isStreaming() for child in children)):
        found.add(_STATEFUL[name])
    return found

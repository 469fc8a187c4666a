"""The rows that a task gets from Spark, checked against the range that the driver planned for their partition."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from kconsume.errors import TransactionMisused
from kconsume.records import Partition
from kconsume.spark._batch.ranges import OffsetRange

if TYPE_CHECKING:
    import pyarrow as pa


class RangeRows:
    """The record batches of a task. Raises for rows of another partition, or outside of the planned range."""

    def __init__(self, batches: Iterator[pa.RecordBatch], schema: pa.Schema | None = None) -> None:
        """schema: the schema of the rows that the handler gets; None for the schema that Spark gives."""
        self._source = iter(batches)
        self._schema = schema
        self._first = next((batch for batch in self._source if batch.num_rows), None)
        self._kept: pa.Table | None = None
        self._first_was_yielded = False
        self._source_error: BaseException | None = None
        self.count = 0
        self.planned: OffsetRange | None = None
        """The range that the driver planned. Must be set before rows are read."""
        self.partition: Partition | None = None
        """The partition of the first row; None without rows."""
        if self._first is not None:
            self.partition = Partition(self._first["topic"][0].as_py(), self._first["partition"][0].as_py())

    @property
    def schema(self) -> pa.Schema:
        assert self._first is not None
        return self._schema or self._first.schema

    def batches(self) -> Iterator[pa.RecordBatch]:
        """Yields each row once. `drain` reads and checks the rows that a handler has not taken."""
        assert self._first is not None
        if not self._first_was_yielded:
            self._first_was_yielded = True
            yield self._checked(self._first)
        while (batch := self._next()) is not None:
            yield self._checked(batch)

    def _next(self) -> pa.RecordBatch | None:
        """The next record batch. An error of the source is raised again at each call, because a handler may swallow
        the error as if it were the end of the rows, and return normally."""
        if self._source_error is not None:
            raise self._source_error
        try:
            return next(self._source, None)
        except BaseException as error:
            self._source_error = error
            raise

    def kept(self) -> pa.Table:
        """All rows as a table, which stays in memory."""
        import pyarrow as pa

        if self._kept is None:
            self._kept = pa.Table.from_batches(self.batches(), self.schema)
        return self._kept

    def drain(self) -> None:
        """Read and check the rest of the rows."""
        for _ in self.batches():
            pass

    def _checked(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        assert self.planned is not None
        self.count += batch.num_rows
        if batch.num_rows and not _is_in(batch, self.planned):
            self._source_error = TransactionMisused(
                f"a task got rows outside of {self.planned}, so the rows cannot be matched to ranges: give "
                f"for_each_partition the frame as it came from Kafka, without repartition, coalesce, union or join"
            )
            raise self._source_error
        return batch if self._schema is None else batch.cast(self._schema)


def _is_in(batch: pa.RecordBatch, planned: OffsetRange) -> bool:
    import pyarrow.compute

    # `min_max` computes both ends in the time of one.
    ends: Any = pyarrow.compute.min_max
    first, last = (ends(batch["offset"])[end].as_py() for end in ("min", "max"))
    number, topic = planned.partition.number, planned.partition.topic
    numbers = {ends(batch["partition"])[end].as_py() for end in ("min", "max")}
    topics = {ends(batch["topic"])[end].as_py() for end in ("min", "max")}
    return numbers == {number} and topics == {topic} and first >= planned.first and last < planned.end

"""Splits a micro-batch into parts, to find the records that fail: first one part for each partition, then halves.

The rows of a small part are fetched to the driver, and the handler gets a DataFrame of these local rows, because a job
on Spark's cache takes as long for ten records as for ten thousand.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kconsume.spark._batch.frames import rows_in_ranges
from kconsume.spark._batch.ranges import OffsetRange

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame

FETCH_BELOW = 20_000
"""The rows of a part are fetched if it has at most this many offsets."""


@dataclass(frozen=True, slots=True)
class BatchPart:
    """A part of a micro-batch: some of its ranges, or some rows of one range."""

    batch_frame: DataFrame
    """The frame of the micro-batch."""
    ranges: tuple[OffsetRange, ...]
    table: pa.Table | None = None
    """The rows of this part; None until they are fetched."""

    @property
    def frame(self) -> DataFrame:
        """The rows of this part, as the handler gets them."""
        if self.table is None:
            return rows_in_ranges(self.batch_frame, self.ranges)
        return self.batch_frame.sparkSession.createDataFrame(self.table, self.batch_frame.schema)

    @property
    def is_single_record(self) -> bool:
        return self.table is not None and self.table.num_rows == 1

    @property
    def rows(self) -> list[Mapping[str, Any]]:
        assert self.table is not None
        return list(self.table.to_pylist())

    def split(self) -> list[BatchPart]:
        """Smaller parts with the same records; parts without records are left out."""
        if len(self.ranges) > 1:
            return [BatchPart(self.batch_frame, (each,)) for each in self.ranges]
        (only,) = self.ranges
        if self.table is not None:
            middle = self.table.num_rows // 2
            return [self._with_rows(self.table.slice(0, middle)), self._with_rows(self.table.slice(middle))]
        if len(only) > FETCH_BELOW:
            return [BatchPart(self.batch_frame, (half,)) for half in only.halves()]
        table = self.frame.toArrow().sort_by("offset")
        if table.num_rows < 2:
            return [self._with_rows(table)] if table.num_rows else []
        return self._with_rows(table).split()

    def _with_rows(self, rows: pa.Table) -> BatchPart:
        # A copy, because Spark cannot take slices of list columns with nulls.
        table = rows.take(list(range(rows.num_rows)))
        offsets = table["offset"]
        first, last = offsets[0].as_py(), offsets[-1].as_py()
        return BatchPart(self.batch_frame, (OffsetRange(self.ranges[0].partition, first, last + 1),), table)

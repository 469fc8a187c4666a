"""A part of a micro-batch, handed over by itself to find the records that fail: by partition, then by halves.

What is left when it is small is fetched and kept here, and handed over as frames of local rows: a job on Spark's cache
takes as long for ten records as for ten thousand.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kconsume.spark.query import in_ranges
from kconsume.spark.ranges import OffsetRange

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame

FEW = 20_000
"""Offsets of which the records are fetched."""


@dataclass(frozen=True, slots=True)
class Piece:
    """These ranges of a whole frame; with its rows, once it is of one partition and small."""

    whole: DataFrame
    ranges: tuple[OffsetRange, ...]
    table: pa.Table | None = None

    @property
    def frame(self) -> DataFrame:
        if self.table is None:
            return in_ranges(self.whole, self.ranges)
        return self.whole.sparkSession.createDataFrame(self.table, self.whole.schema)

    @property
    def is_one(self) -> bool:
        return self.table is not None and self.table.num_rows == 1

    @property
    def rows(self) -> list[Mapping[str, Any]]:
        assert self.table is not None
        return list(self.table.to_pylist())

    def smaller(self) -> list[Piece]:
        """What it is made of; nothing of records that there are none of."""
        if len(self.ranges) > 1:
            return [Piece(self.whole, (each,)) for each in self.ranges]
        (only,) = self.ranges
        if self.table is not None:
            middle = self.table.num_rows // 2
            return [self._rows(self.table.slice(0, middle)), self._rows(self.table.slice(middle))]
        if len(only) > FEW:
            return [Piece(self.whole, (half,)) for half in only.halves()]
        table = self.frame.toArrow().sort_by("offset")
        if table.num_rows < 2:
            return [self._rows(table)] if table.num_rows else []
        return self._rows(table).smaller()

    def _rows(self, part: pa.Table) -> Piece:
        table = part.take(list(range(part.num_rows)))  # a copy: Spark cannot take slices of lists with nulls in them
        offsets = table["offset"]
        first, last = offsets[0].as_py(), offsets[-1].as_py()
        return Piece(self.whole, (OffsetRange(self.ranges[0].partition, first, last + 1),), table)

"""The two sides, lake and warehouse: starts each side, counts its stored clicks, and reads them back.

Only the tables of the warehouse are created here; nothing else is written. pyarrow reads the lake, without Spark.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import psycopg
import pyarrow.parquet as pq

from . import books
from .clicks import Click

SCHEMA = Path(__file__).with_name("schema.sql").read_text()


class Side(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def command(self) -> Sequence[str]:
        """The arguments of `python -m`."""

    @property
    def legend(self) -> str: ...

    def kept(self) -> int:
        """Return how many clicks are stored now."""

    def clicks(self) -> list[Click]: ...

    def books(self, sent: Sequence[Click]) -> list[books.Book]: ...


class Lake:
    name = "lake"
    command = ("kconsume", "run", "examples.lakehouse.lake:app")
    legend = "lake: parquet, by SparkSink"

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def kept(self) -> int:
        return sum(pq.read_metadata(file).num_rows for file in self._files())

    def clicks(self) -> list[Click]:
        return [Click(**row) for file in self._files() for row in pq.read_table(file).to_pylist()]

    def books(self, sent: Sequence[Click]) -> list[books.Book]:
        return [books.of_clicks("lake: SparkSink", sent, self.clicks())]

    def _files(self) -> Iterator[Path]:
        # `pyarrow.dataset` is not used: it also lists temporary files, and fails when Spark removes one of them.
        return self._folder.glob("*.parquet")


class Warehouse:
    name = "warehouse"
    command = ("examples.lakehouse.warehouse",)
    legend = "warehouse: PostgreSQL, by foreach_batch"

    def __init__(self, connection: psycopg.Connection) -> None:
        """Creates the tables."""
        self._connection = connection
        connection.execute(SCHEMA.encode())

    def kept(self) -> int:
        return int(self._rows("select count(*) from clicks")[0][0])

    def clicks(self) -> list[Click]:
        return [Click(*row) for row in self._rows("select id, visitor, page, at, milliseconds from clicks")]

    def books(self, sent: Sequence[Click]) -> list[books.Book]:
        pages = Counter[str](dict(self._rows("select page, clicks from pages")))
        return [
            books.of_clicks("warehouse: rows", sent, self.clicks()),
            books.of_pages("totals of pages", sent, pages),
        ]

    def _rows(self, query: str) -> list[tuple[Any, ...]]:
        return self._connection.execute(query.encode()).fetchall()

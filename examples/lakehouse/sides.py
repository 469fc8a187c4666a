"""The two sides, for the runner: how each is started, how far it has come, and what it has kept, read back.

Writes nothing but the warehouse's empty tables. The lake is read by pyarrow, without Spark.
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
        """What `python -m` starts."""

    @property
    def legend(self) -> str: ...

    def kept(self) -> int:
        """How many clicks are there by now."""

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
        # Not by pyarrow.dataset while it is written to: that also lists what lies aside, and fails when it goes.
        return self._folder.glob("*.parquet")


class Warehouse:
    name = "warehouse"
    command = ("examples.lakehouse.warehouse",)
    legend = "warehouse: PostgreSQL, by foreach_batch"

    def __init__(self, connection: psycopg.Connection) -> None:
        """Its tables are made."""
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

"""The task of `spark-ledger` in executors: a COPY, with an offset range in its transaction (kconsume) or without.

This is a module of its own, because executors import it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import psycopg
import pyarrow as pa

from kconsume.spark import for_each_partition


@for_each_partition
def copy(rows: Iterator[pa.RecordBatch], tx: psycopg.Connection) -> None:
    with tx.cursor() as cursor, cursor.copy("copy copied (record_offset, value) from stdin") as into:
        for batch in rows:
            for row in zip(batch["offset"].to_pylist(), batch["value"].to_pylist(), strict=True):
                into.write_row(row)


class BareTask:
    """Runs one transaction for each task, and keeps the connection open for the next task."""

    _connections: ClassVar[dict[str, psycopg.Connection[Any]]] = {}

    def __init__(self, url: str) -> None:
        self._url = url

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        connection = self._connections.get(self._url)
        if connection is None:
            connection = self._connections[self._url] = psycopg.connect(self._url, prepare_threshold=None)
        with connection.transaction():
            copy(batches, connection)
        yield pa.RecordBatch.from_pydict({"rows": pa.array([1], pa.int64())})


def make_table(url: str) -> None:
    with psycopg.connect(url) as connection:
        connection.execute("drop table if exists copied")
        connection.execute("create table copied (record_offset bigint not null, value bytea)")


def count(url: str) -> int:
    with psycopg.connect(url) as connection:
        (rows,) = connection.execute("select count(*) from copied").fetchone() or (0,)
        return int(rows)

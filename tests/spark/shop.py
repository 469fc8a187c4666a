"""A shop for stream tests: a topic, a database with a table of what was seen, handlers, and a query of a person's own.

The handlers are in a module, because executors import it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession

from kconsume import Batch
from kconsume.backends import PostgresStore
from kconsume.records import Partition
from kconsume.spark import for_each_partition
from tests.fix_kafka import _lasting_producer, produce

AvailableNow = {"availableNow": True}


class Shop:
    """One topic, one database."""

    def __init__(self, bootstrap: str, topic: str, url: str, folder: Path, partitions: int) -> None:
        self.bootstrap = bootstrap
        self.topic = topic
        self.url = url
        self.folder = folder
        self.partitions = partitions
        self.written: list[str] = []
        with self.look() as look:
            look.execute("create table if not exists seen (value text)")

    def look(self) -> psycopg.Connection:
        return psycopg.connect(self.url, autocommit=True)

    def fill(
        self, each: int, label: str = "v", partitions: Iterable[int] | None = None, *, fresh: bool = False
    ) -> None:
        """So many numbered records in each partition; `fresh`: by a producer that has just asked which there are."""
        if fresh:
            _lasting_producer.cache_clear()
        for partition in range(self.partitions) if partitions is None else partitions:
            values = [f"{label}:{partition}:{n}" for n in range(each)]
            produce(self.bootstrap, self.topic, values, partition=partition)
            self.written += values

    def seen(self) -> list[str]:
        with self.look() as look:
            return sorted(value for (value,) in look.execute("select value from seen"))

    def is_exact(self) -> bool:
        return self.seen() == sorted(self.written)

    def offsets(self, group: str) -> dict[int, int]:
        store = PostgresStore(self.url)
        try:
            positions = store.load(group, [Partition(self.topic, n) for n in range(self.partitions)])
            return {p.number: position.next_offset for p, position in positions.items()}
        finally:
            store.close()

    def source(self, spark: SparkSession, **options: str) -> DataFrame:
        chosen = {
            "kafka.bootstrap.servers": self.bootstrap,
            "subscribe": self.topic,
            "startingOffsets": "earliest",
            "includeHeaders": "true",
            **options,
        }
        return spark.readStream.format("kafka").options(**chosen).load()

    def query(
        self,
        spark: SparkSession,
        handler: Callable[[DataFrame, int], None],
        checkpoint: str = "own",
        frame: DataFrame | None = None,
        trigger: dict[str, Any] | None = None,
        **options: str,
    ) -> Any:
        """A query of a person's own; until all is read, unless there is another trigger."""
        source = self.source(spark, **options) if frame is None else frame
        writer = source.writeStream.foreachBatch(handler).option("checkpointLocation", str(self.folder / checkpoint))
        return writer.trigger(**(AvailableNow if trigger is None else trigger)).start()


def values_of(df: DataFrame) -> list[str]:
    return [row.v for row in df.selectExpr("cast(value as string) v").collect()]


def texts(batches: Iterable[pa.RecordBatch]) -> Iterator[str]:
    for batch in batches:
        for value in batch["value"].to_pylist():
            assert isinstance(value, bytes)
            yield value.decode()


def write(tx: psycopg.Connection[Any], values: Iterable[str]) -> None:
    with tx.cursor().copy("copy seen from stdin") as copy:
        for value in values:
            copy.write_row((value,))


def load(df: DataFrame, tx: psycopg.Connection) -> None:
    """In the driver: all of a batch in one transaction."""
    write(tx, values_of(df))


@for_each_partition
def load_rows(rows: Iterator[pa.RecordBatch], tx: psycopg.Connection) -> None:
    """In executors: a range in a transaction of its own."""
    write(tx, texts(rows))


def load_table(table: pa.Table, tx: psycopg.Connection) -> None:
    """The same for an app."""
    write(tx, texts(table.to_batches()))


def is_bad(value: str) -> bool:
    return value.startswith("bad")


def load_strictly(df: DataFrame, tx: psycopg.Connection) -> None:
    values = values_of(df)
    write(tx, values)
    if bad := [value for value in values if is_bad(value)]:
        raise ValueError(f"cannot load {bad[0]}")


@for_each_partition
def load_table_strictly(table: pa.Table, tx: psycopg.Connection) -> None:
    values = list(texts(table.to_batches()))
    write(tx, values)
    if bad := [value for value in values if is_bad(value)]:
        raise ValueError(f"cannot load {bad[0]}")


def tell_batch(table: pa.Table, batch: Batch, tx: psycopg.Connection) -> None:
    """All that a handler of tables can know, as text: of each record, and of the batch."""
    with_metadata = [repr((row, record)) for row, record in zip(table.to_pylist(), batch, strict=True)]
    told = [
        str(table.schema), f"{batch.topic}/{batch.partition}@{batch.first}-{batch.last}", batch.id, len(batch),
        batch.attempt, bool(batch), batch.keys, batch.values, batch.offsets, batch.timestamps, batch.headers, batch[3],
        list(batch[2:5]), batch[2:5].id, batch[-1].offset, *with_metadata,
    ]  # fmt: skip
    for number, each in enumerate(told):
        tx.execute("insert into seen values (%s)", (f"{number:03} {each!r}",))

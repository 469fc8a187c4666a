"""`SparkSink`: a ready-made handler that appends a topic to a folder or a table.

    app.consume("clicks", batch=Batching(records=100_000, wait=5.0))(SparkSink(path="/data/clicks", rows=Click))

The sink is a handler with a signature, so retries, dead letters and `check` work as for any handler. It takes the batch
as a table, and makes a DataFrame of the rows that are not written yet. `ranged_files` and `postgres_copy` guarantee
that a range is written once.
"""

from __future__ import annotations

import inspect
import re
from bisect import bisect_left
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from kconsume._event_log import EventLog
from kconsume._handlers.batches import Batch
from kconsume.errors import ConfigurationError
from kconsume.spark._batch.stream_batch import StreamBatch
from kconsume.spark._sink.dataframes import to_dataframe
from kconsume.spark._sink.frame_provider import describe
from kconsume.spark._sink.postgres_copy import RangeTable, check_address, copy_rows
from kconsume.spark._sink.ranged_files import RangedFiles, RangeSource, SinkId
from kconsume.spark.jars import pyspark_version

if TYPE_CHECKING:
    import pyarrow
    from pyspark.sql import DataFrame, SparkSession

    Transform = Callable[[DataFrame], DataFrame]

_log = EventLog("spark")

FILES = ("parquet", "orc")
"""Formats for `path=`."""
FORMATS = (*FILES, "jdbc")


class SparkSink:
    """A handler that appends a topic to a folder or to a table of PostgreSQL; exactly once, with any offset store.

    Sinks of several groups may write one topic into one folder or table: each appends all of its rows.

    Args:
        path: the folder; on this machine, or mounted.
        table: the table of PostgreSQL, instead of `path`.
        format: `"parquet"` (default) or `"orc"` for `path`, `"jdbc"` for `table`.
        rows: the model whose fields are the columns; without it the columns are key, value, topic, partition, offset,
            timestamp and headers.
        transform: makes the DataFrame to write from the DataFrame of a batch. Must be deterministic, and must not
            combine rows, because a batch may be cut at another offset when it is written again.
        url: a PostgreSQL database for `table`; without it the rows are written in the transaction of
            `offsets="postgresql://…"`.
        options: `compression`, and properties of the format such as `parquet.page.size`.
        name: the handler's name. A sink with another name is another sink, and does not know what this one has written.
    """

    def __init__(
        self,
        *,
        path: str | Path | None = None,
        table: str | None = None,
        format: str | None = None,
        rows: type | None = None,
        transform: Transform | None = None,
        url: str | None = None,
        options: Mapping[str, str] | None = None,
        name: str | None = None,
    ) -> None:
        format = format or ("parquet" if table is None else "jdbc")
        _check(path, table, format, url, options)
        pyspark_version()
        self._rows = rows
        self._transform = transform
        self._options = dict(options or {})
        self._format = format
        self._name = name or ""
        self.guarantee = ""
        """The promise of this sink, in one sentence."""
        if path is not None:
            self._write_to_folder(_local(path))
        else:
            self._write_to_table(str(table), url)
        self.__name__ = self.__qualname__ = name or _name_of(str(path or table))

    def __call__(self, *arguments: Any, **named: Any) -> None:
        """Append a batch. `__signature__` declares the parameters, which depend on where the sink writes."""
        self._write(*arguments, **named)

    def _declare(self, write: Callable[..., None], guarantee: str, **parameters: object) -> None:
        """Set the function that writes, the guarantee, and the signature: `rows`, `batch` and the given parameters."""
        import pyarrow

        table = pyarrow.Table if self._rows is None else Annotated[pyarrow.Table, self._rows]
        hints: dict[str, object] = {"rows": table, "batch": Batch, **parameters}
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        self._write = write
        self.guarantee = guarantee
        self.__signature__ = inspect.Signature([inspect.Parameter(name, kind) for name in hints])
        self.__annotations__ = {**hints, "return": None}

    # Into a folder

    def _write_to_folder(self, folder: Path) -> None:
        from pyspark.sql import SparkSession

        self._folder = folder
        self._files: dict[SinkId, RangedFiles] = {}
        self._declare(
            self._write_file,
            f"exactly once: each range of offsets is one {self._format} file in {folder}, which readers see complete "
            f"or not at all, and never twice",
            spark=SparkSession,
        )

    def _write_file(self, rows: pyarrow.Table, batch: Batch, spark: SparkSession) -> None:
        files, source = self._files_of(batch), _source(batch)
        while True:
            end = files.next_offset(source)
            new = _rows_from(end, rows, batch)
            if new.num_rows == 0:
                return
            first = batch.first if new.num_rows == len(batch) else batch[len(batch) - new.num_rows].offset
            with files.staging(source) as folder:
                describe(spark, batch.topic, batch.partition, first, batch.last)
                frame = self._transformed(to_dataframe(spark, new)).coalesce(1)
                # Without a scheme Spark would look for the folder on its default file system.
                frame.write.format(self._format).options(**self._options).save(f"file:{folder}")
                if files.publish(source, _only_file(folder, self._format), end, first, batch.last):
                    return

    def _files_of(self, batch: Batch) -> RangedFiles:
        sink = self._sink(batch)
        if sink not in self._files:
            self._files[sink] = RangedFiles(self._folder, f".{self._format}", sink)
        return self._files[sink]

    # Into PostgreSQL

    def _write_to_table(self, table: str, url: str | None) -> None:
        spark: dict[str, object] = {}
        if self._transform is not None:
            from pyspark.sql import SparkSession

            spark["spark"] = SparkSession
        self._table = table
        if url is None:
            import psycopg

            self._declare(
                self._write_in_store_transaction,
                f"exactly once: the rows of {table} and the offset commit together",
                tx=psycopg.Connection,
                **spark,
            )
            return
        self._ranges = RangeTable(check_address(url), table)
        self._declare(
            self._write_with_range,
            f"exactly once: the rows of {table} and the range of their offsets (kconsume_sink_ranges) commit together",
            **spark,
        )

    def _write_in_store_transaction(
        self, rows: pyarrow.Table, batch: Batch, tx: Any, spark: SparkSession | None = None
    ) -> None:
        copy_rows(tx, self._table, self._transformed_rows(rows, batch, spark))

    def _write_with_range(self, rows: pyarrow.Table, batch: Batch, spark: SparkSession | None = None) -> None:
        with self._ranges.transaction(_source(batch), self._sink(batch), batch.last) as (connection, end):
            new = _rows_from(end, rows, batch)
            if new.num_rows:
                copy_rows(connection, self._table, self._transformed_rows(new, batch, spark))

    def _transformed_rows(self, rows: pyarrow.Table, batch: Batch, spark: SparkSession | None) -> pyarrow.Table:
        """The rows after `transform`. Spark runs only if there is a `transform`."""
        if spark is None or self._transform is None:
            return rows
        describe(spark, batch.topic, batch.partition, batch.first, batch.last)
        return self._transformed(to_dataframe(spark, rows)).toArrow()

    def _sink(self, batch: Batch) -> SinkId:
        return SinkId(batch.id.rsplit(":", 3)[0], self._name)

    def _transformed(self, frame: DataFrame) -> DataFrame:
        return frame if self._transform is None else self._transform(frame)


def _source(batch: Batch) -> RangeSource:
    if isinstance(batch, StreamBatch):
        raise ConfigurationError(
            "SparkSink(url=…) records its ranges with the ids of topics, which a batch of kconsume.spark.stream() does "
            "not have: leave url= out and keep the offsets in that PostgreSQL (offsets='postgresql://…'), or use "
            "app.run()"
        )
    topic_id = batch.id.rsplit(":", 3)[1]
    return RangeSource(batch.topic, batch.partition, "" if topic_id == batch.topic else topic_id)


def _rows_from(offset: int, rows: pyarrow.Table, batch: Batch) -> pyarrow.Table:
    """The rows from this offset on; those before it were written already."""
    if batch.first >= offset:
        return rows
    new = rows.slice(bisect_left(batch.offsets, offset))
    skipped = len(batch) - new.num_rows
    _log.info("records written before", partition=f"{batch.topic}/{batch.partition}", records=skipped)
    return new


def _only_file(folder: Path, format: str) -> Path:
    files = sorted(folder.glob(f"part-*.{format}"))
    if len(files) != 1:
        raise ConfigurationError(
            f"this process sees {len(files)} files of Spark in {folder}, and there must be one: with executors on "
            f"other machines, path= must be a folder that all of them share"
        )
    return files[0]


def _name_of(target: str) -> str:
    last = target.rstrip("/").rpartition("/")[2]
    return f"sink_{re.sub(r'[^a-zA-Z0-9]+', '_', last).strip('_') or 'rows'}"


def _local(path: str | Path) -> Path:
    text = str(path)
    scheme, colon, rest = text.partition(":")
    if colon and scheme == "file":
        return Path("/" + rest.lstrip("/"))
    if "://" in text or (colon and "/" not in scheme and len(scheme) > 1):
        raise ConfigurationError(
            f"SparkSink(path={text!r}) is not on a file system of this machine, and on other file systems a file is "
            f"not moved to its place in one step: name a folder, which may be a mounted one, or take the DataFrame in "
            f"a handler of your own (df.write.save({text!r})), with the guarantee at least once"
        )
    return Path(text).absolute()


def _check(
    path: str | Path | None, table: str | None, format: str, url: str | None, options: Mapping[str, str] | None
) -> None:
    if (path is None) == (table is None) or not (path or table):
        raise ConfigurationError("SparkSink takes one of path= and table=: SparkSink(path='/data/clicks')")
    if format not in FORMATS:
        raise ConfigurationError(
            f"SparkSink(format={format!r}) is not offered: choose {', '.join(FORMATS)}, or take the DataFrame in a "
            f"handler of your own (df.write.format({format!r}), with concurrency=1), with the guarantee at least once"
        )
    if format == "jdbc" and table is None:
        raise ConfigurationError("SparkSink(format='jdbc') writes rows into a table: give its name, table='clicks'")
    if format != "jdbc" and table is not None:
        # All writers that append to a table share a temporary folder of Spark's committer, and the first writer that
        # ends removes the folder.
        raise ConfigurationError(
            f"SparkSink(table={table!r}) is a table of PostgreSQL, format='jdbc'; {format} files go into a folder, "
            f"path=…, which Spark reads as a table; for one of Spark's catalog take the DataFrame in a handler of your "
            f"own (df.write.saveAsTable({table!r}), with concurrency=1), with the guarantee at least once"
        )
    if format != "jdbc" and url is not None:
        raise ConfigurationError(
            "SparkSink(url=...) is the database of format='jdbc': give table= instead of path=, or leave url= out"
        )
    if format == "jdbc" and options:
        raise ConfigurationError(
            "SparkSink(options=...) is for Spark's writers, and format='jdbc' is written by COPY: leave options= out"
        )
    for name in options or {}:
        _check_option(name)


_SEVERAL_FILES = ("partitionby", "bucketby", "sortby", "clusterby", "maxrecordsperfile")


def _check_option(name: str) -> None:
    """Refuse options that Spark would ignore without an error: unknown ones, and names of its writer's methods."""
    if name.lower() in _SEVERAL_FILES:
        raise ConfigurationError(
            f"SparkSink(options={{{name!r}: …}}) is not offered: a range of offsets is one file, and this option makes "
            f"several; write the DataFrame in a handler of your own (df.write.partitionBy(…), with concurrency=1), "
            f"with the guarantee at least once"
        )
    if name.lower() != "compression" and "." not in name:
        raise ConfigurationError(
            f"SparkSink(options={{{name!r}: …}}) is not an option of Spark's parquet and orc writers, and Spark would "
            f"ignore it: give compression, or a property of the format with its full name, such as parquet.page.size"
        )

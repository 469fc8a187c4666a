"""Writes the rows of a `pyarrow.Table` into a table of PostgreSQL, by COPY, in the transaction of the caller.

Spark's own JDBC writer commits each partition on a connection of its own, so its transaction cannot include an offset.
Here the rows are in the transaction of the offset store. If the sink has a `url`, the rows are instead in a transaction
with a row of `kconsume_sink_ranges` that holds the next offset to write. The transaction locks that row first, so the
second of two writers waits, and then sees what the first has written.

Each row of `kconsume_sink_ranges` belongs to one sink. Its column `target` identifies the sink: the first sink that
writes a partition has the name of the table, any other sink has the name of the table and its own id. The first sink is
recorded in `kconsume_sink_owners`. Earlier versions had only rows of first sinks. This module does not use Spark.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import msgspec

from kconsume._event_log import EventLog
from kconsume.errors import ConfigurationError, MissingExtra

if TYPE_CHECKING:
    import psycopg
    import pyarrow

    from kconsume.spark._sink.ranged_files import RangeSource, SinkId

Key = tuple[str, str, int, str]
"""Target, topic, partition and topic id."""
_log = EventLog("spark")

_CREATE_TABLES = """
select pg_advisory_xact_lock(hashtextextended('kconsume_sink_ranges', 0));
create table if not exists kconsume_sink_ranges (
    target text not null,
    topic text not null,
    partition integer not null,
    topic_id text not null,
    next_offset bigint not null,
    updated_at timestamptz not null default now(),
    primary key (target, topic, partition, topic_id)
);
create table if not exists kconsume_sink_owners (
    target text not null,
    topic text not null,
    partition integer not null,
    topic_id text not null,
    sink text not null,
    primary key (target, topic, partition, topic_id)
)"""
_TAKE_ROW = """
insert into kconsume_sink_owners (target, topic, partition, topic_id, sink) values (%s, %s, %s, %s, %s)
on conflict do nothing"""
_INSERT_ROW = """
insert into kconsume_sink_ranges (target, topic, partition, topic_id, next_offset) values (%s, %s, %s, %s, 0)
on conflict do nothing"""
_WHERE = "where target = %s and topic = %s and partition = %s and topic_id = %s"
_OWNER = f"select sink from kconsume_sink_owners {_WHERE}"
_NEXT_OFFSET = f"select next_offset from kconsume_sink_ranges {_WHERE}"
_LOCK_ROW = f"{_NEXT_OFFSET} for update"
_MOVE = f"update kconsume_sink_ranges set next_offset = %s, updated_at = now() {_WHERE}"


def copy_rows(connection: psycopg.Connection, target: str, rows: pyarrow.Table) -> None:
    """Append rows in the transaction of the connection.

    Args:
        target: the table, with or without a schema.
        rows: its columns are columns of the target, by name. Nested values become JSON.
    """
    from psycopg import sql

    statement = sql.SQL("copy {} ({}) from stdin").format(
        sql.Identifier(*target.split(".")), sql.SQL(", ").join(map(sql.Identifier, rows.column_names))
    )
    columns = [_cells(column) for column in rows.columns]
    with connection.cursor() as cursor, cursor.copy(statement) as copy:
        for row in zip(*columns, strict=True):
            copy.write_row(row)


def _cells(column: pyarrow.ChunkedArray[Any]) -> list[Any]:
    import pyarrow.types as kinds

    values = column.to_pylist()
    if not kinds.is_nested(column.type):
        return values
    return [None if value is None else msgspec.json.encode(value).decode() for value in values]


class RangeTable:
    """The ranges that were written to a table, in `kconsume_sink_ranges` of the same database."""

    def __init__(self, url: str, target: str) -> None:
        self._url = url
        self._target = target
        self._tables_exist = False
        self._keys: dict[tuple[RangeSource, SinkId], Key] = {}

    @contextmanager
    def transaction(self, source: RangeSource, sink: SinkId, last: int) -> Iterator[tuple[psycopg.Connection, int]]:
        """A transaction, and the first offset that is not written yet. At the end of the block the offsets up to `last`
        are recorded as written, and the transaction commits."""
        with connect(self._url) as connection:
            if not self._tables_exist:
                connection.execute(_CREATE_TABLES)
                connection.commit()
                self._tables_exist = True
            if (source, sink) not in self._keys:
                self._keys[source, sink] = self._key(connection, source, sink)
            key = self._keys[source, sink]
            connection.execute(_INSERT_ROW, key)
            row = connection.execute(_LOCK_ROW, key).fetchone()
            assert row is not None
            yield connection, row[0]
            connection.execute(_MOVE, (max(row[0], last + 1), *key))

    def _key(self, connection: psycopg.Connection, source: RangeSource, sink: SinkId) -> Key:
        """The key of this sink's row. The first sink that writes the partition gets the row with the table's name."""
        first = (self._target, source.topic, source.partition, source.topic_id)
        taken = connection.execute(_TAKE_ROW, (*first, str(sink))).rowcount
        owner = connection.execute(_OWNER, first).fetchone()
        earlier = connection.execute(_NEXT_OFFSET, first).fetchone() if taken else None
        connection.commit()
        partition = f"{source.topic}/{source.partition}"
        if earlier is not None:
            _log.warning(
                "earlier ranges taken over",
                table=self._target,
                partition=partition,
                sink=sink,
                offset=earlier[0],
                effect="offsets below this one are not written again: an earlier version of kconsume has written them",
            )
        assert owner is not None
        if owner[0] == str(sink):
            return first
        _log.warning(
            "table has rows of another sink",
            table=self._target,
            partition=partition,
            sink=sink,
            other=owner[0],
            hint="each sink writes all of its rows; the rows of both are kept",
        )
        return (f"{self._target} {sink}", *first[1:])


def connect(url: str) -> psycopg.Connection:
    try:
        import psycopg
    except ImportError as error:
        raise MissingExtra(
            "format='jdbc' writes to PostgreSQL with psycopg, which is not installed: pip install 'kconsume[postgres]'"
        ) from error
    return psycopg.connect(url)


def check_address(url: str) -> str:
    """The address as psycopg reads it: without the `jdbc:` of Spark's addresses."""
    address = url.removeprefix("jdbc:")
    if not address.startswith(("postgresql://", "postgres://")):
        raise ConfigurationError(
            f"SparkSink(url={url.partition('//')[0]}//…) names no PostgreSQL, and only PostgreSQL can keep rows and "
            f"their range in one transaction: write url='postgresql://host/database', or take the DataFrame in a "
            f"handler of your own (df.write.jdbc), with the guarantee at least once"
        )
    return address

"""Rows of a `pyarrow.Table` into a table of PostgreSQL: by COPY, in somebody's transaction.

Spark's own JDBC writer commits each partition on a connection of its own, so that no offset can be a part of it. Here
the rows are in the transaction of the offset store; or, with an address of their own, in one with a row that says how
far the table has come: `kconsume_sink_ranges`. That row is locked first, so that of two writers one waits, and then
sees what the other has done.

Such a row belongs to one sink. The first sink that writes a partition takes the row that has only the table's name,
which is the only one that earlier versions know, and is noted in `kconsume_sink_owners`. The target of any other sink's
row is the table and the sink. Nothing here knows Spark.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import msgspec

from kconsume.errors import ConfigurationError, MissingExtra

if TYPE_CHECKING:
    import psycopg
    import pyarrow

    from kconsume.spark.ranged_files import Sink, Source

Key = tuple[str, str, int, str]
_log = logging.getLogger("kconsume.spark")

_MAKE = """
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
_TAKE = """
insert into kconsume_sink_owners (target, topic, partition, topic_id, sink) values (%s, %s, %s, %s, %s)
on conflict do nothing"""
_MAKE_ROW = """
insert into kconsume_sink_ranges (target, topic, partition, topic_id, next_offset) values (%s, %s, %s, %s, 0)
on conflict do nothing"""
_WHERE = "where target = %s and topic = %s and partition = %s and topic_id = %s"
_OWNER = f"select sink from kconsume_sink_owners {_WHERE}"
_AT = f"select next_offset from kconsume_sink_ranges {_WHERE}"
_LOCK = f"{_AT} for update"
_MOVE = f"update kconsume_sink_ranges set next_offset = %s, updated_at = now() {_WHERE}"


def copy_rows(connection: psycopg.Connection, target: str, rows: pyarrow.Table) -> None:
    """Append them. The columns of `rows` are columns of the target, by name; nested ones become JSON."""
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
    """How far a target has come, kept beside it."""

    def __init__(self, url: str, target: str) -> None:
        self._url = url
        self._target = target
        self._made = False
        self._keys: dict[tuple[Source, Sink], Key] = {}

    @contextmanager
    def transaction(self, source: Source, sink: Sink, last: int) -> Iterator[tuple[psycopg.Connection, int]]:
        """A transaction that takes the sink beyond `last`, and the first offset that it has not written yet."""
        with connect(self._url) as connection:
            if not self._made:
                connection.execute(_MAKE)
                connection.commit()
                self._made = True
            if (source, sink) not in self._keys:
                self._keys[source, sink] = self._key(connection, source, sink)
            key = self._keys[source, sink]
            connection.execute(_MAKE_ROW, key)
            row = connection.execute(_LOCK, key).fetchone()
            assert row is not None
            yield connection, row[0]
            connection.execute(_MOVE, (max(row[0], last + 1), *key))

    def _key(self, connection: psycopg.Connection, source: Source, sink: Sink) -> Key:
        """The row of this sink."""
        first = (self._target, source.topic, source.partition, source.topic_id)
        taken = connection.execute(_TAKE, (*first, str(sink))).rowcount
        row = connection.execute(_OWNER, first).fetchone()
        earlier = connection.execute(_AT, first).fetchone() if taken else None
        connection.commit()
        if earlier is not None:
            _log.warning("sink goes on behind the ranges that an earlier version of kconsume wrote table=%s "
                         "partition=%s/%s sink=%s offset=%d", self._target, source.topic, source.partition, sink,
                         earlier[0])  # fmt: skip
        assert row is not None
        if row[0] == str(sink):
            return first
        _log.warning("table has rows of another sink, and the rows of both are kept table=%s partition=%s/%s sink=%s "
                     "other=%s", self._target, source.topic, source.partition, sink, row[0])  # fmt: skip
        return (f"{self._target} {sink}", *first[1:])


def connect(url: str) -> psycopg.Connection:
    try:
        import psycopg
    except ImportError as error:
        raise MissingExtra(
            "format='jdbc' writes to PostgreSQL by psycopg, which is not installed: pip install 'kconsume[postgres]'"
        ) from error
    return psycopg.connect(url)


def check_address(url: str) -> str:
    """As psycopg reads it; Spark's own begin with `jdbc:`."""
    address = url.removeprefix("jdbc:")
    if not address.startswith(("postgresql://", "postgres://")):
        raise ConfigurationError(
            f"SparkSink(url={url.partition('//')[0]}//…) names no PostgreSQL, and rows and their range are kept "
            f"together in PostgreSQL only: write url='postgresql://host/database', or take the DataFrame in a handler "
            f"of your own (df.write.jdbc), at least once"
        )
    return address

"""Messages as a `pyarrow.Table`: one row for each record, with the columns of Spark's Kafka source.

pyarrow is imported when the first table is made, because the base install does not include it. A table has the
records of one partition, as a batch does. This module must not decode values.

Each column is read with one `map` over the message's own method. A tuple or a dict for each row costs more than twice
as much.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from datetime import datetime, timedelta
from functools import cache
from typing import TYPE_CHECKING, TypeAlias

from kconsume.errors import MissingExtra
from kconsume.records import Message

if TYPE_CHECKING:
    import pyarrow

    Column: TypeAlias = pyarrow.Array[pyarrow.Scalar[pyarrow.DataType]]

_EPOCH = datetime(1970, 1, 1)
_EARLIEST = (datetime.min - _EPOCH) // timedelta(milliseconds=1)
_LATEST = (datetime.max - _EPOCH) // timedelta(milliseconds=1)


@cache
def schema() -> pyarrow.Schema:
    """Return the columns of a table. Raises MissingExtra if pyarrow is not installed.

    Keys and values are `binary`, because fewer readers know `large_binary`. A column of more than 2 GB becomes two
    chunks.
    """
    try:
        import pyarrow as pa
    except ImportError as error:
        raise MissingExtra(
            "a handler that takes a pyarrow.Table needs pyarrow, which is not installed: pip install pyarrow "
            "(kconsume[spark] brings it too)"
        ) from error
    columns: dict[str, pa.DataType] = {
        "key": pa.binary(),
        "value": pa.binary(),
        "topic": pa.string(),
        "partition": pa.int32(),
        "offset": pa.int64(),
        "timestamp": pa.timestamp("ms", "UTC"),
        "headers": _header_list(),
    }
    return pa.schema(columns)


def table_of(messages: Sequence[Message]) -> pyarrow.Table:
    """Return the records as a table.

    Args:
        messages: records of one partition, all of one class: the client's class, or a class of the tests.
    """
    columns = schema()
    if not messages:
        return columns.empty_table()
    import pyarrow as pa

    kind, first, count = type(messages[0]), messages[0], len(messages)
    return pa.Table.from_arrays(
        [
            pa.array(list(map(kind.key, messages)), pa.binary()),
            pa.array(list(map(kind.value, messages)), pa.binary()),
            # Explicit types: to infer one, pyarrow looks for dateutil, every time if dateutil is missing (90 µs).
            pa.repeat(pa.scalar(first.topic(), pa.string()), count),
            pa.repeat(pa.scalar(first.partition(), pa.int32()), count),
            _offsets(messages),
            _timestamps(messages),
            _headers(messages),
        ],
        schema=columns,
    )


def _offsets(messages: Sequence[Message]) -> Column:
    """Return the offsets. Every record has an offset, so no value is null.

    The way through Python's `array` takes half the time of `pyarrow.array`.
    """
    import pyarrow as pa

    numbers = array("q", map(type(messages[0]).offset, messages))
    return pa.Array.from_buffers(pa.int64(), len(numbers), [None, pa.py_buffer(numbers)])


@cache
def _header_list() -> pyarrow.ListType[pyarrow.StructType]:
    import pyarrow as pa

    return pa.list_(pa.struct([pa.field("key", pa.string()), pa.field("value", pa.binary())]))


def _timestamps(messages: Sequence[Message]) -> Column:
    """Return the timestamps: null if a record has none, or if `datetime` cannot hold it, as in `Record`.

    A producer may write any 64-bit number as a timestamp.
    """
    import pyarrow as pa

    millis = [
        moment if known and _EARLIEST <= moment <= _LATEST else None
        for known, moment in map(type(messages[0]).timestamp, messages)
    ]
    return pa.array(millis, pa.timestamp("ms", "UTC"))


def _headers(messages: Sequence[Message]) -> Column:
    """Return the headers: null if a record has none. Most records have none, so that case must cost almost nothing.

    A map is the fastest way to a column of pairs. A map has the same layout in memory as the list of
    structs to which it is cast.
    """
    import pyarrow as pa

    pairs = list(map(type(messages[0]).headers, messages))
    if not any(pairs):
        return pa.nulls(len(pairs), _header_list())
    return pa.array([some or None for some in pairs], pa.map_(pa.string(), pa.binary())).cast(_header_list())

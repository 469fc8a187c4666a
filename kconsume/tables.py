"""Messages as a `pyarrow.Table`: one row a record, the columns that Spark's Kafka source has.

The only place where pyarrow is imported, and only when a table is asked for: it is no dependency of the base
install. Nothing here decodes; a table is of one partition, because a batch is.

A column is read in one go (`map` over the message's own method), which is what makes a row cheap: a tuple a row, or
a dict, costs more than twice as much.
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
    """The columns of every table.

    `binary` and not `large_binary`, which fewer readers know: what passes 2 GB in one table becomes two chunks of
    the column, and no record is that large.
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
    """The records as a table. All are of one partition, and of one class: the client's or a stand-in's."""
    columns = schema()
    if not messages:
        return columns.empty_table()
    import pyarrow as pa

    kind, first, count = type(messages[0]), messages[0], len(messages)
    return pa.Table.from_arrays(
        [
            pa.array(list(map(kind.key, messages)), pa.binary()),
            pa.array(list(map(kind.value, messages)), pa.binary()),
            # With their types: to guess one, pyarrow looks for dateutil, each time anew where there is none (90 µs).
            pa.repeat(pa.scalar(first.topic(), pa.string()), count),
            pa.repeat(pa.scalar(first.partition(), pa.int32()), count),
            _offsets(messages),
            _timestamps(messages),
            _headers(messages),
        ],
        schema=columns,
    )


def _offsets(messages: Sequence[Message]) -> Column:
    """From Python's own array of 64 bits, in half the time: no record is without an offset, so none is looked for."""
    import pyarrow as pa

    numbers = array("q", map(type(messages[0]).offset, messages))
    return pa.Array.from_buffers(pa.int64(), len(numbers), [None, pa.py_buffer(numbers)])


@cache
def _header_list() -> pyarrow.ListType[pyarrow.StructType]:
    import pyarrow as pa

    return pa.list_(pa.struct([pa.field("key", pa.string()), pa.field("value", pa.binary())]))


def _timestamps(messages: Sequence[Message]) -> Column:
    """Null where there is none, and where no date can hold it (a producer may write any 64 bits): as in `Record`."""
    import pyarrow as pa

    millis = [
        moment if known and _EARLIEST <= moment <= _LATEST else None
        for known, moment in map(type(messages[0]).timestamp, messages)
    ]
    return pa.array(millis, pa.timestamp("ms", "UTC"))


def _headers(messages: Sequence[Message]) -> Column:
    """Null where there are none, which is nearly everywhere and must cost nearly nothing.

    Pairs become a column fastest as a map, which is laid out in memory as the list of structs that it is cast to.
    """
    import pyarrow as pa

    pairs = list(map(type(messages[0]).headers, messages))
    if not any(pairs):
        return pa.nulls(len(pairs), _header_list())
    return pa.array([some or None for some in pairs], pa.map_(pa.string(), pa.binary())).cast(_header_list())

"""Makes dead letters from rows of a DataFrame or a table. Each row is turned into a record, and that into a letter.

The content of a letter is defined in `kconsume.failures.letter_headers`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, cast, overload

from kconsume._kafka.outgoing import Outgoing, encoded
from kconsume._runtime.output.publisher import outgoing_of
from kconsume.errors import ConfigurationError
from kconsume.failures.dead_letter import DeadLetter
from kconsume.failures.letter_headers import Letter, letter_of
from kconsume.records import Headers, Partition, Record

if TYPE_CHECKING:
    import pyarrow as pa

OFFSET_COLUMNS = ("topic", "partition", "offset")
_CREATE_TIME = 1
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class RowMessage:
    """A row with the methods of `confluent_kafka.Message`."""

    __slots__ = ("_row",)

    def __init__(self, row: Mapping[str, Any]) -> None:
        self._row = row

    def topic(self) -> str:
        return cast(str, self._row["topic"])

    def partition(self) -> int:
        return int(self._row["partition"])

    def offset(self) -> int:
        return int(self._row["offset"])

    def key(self) -> bytes | None:
        return _bytes(self._row.get("key"))

    def value(self) -> bytes | None:
        return _bytes(self._row.get("value"))

    def headers(self) -> list[tuple[str, bytes | None]] | None:
        return [_header(each) for each in self._row.get("headers") or ()]

    def timestamp(self) -> tuple[int, int]:
        moment = self._row.get("timestamp")
        if not isinstance(moment, datetime):
            return (0, -1)
        # Spark gives local times without a zone.
        aware = moment if moment.tzinfo is not None else moment.astimezone()
        return (_CREATE_TIME, round((aware - _EPOCH).total_seconds() * 1000))

    def leader_epoch(self) -> int | None:
        return None

    def __len__(self) -> int:
        return len(self.value() or b"")


class TableMessages(Sequence[RowMessage]):
    """The rows of a table with the methods of `confluent_kafka.Message`. A row is converted when it is accessed."""

    def __init__(self, table: pa.Table) -> None:
        self._table = table

    def __len__(self) -> int:
        return self._table.num_rows

    def __iter__(self) -> Iterator[RowMessage]:
        return map(RowMessage, rows_of(self._table))

    @overload
    def __getitem__(self, index: int) -> RowMessage: ...
    @overload
    def __getitem__(self, index: slice) -> TableMessages: ...
    def __getitem__(self, index: int | slice) -> RowMessage | TableMessages:
        if isinstance(index, slice):
            first, end, _ = index.indices(len(self))
            return TableMessages(self._table.slice(first, max(0, end - first)))
        (row,) = rows_of(self._table.slice(range(len(self))[index], 1))
        return RowMessage(row)


def record_of_row(row: Mapping[str, Any], scope: str, attempt: int) -> Record:
    message = RowMessage(row)
    kind, millis = message.timestamp()
    moment = datetime.fromtimestamp(millis / 1000, UTC) if kind else None
    headers: Headers = tuple((name, value or b"") for name, value in message.headers() or ())
    place = (message.topic(), message.partition(), message.offset())
    return Record(
        *place, message.key(), message.value(), headers, moment, attempt, f"{scope}:{message.partition()}:{place[2]}"
    )


def rows_of(table: pa.Table) -> Iterator[Mapping[str, Any]]:
    for batch in table.to_batches():
        yield from batch.to_pylist()


def require_offset_columns(columns: Sequence[str], why: str) -> None:
    missing = [name for name in OFFSET_COLUMNS if name not in columns]
    if missing:
        raise ConfigurationError(
            f"the frame has no column {', '.join(missing)}, and {why}: keep topic, partition and offset of the Kafka "
            f"source in the frame that foreachBatch gets"
        )


class FailedRow(NamedTuple):
    """A record that failed and is not tried again."""

    partition: Partition
    """The partition from which the record was read. The letter may name an earlier place, from the record's headers."""
    letter: Letter


def failed_row(
    row: Mapping[str, Any], error: BaseException, *, group: str, scopes: Mapping[str, str], attempts: int
) -> FailedRow:
    """Make the dead letter of the row.

    Args:
        scopes: the beginning of `Record.id`, by topic.
        attempts: how often the handler was called with the row.
    """
    message = RowMessage(row)
    scope = scopes.get(message.topic(), f"{group}:{message.topic()}")
    letter = letter_of(message, error, group=group, scope=scope, attempts=attempts)
    return FailedRow(Partition(message.topic(), message.partition()), letter)


class LetterTable(Protocol):
    """A transaction that writes dead letters into a table."""

    def keep(self, table: str, letters: Sequence[Letter]) -> None: ...


def write_letters(
    failed: Sequence[FailedRow],
    dead_letter: DeadLetter,
    tx: LetterTable,
    post: Callable[[Partition, Sequence[Outgoing]], None],
    most: int,
) -> dict[Partition, int]:
    """Write the letters in the transaction. Returns the number of new outbox rows, by partition.

    Args:
        post: adds records of a partition to the outbox, in the transaction.
        most: the size in bytes of the largest record that the outbox takes.
    """
    if dead_letter.table is not None:
        tx.keep(dead_letter.table, [each.letter.with_own_origin() for each in failed])
        return {}
    rows: dict[Partition, list[Outgoing]] = {}
    for partition, letter in failed:
        rows.setdefault(partition, []).append(encoded(outgoing_of(letter), dead_letter.topic, most))
    for partition, outgoing in rows.items():
        post(partition, outgoing)
    return {partition: len(outgoing) for partition, outgoing in rows.items()}


def _bytes(value: object) -> bytes | None:
    if value is None or isinstance(value, bytes):
        return value
    if isinstance(value, bytearray | memoryview):
        return bytes(value)
    return str(value).encode()


def _header(each: Any) -> tuple[str, bytes | None]:
    name, value = (each["key"], each["value"]) if isinstance(each, Mapping) else (each[0], each[1])
    return str(name), _bytes(value)

"""Reading a table of dead letters, for people: what is in it by cause, and one letter by its row.

Beside the stores and not in them: it has a connection of its own, which may only read, makes nothing, and waits for no
writer. What the table is, is `letter_table.py`'s; here are its questions, and how SQLite is asked. PostgreSQL is asked
by `postgres_letter_reading.py`.
"""

from __future__ import annotations

import base64
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, Protocol

import msgspec

from kconsume.backends.abc import OffsetStore
from kconsume.backends.letter_table import Dialect, quoted
from kconsume.backends.sqlite import SqliteStore
from kconsume.errors import ConfigurationError, StoreError
from kconsume.failures.letters import Letter, read_marks, reset_epoch_in
from kconsume.output import RESET
from kconsume.records import Headers, Partition
from kconsume.settings import masked_address, scheme_in

_COLUMNS = (
    "group_id, topic, partition, record_offset, origin, attempts, exception, message, trace, key, value, headers, "
    "record_timestamp, failed_at, redriven"
)
_IS_SENT = "sent_back is not null and sent_back = failed_at"


@dataclass(frozen=True, slots=True)
class Heap:
    """The letters of one topic that failed for one cause."""

    topic: str
    """Where the records came from."""
    cause: str
    """The dotted name of the error's class."""
    count: int
    first: datetime | None
    last: datetime | None
    example: str
    """Where one of them is: the id of its row, or its place in a topic."""


@dataclass(frozen=True, slots=True)
class KeptLetter:
    """A letter of a table."""

    letter: Letter
    failed_at: datetime
    row: int = 0
    is_sent: bool = False
    """Whether it was sent back, and has not failed since. Told by `page`."""


class LetterReader(Protocol):
    """A table of dead letters that is read. Each call connects, asks and leaves."""

    def is_there(self) -> bool: ...

    def heaps(self, since: datetime | None = None, group: str | None = None) -> list[Heap]:
        """All of it by topic and cause, in this order; only those that failed `since`, in the consumer group."""
        ...

    def letter(self, row: int) -> KeptLetter | None:
        """The letter in this row; None if there is no such row."""
        ...

    def page(self, after: int, most: int) -> list[KeptLetter]:
        """The letters behind this row, in the order of their rows."""
        ...


def letters_in(store: OffsetStore, table: str) -> LetterReader:
    """The table beside the store's offsets. It need not be there; its name must be one that `DeadLetter` takes."""
    if isinstance(store, SqliteStore):
        return _SqliteLetters(store, table)
    if scheme_in(store.address) in ("postgresql", "postgres"):
        from kconsume.backends.postgres_letter_reading import PostgresLetters

        return PostgresLetters(store, table)
    raise ConfigurationError(
        f"{masked_address(store.address)} has no tables, so no dead letters are in it: name a postgresql:// or "
        f"sqlite:/// address, or a topic"
    )


class _SqliteLetters:
    def __init__(self, store: SqliteStore, table: str) -> None:
        self._store = store
        self._table = table

    def is_there(self) -> bool:
        if not self._store.path.exists():
            return False
        with self._reading() as connection:
            try:
                connection.execute(f"select 1 from {quoted(self._table)} limit 0")
            except sqlite3.OperationalError as error:
                if str(error).startswith("no such table"):
                    return False
                raise
        return True

    def heaps(self, since: datetime | None = None, group: str | None = None) -> list[Heap]:
        values = {"since": None if since is None else since.astimezone(UTC).isoformat(), "group": group}
        with self._reading() as connection:
            return [heap_of(row) for row in connection.execute(select_heaps(self._table, "sqlite", values), values)]

    def letter(self, row: int) -> KeptLetter | None:
        with self._reading() as connection:
            try:
                found = connection.execute(select_letter(self._table, "sqlite"), {"row": row}).fetchone()
            except OverflowError:  # no row of SQLite's has such a number
                return None
        return None if found is None else kept_of(found)

    def page(self, after: int, most: int) -> list[KeptLetter]:
        with self._reading() as connection:
            columns = {column[1] for column in connection.execute(f"pragma table_info({quoted(self._table)})")}
            asked = select_page(self._table, "sqlite", knows_sent="sent_back" in columns)
            return [paged_of(row) for row in connection.execute(asked, {"after": after, "most": most})]

    @contextmanager
    def _reading(self) -> Iterator[sqlite3.Connection]:
        file = f"{self._store.path.absolute().as_uri()}?mode=ro"
        try:
            with closing(sqlite3.connect(file, uri=True)) as connection:
                yield connection
        except sqlite3.Error as error:
            if str(error).startswith("no such column"):
                raise other_table(self._table, self._store.address, str(error)) from error
            raise StoreError(
                f"{self._store.address} cannot be read ({error}): is it a database of SQLite that this user may read?"
            ) from error


# What both are asked, and what they answer


def select_heaps(table: str, dialect: Dialect, values: Mapping[str, object]) -> str:
    """`values` are those of `since` and `group`; None is not asked for."""
    asked = {"since": "failed_at >= {}", "group": "group_id = {}"}
    wanted = [asked[name].format(_spelled(name, dialect)) for name, value in values.items() if value is not None]
    return (
        f"select topic, exception, count(*), min(failed_at), max(failed_at), max(id) from {quoted(table)} "
        f"{'where ' if wanted else ''}{' and '.join(wanted)} group by topic, exception order by topic, exception"
    )


def select_letter(table: str, dialect: Dialect) -> str:
    return f"select {_COLUMNS} from {quoted(table)} where id = {_spelled('row', dialect)}"


def select_page(table: str, dialect: Dialect, *, knows_sent: bool) -> str:
    after, most = _spelled("after", dialect), _spelled("most", dialect)
    is_sent = _IS_SENT if knows_sent else "1 = 0"
    return f"select id, {is_sent}, {_COLUMNS} from {quoted(table)} where id > {after} order by id limit {most}"


def select_rows(table: str, rows: Sequence[int]) -> str:
    """Of a table that has the column `sent_back`."""
    numbers = ", ".join(str(int(row)) for row in rows)
    return f"select id, {_IS_SENT}, {_COLUMNS} from {quoted(table)} where id in ({numbers}) order by id"


def _spelled(name: str, dialect: Dialect) -> str:
    return f":{name}" if dialect == "sqlite" else f"%({name})s"


def heap_of(row: Sequence[Any]) -> Heap:
    topic, cause, count, first, last, newest = row
    return Heap(topic, cause, count, _moment(first), _moment(last), str(newest))


def kept_of(row: Sequence[Any]) -> KeptLetter:
    (
        group, topic, partition, offset, origin, attempts, exception, message, trace, key, value, headers, at, failed,
        redriven,
    ) = row  # fmt: skip
    kept = _headers(headers)
    own, reset_epoch = tuple(pair for pair in kept if pair[0] != RESET), reset_epoch_in(read_marks(kept))
    letter = Letter(
        Partition(topic, partition), offset, group, origin, attempts, exception, message, trace, key, value,
        None if at is None else _moment(at), own, None, redriven, reset_epoch,
    )  # fmt: skip
    return KeptLetter(letter, _moment(failed))


def paged_of(row: Sequence[Any]) -> KeptLetter:
    number, is_sent, *letter = row
    return replace(kept_of(letter), row=number, is_sent=bool(is_sent))


def other_table(table: str, address: str, said: str) -> ConfigurationError:
    return ConfigurationError(
        f"{table} in {address} is no table of dead letters ({said}): name the one of DeadLetter(table=...)"
    )


def _moment(stored: str | datetime) -> datetime:
    return (datetime.fromisoformat(stored) if isinstance(stored, str) else stored).astimezone(UTC)


def _headers(text: str) -> Headers:
    """The reverse of `letter_table.headers_text`."""
    return tuple(
        (name, base64.b64decode(value)) for name, value in msgspec.json.decode(text, type=list[tuple[str, str]])
    )

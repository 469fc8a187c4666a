"""Reads a table of dead letters, for users: summaries by cause, one letter by the id of its row, and pages of letters.

A reader opens a read-only connection for each call, creates nothing, and never waits for a writer. This module has the
protocol of a reader, and the queries for SQLite and PostgreSQL. The readers are `sqlite.dead_letter_reader` and
`postgres.dead_letters.reader`.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, Protocol

import msgspec

from kconsume._config.client_settings import masked_address, scheme_in
from kconsume._kafka.outgoing import RESET
from kconsume.backends.base import OffsetStore
from kconsume.backends.dead_letters.tables import Dialect, quoted
from kconsume.backends.sqlite.store import SqliteStore
from kconsume.errors import ConfigurationError
from kconsume.failures.letter_headers import Letter, read_added_headers, reset_epoch_in
from kconsume.records import Headers, Partition

_COLUMNS = (
    "group_id, topic, partition, record_offset, origin, attempts, exception, message, trace, key, value, headers, "
    "record_timestamp, failed_at, redriven"
)
_IS_SENT = "sent_back is not null and sent_back = failed_at"


@dataclass(frozen=True, slots=True)
class CauseSummary:
    """A summary of the dead letters of one topic whose handlers raised the same class of error."""

    topic: str
    """The topic of the records."""
    cause: str
    """The dotted name of the error's class."""
    count: int
    first: datetime | None
    last: datetime | None
    example: str
    """One of these letters: the id of its row in a table, or its partition and offset in a topic."""
    sent_back: int = 0
    """How many of these letters were sent back to Kafka and have not failed since."""


@dataclass(frozen=True, slots=True)
class KeptLetter:
    """A dead letter in a table."""

    letter: Letter
    failed_at: datetime
    row: int = 0
    is_sent: bool = False
    """True if the letter was sent back to Kafka and has not failed since."""


@dataclass(frozen=True, slots=True)
class PurgeSelection:
    """Selects the dead letters to delete: the letters that meet every condition."""

    sent_back: bool = False
    """Only letters that were sent back to Kafka and have not failed since."""
    before: datetime | None = None
    """Only letters that failed before this time."""
    group: str | None = None
    """Only letters of this consumer group."""


class LetterReader(Protocol):
    """Reads one table of dead letters. Each call opens a connection and closes it."""

    def exists(self) -> bool: ...

    def summaries(self, since: datetime | None = None, group: str | None = None) -> list[CauseSummary]:
        """Return a summary for each topic and cause, sorted by topic and then by cause.

        Args:
            since: only letters that failed at this time or later.
            group: only letters of this consumer group.
        """
        ...

    def letter(self, row: int) -> KeptLetter | None:
        """The letter in this row; None if there is no such row."""
        ...

    def page(self, after: int, most: int) -> list[KeptLetter]:
        """The letters that follow a row, in the order of their rows.

        Args:
            after: the id of the row before the page; 0 for the first page.
            most: the highest number of letters.
        """
        ...

    def purgeable(self, selection: PurgeSelection) -> tuple[int, int]:
        """Return two numbers: how many letters meet the selection, and how many letters the table has."""
        ...


def letters_in(store: OffsetStore, table: str) -> LetterReader:
    """Return the reader for a table of dead letters in the store's database. Raises `ConfigurationError` if the store
    is not a database with tables.

    Args:
        table: the name of the table, as in `DeadLetter(table=...)`. The table need not exist.
    """
    if isinstance(store, SqliteStore):
        from kconsume.backends.sqlite.dead_letter_reader import SqliteLetters

        return SqliteLetters(store, table)
    if scheme_in(store.address) in ("postgresql", "postgres"):
        from kconsume.backends.postgres.dead_letters.reader import PostgresLetters

        return PostgresLetters(store, table)
    raise ConfigurationError(
        f"{masked_address(store.address)} has no tables, so it contains no dead letters: give a postgresql:// or "
        f"sqlite:/// address, or a topic"
    )


# Queries and rows


def select_summaries(table: str, dialect: Dialect, values: Mapping[str, object], *, knows_sent: bool) -> str:
    """The query for the summaries by topic and exception.

    Args:
        values: the parameters `since` and `group`; None means no condition.
        knows_sent: True if the table has the column `sent_back`.
    """
    sent = f"count(case when {_IS_SENT} then 1 end)" if knows_sent else "0"
    conditions = {"since": "failed_at >= {}", "group": "group_id = {}"}
    wanted = [conditions[name].format(_parameter(name, dialect)) for name, value in values.items() if value is not None]
    return (
        f"select topic, exception, count(*), min(failed_at), max(failed_at), max(id), {sent} from {quoted(table)} "
        f"{'where ' if wanted else ''}{' and '.join(wanted)} group by topic, exception order by topic, exception"
    )


def select_letter(table: str, dialect: Dialect, *, knows_sent: bool) -> str:
    is_sent = _IS_SENT if knows_sent else "1 = 0"
    return f"select id, {is_sent}, {_COLUMNS} from {quoted(table)} where id = {_parameter('row', dialect)}"


def select_page(table: str, dialect: Dialect, *, knows_sent: bool) -> str:
    after, most = _parameter("after", dialect), _parameter("most", dialect)
    is_sent = _IS_SENT if knows_sent else "1 = 0"
    return f"select id, {is_sent}, {_COLUMNS} from {quoted(table)} where id > {after} order by id limit {most}"


def select_rows(table: str, rows: Sequence[int]) -> str:
    """The query for letters by the ids of their rows. The table must have the column `sent_back`."""
    numbers = ", ".join(str(int(row)) for row in rows)
    return f"select id, {_IS_SENT}, {_COLUMNS} from {quoted(table)} where id in ({numbers}) order by id"


def purge_condition(selection: PurgeSelection, dialect: Dialect, *, knows_sent: bool) -> tuple[str, dict[str, object]]:
    """The SQL condition of a selection, and the values of its parameters."""
    conditions, values = ["1 = 1"], dict[str, object]()
    if selection.sent_back:
        conditions.append(_IS_SENT if knows_sent else "1 = 0")
    if selection.before is not None:
        conditions.append(f"failed_at < {_parameter('before', dialect)}")
        before = selection.before.astimezone(UTC)
        values["before"] = before.isoformat() if dialect == "sqlite" else before
    if selection.group is not None:
        conditions.append(f"group_id = {_parameter('group', dialect)}")
        values["group"] = selection.group
    return " and ".join(conditions), values


def count_purgeable(table: str, condition: str) -> str:
    return f"select count(case when {condition} then 1 end), count(*) from {quoted(table)}"


def delete_purgeable(table: str, condition: str) -> str:
    return f"delete from {quoted(table)} where {condition}"


def _parameter(name: str, dialect: Dialect) -> str:
    return f":{name}" if dialect == "sqlite" else f"%({name})s"


def summary_of(row: Sequence[Any]) -> CauseSummary:
    topic, cause, count, first, last, newest, sent_back = row
    return CauseSummary(topic, cause, count, _moment(first), _moment(last), str(newest), sent_back)


def letter_of(row: Sequence[Any]) -> KeptLetter:
    (
        group, topic, partition, offset, origin, attempts, exception, message, trace, key, value, headers, at, failed,
        redriven,
    ) = row  # fmt: skip
    kept = _headers(headers)
    own, reset_epoch = tuple(pair for pair in kept if pair[0] != RESET), reset_epoch_in(read_added_headers(kept))
    letter = Letter(
        Partition(topic, partition), offset, group, origin, attempts, exception, message, trace, key, value,
        None if at is None else _moment(at), own, None, redriven, reset_epoch,
    )  # fmt: skip
    return KeptLetter(letter, _moment(failed))


def numbered_letter_of(row: Sequence[Any]) -> KeptLetter:
    number, is_sent, *letter = row
    return replace(letter_of(letter), row=number, is_sent=bool(is_sent))


def wrong_table(table: str, address: str, reason: str) -> ConfigurationError:
    return ConfigurationError(
        f"{table} in {address} is not a table of dead letters ({reason}): give the table of DeadLetter(table=...)"
    )


def _moment(stored: str | datetime) -> datetime:
    return (datetime.fromisoformat(stored) if isinstance(stored, str) else stored).astimezone(UTC)


def _headers(text: str) -> Headers:
    """The reverse of `tables.headers_text`."""
    return tuple(
        (name, base64.b64decode(value)) for name, value in msgspec.json.decode(text, type=list[tuple[str, str]])
    )

"""The SQL for a table of dead letters, which `DeadLetter(table=...)` writes in the transaction that moves the offset.

SQL texts and parameters for SQLite and PostgreSQL; this module uses no connection. Each failed record of a group has
one row, and the group and the record's origin are the key. If the record fails again after it was sent back to Kafka,
this row is updated.
"""

from __future__ import annotations

import base64
from datetime import UTC, datetime
from typing import Literal, TypeAlias

import msgspec

from kconsume._kafka.outgoing import RESET
from kconsume.failures.letter_headers import Letter
from kconsume.records import Headers

Dialect: TypeAlias = Literal["sqlite", "postgres"]

_TYPES = {
    "sqlite": {"id": "integer primary key", "bytes": "blob", "moment": "text", "wide": "integer"},
    "postgres": {
        "id": "bigint generated always as identity primary key",
        "bytes": "bytea",
        "moment": "timestamptz",
        "wide": "bigint",
    },
}
_COLUMNS = (
    "group_id", "topic", "partition", "record_offset", "origin", "attempts", "exception", "message", "trace", "key",
    "value", "headers", "record_timestamp", "failed_at",
)  # fmt: skip
_UPDATED = ("attempts", "exception", "message", "trace", "headers", "failed_at")


def quoted(table: str) -> str:
    """`shop.order` quoted for SQL, so that reserved words can be names too."""
    return ".".join(f'"{part}"' for part in table.split("."))


def create(table: str, dialect: Dialect) -> str:
    return """create table if not exists {table} (
    id {id}, group_id text not null, topic text not null, partition integer not null, record_offset {wide} not null,
    origin text not null, attempts integer not null, exception text not null, message text not null,
    trace text not null, key {bytes}, value {bytes}, headers text not null, record_timestamp {moment},
    failed_at {moment} not null, redriven integer not null default 0, sent_back {moment}, unique (group_id, origin)
)""".format(table=quoted(table), **_TYPES[dialect])


def insert(table: str, dialect: Dialect) -> str:
    parameters = (f":{name}" if dialect == "sqlite" else f"%({name})s" for name in _COLUMNS)
    updated = ", ".join(f"{name} = excluded.{name}" for name in _UPDATED)
    return (
        f"insert into {quoted(table)} ({', '.join(_COLUMNS)}) values ({', '.join(parameters)}) "
        f"on conflict (group_id, origin) do update set {updated}"
    )


# When a letter is sent back to Kafka, the column `sent_back` gets the value of `failed_at`. If the record fails again,
# `failed_at` changes, and the two columns differ. So the clocks of two processes are never compared. A table of an
# earlier version gets the column when a letter is sent back.


def add_sent_back(table: str, dialect: Dialect) -> str:
    return f"alter table {quoted(table)} add column sent_back {_TYPES[dialect]['moment']}"


def mark_sent_back(table: str, dialect: Dialect) -> str:
    row = ":row" if dialect == "sqlite" else "%(row)s"
    return f"update {quoted(table)} set redriven = redriven + 1, sent_back = failed_at where id = {row}"


def row_of(letter: Letter, dialect: Dialect) -> dict[str, object]:
    def moment(at: datetime | None) -> object:
        return at.isoformat() if at is not None and dialect == "sqlite" else at

    return {
        "group_id": letter.group,
        "topic": letter.partition.topic,
        "partition": letter.partition.number,
        "record_offset": letter.offset,
        "origin": letter.origin,
        "attempts": letter.attempts,
        "exception": letter.exception,
        "message": _text(letter.message),
        "trace": _text(letter.trace),
        "key": letter.key,
        "value": letter.value,
        "headers": headers_text(letter.headers + _reset_of(letter)),
        "record_timestamp": moment(letter.timestamp),
        "failed_at": moment(datetime.now(UTC)),
    }


def _reset_of(letter: Letter) -> Headers:
    """The reset epoch as a header, which is stored with the record's own headers. So a table of an earlier version
    needs no new column, and an earlier kconsume that sends the letter back sends this header too."""
    return ((RESET, b"%d" % letter.reset_epoch),) if letter.reset_epoch else ()


def headers_text(headers: Headers) -> str:
    """The headers as JSON: a list of pairs, with the value in base64 because it may be any bytes."""
    return msgspec.json.encode([(name, base64.b64encode(value).decode()) for name, value in headers]).decode()


def _text(text: str) -> str:
    """The text without the characters that a database refuses: NUL and lone surrogates are escaped."""
    return text.replace("\0", "\\x00").encode(errors="backslashreplace").decode()

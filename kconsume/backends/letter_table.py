"""The table of dead letters: what `DeadLetter(table=...)` writes in the transaction of the offset.

Texts and values for two dialects, and no connection. One row for each record of a group that failed, by its origin: one
that fails again after it was sent back has its row renewed, and not a second one.
"""

from __future__ import annotations

import base64
from datetime import UTC, datetime
from typing import Literal, TypeAlias

import msgspec

from kconsume.failures.letters import Letter
from kconsume.output import RESET
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
_RENEWED = ("attempts", "exception", "message", "trace", "headers", "failed_at")


def quoted(table: str) -> str:
    """`shop.order` as SQL has it: exactly this name, whatever words SQL keeps for itself."""
    return ".".join(f'"{part}"' for part in table.split("."))


def create(table: str, dialect: Dialect) -> str:
    return """create table if not exists {table} (
    id {id}, group_id text not null, topic text not null, partition integer not null, record_offset {wide} not null,
    origin text not null, attempts integer not null, exception text not null, message text not null,
    trace text not null, key {bytes}, value {bytes}, headers text not null, record_timestamp {moment},
    failed_at {moment} not null, redriven integer not null default 0, sent_back {moment}, unique (group_id, origin)
)""".format(table=quoted(table), **_TYPES[dialect])


def insert(table: str, dialect: Dialect) -> str:
    spelled = (f":{name}" if dialect == "sqlite" else f"%({name})s" for name in _COLUMNS)
    renewed = ", ".join(f"{name} = excluded.{name}" for name in _RENEWED)
    return (
        f"insert into {quoted(table)} ({', '.join(_COLUMNS)}) values ({', '.join(spelled)}) "
        f"on conflict (group_id, origin) do update set {renewed}"
    )


# Sending letters back: `sent_back` is the `failed_at` of the failure that was sent back. So in a row that failed anew
# the two differ, and no clocks are compared. A table of an earlier version gets the column when one is sent back.


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
    """Beside the record's own headers: so a table of an earlier version needs no new column, and an earlier version
    that sends the letter back keeps it."""
    return ((RESET, b"%d" % letter.reset_epoch),) if letter.reset_epoch else ()


def headers_text(headers: Headers) -> str:
    """As JSON: a list of pairs, the value in base64, since it is any bytes."""
    return msgspec.json.encode([(name, base64.b64encode(value).decode()) for name, value in headers]).decode()


def _text(text: str) -> str:
    """What a database takes for text."""
    return text.replace("\0", "\\x00").encode(errors="backslashreplace").decode()

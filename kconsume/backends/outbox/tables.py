"""The tables of the outbox, in which a handler or a program writes the records to send, in its own transaction.

SQL texts and parameters for SQLite and PostgreSQL; this module uses no connection. `kconsume_outbox` holds the records
that the broker has not confirmed, in the order of their numbers. A record that a handler sent belongs to the partition
that the handler was consuming; a record of `Outbox.send` belongs to no partition. `kconsume_seen` holds the origins
(header `kconsume-origin`) of the records that a group has handled, so that a duplicate is recognized.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Final, NamedTuple, cast

import msgspec

from kconsume._kafka.outgoing import Outgoing
from kconsume.records import Headers, Partition

UNOWNED: Final = Partition("", 0)
"""The partition of rows of `Outbox.send`, which any running app may send. The group of these rows is empty."""
LEASE: Final = 10.0
"""Seconds for which one app alone may send the rows of `Outbox.send`, unless the app renews the lease. A lease that
begins in the future is not valid: otherwise a clock that was set back would prolong the lease."""
KEPT_DAYS: Final = 7
"""Days for which `kconsume_seen` keeps an origin."""
FORGOTTEN_AT_ONCE: Final = 10_000
"""How many origins one statement deletes at most. A transaction that handles one of these origins again waits until the
statement has ended, so the statement must be short."""

_headers = msgspec.json.Decoder(list[tuple[str, bytes]])
_as_json = msgspec.json.Encoder().encode


class Posted(msgspec.Struct, frozen=True, gc=False):
    """A row of the outbox.

    `gc=False`, because no reference cycle can contain a row. Otherwise the garbage collector would traverse thousands
    of rows in flight again and again.
    """

    number: int
    outgoing: Outgoing


class Targets(NamedTuple):
    """Selects outbox rows of a partition by the topic to which they are sent, and by their number."""

    topics: tuple[str, ...]
    others: bool = False
    """True to select the rows to all topics except `topics`."""
    above: int = 0
    """Rows up to this number need not be read, because they were deleted. A store that finds deleted rows without a
    scan may ignore it."""


ALL_TARGETS: Final = Targets((), others=True)
NO_TARGETS: Final[Mapping[Partition, Targets]] = {}
"""No restriction for any partition: all rows."""


def headers_text(headers: Headers) -> str:
    """The headers as JSON: a list of pairs, with the value in base64 because it may be any bytes."""
    return _as_json(headers).decode() if headers else "[]"


def headers_of(text: str) -> Headers:
    return () if text == "[]" else tuple(_headers.decode(text))


def outgoing_of(target: str, key: bytes | None, value: bytes | None, headers: str, moment: datetime | None) -> Outgoing:
    return Outgoing(value, key, headers_of(headers), target, moment)


# SQLite

SQLITE_STEP: Final = """
create table kconsume_outbox (
    id integer primary key autoincrement, group_id text not null, topic text not null, partition integer not null,
    target text not null, key blob, value blob, headers text not null, record_timestamp text, posted_at text not null
);
create index kconsume_outbox_partition on kconsume_outbox (group_id, topic, partition, id);
create table kconsume_seen (
    group_id text not null, origin text not null, seen_at text not null, primary key (group_id, origin)
) without rowid;
alter table kconsume_schema add column relay text;
alter table kconsume_schema add column relay_at text;
"""
SQLITE_POST: Final = """insert into kconsume_outbox
    (group_id, topic, partition, target, key, value, headers, record_timestamp, posted_at)
    values (?, ?, ?, ?, ?, ?, ?, ?, ?)"""
SQLITE_READ: Final = """select b.id, b.target, b.key, b.value, b.headers, b.record_timestamp from kconsume_outbox b
    where b.group_id = ? and b.topic = ? and b.partition = ? order by b.id limit ?"""
_SQLITE_BEFORE_ORDER = " order by b.id"
SQLITE_IS_OURS: Final = (
    "select 1 from kconsume_offsets where group_id = ? and topic = ? and partition = ? and epoch = ?"
)
SQLITE_DELETE: Final = "delete from kconsume_outbox where id = ?"
SQLITE_RECORD_ORIGIN: Final = (
    "insert into kconsume_seen (group_id, origin, seen_at) values (?, ?, ?) on conflict do nothing"
)
SQLITE_SEEN_TIME: Final = "create index if not exists kconsume_seen_time on kconsume_seen (seen_at)"
SQLITE_FORGET: Final = f"""delete from kconsume_seen where (group_id, origin) in
    (select group_id, origin from kconsume_seen where seen_at < ? order by seen_at limit {FORGOTTEN_AT_ONCE})"""
SQLITE_HAS_UNOWNED: Final = "select 1 from kconsume_outbox where group_id = '' limit 1"
SQLITE_LEASE: Final = """update kconsume_schema set relay = ?1, relay_at = ?2
    where relay = ?1 or relay_at is null or relay_at not between ?3 and ?4"""


def sqlite_read(
    group: str, partition: Partition, most: int, targets: Targets | None
) -> tuple[str, tuple[str | int, ...]]:
    """The statement that reads the first rows of a partition, and its parameters."""
    if targets is None:
        return SQLITE_READ, (group, *partition, most)
    marks = ", ".join("?" * len(targets.topics))
    chosen = f" and b.target {'not ' * targets.others}in ({marks})"
    statement = SQLITE_READ.replace(_SQLITE_BEFORE_ORDER, chosen + _SQLITE_BEFORE_ORDER)
    return statement, (group, *partition, *targets.topics, most)


def sqlite_rows(group: str, partition: Partition, outgoing: Sequence[Outgoing], now: str) -> list[tuple[object, ...]]:
    return [
        (
            group, *partition, each.topic, each.key, each.value, headers_text(cast(Headers, each.headers)),
            None if each.timestamp is None else each.timestamp.isoformat(), now,
        )
        for each in outgoing
    ]  # fmt: skip


def sqlite_posted(row: tuple[Any, ...]) -> Posted:
    number, target, key, value, headers, moment = row
    return Posted(number, outgoing_of(target, key, value, headers, moment and datetime.fromisoformat(moment)))


# PostgreSQL

POSTGRES_STEP: Final = """\
create table {schema}kconsume_outbox (
    id bigint generated always as identity, group_id text not null, topic text not null, partition integer not null,
    target text not null, key bytea, value bytea, headers text not null, record_timestamp timestamptz,
    posted_at timestamptz not null default now(), primary key (group_id, topic, partition, id)
) with (autovacuum_vacuum_scale_factor = 0.01);
create table {schema}kconsume_seen (
    group_id text not null, origin text not null, seen_at timestamptz not null default now(),
    primary key (group_id, origin)
);
alter table {schema}kconsume_schema add column relay text, add column relay_at timestamptz;
"""


def postgres_rows(group: str, partition: Partition, outgoing: Sequence[Outgoing]) -> dict[str, Any]:
    """The parameters of `Statements.post`. All rows are in one JSON text, with bytes in base64."""
    rows = _as_json(outgoing).decode()
    return {"group": group, "topic": partition.topic, "partition": partition.number, "rows": rows}

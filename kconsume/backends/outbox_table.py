"""The tables of the outbox: what leaves by a topic, written in the transaction that it belongs to.

Texts and values for two dialects, and no connection. `kconsume_outbox` holds what is not confirmed yet, in the order of
its numbers: by the partition whose records it came from, or, for what a person has put there, by none.
`kconsume_seen` holds the origins that a group has taken in, so that one that comes again is known.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Final, NamedTuple, cast

import msgspec

from kconsume.output import Outgoing
from kconsume.records import Headers, Partition

NOBODYS: Final = Partition("", 0)
"""Of what a person has put into the outbox: any app that runs may send it. Its group is empty as well."""
LEASE: Final = 10.0
"""Seconds for which one app sends what is nobody's; then another may. So it may also if the lease was taken in what is
the future by now: a clock that was put back would else keep it for as long."""
KEPT_DAYS: Final = 7
"""How long an origin is known."""
FORGOTTEN_AT_ONCE: Final = 10_000
"""So many origins are forgotten in one statement: all that are due could be too many for one that must come to an end,
and who takes the same origin in again waits for it."""

_headers = msgspec.json.Decoder(list[tuple[str, bytes]])
_as_json = msgspec.json.Encoder().encode


class Posted(msgspec.Struct, frozen=True, gc=False):
    """A row of the outbox. Nothing in it refers to it, so the collector need not know of it: it would go through the
    thousands that are under way again and again."""

    number: int
    outgoing: Outgoing


class Targets(NamedTuple):
    """Of a partition's rows, those to these topics; or, with `others`, those to all other topics."""

    topics: tuple[str, ...]
    others: bool = False


ALL_TARGETS: Final = Targets((), others=True)
NO_TARGETS: Final[Mapping[Partition, Targets]] = {}
"""All rows."""


def headers_text(headers: Headers) -> str:
    """As JSON: a list of pairs, the value in base64, since it is any bytes."""
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
SQLITE_TAKE_IN: Final = "insert into kconsume_seen (group_id, origin, seen_at) values (?, ?, ?) on conflict do nothing"
SQLITE_SEEN_TIME: Final = "create index if not exists kconsume_seen_time on kconsume_seen (seen_at)"
SQLITE_FORGET: Final = f"""delete from kconsume_seen where (group_id, origin) in
    (select group_id, origin from kconsume_seen where seen_at < ? order by seen_at limit {FORGOTTEN_AT_ONCE})"""
SQLITE_HAS_STRAYS: Final = "select 1 from kconsume_outbox where group_id = '' limit 1"
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
    """Bytes are in base64."""
    rows = _as_json(outgoing).decode()
    return {"group": group, "topic": partition.topic, "partition": partition.number, "rows": rows}


def postgres_numbers(text: bytes | str) -> list[int]:
    """Of an array."""
    return list(map(int, text[1:-1].split(cast(Any, b"," if isinstance(text, bytes) else ","))))

"""The SQL statements of `sqlite:///`, and functions that read rows over a connection of the caller."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import TypeAlias

from kconsume.backends.base import Position
from kconsume.backends.claim import fenced
from kconsume.errors import Fenced
from kconsume.records import Partition

_KEY = "group_id = ? and topic = ? and partition = ?"
READ = f"""select next_offset, epoch, topic_id, owner, leader_epoch, metadata, updated_at, generation,
           coalesce(reset_epoch, 0) from kconsume_offsets where {_KEY}"""
PIN = """insert into kconsume_offsets
         (group_id, topic, partition, next_offset, epoch, reset_epoch, topic_id, leader_epoch, updated_at)
         select ?, ?, ?, ?, last_epoch, last_epoch, ?, ?, ? from kconsume_schema where true on conflict do nothing"""
CLAIM = f"""update kconsume_offsets
            set epoch = epoch + 1, owner = ?, generation = coalesce(?, generation), updated_at = ? where {_KEY}"""
RECLAIM = f"update kconsume_offsets set epoch = epoch + 1, owner = ?, updated_at = ? where {_KEY} and epoch = ?"
SAVE = f"""update kconsume_offsets set next_offset = ?, leader_epoch = ?, updated_at = ?,
           topic_id = coalesce(?, topic_id)
           where {_KEY} and epoch = ? and next_offset <= ? and next_offset in (coalesce(?, next_offset), ?)"""
MARK = f"update kconsume_offsets set updated_at = ? where {_KEY} and epoch = ?"
NOTE = f"update kconsume_offsets set metadata = ? where {_KEY} and epoch = ?"
ADVANCE = f"""update kconsume_offsets set next_offset = ?, leader_epoch = ?
              where updated_at = ? and {_KEY} and epoch = ? and next_offset = ?"""
RESET = """insert into kconsume_offsets (group_id, topic, partition, next_offset, epoch, reset_epoch, updated_at)
           select ?, ?, ?, ?, last_epoch + 1, last_epoch + 1, ? from kconsume_schema where true on conflict do update
           set next_offset = excluded.next_offset, epoch = epoch + 1, reset_epoch = epoch + 1, topic_id = null,
               owner = null,
               leader_epoch = null, metadata = '', updated_at = excluded.updated_at"""
KEEP_LAST_EPOCH = f"""update kconsume_schema set last_epoch =
                      max(last_epoch, (select coalesce(max(epoch), 0) from kconsume_offsets where {_KEY}))"""
LAST_EPOCH = "select last_epoch from kconsume_schema"
DELETE = f"delete from kconsume_offsets where {_KEY}"
PARTITIONS_OF_GROUP = "select topic, partition from kconsume_offsets where group_id = ?"
GROUPS = "select distinct group_id from kconsume_offsets order by 1"
STORE_ID = "select store_id from kconsume_schema"

RECORD_DELETION = """insert into kconsume_deleted (group_id, topic, partition, epoch, deleted_at) values (?, ?, ?, ?, ?)
                     on conflict do update set epoch = excluded.epoch, deleted_at = excluded.deleted_at"""
DELETED_EPOCH = """select epoch from kconsume_deleted where group_id = ?
                   and (topic = ? and partition = ? or topic = '') order by topic desc limit 1"""

Row: TypeAlias = tuple[int, int, str | None, str | None, int | None, str, str, int | None, int]


def now() -> str:
    """The current time as text, in the format of the tables."""
    return datetime.now(UTC).isoformat()


def row_of(connection: sqlite3.Connection, group: str, partition: Partition) -> Row | None:
    """The row of a partition; None if it has none."""
    row: Row | None = connection.execute(READ, (group, *partition)).fetchone()
    return row


def positions_of(
    connection: sqlite3.Connection, group: str, partitions: Iterable[Partition]
) -> dict[Partition, Position]:
    """The positions of the partitions that have a row."""
    rows = {p: row_of(connection, group, p) for p in partitions}
    return {p: _position(row) for p, row in rows.items() if row is not None}


def fenced_at(group: str, partition: Partition, epoch: int, row: Row | None, offset: int | None = None) -> Fenced:
    """As `claim.fenced`, for a row of this database."""
    return fenced(group, partition, epoch, None if row is None else _position(row), offset)


def _position(row: Row) -> Position:
    next_offset, epoch, topic_id, owner, leader_epoch, metadata, updated_at, generation, reset_epoch = row
    moment = datetime.fromisoformat(updated_at)
    rest = (owner, leader_epoch, metadata, moment)
    return Position(next_offset, epoch, topic_id, *rest, generation=generation, reset_epoch=reset_epoch)

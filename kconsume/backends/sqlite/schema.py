"""Makes the tables of `sqlite:///` on first use, and updates them."""

from __future__ import annotations

import sqlite3

from kconsume.backends.outbox.tables import SQLITE_SEEN_TIME, SQLITE_STEP

# The SQL comment makes these texts unique. Otherwise a handler's "commit" would use kconsume's own "commit" from the
# statement cache, which is already authorised.
BEGIN, COMMIT, ROLLBACK = "begin immediate -- kconsume", "commit -- kconsume", "rollback -- kconsume"

SCHEMA_VERSION = 2

# `last_epoch` is the highest epoch of all deleted rows. New rows get a higher epoch, so that no epoch is used twice and
# a zombie from before the delete stays fenced.
_CREATE = """
create table kconsume_schema (version integer not null, last_epoch bigint not null default 0);
create table kconsume_offsets (
    group_id text not null, topic text not null, partition integer not null,
    next_offset bigint not null, epoch bigint not null, topic_id text, owner text,
    leader_epoch integer, metadata text not null default '', updated_at text not null,
    primary key (group_id, topic, partition)
) without rowid;
insert into kconsume_schema (version) values (1);
"""
_STEPS = (_CREATE, SQLITE_STEP)
"""The step at index n updates the tables from version n to version n + 1."""
_ADDITIONS = 2
"""The number of additions to the tables of this version. An addition is a column, table or index that an earlier
kconsume does not need."""
_COLUMNS = (
    ("kconsume_schema", "additions", "integer"),
    ("kconsume_schema", "store_id", "text"),
    ("kconsume_offsets", "generation", "bigint"),
    ("kconsume_offsets", "reset_epoch", "bigint"),
)
"""The added columns; each may be null. SQLite has no `add column if not exists`."""
# Records which rows were deleted, and up to which epoch. A row with an empty topic means the partitions of the group
# that had no row.
_DELETED = """create table if not exists kconsume_deleted (
    group_id text not null, topic text not null, partition integer not null, epoch bigint not null,
    deleted_at text not null, primary key (group_id, topic, partition)
) without rowid"""
_NAME = "update kconsume_schema set store_id = lower(hex(randomblob(16))) where store_id is null"
_HAS_SCHEMA = "select count(*) from sqlite_master where type = 'table' and name = 'kconsume_schema'"


def version_of(connection: sqlite3.Connection) -> int:
    """The version of the existing tables; 0 if there are none."""
    if connection.execute(_HAS_SCHEMA).fetchone() == (0,):
        return 0
    (version,) = connection.execute("select version from kconsume_schema").fetchone()
    return int(version)


def is_up_to_date(connection: sqlite3.Connection) -> bool:
    """True if the tables have the version and the additions of this kconsume, or a newer version."""
    version = version_of(connection)
    if version != SCHEMA_VERSION:
        return version > SCHEMA_VERSION
    if not _has_column(connection, "kconsume_schema", "additions"):
        return False
    (additions,) = connection.execute("select additions from kconsume_schema").fetchone()
    return (additions or 0) >= _ADDITIONS


def _has_column(connection: sqlite3.Connection, table: str, column: str) -> bool:
    return any(row[1] == column for row in connection.execute(f"pragma table_info({table})"))


def bring_up_to_date(connection: sqlite3.Connection) -> None:
    """Make or update the tables in one transaction. The caller holds the turnstile lock."""
    connection.execute(BEGIN)
    try:
        version = version_of(connection)  # read again: another process may have updated the tables
        for step in _STEPS[version:]:
            for statement in filter(str.strip, step.split(";")):
                connection.execute(statement)
        if version <= SCHEMA_VERSION:
            for table, column, kind in _COLUMNS:
                if not _has_column(connection, table, column):
                    connection.execute(f"alter table {table} add column {column} {kind}")
            connection.execute(_DELETED)
            connection.execute(SQLITE_SEEN_TIME)
            connection.execute(_NAME)
            connection.execute("update kconsume_schema set version = ?, additions = ?", (SCHEMA_VERSION, _ADDITIONS))
        connection.execute(COMMIT)
    finally:
        if connection.in_transaction:
            connection.execute(ROLLBACK)

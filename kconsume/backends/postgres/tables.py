"""The tables of `postgresql://`: their versions, the SQL that creates and updates them, and the rights on them.

Texts only: `schema` decides which are executed.
"""

from __future__ import annotations

from kconsume.backends.outbox.tables import POSTGRES_STEP

VERSION = 2
"""The version of the tables that this kconsume reads and writes."""

# Rows are updated often and never grow. Half of each page is kept free, so that the new version of a row fits on the
# page of the old one and no index entry changes. `last_epoch` is the highest epoch of all deleted rows. New rows get a
# higher epoch, so that no epoch is used twice and a zombie from before the delete stays fenced.
_CREATE = """\
create table {schema}kconsume_schema (version integer not null, last_epoch bigint not null default 0);
create table {schema}kconsume_offsets (
    group_id text not null, topic text not null, partition integer not null,
    next_offset bigint not null, epoch bigint not null, topic_id text, owner text,
    leader_epoch integer, metadata text not null default '', updated_at timestamptz not null default now(),
    primary key (group_id, topic, partition)
) with (fillfactor = 50, autovacuum_vacuum_scale_factor = 0.01);
insert into {schema}kconsume_schema (version) values (1);
"""
STEPS = (_CREATE, POSTGRES_STEP)
"""The step at index n brings the tables from version n to version n + 1."""

OLDEST = 140000
"""`server_version_num` of the first server whose `pg_terminate_backend` has a timeout and returns whether the backend
ended. kconsume needs the right to call this function."""

ADDITIONS = 2
"""The number of additions to the tables of this version. An addition is something that an earlier kconsume does not
need: a nullable column, or a new table or index. Processes of kconsume with and without an addition run side by side,
in any order of their start. Any other change of the tables is a new version."""
ADD = """\
alter table {schema}kconsume_schema add column if not exists additions integer;
alter table {schema}kconsume_offsets add column if not exists generation bigint;
alter table {schema}kconsume_schema add column if not exists store_id text;
alter table {schema}kconsume_offsets add column if not exists reset_epoch bigint;
create table if not exists {schema}kconsume_deleted (
    group_id text not null, topic text not null, partition integer not null, epoch bigint not null,
    deleted_at timestamptz not null default now(), primary key (group_id, topic, partition)
);
create index if not exists kconsume_seen_time on {schema}kconsume_seen (seen_at);
update {schema}kconsume_schema set store_id = md5(random()::text || random()::text || clock_timestamp()::text)
    where store_id is null;
"""
"""The SQL of all additions. It may be run any number of times."""

RIGHTS = (
    ("kconsume_deleted", "select, insert, update"),
    ("kconsume_offsets", "select, insert, update, delete"),
    ("kconsume_outbox", "select, insert, delete"),
    ("kconsume_schema", "select, update"),
    ("kconsume_seen", "select, insert, delete"),
)
"""The rights that a role needs if it does not own the tables."""

"""The statements of `postgresql://`: what is sent, and nothing about when.

Texts for one schema, the schema itself in versions, and the number of the advisory lock that stands for a partition.
No connection is touched here.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from kconsume.backends.abc import ALWAYS
from kconsume.backends.outbox_table import FORGOTTEN_AT_ONCE, KEPT_DAYS, LEASE, POSTGRES_STEP
from kconsume.records import Partition

VERSION = 2
"""Of the tables that this kconsume reads and writes."""

# Rows are updated all the time and never grow: half a page is kept free, so that a new version of a row fits beside the
# old one and no index is touched. `last_epoch` is the highest epoch of all deleted rows: rows made later begin above
# it, so that no epoch is ever given out twice and a zombie from before the delete stays fenced.
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
"""The step at index n makes version n + 1 out of version n."""

OLDEST = 140000
"""`server_version_num` of the first server that ends a backend and says whether it did (`pg_terminate_backend` with a
timeout, by which we ask for the right to it)."""

ADDITIONS = 2
"""How many times something was added to the tables of this version that an earlier kconsume does not miss: columns that
may be empty, tables and indexes that it does not know. So processes of both run side by side, whichever starts first; a
change that they cannot share is a new version."""
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
"""All of them, in any order and as often as one likes."""

RIGHTS = (
    ("kconsume_deleted", "select, insert, update"),
    ("kconsume_offsets", "select, insert, update, delete"),
    ("kconsume_outbox", "select, insert, delete"),
    ("kconsume_schema", "select, update"),
    ("kconsume_seen", "select, insert, delete"),
)

_ROW = "next_offset, epoch, topic_id, owner, leader_epoch, metadata, updated_at, generation, coalesce(reset_epoch, 0)"
_KEY = "group_id = %(group)s and topic = %(topic)s and partition = %(partition)s"
_WANTED = "unnest(%(topics)s::text[], %(partitions)s::int[])"
_BURY_AGAIN = """on conflict (group_id, topic, partition)
            do update set epoch = excluded.epoch, deleted_at = excluded.deleted_at"""
_IS_WANTED = "o.group_id = %(group)s and o.topic = w.topic and o.partition = w.partition"


@dataclass(frozen=True, slots=True)
class Statements:
    """Every statement, for tables in one schema: `prefix` is empty, or the quoted schema with a dot.

    A run always names the schema: whatever a handler does with `search_path`, these are about the same tables.
    """

    prefix: str = ""

    @property
    def schema(self) -> str:
        """The name of the table, as it stands in a text that takes no parameters."""
        return f"{self.prefix}kconsume_schema"

    @property
    def _offsets(self) -> str:
        return f"{self._prefix}kconsume_offsets"

    @property
    def _schema(self) -> str:
        return f"{self._prefix}kconsume_schema"

    @property
    def _prefix(self) -> str:
        """In a text that takes parameters, where a percent sign is written twice."""
        return self.prefix.replace("%", "%%")

    # A transaction of a handler

    @property
    def check(self) -> str:
        """In a statement of its own, after the lock: only then a claim is either seen here, or sees the lock."""
        return f"select next_offset from {self._offsets} where {_KEY} and epoch = %(epoch)s"

    @property
    def peek(self) -> str:
        return f"select next_offset, epoch, topic_id, owner from {self._offsets} where {_KEY}"

    @property
    def advance(self) -> str:
        """Fails in the server if the row is not ours, or the transaction not the one that we began: a COMMIT that was
        sent right behind it is then not carried out."""
        return f"""with moved as (
            update {self._offsets} set next_offset = %(new)s, leader_epoch = %(leader_epoch)s, updated_at = now()
            where {_KEY} and epoch = %(epoch)s and next_offset = %(old)s
              and current_setting('kconsume.tx', true) = %(mark)s
            returning 1
        ) select 1 / count(*), set_config('lock_timeout', current_setting('kconsume.lock_timeout'), true) from moved"""

    @property
    def note(self) -> str:
        return f"update {self._offsets} set metadata = %(text)s where {_KEY} and epoch = %(epoch)s"

    # Rows of many partitions

    @property
    def load(self) -> str:
        return f"select o.topic, o.partition, {_ROW} from {self._offsets} o, {_WANTED} w(topic, partition) \
            where {_IS_WANTED}"

    @property
    def lock_rows(self) -> str:
        """Always in the same order, so that two who want some of the same rows never wait for each other."""
        return f"select o.topic, o.partition, {_ROW} from {self._offsets} o, {_WANTED} w(topic, partition) \
            where {_IS_WANTED} order by o.topic, o.partition for update of o"

    @property
    def pin(self) -> str:
        return f"""insert into {self._offsets}
                (group_id, topic, partition, next_offset, epoch, reset_epoch, topic_id, leader_epoch)
            select %(group)s, w.topic, w.partition, w.next_offset, s.last_epoch, s.last_epoch,
                w.topic_id, w.leader_epoch
            from {self._last_epoch} s, unnest(%(topics)s::text[], %(partitions)s::int[], %(offsets)s::bigint[],
                %(topic_ids)s::text[], %(leader_epochs)s::int[])
                w(topic, partition, next_offset, topic_id, leader_epoch)
            order by w.topic, w.partition on conflict do nothing"""

    @property
    def _last_epoch(self) -> str:
        """Locked against a delete that is under way: it would otherwise raise what was read here a moment ago."""
        return f"(select last_epoch from {self._schema} for share)"

    @property
    def retiring(self) -> str:
        """Before a delete: then no row is made under an epoch that the delete is about to retire."""
        return f"select last_epoch from {self._schema} for update"

    @property
    def raise_epochs(self) -> str:
        return f"""update {self._offsets} o set epoch = o.epoch + 1, owner = %(owner)s,
                generation = coalesce(%(generation)s::bigint, o.generation), updated_at = now()
            from {_WANTED} w(topic, partition) where {_IS_WANTED} returning o.topic, o.partition, {_ROW}"""

    @property
    def save(self) -> str:
        return f"""update {self._offsets} o set next_offset = w.next_offset, leader_epoch = w.leader_epoch,
                topic_id = coalesce(w.topic_id, o.topic_id), updated_at = now()
            from unnest(%(topics)s::text[], %(partitions)s::int[], %(offsets)s::bigint[], %(epochs)s::bigint[],
                %(topic_ids)s::text[], %(leader_epochs)s::int[], %(previous)s::bigint[])
                w(topic, partition, next_offset, epoch, topic_id, leader_epoch, previous)
            where {_IS_WANTED} and o.epoch = w.epoch and o.next_offset <= w.next_offset
              and o.next_offset in (coalesce(w.previous, o.next_offset), w.next_offset)
            returning o.topic, o.partition"""

    @property
    def reset(self) -> str:
        return f"""insert into {self._offsets} as o (group_id, topic, partition, next_offset, epoch, reset_epoch)
            select %(group)s, w.topic, w.partition, w.next_offset, s.last_epoch + 1, s.last_epoch + 1
            from {self._last_epoch} s, unnest(%(topics)s::text[], %(partitions)s::int[], %(offsets)s::bigint[])
                w(topic, partition, next_offset)
            order by w.topic, w.partition
            on conflict (group_id, topic, partition) do update set next_offset = excluded.next_offset,
                epoch = o.epoch + 1, reset_epoch = o.epoch + 1, topic_id = null, owner = null, leader_epoch = null,
                metadata = '', updated_at = now()"""

    @property
    def delete(self) -> str:
        return f"""with gone as (
            delete from {self._offsets} o using {_WANTED} w(topic, partition) where {_IS_WANTED}
            returning o.topic, o.partition, o.epoch
        ), buried as ({self._bury} select distinct %(group)s, w.topic, w.partition, coalesce(g.epoch, {ALWAYS})
            from {_WANTED} w(topic, partition) left join gone g using (topic, partition) {_BURY_AGAIN})
        {self._retire}"""

    @property
    def delete_group(self) -> str:
        return f"""with gone as (
            delete from {self._offsets} where group_id = %(group)s returning topic, partition, epoch
        ), buried as ({self._bury} select %(group)s, topic, partition, epoch from gone
            union all select %(group)s, '', -1, {ALWAYS} {_BURY_AGAIN})
        {self._retire}"""

    @property
    def _deleted(self) -> str:
        return f"{self._prefix}kconsume_deleted"

    @property
    def _bury(self) -> str:
        return f"insert into {self._deleted} as d (group_id, topic, partition, epoch)"

    @property
    def about_to_make(self) -> str:
        """A row that is made is not deleted from there on."""
        return f"""{self._bury} select %(group)s, w.topic, w.partition, s.last_epoch
            from {self._last_epoch} s, {_WANTED} w(topic, partition)
            where not exists (select 1 from {self._offsets} o where {_IS_WANTED})
              and exists (select 1 from {self._deleted} e where e.group_id = %(group)s
                and (e.topic = '' or e.topic = w.topic and e.partition = w.partition))
            order by w.topic, w.partition {_BURY_AGAIN}"""

    @property
    def deleted(self) -> str:
        return f"""select w.topic, w.partition, d.epoch from {_WANTED} w(topic, partition) cross join lateral (
            select epoch from {self._deleted} e where e.group_id = %(group)s
              and (e.topic = '' or e.topic = w.topic and e.partition = w.partition) order by e.topic desc limit 1) d"""

    @property
    def identity(self) -> str:
        return f"select store_id from {self._schema}"

    @property
    def _retire(self) -> str:
        return (
            f"update {self._schema} set last_epoch = greatest(last_epoch, (select coalesce(max(epoch), 0) from gone))"
        )

    @property
    def groups(self) -> str:
        return f"select distinct group_id from {self._offsets} order by 1"

    # The outbox

    @property
    def _outbox(self) -> str:
        return f"{self._prefix}kconsume_outbox"

    @property
    def _seen(self) -> str:
        return f"{self._prefix}kconsume_seen"

    @property
    def post(self) -> str:
        """Numbered in the order of the array. One text for all rows: arrays of psycopg cost five times as much."""
        return f"""insert into {self._outbox}
                (group_id, topic, partition, target, key, value, headers, record_timestamp)
            select %(group)s, %(topic)s, %(partition)s, w.target, decode(w.key, 'base64'), decode(w.value, 'base64'),
                w.headers, w.moment
            from rows from (json_to_recordset(%(rows)s::json)
                    as (topic text, key text, value text, headers text, timestamp timestamptz))
                with ordinality w(target, key, value, headers, moment, place)
            order by w.place"""

    @property
    def post_numbered(self) -> str:
        """Answers with the numbers. Who may insert, and no more, cannot ask for them."""
        return f"with w as ({self.post} returning id) select array_agg(id order by id)::text from w"

    @property
    def posted(self) -> str:
        """The first rows of each partition that is still ours, above its floor; which one, by its place in arrays."""
        return f"""select w.place, b.id, b.target, b.key, b.value, b.headers, b.record_timestamp
            from unnest(%(topics)s::text[], %(partitions)s::int[], %(epochs)s::bigint[], %(floors)s::bigint[])
                with ordinality w(topic, partition, epoch, floor, place)
            join {self._offsets} o on {_IS_WANTED} and o.epoch = w.epoch
            cross join lateral (select * from {self._outbox} r
                where r.group_id = %(group)s and r.topic = w.topic and r.partition = w.partition and r.id > w.floor
                order by r.id limit %(most)s) b
            order by w.place, b.id"""

    @property
    def posted_to(self) -> str:
        """The same, of the rows to some topics, or to all others. No name of a topic has a comma in it."""
        arrays, columns, condition = "%(floors)s::bigint[]", "epoch, floor, place)", "r.id > w.floor"
        chosen = "(r.target = any(string_to_array(w.names, ','))) <> w.others"
        return (
            self.posted.replace(arrays, f"{arrays}, %(names)s::text[], %(others)s::bool[]")
            .replace(columns, "epoch, floor, names, others, place)")
            .replace(condition, f"{condition} and {chosen}")
        )

    @property
    def delivered(self) -> str:
        return f"delete from {self._outbox} where {_KEY} and id = any(%(numbers)s::bigint[])"

    @property
    def take_in(self) -> str:
        """Answers with those that were not known."""
        return f"""insert into {self._seen} (group_id, origin) select distinct %(group)s, w.origin
            from unnest(%(origins)s::text[]) w(origin) order by w.origin on conflict do nothing returning origin"""

    @property
    def forget(self) -> str:
        """Those that are known for longest. Several apps may be at it: none waits for what another deletes."""
        return f"""delete from {self._seen} where ctid = any (array(
            select ctid from {self._seen} where seen_at < now() - interval '{KEPT_DAYS} days'
            order by seen_at limit {FORGOTTEN_AT_ONCE} for update skip locked))"""

    @property
    def lease(self) -> str:
        """Who may send what is nobody's, if there is something."""
        return f"""update {self._schema} set relay = %(owner)s, relay_at = now()
            where (relay = %(owner)s or relay_at is null
                or relay_at not between now() - interval '{LEASE} seconds' and now() + interval '{LEASE} seconds')
              and exists (select 1 from {self._outbox} where group_id = '')"""

    @property
    def strays(self) -> str:
        return f"""select 1, id, target, key, value, headers, record_timestamp from {self._outbox}
            where group_id = '' and topic = '' and partition = 0
              and (target = any(%(names)s::text[])) <> %(others)s order by id limit %(most)s"""

    # Who is in the way of a claim

    @property
    def holders(self) -> str:
        """The backends with an open transaction on partitions that are still ours: whoever has claimed one of them
        after us is not to be hindered."""
        return self._in_the_way("l.pid")

    @property
    def end_holder(self) -> str:
        return f"{self._in_the_way('l.pid, pg_terminate_backend(l.pid)')} and l.pid = %(pid)s"

    def _in_the_way(self, answer: str) -> str:
        return f"""select {answer} from {self._offsets} o
            join unnest(%(topics)s::text[], %(partitions)s::int[], %(epochs)s::bigint[], %(locks)s::bigint[])
                w(topic, partition, epoch, lock) on {_IS_WANTED} and o.epoch = w.epoch
            join pg_locks l on l.locktype = 'advisory' and l.objsubid = 1 and l.granted
                and l.database = (select oid from pg_database where datname = current_database())
                and l.classid::bigint = ((w.lock >> 32) & 4294967295) and l.objid::bigint = (w.lock & 4294967295)
            where l.pid <> pg_backend_pid()"""


# Who keeps a row that a backend waits for: whoever has the transaction that it waits to see the end of. Whoever only
# stands before it in the queue does not. The row itself names nobody if it is not committed yet, and names a number
# that means something else if several have it locked.
_KEEPS_A_ROW = """from pg_locks w
    join pg_locks h on h.locktype = 'transactionid' and h.granted and h.transactionid = w.transactionid
    where w.locktype = 'transactionid' and not w.granted and w.pid = %(waiting)s
      and h.pid = any(pg_blocking_pids(%(waiting)s))"""
BLOCKERS = f"select h.pid, h.transactionid::text {_KEEPS_A_ROW}"
END_BLOCKER = f"select h.pid, pg_terminate_backend(h.pid) {_KEEPS_A_ROW} and h.pid = %(pid)s"
NOW = "select clock_timestamp()"
# Whoever asks for its lock now, in a transaction that began before that time. The pattern does not match itself, for
# others may be asking this too.
ENTERING = """select 1 from pg_stat_activity where datname = current_database() and pid <> pg_backend_pid()
    and state = 'active' and xact_start <= %s and query ~ 'advisory[_]xact_lock_shared' limit 1"""
MY_PID = "select pg_backend_pid()"
WHOSE = "select usename, current_user from pg_stat_activity where pid = %(pid)s"
"""The role of a backend, and ours."""

LOCKED_AT_MOST = "10s"
"""How long a statement of ours waits for a row."""

BEGIN = "begin isolation level read committed, read write"
# In one round trip, and undone with the transaction: behind a pooler, nothing may outlive it. Whoever is frozen between
# two of these statements is ended by the server.
BEGIN_OURS = f"""{BEGIN};
    set local lock_timeout = '{LOCKED_AT_MOST}';
    set local statement_timeout = '20s';
    set local idle_in_transaction_session_timeout = '10s'"""
BEGIN_SCHEMA = f"""{BEGIN};
    set local lock_timeout = '{LOCKED_AT_MOST}';
    set local idle_in_transaction_session_timeout = '10s'"""

_LOCK = """select pg_advisory_xact_lock_shared(%(lock)s), set_config('kconsume.tx', %(mark)s, true),
    set_config('idle_in_transaction_session_timeout', %(idle)s, true)"""
_IMPATIENT = f"""select set_config('kconsume.lock_timeout', current_setting('lock_timeout'), true),
    set_config('lock_timeout', '{LOCKED_AT_MOST}', true)"""
_BY_INDEX = "set_config('enable_seqscan', 'off', true)"


@dataclass(frozen=True, slots=True)
class Course:
    """The statements of a handler's transaction, in their order."""

    begin: str
    lock: str
    check: str
    impatient: str
    """Right before the offset moves: from here on it is we who wait."""
    advance: str
    peek: str
    post: str
    take_in: str

    @classmethod
    def of(cls, statements: Statements, isolation: str) -> Course:
        begin = f"begin isolation level {isolation}, read write"
        lock, check, impatient = _LOCK, statements.check, _IMPATIENT
        if isolation == "serializable":
            # A table as small as ours is read whole, when PostgreSQL may choose; then each transaction has read the
            # rows of all, and they conflict. What the handler's statements may is as it was before.
            lock += f", set_config('kconsume.seqscan', current_setting('enable_seqscan'), true), {_BY_INDEX}"
            kept = "set_config('enable_seqscan', current_setting('kconsume.seqscan'), true)"
            check = check.replace("select next_offset", f"select next_offset, {kept}", 1)
            impatient += f", {_BY_INDEX}"
        outbox = (statements.post_numbered, statements.take_in)
        return cls(begin, lock, check, impatient, statements.advance, statements.peek, *outbox)


Statement: TypeAlias = tuple[str, Mapping[str, str | int | None] | None]
"""A text, and the values of its parameters."""


def in_one(statements: Iterable[Statement]) -> str:
    """All of them in one text, for the simple protocol: one message, and after an error the rest is not carried out."""
    texts = (
        text if values is None else text % {name: _literal(value) for name, value in values.items()}
        for text, values in statements
    )
    return ";".join(texts)


def _literal(value: str | int | None) -> str:
    if value is None:
        return "null"
    return str(value) if isinstance(value, int) else _quoted_text(value)


@functools.lru_cache(1024)
def _quoted_text(text: str) -> str:
    """Escaped in a way that no setting of the session changes, its encoding included."""
    plain = text.replace("\\", "\\\\").replace("'", "''")
    return "E'" + "".join(c if c.isascii() else f"\\U{ord(c):08x}" for c in plain) + "'"


MAY_END_OTHERS = "select has_function_privilege('pg_terminate_backend(integer, bigint)', 'execute')"


def lock_of(prefix: str, group: str, partition: Partition) -> int:
    """The number of a partition's advisory lock. Two partitions with one number would only be ended together."""
    text = "\0".join((prefix, group, partition.topic, str(partition.number)))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), signed=True)


MAY_END_ALL = """select pg_has_role('pg_signal_backend', 'usage') or rolsuper
    from pg_roles where rolname = current_user"""


def quoted(schema: str) -> str:
    return '"' + schema.replace('"', '""') + '".'

"""The statements about offsets and the outbox, and about the backends that block a claim.

This module makes the texts, and the numbers of advisory locks. It has no connection and does no I/O.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from kconsume.backends.capabilities import ALWAYS
from kconsume.backends.outbox.tables import FORGOTTEN_AT_ONCE, KEPT_DAYS, LEASE
from kconsume.records import Partition

_ROW = "next_offset, epoch, topic_id, owner, leader_epoch, metadata, updated_at, generation, coalesce(reset_epoch, 0)"
_KEY = "group_id = %(group)s and topic = %(topic)s and partition = %(partition)s"
_WANTED = "unnest(%(topics)s::text[], %(partitions)s::int[])"
_MARK_AGAIN = """on conflict (group_id, topic, partition)
            do update set epoch = excluded.epoch, deleted_at = excluded.deleted_at"""
_IS_WANTED = "o.group_id = %(group)s and o.topic = w.topic and o.partition = w.partition"


@dataclass(frozen=True, slots=True)
class Statements:
    """Every statement, for the tables of one schema.

    While an app runs, statements always name the schema, so that they use the same tables under any `search_path` of a
    handler.
    """

    prefix: str = ""
    """Empty, or the quoted schema with a dot."""

    @property
    def schema(self) -> str:
        """The name of the table `kconsume_schema`, for a statement without parameters."""
        return f"{self.prefix}kconsume_schema"

    @property
    def _offsets(self) -> str:
        return f"{self.escaped_prefix}kconsume_offsets"

    @property
    def _schema(self) -> str:
        return f"{self.escaped_prefix}kconsume_schema"

    @property
    def escaped_prefix(self) -> str:
        """The prefix for a statement with parameters, in which a percent sign is written twice."""
        return self.prefix.replace("%", "%%")

    # A transaction of a handler

    @property
    def check(self) -> str:
        """Returns a row if the partition has the epoch. Must be a separate statement after the advisory lock: then
        either this statement sees a new claim, or the claim sees the lock."""
        return f"select next_offset from {self._offsets} where {_KEY} and epoch = %(epoch)s"

    @property
    def read_row(self) -> str:
        return f"select next_offset, epoch, topic_id, owner from {self._offsets} where {_KEY}"

    @property
    def advance(self) -> str:
        """Fails in the server if the row has another epoch or offset, or if the transaction is not the one that
        kconsume began. The server then does not execute a COMMIT that was sent right after this statement."""
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
        """Locks rows always in the same order, so that two transactions that lock some of the same rows never
        deadlock."""
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
        """Reads `last_epoch` with a lock. Otherwise a delete at the same time could raise `last_epoch` after this
        read."""
        return f"(select last_epoch from {self._schema} for share)"

    @property
    def lock_last_epoch(self) -> str:
        """Sent before a delete. The lock prevents that a row is created meanwhile with an epoch of a deleted row."""
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
        ), marked as ({self._mark_deleted} select distinct %(group)s, w.topic, w.partition, coalesce(g.epoch, {ALWAYS})
            from {_WANTED} w(topic, partition) left join gone g using (topic, partition) {_MARK_AGAIN})
        {self._retire}"""

    @property
    def delete_group(self) -> str:
        return f"""with gone as (
            delete from {self._offsets} where group_id = %(group)s returning topic, partition, epoch
        ), marked as ({self._mark_deleted} select %(group)s, topic, partition, epoch from gone
            union all select %(group)s, '', -1, {ALWAYS} {_MARK_AGAIN})
        {self._retire}"""

    @property
    def _deleted(self) -> str:
        return f"{self.escaped_prefix}kconsume_deleted"

    @property
    def _mark_deleted(self) -> str:
        return f"insert into {self._deleted} as d (group_id, topic, partition, epoch)"

    @property
    def mark_created(self) -> str:
        """Sent before rows are created. Records for deleted partitions that only epochs up to `last_epoch` count as
        deleted."""
        return f"""{self._mark_deleted} select %(group)s, w.topic, w.partition, s.last_epoch
            from {self._last_epoch} s, {_WANTED} w(topic, partition)
            where not exists (select 1 from {self._offsets} o where {_IS_WANTED})
              and exists (select 1 from {self._deleted} e where e.group_id = %(group)s
                and (e.topic = '' or e.topic = w.topic and e.partition = w.partition))
            order by w.topic, w.partition {_MARK_AGAIN}"""

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
        return f"{self.escaped_prefix}kconsume_outbox"

    @property
    def _seen(self) -> str:
        return f"{self.escaped_prefix}kconsume_seen"

    @property
    def post(self) -> str:
        """Numbers the rows in the order of the JSON array. JSON costs a fifth of psycopg's arrays."""
        return f"""insert into {self._outbox}
                (group_id, topic, partition, target, key, value, headers, record_timestamp)
            select %(group)s, %(topic)s, %(partition)s, w.target, decode(w.key, 'base64'), decode(w.value, 'base64'),
                w.headers, w.moment
            from rows from (json_to_recordset(%(rows)s::json)
                    as (topic text, key text, value text, headers text, timestamp timestamptz))
                with ordinality w(target, key, value, headers, moment, place)
            order by w.place"""

    @property
    def posted(self) -> str:
        """The first rows with a higher number than `above`, to the given topics or to all other topics, for each
        partition that still has the given epoch. `place` is the index of the partition in the arrays, counted from 1.
        No topic name contains a comma."""
        return f"""select w.place, b.id, b.target, b.key, b.value, b.headers, b.record_timestamp
            from unnest(%(topics)s::text[], %(partitions)s::int[], %(epochs)s::bigint[], %(above)s::bigint[],
                %(names)s::text[], %(others)s::bool[])
                with ordinality w(topic, partition, epoch, above, names, others, place)
            join {self._offsets} o on {_IS_WANTED} and o.epoch = w.epoch
            cross join lateral (select * from {self._outbox} r
                where r.group_id = %(group)s and r.topic = w.topic and r.partition = w.partition and r.id > w.above
                    and (r.target = any(string_to_array(w.names, ','))) <> w.others
                order by r.id limit %(most)s) b
            order by w.place, b.id"""

    @property
    def delivered(self) -> str:
        return f"delete from {self._outbox} where {_KEY} and id = any(%(numbers)s::bigint[])"

    @property
    def record_origins(self) -> str:
        """Inserts the origins of handled records. Returns the origins that were not stored before."""
        return f"""insert into {self._seen} (group_id, origin) select distinct %(group)s, w.origin
            from unnest(%(origins)s::text[]) w(origin) order by w.origin on conflict do nothing returning origin"""

    @property
    def forget_origins(self) -> str:
        """Deletes the oldest expired origins. Several apps may execute this at the same time: rows that another app
        deletes are skipped."""
        return f"""delete from {self._seen} where ctid = any (array(
            select ctid from {self._seen} where seen_at < now() - interval '{KEPT_DAYS} days'
            order by seen_at limit {FORGOTTEN_AT_ONCE} for update skip locked))"""

    @property
    def lease(self) -> str:
        """Takes or renews the lease to send rows of `Outbox.send`, if there are such rows."""
        return f"""update {self._schema} set relay = %(owner)s, relay_at = now()
            where (relay = %(owner)s or relay_at is null
                or relay_at not between now() - interval '{LEASE} seconds' and now() + interval '{LEASE} seconds')
              and exists (select 1 from {self._outbox} where group_id = '')"""

    @property
    def unowned_rows(self) -> str:
        return f"""select 1, id, target, key, value, headers, record_timestamp from {self._outbox}
            where group_id = '' and topic = '' and partition = 0
              and (target = any(%(names)s::text[])) <> %(others)s order by id limit %(most)s"""

    @property
    def count_unsent(self) -> str:
        """Counts the rows of `Outbox.send` to these topics that the broker has not confirmed."""
        return f"select count(*) from {self._outbox} where group_id = '' and target = any(%(topics)s)"

    @property
    def release_lease(self) -> str:
        return f"update {self._schema} set relay = null, relay_at = null where relay = %(owner)s"

    # Backends that block a claim

    @property
    def lock_holders(self) -> str:
        """The backends with an open transaction on partitions that still have the given epoch. A partition with a newer
        epoch is left out, because the backend of its newer owner must not be ended."""
        return self._of_lock_holders("l.pid")

    @property
    def end_lock_holder(self) -> str:
        return f"{self._of_lock_holders('l.pid, pg_terminate_backend(l.pid)')} and l.pid = %(pid)s"

    def _of_lock_holders(self, columns: str) -> str:
        return f"""select {columns} from {self._offsets} o
            join unnest(%(topics)s::text[], %(partitions)s::int[], %(epochs)s::bigint[], %(locks)s::bigint[])
                w(topic, partition, epoch, lock) on {_IS_WANTED} and o.epoch = w.epoch
            join pg_locks l on l.locktype = 'advisory' and l.objsubid = 1 and l.granted
                and l.database = (select oid from pg_database where datname = current_database())
                and l.classid::bigint = ((w.lock >> 32) & 4294967295) and l.objid::bigint = (w.lock & 4294967295)
            where l.pid <> pg_backend_pid()"""


# A backend blocks a row if the waiting backend waits for its transaction. A backend that is only earlier in the queue
# does not block the row. The row itself does not show which transaction blocks it: an uncommitted row names no
# transaction, and a row that several transactions have locked has a multixact number.
_OF_BLOCKERS = """from pg_locks w
    join pg_locks h on h.locktype = 'transactionid' and h.granted and h.transactionid = w.transactionid
    where w.locktype = 'transactionid' and not w.granted and w.pid = %(waiting)s
      and h.pid = any(pg_blocking_pids(%(waiting)s))"""
BLOCKERS = f"select h.pid, h.transactionid::text {_OF_BLOCKERS}"
END_BLOCKER = f"select h.pid, pg_terminate_backend(h.pid) {_OF_BLOCKERS} and h.pid = %(pid)s"
NOW = "select clock_timestamp()"
# Backends that ask for their advisory lock now, in a transaction that began before the given time. Other processes may
# execute this statement too, so the pattern is written so that it does not match its own text.
ENTERING = """select 1 from pg_stat_activity where datname = current_database() and pid <> pg_backend_pid()
    and state = 'active' and xact_start <= %s and query ~ 'advisory[_]xact_lock_shared' limit 1"""
MY_PID = "select pg_backend_pid()"
ROLES = "select usename, current_user from pg_stat_activity where pid = %(pid)s"
"""Returns the role of a backend and the role of this connection."""

MAY_END_OTHERS = "select has_function_privilege('pg_terminate_backend(integer, bigint)', 'execute')"

MAY_END_ALL = """select pg_has_role('pg_signal_backend', 'usage') or rolsuper
    from pg_roles where rolname = current_user"""


def lock_number(prefix: str, group: str, partition: Partition) -> int:
    """The number of a partition's advisory lock. If two partitions had the same number, a claim of one would end the
    transactions of both."""
    text = "\0".join((prefix, group, partition.topic, str(partition.number)))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), signed=True)


def quoted(schema: str) -> str:
    return '"' + schema.replace('"', '""') + '".'

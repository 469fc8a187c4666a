"""The statements of a stream's ledger on PostgreSQL, and their parameters. No connection, no I/O.

Arrays are sent as text (`{orders,orders}`). Topic names have no characters that need an escape in such a text.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kconsume.backends.base import Positions
from kconsume.backends.postgres.statements import Statements, lock_number
from kconsume.records import Partition
from kconsume.spark._batch.ranges import OffsetRange

HEARTBEAT_TIMEOUT = 15
"""Seconds without a heartbeat after which a query counts as dead, even if its connection still exists."""

Values = dict[str, str | int | None]


@dataclass(frozen=True, slots=True)
class StreamStatements:
    """The statements, for the tables of one schema."""

    sql: Statements

    @property
    def _streams(self) -> str:
        return f"{self.sql.escaped_prefix}kconsume_streams"

    @property
    def _offsets(self) -> str:
        return f"{self.sql.escaped_prefix}kconsume_offsets"

    # The table

    @property
    def table_exists(self) -> str:
        return "select to_regclass(%(table)s) is not null"

    @property
    def table(self) -> str:
        """The table's name for a statement without parameters."""
        return f"{self.sql.prefix}kconsume_streams"

    @property
    def create_table(self) -> str:
        return f"""create table if not exists {self.table} (
    group_id text not null, name text not null, owner text not null, topics text[] not null,
    beat_at timestamptz not null default now(), stop_asked boolean not null default false,
    number bigint not null default 0, plan text, primary key (group_id, name)
) with (fillfactor = 50, autovacuum_vacuum_scale_factor = 0.01)"""

    # Registered queries

    @property
    def register(self) -> str:
        """Returns no row if a query of other topics has the name, unless `mine` is true.

        The number begins at the highest number of the group, because a user's table that has seen a number skips lower
        numbers."""
        return f"""insert into {self._streams} as s (group_id, name, owner, topics, number)
            select %(group)s, %(name)s, %(owner)s, %(topics)s::text[], coalesce(max(o.number), 0)
            from {self._streams} o where o.group_id = %(group)s
            on conflict (group_id, name) do update
            set owner = excluded.owner, topics = excluded.topics, beat_at = now(), stop_asked = false
            where %(mine)s or s.topics && excluded.topics returning name"""

    @property
    def set_topics(self) -> str:
        return f"update {self._streams} set topics = %(topics)s::text[] where {_MINE}"

    @property
    def heartbeat(self) -> str:
        return f"update {self._streams} set beat_at = now() where {_MINE} returning stop_asked"

    @property
    def request_stop(self) -> str:
        return f"""update {self._streams} set stop_asked = true where group_id = %(group)s
            and (%(name)s::text is null or name = %(name)s or starts_with(name, %(name)s || ' ')) returning name"""

    @property
    def live_owner(self) -> str:
        """The owner of another query of the group that reads this topic and had a heartbeat in time."""
        return f"""select owner from {self._streams} where group_id = %(group)s and %(topic)s = any(topics)
            and owner <> %(owner)s and beat_at > now() - interval '{HEARTBEAT_TIMEOUT} seconds'
            order by beat_at desc limit 1"""

    # Plans

    @property
    def pending_plan(self) -> str:
        return f"select plan from {self._streams} where group_id = %(group)s and name = %(name)s"

    @property
    def begin_plan(self) -> str:
        """Sets the plan and returns its number: a new one, unless the same plan is pending.

        The number is at least the clock in milliseconds, because users' tables skip a number that they have seen:
        numbers must also grow if this row was deleted, if the query was renamed, or if the database lost its last
        commits in a failover."""
        return f"""update {self._streams} set plan = %(plan)s, beat_at = now(), number = case when plan = %(plan)s
            then number else greatest(number + 1, {_MILLISECONDS}) end where {_MINE} returning number"""

    @property
    def reserve_numbers(self) -> str:
        return f"update {self._streams} set number = number + %(count)s where {_MINE} returning number"

    @property
    def drop_plan(self) -> str:
        return f"update {self._streams} set plan = null where {_MINE}"

    # A transaction over many partitions

    @property
    def lock(self) -> str:
        """Takes all locks. Must be a separate statement before `check`: then either `check` sees a concurrent claim, or
        the claim sees the locks."""
        return "select count(pg_advisory_xact_lock_shared(l)) from unnest(%(locks)s::bigint[]) l"

    @property
    def mark(self) -> str:
        return """select set_config('kconsume.tx', %(mark)s, true),
            set_config('idle_in_transaction_session_timeout', %(idle)s, true)"""

    @property
    def check(self) -> str:
        """Returns a row if all partitions have our epochs."""
        return f"""select 1 from (select count(*) n from {self._offsets} o join {_WANTED} on {_IS_OURS}) q
            where q.n = %(count)s"""

    @property
    def advance(self) -> str:
        """Moves the offsets. Fails in the server unless each row has the expected offset and our epoch. The rows are
        locked in the order in which claims lock them."""
        return f"""with held as (
            select o.topic, o.partition, w.next from {self._offsets} o join unnest(%(topics)s::text[],
                %(partitions)s::int[], %(epochs)s::bigint[], %(olds)s::bigint[], %(news)s::bigint[])
                w(topic, partition, epoch, old, next) on {_IS_OURS} and o.next_offset = w.old
            where current_setting('kconsume.tx', true) = %(mark)s
            order by o.topic, o.partition for update of o
        ), moved as (
            update {self._offsets} o set next_offset = held.next, leader_epoch = null, updated_at = now() from held
            where o.group_id = %(group)s and o.topic = held.topic and o.partition = held.partition returning 1
        ) select 1 / (count(*) = %(count)s)::int, set_config('lock_timeout', current_setting('kconsume.lock_timeout'),
            true) from moved"""


_MILLISECONDS = "(extract(epoch from clock_timestamp()) * 1000)::bigint"
_MINE = "group_id = %(group)s and name = %(name)s and owner = %(owner)s"
_WANTED = """unnest(%(topics)s::text[], %(partitions)s::int[], %(epochs)s::bigint[]) w(topic, partition, epoch)"""
_IS_OURS = "o.group_id = %(group)s and o.topic = w.topic and o.partition = w.partition and o.epoch = w.epoch"

BEGIN_LOCK_TRANSACTION = "begin; set local idle_in_transaction_session_timeout = 0; set local statement_timeout = '20s'"
"""Begins the transaction that holds a query's locks for as long as the query runs. Behind a pooler, session locks would
stay with the server's connection. Between statements the transaction has no snapshot, so it does not hinder vacuum."""
TRY_LOCK = "select pg_try_advisory_xact_lock(%(lock)s)"
TERMINATE_LOCK_HOLDER = f"""select pg_terminate_backend(l.pid) from pg_locks l join pg_stat_activity a on a.pid = l.pid
    where a.xact_start < now() - interval '{HEARTBEAT_TIMEOUT} seconds'
    and l.locktype = 'advisory' and l.objsubid = 1 and l.granted
    and l.database = (select oid from pg_database where datname = current_database())
    and l.classid::bigint = ((%(lock)s::bigint >> 32) & 4294967295)
    and l.objid::bigint = (%(lock)s::bigint & 4294967295) and l.pid <> pg_backend_pid()"""


def stream_lock(prefix: str, group: str, topic: str) -> int:
    """The number of the advisory lock that makes a query the only one of its group on a topic."""
    text = "\0".join((prefix, group, topic))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8, person=b"spark").digest(), signed=True)


def array(items: Sequence[object]) -> str:
    """An array parameter as text."""
    return "{" + ",".join(map(str, items)) + "}"


def partition_locks(prefix: str, group: str, partitions: Sequence[Partition]) -> str:
    return array([lock_number(prefix, group, partition) for partition in partitions])


def check_values(group: str, positions: Positions) -> Values:
    """The parameters of `StreamStatements.check`."""
    return {
        "group": group,
        "topics": array([p.topic for p in positions]),
        "partitions": array([p.number for p in positions]),
        "epochs": array([position.epoch for position in positions.values()]),
        "count": len(positions),
    }


def advance_values(group: str, ranges: Sequence[OffsetRange], epochs: Mapping[Partition, int], mark: str) -> Values:
    """The parameters of `StreamStatements.advance`."""
    return {
        "group": group,
        "topics": array([each.partition.topic for each in ranges]),
        "partitions": array([each.partition.number for each in ranges]),
        "epochs": array([epochs[each.partition] for each in ranges]),
        "olds": array([each.first for each in ranges]),
        "news": array([each.end for each in ranges]),
        "count": len(ranges),
        "mark": mark,
    }

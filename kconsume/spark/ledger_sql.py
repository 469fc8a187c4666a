"""The statements of a stream's ledger on PostgreSQL: what is sent, and nothing about when.

Arrays go as text (`{orders,orders}`): names of topics have no character that such a text would have to escape.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kconsume.backends.abc import Positions
from kconsume.backends.postgres_sql import Statements, lock_of
from kconsume.records import Partition
from kconsume.spark.ranges import OffsetRange

ALIVE = 15
"""Seconds since its last word, after which a query is taken for dead though its connection is there."""

Values = dict[str, str | int | None]


@dataclass(frozen=True, slots=True)
class StreamStatements:
    """For tables in one schema."""

    sql: Statements

    @property
    def _prefix(self) -> str:
        return self.sql._prefix

    @property
    def _streams(self) -> str:
        return f"{self._prefix}kconsume_streams"

    @property
    def _offsets(self) -> str:
        return f"{self._prefix}kconsume_offsets"

    # The table

    @property
    def looked_for(self) -> str:
        return "select to_regclass(%(table)s) is not null"

    @property
    def table(self) -> str:
        return f"{self.sql.prefix}kconsume_streams"

    @property
    def create(self) -> str:
        return f"""create table if not exists {self.table} (
    group_id text not null, name text not null, owner text not null, topics text[] not null,
    beat_at timestamptz not null default now(), stop_asked boolean not null default false,
    number bigint not null default 0, plan text, primary key (group_id, name)
) with (fillfactor = 50, autovacuum_vacuum_scale_factor = 0.01)"""

    # Who runs

    @property
    def enter(self) -> str:
        """No row if the name is that of a query of other topics, unless `mine`. In a group numbers never begin again:
        a table that was told of one skips those below it."""
        return f"""insert into {self._streams} as s (group_id, name, owner, topics, number)
            select %(group)s, %(name)s, %(owner)s, %(topics)s::text[], coalesce(max(o.number), 0)
            from {self._streams} o where o.group_id = %(group)s
            on conflict (group_id, name) do update
            set owner = excluded.owner, topics = excluded.topics, beat_at = now(), stop_asked = false
            where %(mine)s or s.topics && excluded.topics returning name"""

    @property
    def also(self) -> str:
        return f"update {self._streams} set topics = %(topics)s::text[] where {_MINE}"

    @property
    def beat(self) -> str:
        return f"update {self._streams} set beat_at = now() where {_MINE} returning stop_asked"

    @property
    def ask_to_stop(self) -> str:
        return f"""update {self._streams} set stop_asked = true where group_id = %(group)s
            and (%(name)s::text is null or name = %(name)s or starts_with(name, %(name)s || ' ')) returning name"""

    @property
    def alive(self) -> str:
        """The owner of another query of the group that reads this topic and has given a sign of life."""
        return f"""select owner from {self._streams} where group_id = %(group)s and %(topic)s = any(topics)
            and owner <> %(owner)s and beat_at > now() - interval '{ALIVE} seconds' order by beat_at desc limit 1"""

    # Plans

    @property
    def pending(self) -> str:
        return f"select plan from {self._streams} where group_id = %(group)s and name = %(name)s"

    @property
    def begin(self) -> str:
        """A new number, unless it is the plan that is pending. The clock is in it because users' tables skip a number
        that they have seen: numbers must grow also when this row was deleted, or belongs to a query that was renamed,
        or when the database lost its last commits in a failover."""
        return f"""update {self._streams} set plan = %(plan)s, beat_at = now(), number = case when plan = %(plan)s
            then number else greatest(number + 1, {_MILLISECONDS}) end where {_MINE} returning number"""

    @property
    def reserve(self) -> str:
        return f"update {self._streams} set number = number + %(count)s where {_MINE} returning number"

    @property
    def drop(self) -> str:
        return f"update {self._streams} set plan = null where {_MINE}"

    # A transaction over many partitions

    @property
    def lock(self) -> str:
        """All locks before the epochs are looked at: a claim is then either seen, or sees the locks."""
        return "select count(pg_advisory_xact_lock_shared(l)) from unnest(%(locks)s::bigint[]) l"

    @property
    def mark(self) -> str:
        return """select set_config('kconsume.tx', %(mark)s, true),
            set_config('idle_in_transaction_session_timeout', %(idle)s, true)"""

    @property
    def check(self) -> str:
        """Answers with a row if all of them are ours."""
        return f"""select 1 from (select count(*) n from {self._offsets} o join {_HELD} on {_IS_HELD}) q
            where q.n = %(count)s"""

    @property
    def advance(self) -> str:
        """Fails in the server unless each row is where we left it. Locked in the order in which claims lock them."""
        return f"""with held as (
            select o.topic, o.partition, w.next from {self._offsets} o join unnest(%(topics)s::text[],
                %(partitions)s::int[], %(epochs)s::bigint[], %(olds)s::bigint[], %(news)s::bigint[])
                w(topic, partition, epoch, old, next) on {_IS_HELD} and o.next_offset = w.old
            where current_setting('kconsume.tx', true) = %(mark)s
            order by o.topic, o.partition for update of o
        ), moved as (
            update {self._offsets} o set next_offset = held.next, leader_epoch = null, updated_at = now() from held
            where o.group_id = %(group)s and o.topic = held.topic and o.partition = held.partition returning 1
        ) select 1 / (count(*) = %(count)s)::int, set_config('lock_timeout', current_setting('kconsume.lock_timeout'),
            true) from moved"""


_MILLISECONDS = "(extract(epoch from clock_timestamp()) * 1000)::bigint"
_MINE = "group_id = %(group)s and name = %(name)s and owner = %(owner)s"
_HELD = """unnest(%(topics)s::text[], %(partitions)s::int[], %(epochs)s::bigint[]) w(topic, partition, epoch)"""
_IS_HELD = "o.group_id = %(group)s and o.topic = w.topic and o.partition = w.partition and o.epoch = w.epoch"

HOLD = "begin; set local idle_in_transaction_session_timeout = 0; set local statement_timeout = '20s'"
"""The transaction that a query keeps open for as long as it runs, for its locks: behind a pooler, locks of a session
would stay with the server's connection. Between statements it holds no snapshot, so nothing is kept from vacuum."""
TRY_LOCK = "select pg_try_advisory_xact_lock(%(lock)s)"
END_HOLDER = f"""select pg_terminate_backend(l.pid) from pg_locks l join pg_stat_activity a on a.pid = l.pid
    where a.xact_start < now() - interval '{ALIVE} seconds' and l.locktype = 'advisory' and l.objsubid = 1 and l.granted
    and l.database = (select oid from pg_database where datname = current_database())
    and l.classid::bigint = ((%(lock)s::bigint >> 32) & 4294967295)
    and l.objid::bigint = (%(lock)s::bigint & 4294967295) and l.pid <> pg_backend_pid()"""


def stream_lock(prefix: str, group: str, topic: str) -> int:
    """The number of the lock that the one query of a group on a topic holds."""
    text = "\0".join((prefix, group, topic))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8, person=b"spark").digest(), signed=True)


def array(items: Sequence[object]) -> str:
    return "{" + ",".join(map(str, items)) + "}"


def locks_of(prefix: str, group: str, partitions: Sequence[Partition]) -> str:
    return array([lock_of(prefix, group, partition) for partition in partitions])


def held(group: str, positions: Positions) -> Values:
    return {
        "group": group,
        "topics": array([p.topic for p in positions]),
        "partitions": array([p.number for p in positions]),
        "epochs": array([position.epoch for position in positions.values()]),
        "count": len(positions),
    }


def moves(group: str, ranges: Sequence[OffsetRange], epochs: Mapping[Partition, int], mark: str) -> Values:
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

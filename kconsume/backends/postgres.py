"""`postgresql://`: offsets in the person's own PostgreSQL, in the handler's own transaction, behind a fence.

Here are the rows and who owns them: claim, save, reset. What happens in a handler's transaction is `postgres_tx.py`'s,
and how those are ended that are in the way of a claim, `postgres_zombies.py`'s.

A claim raises the epochs and commits that; from then on no transaction under an older one can move the offset. Then it
looks for backends that still have such a transaction open, by their advisory lock, gives them a moment to end, and ends
them: a frozen owner must not keep rows locked that the next one needs. A transaction that begins after the claim sees
the new epoch; one that began before is seen by the claim.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypeVar

import psycopg

from kconsume.backends import claiming
from kconsume.backends import postgres_tx as handlers
from kconsume.backends.abc import AsyncTx, ClaimTerms, Position, Positions, Refused, Start, Tx
from kconsume.backends.claiming import Answers, fenced
from kconsume.backends.outbox_table import (
    ALL_TARGETS,
    FORGOTTEN_AT_ONCE,
    NO_TARGETS,
    NOBODYS,
    Posted,
    Targets,
    headers_of,
    postgres_rows,
)
from kconsume.backends.postgres_address import ISOLATION, POOL, Address, address_of
from kconsume.backends.postgres_faults import store_error
from kconsume.backends.postgres_floors import Floors
from kconsume.backends.postgres_lent import LentAsyncConnection, LentConnection
from kconsume.backends.postgres_schema import found, ready
from kconsume.backends.postgres_slots import LoopSlots, Plain, Slots
from kconsume.backends.postgres_sql import BEGIN, BEGIN_OURS, MAY_END_OTHERS, Statements, lock_of
from kconsume.backends.postgres_tx import PostgresTx, Terms
from kconsume.backends.postgres_watch import watch
from kconsume.backends.postgres_zombies import end_earlier_owners, row_holders_ended
from kconsume.errors import ConfigurationError, Conflict, MissingExtra, StoreUnavailable
from kconsume.output import Outgoing
from kconsume.records import Partition

if TYPE_CHECKING:
    from sqlalchemy import Engine
    from sqlalchemy.ext.asyncio import AsyncEngine

    from kconsume.backends.postgres_sqlalchemy import Rehearsal as SessionRehearsal
    from kconsume.backends.postgres_sqlalchemy import Sessions

T = TypeVar("T")

Epochs = Mapping[Partition, int]


class PostgresStore:
    """Offsets in a PostgreSQL: `PostgresStore("postgresql://user@host/shop")`. Opens nothing until it is used.

    With `engine=` of SQLAlchemy, handlers get a `Session` or an `AsyncSession` on a connection of that engine; an
    address beside it is then for kconsume's own connections alone.
    """

    guarantee: ClassVar[str] = "exactly once: what the handler writes and the offset commit together"
    by_record: ClassVar[bool] = False
    keeps_letters: ClassVar[bool] = True
    severs: ClassVar[bool] = True

    def __init__(
        self,
        conninfo: str | None = None,
        *,
        engine: Engine | AsyncEngine | None = None,
        schema: str | None = None,
        pool: int = POOL,
        isolation: str = ISOLATION[0],
    ) -> None:
        if engine is not None:
            self._open(*_of_engine(engine, conninfo, schema, pool, isolation))
        elif conninfo is not None:
            self._open(Address(conninfo, schema, pool, isolation))
        else:
            raise ConfigurationError(
                "PostgresStore() names no database: write PostgresStore('postgresql://user@host/database'), or "
                "PostgresStore(engine=create_engine('postgresql+psycopg://…'))"
            )

    @classmethod
    def from_url(cls, url: str) -> PostgresStore:
        """`postgresql://user@host:port/db?schema=…&pool=…&isolation=…`"""
        store = cls.__new__(cls)
        store._open(address_of(url))
        return store

    def _open(self, address: Address, sessions: Sessions | None = None) -> None:
        self.address = address.shown
        self.parallel: int | None = address.pool if sessions is None else sessions.parallel
        self.pipelines = sessions is None
        self.connection_types: tuple[type, ...] = (psycopg.Connection, psycopg.AsyncConnection)
        self.async_connection_types: tuple[type, ...] = (psycopg.AsyncConnection,)
        if sessions is not None:
            self.connection_types, self.async_connection_types = sessions.types, sessions.async_types
        self._sessions = sessions
        self._at = address
        self._sql = Statements(address.prefix)
        self._terms: Terms | None = None
        self._lock = threading.Lock()
        self._loops: list[LoopSlots] = []
        self._floors = Floors()
        # A claim never waits for handlers, nor they for it.
        self._desk = Slots(address, 2, self._prepare)
        self._slots = Slots(address, address.pool, self._prepare)

    # For the engine

    def load(self, group: str, partitions: Iterable[Partition]) -> dict[Partition, Position]:
        wanted = list(partitions)
        if not wanted:
            return {}
        with self._ours() as connection:
            return _positions(connection.execute(self._sql.load, _keys(group, wanted)))

    def save(self, group: str, positions: Positions) -> None:
        if not positions:
            return
        with self._writing() as connection:
            keys = _keys(group, positions)
            connection.execute(self._sql.lock_rows, keys)
            values = {
                **keys,
                "offsets": [p.next_offset for p in positions.values()],
                "epochs": [p.epoch for p in positions.values()],
                "topic_ids": [p.topic_id for p in positions.values()],
                "leader_epochs": [p.leader_epoch for p in positions.values()],
                "previous": [p.previous for p in positions.values()],
            }
            saved = {Partition(*row) for row in connection.execute(self._sql.save, values)}
            for partition, position in positions.items():
                if partition not in saved:
                    stored = _positions(connection.execute(self._sql.load, _keys(group, [partition])))
                    raise fenced(group, partition, position.epoch, stored.get(partition), position.next_offset)

    def claim(
        self,
        group: str,
        partitions: Sequence[Partition],
        owner: str,
        start: Start,
        terms: ClaimTerms | None = None,
    ) -> dict[Partition, Position | Refused]:
        def claim(wanted: Sequence[Partition], pinned: Positions) -> Answers | list[Partition]:
            def raised(connection: Plain) -> Answers | list[Partition]:
                rows = _locked(connection, self._sql, group, wanted)
                if new := {p: position for p, position in pinned.items() if p not in rows}:
                    connection.execute(self._sql.about_to_make, _keys(group, new))
                    connection.execute(self._sql.pin, _pins(group, new))
                    rows = _locked(connection, self._sql, group, wanted)  # another may have made some of them just now
                accepted = [p for p in wanted if claiming.accepts(rows.get(p), p, owner, terms)]
                if missing := [p for p in accepted if p not in rows]:
                    return missing
                late = {p: claiming.refused(group, p, terms, rows.get(p)) for p in wanted if p not in accepted}
                return {**self._raised(connection, group, accepted, owner, terms), **late}

            return self._past_row_locks(raised)

        if not partitions:
            return {}
        answers = claiming.claim_pinned(partitions, start, self.load(group, partitions), claim, terms)
        # What is returned is final: whoever moved an offset meanwhile held its row, and the update waited for that.
        self._end_earlier_owners(group, {p: each.epoch for p, each in answers.items() if isinstance(each, Position)})
        return answers

    def reclaim(self, group: str, epochs: Epochs, owner: str) -> dict[Partition, Position]:
        def raised(connection: Plain) -> dict[Partition, Position]:
            stored = _locked(connection, self._sql, group, sorted(epochs))
            for partition, epoch in epochs.items():
                row = stored.get(partition)
                if row is None or row.epoch != epoch:
                    raise fenced(group, partition, epoch, row)
            return self._raised(connection, group, epochs, owner, None)

        claimed = self._past_row_locks(raised)
        self._end_earlier_owners(group, {p: position.epoch for p, position in claimed.items()})
        return claimed

    # For handlers

    @contextmanager
    def transaction(self, group: str, partition: Partition, epoch: int) -> Iterator[Tx]:
        if self._sessions is not None:
            self._desk_is_ready()
            with self._sessions.transaction(self._known(), group, partition, epoch) as lent:
                yield lent
            return
        with self._slots.borrow() as connection:
            with handlers.transaction(self._known(), connection, group, partition, epoch, pipelined=False) as tx:
                yield tx

    @contextmanager
    def pipelined(self, group: str, partition: Partition, epoch: int) -> Iterator[PostgresTx]:
        """As `transaction`, with statements sent and not waited for: how they went shows at the end. Not where the idle
        limit is what ends a frozen owner: a server does not take a connection in a pipeline for idle."""
        with self._slots.borrow() as connection:
            terms = self._known()
            with handlers.transaction(terms, connection, group, partition, epoch, pipelined=terms.may_end) as tx:
                yield tx

    @asynccontextmanager
    async def async_transaction(self, group: str, partition: Partition, epoch: int) -> AsyncIterator[AsyncTx]:
        if self._terms is None:
            await asyncio.to_thread(self._desk_is_ready)
        if self._sessions is not None:
            async with self._sessions.async_transaction(self._known(), group, partition, epoch) as lent:
                yield lent
            return
        async with self._loop_slots().borrow() as connection:
            async with handlers.async_transaction(self._known(), connection, group, partition, epoch) as tx:
                yield tx

    @contextmanager
    def rehearsal(self) -> Iterator[Rehearsal | SessionRehearsal]:
        """A transaction as a handler gets it, of which nothing stays: for `kconsume try`."""
        if self._sessions is not None:
            with self._sessions.rehearsal() as rehearsal:
                yield rehearsal
            return
        with self._slots.borrow() as below:
            below.execute(BEGIN)
            connection = LentConnection(below.pgconn)
            try:
                yield Rehearsal(connection)
            finally:
                connection.end()
                below.execute("rollback")

    @asynccontextmanager
    async def async_rehearsal(self) -> AsyncIterator[Rehearsal | SessionRehearsal]:
        """The same for an `async def`."""
        if self._sessions is not None:
            async with self._sessions.async_rehearsal() as rehearsal:
                yield rehearsal
            return
        async with self._loop_slots().borrow() as below:
            await below.execute(BEGIN)
            connection = LentAsyncConnection(below.pgconn)
            try:
                yield Rehearsal(connection)
            finally:
                connection.end()
                await below.execute("rollback")

    def note(self, group: str, partition: Partition, epoch: int, text: str) -> None:
        key = {"group": group, "topic": partition.topic, "partition": partition.number}
        with self._ours() as connection:
            connection.execute(self._sql.note, {**key, "epoch": epoch, "text": text})

    # For the relay

    def posted(
        self, group: str, epochs: Epochs, most: int, targets: Mapping[Partition, Targets] = NO_TARGETS
    ) -> dict[Partition, list[Posted]]:
        asked = list(epochs)
        with self._ours() as connection, connection.cursor(binary=True) as cursor:
            floors = [self._floors.above(group, p, epoch) for p, epoch in epochs.items()]
            values = {**_keys(group, asked), "epochs": list(epochs.values()), "floors": floors, "most": most}
            if targets:
                chosen = [targets.get(p, ALL_TARGETS) for p in asked]
                values["names"], values["others"] = [",".join(c.topics) for c in chosen], [c.others for c in chosen]
            rows = cursor.execute(self._sql.posted_to if targets else self._sql.posted, values).fetchall()
        lots = {asked[place - 1]: list(map(_posted, lot)) for place, lot in groupby(rows, itemgetter(0))}
        for partition in () if targets else asked:  # a floor rests on all rows of its partition
            self._floors.read(group, partition, [row.number for row in lots.get(partition, ())])
        return lots

    def delivered(self, group: str, numbers: Mapping[Partition, Sequence[int]]) -> None:
        with self._ours() as connection, connection.pipeline():
            for partition, each in numbers.items():
                # As text: psycopg takes longer to make an array of numbers than PostgreSQL to delete their rows.
                values = {"group": group, "numbers": f"{{{','.join(map(str, each))}}}"}
                key = {"topic": partition.topic, "partition": partition.number}
                connection.execute(self._sql.delivered, {**key, **values})
        for partition, each in numbers.items():
            self._floors.deleted(group, partition, each)

    def strays(self, owner: str, most: int, targets: Targets | None = None) -> list[Posted]:
        with self._ours() as connection:
            if connection.execute(self._sql.lease, {"owner": owner}).rowcount != 1:
                return []
            names, others = targets or ALL_TARGETS
            values = {"most": most, "names": list(names), "others": others}
            return list(map(_posted, connection.execute(self._sql.strays, values)))

    def posting(self, outgoing: Outgoing) -> tuple[str, dict[str, Any]]:
        self._desk_is_ready()
        return self._sql.post, postgres_rows("", NOBODYS, [outgoing])

    def forget_origins(self) -> bool:
        with self._ours() as connection:
            return connection.execute(self._sql.forget).rowcount >= FORGOTTEN_AT_ONCE

    # For people and tools

    def reset(self, group: str, offsets: Mapping[Partition, int]) -> None:
        if offsets:
            with self._writing() as connection:
                connection.execute(self._sql.about_to_make, _keys(group, offsets))
                connection.execute(self._sql.reset, {**_keys(group, offsets), "offsets": list(offsets.values())})

    def delete(self, group: str, partitions: Iterable[Partition] | None = None) -> None:
        with self._writing() as connection:
            connection.execute(self._sql.retiring, {})
            if partitions is None:
                connection.execute(self._sql.delete_group, {"group": group})
            else:
                connection.execute(self._sql.delete, _keys(group, list(partitions)))

    def identity(self) -> str:
        with self._ours() as connection:
            (name,) = connection.execute(self._sql.identity, {}).fetchone() or ("",)
        return str(name)

    def deleted(self, group: str, partitions: Iterable[Partition]) -> dict[Partition, int]:
        with self._ours() as connection:
            rows = connection.execute(self._sql.deleted, _keys(group, list(partitions)))
            return {Partition(topic, number): epoch for topic, number, epoch in rows}

    def groups(self) -> list[str]:
        with self._ours() as connection:
            return [group for (group,) in connection.execute(self._sql.groups, {})]

    def close(self) -> None:
        self._desk.close()
        self._slots.close()
        with self._lock:
            loops, self._loops = self._loops, []
        for slots in loops:
            slots.close()

    # Claims

    def _past_row_locks(self, raised: Callable[[Plain], T]) -> T:
        """Raise epochs in a transaction, whoever has the rows locked."""
        with self._writing() as connection, row_holders_ended(self._at, connection):
            return raised(connection)

    def _raised(
        self, connection: Plain, group: str, partitions: Iterable[Partition], owner: str, terms: ClaimTerms | None
    ) -> dict[Partition, Position]:
        generation = None if terms is None else terms.generation
        values = {**_keys(group, partitions), "owner": owner, "generation": generation}
        return _positions(connection.execute(self._sql.raise_epochs, values))

    def _end_earlier_owners(self, group: str, epochs: Epochs) -> None:
        locks = [lock_of(self._sql.prefix, group, p) for p in epochs]
        values = {**_keys(group, epochs), "epochs": list(epochs.values()), "locks": locks}
        end_earlier_owners(self._ours, self._sql, values, by_snapshot=self._at.isolation != ISOLATION[0])

    # Connections

    @contextmanager
    def _ours(self) -> Iterator[Plain]:
        """A connection for statements of our own, each its own transaction."""
        with self._desk.borrow() as connection, self._in_our_words(connection):
            yield connection

    @contextmanager
    def _in_our_words(self, connection: Plain) -> Iterator[None]:
        with watch.over(connection.pgconn, self.address, ours=True):
            try:
                yield
            except psycopg.Error as error:
                fault = store_error(error, self.address)
                # Nothing of a handler's was in it: it is simply tried again.
                raise StoreUnavailable(str(fault)) if isinstance(fault, Conflict) else fault from error

    @contextmanager
    def _writing(self) -> Iterator[Plain]:
        with self._ours() as connection:
            connection.execute(BEGIN_OURS)
            try:
                yield connection
                connection.execute("commit")
            finally:
                if not connection.broken and connection.pgconn.transaction_status:
                    connection.execute("rollback")

    def _prepare(self, connection: Plain) -> None:
        """Of the first connection: the tables, and what our role may do."""
        if self._terms is not None:
            return
        with self._lock:
            if self._terms is None:
                with self._in_our_words(connection):
                    ready(connection, self._sql, self._at)
                    self._sql = found(connection, self._sql)
                    (may,) = connection.execute(MAY_END_OTHERS).fetchone() or (False,)
                self._terms = Terms.of(self.address, self._sql, self._at.isolation, may)

    def _desk_is_ready(self) -> None:
        if self._terms is None:
            with self._ours():
                pass

    def _known(self) -> Terms:
        assert self._terms is not None
        return self._terms

    def _loop_slots(self) -> LoopSlots:
        loop = asyncio.get_running_loop()
        with self._lock:
            for slots in self._loops:
                if slots.loop is loop:
                    return slots
            self._loops = [slots for slots in self._loops if not slots.loop.is_closed()]
            self._loops.append(LoopSlots(self._at, self._at.pool))
            return self._loops[-1]


class Rehearsal(NamedTuple):
    """A transaction that is only tried out."""

    connection: LentConnection | LentAsyncConnection


def _of_engine(
    engine: Engine | AsyncEngine, conninfo: str | None, schema: str | None, pool: int, isolation: str
) -> tuple[Address, Sessions]:
    try:
        from kconsume.backends import postgres_engine, postgres_sqlalchemy
    except ImportError as error:
        raise MissingExtra(
            f"PostgresStore(engine=…) needs SQLAlchemy, which is not installed ({error}): pip install "
            f"'kconsume[sqlalchemy]'"
        ) from error
    address = postgres_engine.address_of(engine, conninfo, schema, pool, isolation)
    return address, postgres_sqlalchemy.Sessions(engine, address)


def _keys(group: str, partitions: Iterable[Partition]) -> dict[str, Any]:
    chosen = list(partitions)
    return {"group": group, "topics": [p.topic for p in chosen], "partitions": [p.number for p in chosen]}


def _pins(group: str, positions: Positions) -> dict[str, Any]:
    return {
        **_keys(group, positions),
        "offsets": [p.next_offset for p in positions.values()],
        "topic_ids": [p.topic_id for p in positions.values()],
        "leader_epochs": [p.leader_epoch for p in positions.values()],
    }


def _locked(connection: Plain, sql: Statements, group: str, wanted: Sequence[Partition]) -> dict[Partition, Position]:
    return _positions(connection.execute(sql.lock_rows, _keys(group, wanted)))


def _positions(rows: Iterable[tuple[Any, ...]]) -> dict[Partition, Position]:
    return {Partition(topic, number): _position(*row) for topic, number, *row in rows}


def _position(offset: int, epoch: int, *rest: Any) -> Position:
    *others, generation, reset_epoch = rest
    return replace(Position(offset, epoch, *others), generation=generation, reset_epoch=reset_epoch)


def _posted(row: tuple[Any, ...]) -> Posted:
    _, number, target, key, value, headers, moment = row
    return Posted(number, Outgoing(value, key, headers_of(headers), target, moment))

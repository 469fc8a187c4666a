"""`postgresql://`: offsets in the user's own PostgreSQL, in the handler's own transaction, fenced by epochs.

This module handles the rows and their owners (claim, save, reset), and the outbox rows of the relay. `transaction` is
the handler's transaction, `takeover` ends the backends that block a claim, and `database` holds the connections.

A claim raises the epochs and commits them. From then on no transaction under an older epoch can move the offset. Then
the claim finds the backends that still have such a transaction open, by their advisory locks. The claim waits a moment
for these backends, and then ends them: a frozen owner must not keep rows locked that the next owner needs. A
transaction that begins after the claim sees the new epoch; the claim sees the lock of a transaction that began before.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import psycopg

from kconsume._kafka.outgoing import Outgoing
from kconsume.backends import claim as claiming
from kconsume.backends.base import ClaimTerms, Position, Positions, Refused, Start, Tx
from kconsume.backends.capabilities import AsyncTx, Capabilities
from kconsume.backends.claim import ClaimResults, fenced
from kconsume.backends.outbox.tables import (
    ALL_TARGETS,
    FORGOTTEN_AT_ONCE,
    NO_TARGETS,
    UNOWNED,
    Posted,
    Targets,
    postgres_rows,
)
from kconsume.backends.postgres import transaction as handler_transactions
from kconsume.backends.postgres.address import ISOLATION, POOL, Address, address_of
from kconsume.backends.postgres.database import PostgresDatabase
from kconsume.backends.postgres.dry_run import PostgresDryRun, async_dry_run, dry_run
from kconsume.backends.postgres.pool import PooledConnection
from kconsume.backends.postgres.rows import (
    partition_arrays,
    partition_key,
    position_arrays,
    positions_of,
    posted_by_partition,
    posted_of,
    target_arrays,
)
from kconsume.backends.postgres.statements import Statements, lock_number
from kconsume.backends.postgres.takeover import end_earlier_owners, row_blockers_ended
from kconsume.backends.postgres.transaction import PostgresTx
from kconsume.errors import ConfigurationError, MissingExtra
from kconsume.records import Partition

if TYPE_CHECKING:
    from sqlalchemy import Engine
    from sqlalchemy.ext.asyncio import AsyncEngine

    from kconsume.backends.postgres.sqlalchemy.transactions import SqlAlchemyDryRun, SqlAlchemyTransactions

T = TypeVar("T")

Epochs = Mapping[Partition, int]


class PostgresStore:
    """Offsets in a PostgreSQL: `PostgresStore("postgresql://user@host/shop")`. Connects at the first use."""

    guarantee: ClassVar[str] = "exactly once: what the handler writes and the offset commit together"
    by_record: ClassVar[bool] = False

    def __init__(
        self,
        conninfo: str | None = None,
        *,
        engine: Engine | AsyncEngine | None = None,
        schema: str | None = None,
        pool: int = POOL,
        isolation: str = ISOLATION[0],
    ) -> None:
        """
        Args:
            conninfo: the address, or a connection string of libpq. With `engine`, it is only for kconsume's own
                connections.
            engine: an engine of SQLAlchemy. Handlers get a `Session` or an `AsyncSession` on a connection of this
                engine.
            schema: where kconsume's tables are; None for the first schema of `search_path`.
            pool: how many handlers' transactions may be open at once.
            isolation: the isolation level of handlers' transactions.
        """
        if engine is not None:
            self._set_up(*_of_engine(engine, conninfo, schema, pool, isolation))
        elif conninfo is not None:
            self._set_up(Address(conninfo, schema, pool, isolation))
        else:
            raise ConfigurationError(
                "PostgresStore() names no database: write PostgresStore('postgresql://user@host/database'), or "
                "PostgresStore(engine=create_engine('postgresql+psycopg://…'))"
            )

    @classmethod
    def from_url(cls, url: str) -> PostgresStore:
        """Return a store for `postgresql://user@host:port/db?schema=…&pool=…&isolation=…`."""
        return cls.from_address(address_of(url))

    @classmethod
    def from_address(cls, address: Address) -> PostgresStore:
        """Return a store with the settings of another store, for instance of a store in another process.

        Args:
            address: `database.address` of the other store.
        """
        store = cls.__new__(cls)
        store._set_up(address)
        return store

    def _set_up(self, address: Address, sessions: SqlAlchemyTransactions | None = None) -> None:
        self.address = address.shown
        self.parallel: int | None = address.pool if sessions is None else sessions.parallel
        self.connection_types: tuple[type, ...] = (psycopg.Connection, psycopg.AsyncConnection)
        self.async_connection_types: tuple[type, ...] = (psycopg.AsyncConnection,)
        if sessions is not None:
            self.connection_types, self.async_connection_types = sessions.types, sessions.async_types
        self.database = PostgresDatabase(address)
        """Used by the store, and by the command line, Spark, dead letters and the outbox."""
        self._sessions = sessions

    @property
    def _statements(self) -> Statements:
        return self.database.statements

    @property
    def capabilities(self) -> Capabilities:
        # SQLAlchemy sends each statement separately: no pipeline, and no COMMIT in the round trip of the advance.
        plain = self._sessions is None
        return Capabilities(
            self,
            async_transactional=self,
            pipelining=self if plain else None,
            outbox=self,
            noting=self,
            named=self,
            dry_run=self,
            async_dry_run=self,
            keeps_letters=True,
            severs=True,
            finishes=plain,
        )

    # For the consumer

    def load(self, group: str, partitions: Iterable[Partition]) -> dict[Partition, Position]:
        wanted = list(partitions)
        if not wanted:
            return {}
        with self.database.connection() as connection:
            return positions_of(connection.execute(self._statements.load, partition_arrays(group, wanted)))

    def save(self, group: str, positions: Positions) -> None:
        if not positions:
            return
        with self.database.transaction() as connection:
            self._locked_rows(connection, group, positions)
            values = {
                **position_arrays(group, positions),
                "epochs": [p.epoch for p in positions.values()],
                "previous": [p.previous for p in positions.values()],
            }
            saved = {Partition(*row) for row in connection.execute(self._statements.save, values)}
            for partition, position in positions.items():
                if partition not in saved:
                    arrays = partition_arrays(group, [partition])
                    stored = positions_of(connection.execute(self._statements.load, arrays))
                    raise fenced(group, partition, position.epoch, stored.get(partition), position.next_offset)

    def claim(
        self,
        group: str,
        partitions: Sequence[Partition],
        owner: str,
        start: Start,
        terms: ClaimTerms | None = None,
    ) -> dict[Partition, Position | Refused]:
        def claim(wanted: Sequence[Partition], pinned: Positions) -> ClaimResults | list[Partition]:
            def raise_epochs(connection: PooledConnection) -> ClaimResults | list[Partition]:
                rows = self._locked_rows(connection, group, wanted)
                if new := {p: position for p, position in pinned.items() if p not in rows}:
                    connection.execute(self._statements.mark_created, partition_arrays(group, new))
                    connection.execute(self._statements.pin, position_arrays(group, new))
                    rows = self._locked_rows(connection, group, wanted)  # another claim may have created some of them
                accepted = [p for p in wanted if claiming.accepts(rows.get(p), p, owner, terms)]
                if missing := [p for p in accepted if p not in rows]:
                    return missing
                late = {p: claiming.refused(group, p, terms, rows.get(p)) for p in wanted if p not in accepted}
                return {**self._raise_epochs(connection, group, accepted, owner, terms), **late}

            return self._in_claim(raise_epochs)

        if not partitions:
            return {}
        answers = claiming.claim_pinned(partitions, start, self.load(group, partitions), claim, terms)
        # The positions are final: a transaction that moves an offset locks its row, and the claim waited for this lock.
        self._end_earlier_owners(group, {p: each.epoch for p, each in answers.items() if isinstance(each, Position)})
        return answers

    def reclaim(self, group: str, epochs: Epochs, owner: str) -> dict[Partition, Position]:
        def raise_epochs(connection: PooledConnection) -> dict[Partition, Position]:
            stored = self._locked_rows(connection, group, sorted(epochs))
            for partition, epoch in epochs.items():
                row = stored.get(partition)
                if row is None or row.epoch != epoch:
                    raise fenced(group, partition, epoch, row)
            return self._raise_epochs(connection, group, epochs, owner, None)

        claimed = self._in_claim(raise_epochs)
        self._end_earlier_owners(group, {p: position.epoch for p, position in claimed.items()})
        return claimed

    # For handlers

    @contextmanager
    def transaction(self, group: str, partition: Partition, epoch: int) -> Iterator[Tx]:
        if self._sessions is not None:
            self.database.prepare()
            with self._sessions.transaction(self.database.tx_settings, group, partition, epoch) as session_tx:
                yield session_tx
            return
        with self._transaction(group, partition, epoch, pipelined=False) as tx:
            yield tx

    @contextmanager
    def pipelined(self, group: str, partition: Partition, epoch: int) -> Iterator[PostgresTx]:
        """As `transaction`, but statements are sent without waiting for each, and their errors are raised at the end.

        No pipeline is used if only the idle limit ends a frozen owner, because a server does not count a connection in
        a pipeline as idle.
        """
        with self._transaction(group, partition, epoch, pipelined=True) as tx:
            yield tx

    @contextmanager
    def _transaction(self, group: str, partition: Partition, epoch: int, *, pipelined: bool) -> Iterator[PostgresTx]:
        with self.database.pool.borrow() as pooled:
            settings = self.database.tx_settings
            pipelined = pipelined and settings.may_end
            with handler_transactions.transaction(settings, pooled, group, partition, epoch, pipelined=pipelined) as tx:
                yield tx

    @asynccontextmanager
    async def async_transaction(self, group: str, partition: Partition, epoch: int) -> AsyncIterator[AsyncTx]:
        if not self.database.is_prepared:
            await asyncio.to_thread(self.database.prepare)
        settings = self.database.tx_settings
        if self._sessions is not None:
            async with self._sessions.async_transaction(settings, group, partition, epoch) as session_tx:
                yield session_tx
            return
        async with self.database.async_pool().borrow() as pooled:
            async with handler_transactions.async_transaction(settings, pooled, group, partition, epoch) as tx:
                yield tx

    @contextmanager
    def dry_run(self) -> Iterator[PostgresDryRun | SqlAlchemyDryRun]:
        """A transaction as a handler gets it, always rolled back: for `kconsume try`."""
        if self._sessions is not None:
            with self._sessions.dry_run() as session_tx:
                yield session_tx
            return
        with self.database.pool.borrow() as pooled, dry_run(pooled) as tx:
            yield tx

    @asynccontextmanager
    async def async_dry_run(self) -> AsyncIterator[PostgresDryRun | SqlAlchemyDryRun]:
        """As `dry_run`, for an `async def`."""
        if self._sessions is not None:
            async with self._sessions.async_dry_run() as session_tx:
                yield session_tx
            return
        async with self.database.async_pool().borrow() as pooled, async_dry_run(pooled) as tx:
            yield tx

    def note(self, group: str, partition: Partition, epoch: int, text: str) -> None:
        with self.database.connection() as connection:
            values = {**partition_key(group, partition), "epoch": epoch, "text": text}
            connection.execute(self._statements.note, values)

    # For the outbox relay

    def posted(
        self, group: str, epochs: Epochs, most: int, targets: Mapping[Partition, Targets] = NO_TARGETS
    ) -> dict[Partition, list[Posted]]:
        partitions, chosen = list(epochs), [targets.get(p, ALL_TARGETS) for p in epochs]
        values = {
            **partition_arrays(group, partitions),
            **target_arrays(chosen),
            "epochs": list(epochs.values()),
            "most": most,
        }
        with self.database.connection() as connection, connection.cursor(binary=True) as cursor:
            return posted_by_partition(partitions, cursor.execute(self._statements.posted, values).fetchall())

    def delivered(self, group: str, numbers: Mapping[Partition, Sequence[int]]) -> None:
        with self.database.connection() as connection, connection.pipeline():
            for partition, each in numbers.items():
                # The numbers are sent as text, because psycopg needs more time to make an array than PostgreSQL needs
                # to delete the rows.
                array = f"{{{','.join(map(str, each))}}}"
                connection.execute(self._statements.delivered, {**partition_key(group, partition), "numbers": array})

    def unowned_rows(self, owner: str, most: int, targets: Targets | None = None) -> list[Posted]:
        with self.database.connection() as connection:
            if connection.execute(self._statements.lease, {"owner": owner}).rowcount != 1:
                return []
            names, others, _ = targets or ALL_TARGETS  # users' transactions do not commit in the order of the numbers
            values = {"most": most, "names": list(names), "others": others}
            return list(map(posted_of, connection.execute(self._statements.unowned_rows, values)))

    def insert_statement(self, outgoing: Outgoing) -> tuple[str, dict[str, Any]]:
        self.database.prepare()
        return self._statements.post, postgres_rows("", UNOWNED, [outgoing])

    def forget_origins(self) -> bool:
        with self.database.connection() as connection:
            return connection.execute(self._statements.forget_origins).rowcount >= FORGOTTEN_AT_ONCE

    # For users and tools

    def reset(self, group: str, offsets: Mapping[Partition, int]) -> None:
        if offsets:
            arrays = partition_arrays(group, offsets)
            with self.database.transaction() as connection:
                connection.execute(self._statements.mark_created, arrays)
                connection.execute(self._statements.reset, {**arrays, "offsets": list(offsets.values())})

    def delete(self, group: str, partitions: Iterable[Partition] | None = None) -> None:
        with self.database.transaction() as connection:
            connection.execute(self._statements.lock_last_epoch, {})
            if partitions is None:
                connection.execute(self._statements.delete_group, {"group": group})
            else:
                connection.execute(self._statements.delete, partition_arrays(group, partitions))

    def identity(self) -> str:
        with self.database.connection() as connection:
            (name,) = connection.execute(self._statements.identity, {}).fetchone() or ("",)
        return str(name)

    def deleted(self, group: str, partitions: Iterable[Partition]) -> dict[Partition, int]:
        with self.database.connection() as connection:
            rows = connection.execute(self._statements.deleted, partition_arrays(group, partitions))
            return {Partition(topic, number): epoch for topic, number, epoch in rows}

    def groups(self) -> list[str]:
        with self.database.connection() as connection:
            return [group for (group,) in connection.execute(self._statements.groups, {})]

    def close(self) -> None:
        self.database.close()

    # Claims

    def _in_claim(self, raise_epochs: Callable[[PooledConnection], T]) -> T:
        """Run a transaction that locks offset rows. If the transaction waits too long for a row lock, the backend that
        holds the lock is ended."""
        with self.database.transaction() as connection, row_blockers_ended(self.database.address, connection):
            return raise_epochs(connection)

    def _locked_rows(
        self, connection: PooledConnection, group: str, partitions: Iterable[Partition]
    ) -> dict[Partition, Position]:
        return positions_of(connection.execute(self._statements.lock_rows, partition_arrays(group, partitions)))

    def _raise_epochs(
        self,
        connection: PooledConnection,
        group: str,
        partitions: Iterable[Partition],
        owner: str,
        terms: ClaimTerms | None,
    ) -> dict[Partition, Position]:
        generation = None if terms is None else terms.generation
        values = {**partition_arrays(group, partitions), "owner": owner, "generation": generation}
        return positions_of(connection.execute(self._statements.raise_epochs, values))

    def _end_earlier_owners(self, group: str, epochs: Epochs) -> None:
        locks = [lock_number(self._statements.prefix, group, p) for p in epochs]
        values = {**partition_arrays(group, epochs), "epochs": list(epochs.values()), "locks": locks}
        by_snapshot = self.database.address.isolation != ISOLATION[0]
        end_earlier_owners(self.database.connection, self._statements, values, by_snapshot=by_snapshot)


def _of_engine(
    engine: Engine | AsyncEngine, conninfo: str | None, schema: str | None, pool: int, isolation: str
) -> tuple[Address, SqlAlchemyTransactions]:
    try:
        from kconsume.backends.postgres.sqlalchemy import address as postgres_engine
        from kconsume.backends.postgres.sqlalchemy import transactions as postgres_sqlalchemy
    except ImportError as error:
        raise MissingExtra(
            f"PostgresStore(engine=…) needs SQLAlchemy, which is not installed ({error}): pip install "
            f"'kconsume[sqlalchemy]'"
        ) from error
    address = postgres_engine.address_of(engine, conninfo, schema, pool, isolation)
    return address, postgres_sqlalchemy.SqlAlchemyTransactions(engine, address)

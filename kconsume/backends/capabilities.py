"""The capabilities of a store beyond its protocol (see `base`), declared as one value.

A store that can do more than its protocol requires has a property `capabilities` that returns a `Capabilities`. All
other code calls `capabilities_of`, and does not test stores or transactions for protocols or attributes. Most
capabilities have a protocol below, which says what the store must do. The conformance suite checks that a store does
what it declares.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from kconsume._kafka.outgoing import Outgoing
from kconsume.backends.base import FencedStore, OffsetStore, TransactionalStore, Tx
from kconsume.backends.outbox.tables import NO_TARGETS, Posted, Targets
from kconsume.errors import StoreError
from kconsume.failures.letter_headers import Letter
from kconsume.records import Partition

if TYPE_CHECKING:
    from kconsume.backends.redis.rows import FailedRecord
    from kconsume.backends.redis.store import Decision

ALWAYS = 2**63 - 1
"""The result of `NamedStore.deleted` for a partition that had no row when it was deleted. No epoch is higher, so every
epoch of the partition counts as deleted."""


@dataclass(frozen=True, slots=True)
class Capabilities:
    """The capabilities of one store.

    `fenced` and `transactional` are derived from the methods of the store. The store declares the rest:
    `Capabilities(self, named=self, severs=True)`. A field such as `named` contains the store itself, typed by the
    protocol of that capability, or None if the store does not have the capability.
    """

    store: OffsetStore
    fenced: FencedStore | None = field(init=False)
    """The store, if it is a `FencedStore`."""
    transactional: TransactionalStore | None = field(init=False)
    """The store, if it is a `TransactionalStore`."""

    _: KW_ONLY
    async_transactional: AsyncTransactionalStore | None = None
    """The store, if its transactions can be awaited on an event loop."""
    pipelining: PipeliningStore | None = None
    """The store, if it can send a handler's statements without waiting for the result of each statement."""
    outbox: OutboxStore | None = None
    """The store, if it keeps the records that handlers send until the broker has confirmed these records. The store's
    transactions are then `OutboxTx`."""
    noting: NotingStore | None = None
    """The store, if it can keep a text beside a position, such as the number of attempts."""
    named: NamedStore | None = None
    """The store, if it has an id and records which rows were deleted."""
    dry_run: DryRunStore | None = None
    """The store, if it has transactions that are always rolled back, for `kconsume try`."""
    async_dry_run: AsyncDryRunStore | None = None
    """The store, if it has transactions for `async def` handlers that are always rolled back."""

    deciding: DecidingStore | None = None
    """The store, if it may apply only a part of a record. The user then decides what to do with that record."""

    keeps_letters: bool = False
    """True if the store's transactions can write dead letters to a table (`LetterTx`)."""
    severs: bool = False
    """True if a transaction can be taken away from a handler that hangs on a thread (`SeverableTx`)."""
    finishes: bool = False
    """True if a transaction can move the offset in the same round trip as the commit (`FinishingTx`)."""
    durable: bool = True
    """False if the rows are lost when the process ends."""
    location: str | None = None
    """Where the rows are, if the address does not say it: the same relative path names another file on another host."""

    def __post_init__(self) -> None:
        store = self.store
        object.__setattr__(self, "fenced", store if isinstance(store, FencedStore) else None)
        object.__setattr__(self, "transactional", store if isinstance(store, TransactionalStore) else None)

    @property
    def connection_types(self) -> tuple[type, ...]:
        """The types of handler parameters that get the transaction; empty if the store has no transactions."""
        return () if self.transactional is None else self.transactional.connection_types

    @property
    def async_connection_types(self) -> tuple[type, ...] | None:
        """The `connection_types` that only `async def` handlers may use. None if all handlers may use all types."""
        return None if self.async_transactional is None else self.async_transactional.async_connection_types


@runtime_checkable
class DeclaringStore(OffsetStore, Protocol):
    """A store that declares its capabilities beyond its protocol."""

    @property
    def capabilities(self) -> Capabilities: ...


def capabilities_of(store: OffsetStore) -> Capabilities:
    """Return the capabilities of a store. For a store that declares none, the result contains only its protocol."""
    return store.capabilities if isinstance(store, DeclaringStore) else Capabilities(store)


# Parts of a store


@runtime_checkable
class AsyncTransactionalStore(TransactionalStore, Protocol):
    """A store with transactions that are awaited. With any other store, an `async def` handler gets a blocking
    transaction, which another thread runs."""

    @property
    def async_connection_types(self) -> tuple[type, ...]:
        """The `connection_types` that only `async def` handlers may use. All other types are for `def` handlers."""
        ...

    def async_transaction(self, group: str, partition: Partition, epoch: int) -> AbstractAsyncContextManager[AsyncTx]:
        """As `TransactionalStore.transaction`, on the running event loop."""
        ...


@runtime_checkable
class DecidingStore(FencedStore, Protocol):
    """A store that cannot undo a command. If the store applied only a part of a record, the partition is not consumed
    until the user has decided to retry or to skip the record."""

    def failures(self, group: str) -> dict[Partition, FailedRecord]:
        """Return the failed record of each partition that waits for a user's decision."""
        ...

    def decide(self, group: str, partition: Partition, what: Decision, *, offset: int | None = None) -> None:
        """Carry out the user's decision about a failed record.

        Args:
            what: `"retry"` or `"skip"`.
            offset: the offset that the failed record must have; None if any failed record is meant.
        """
        ...


@runtime_checkable
class PipeliningStore(TransactionalStore, Protocol):
    """A store that can send a handler's statements without waiting for the result of each statement."""

    def pipelined(self, group: str, partition: Partition, epoch: int) -> AbstractContextManager[Tx]:
        """As `transaction`, but a failed statement or a stale epoch may be reported only at the end. The caller then
        runs the records again in a `transaction`, to learn which record failed."""
        ...


@runtime_checkable
class OutboxStore(TransactionalStore, Protocol):
    """A store that keeps the records that handlers send until the broker has confirmed them: the outbox.

    Transactions of this store are `OutboxTx`. A row belongs to the partition that the handler was consuming. The row
    numbers of a partition grow in the order of its commits, because a partition has one transaction at a time.
    """

    def posted(
        self,
        group: str,
        epochs: Mapping[Partition, int],
        most: int,
        targets: Mapping[Partition, Targets] = NO_TARGETS,
    ) -> dict[Partition, list[Posted]]:
        """Return the first outbox rows of each partition, ordered by number.

        Args:
            epochs: the epoch of the caller for each partition. A partition that has another epoch is left out.
            most: the highest number of rows for each partition.
            targets: for each partition in this mapping, return only these rows.
        """
        ...

    def delivered(self, group: str, numbers: Mapping[Partition, Sequence[int]]) -> None:
        """Delete these rows, which the broker has confirmed. A row that is already deleted is not an error."""
        ...

    def unowned_rows(self, owner: str, most: int, targets: Targets | None = None) -> list[Posted]:
        """Return the first rows that `Outbox.send` wrote. These rows belong to no partition. Returns no rows while
        another app has the lease to send them.

        Args:
            owner: the name of the caller, which takes or renews the lease.
            most: the highest number of rows.
            targets: return only rows to these topics; None for all rows.
        """
        ...

    def insert_statement(self, outgoing: Outgoing) -> tuple[str, Any]:
        """Return the SQL statement and the parameters that insert a record into the outbox, for a transaction of the
        user. Creates the tables if they do not exist."""
        ...

    def forget_origins(self) -> bool | None:
        """Delete expired origins of handled records, a limited number per call. Returns True if more may be left."""
        ...


@runtime_checkable
class NotingStore(FencedStore, Protocol):
    """A store that can keep a text beside a position. The next owner of the partition reads it in
    `Position.metadata`."""

    def note(self, group: str, partition: Partition, epoch: int, text: str) -> None:
        """Store the text. Does nothing if the partition has another epoch."""
        ...


@runtime_checkable
class NamedStore(OffsetStore, Protocol):
    """A store that has an id and records which rows were deleted. With these, kconsume detects a store that lost its
    rows, and another store at the same address."""

    def identity(self) -> str:
        """The id of the store: random, created at the first use, and stored beside the rows. So a restored backup has
        the same id."""
        ...

    def deleted(self, group: str, partitions: Iterable[Partition]) -> dict[Partition, int]:
        """For each partition whose row was deleted: the highest deleted epoch, or `ALWAYS` if there was no row. A row
        that was created again later has a higher epoch. A partition that was never deleted is left out."""
        ...


class DryRunTx(Protocol):
    """A transaction that is always rolled back."""

    @property
    def connection(self) -> object:
        """The connection that the handler gets."""
        ...


@runtime_checkable
class DryRunStore(TransactionalStore, Protocol):
    """A store with transactions that are always rolled back."""

    def dry_run(self) -> AbstractContextManager[DryRunTx]:
        """A transaction with the same connection that a handler gets, rolled back at the end."""
        ...


@runtime_checkable
class AsyncDryRunStore(AsyncTransactionalStore, Protocol):
    """A store with transactions for `async def` handlers that are always rolled back."""

    def async_dry_run(self) -> AbstractAsyncContextManager[DryRunTx]:
        """As `DryRunStore.dry_run`, for an `async def` handler."""
        ...


# Parts of a transaction


@runtime_checkable
class FinishingTx(Tx, Protocol):
    """A transaction that can move its offset in the same round trip as the commit."""

    def finish(self, old: int, new: int, leader_epoch: int | None = None) -> None:
        """As `Tx.advance`, if no other statement follows before the commit. `Fenced` may be raised only at the
        commit."""
        ...


@runtime_checkable
class SeverableTx(Tx, Protocol):
    """A transaction that can be taken away from a handler that hangs, for `timeout=` of handlers on threads."""

    def sever(self) -> None:
        """Roll back now and release every lock, even while the handler's thread uses the connection.

        Later calls of the handler on the connection fail, and kconsume does not use the connection again. Called
        instead of `advance`; the block of the transaction then ends with an error.
        """
        ...


@runtime_checkable
class LetterTx(Tx, Protocol):
    """A transaction that can write dead letters to a table, for `DeadLetter(table=...)`."""

    def keep(self, table: str, letters: Sequence[Letter]) -> None:
        """Write dead letters to the table; create the table if it does not exist. If the table has a row for the same
        group and record, that row is updated. Called before `advance`."""
        ...


@runtime_checkable
class OutboxTx(Tx, Protocol):
    """A transaction of an `OutboxStore`."""

    def post(self, outgoing: Sequence[Outgoing]) -> None:
        """Write encoded records to the outbox, in this order. The records are sent after the commit. Called before
        `advance`."""
        ...

    def record_origins(self, origins: Sequence[str]) -> set[str]:
        """Store that the group has handled the records with these origins (header `kconsume-origin`). Returns the
        origins that were not stored before."""
        ...


class AsyncTx(Protocol):
    """An open transaction on an event loop. The methods do the same as those of `Tx`."""

    @property
    def connection(self) -> object: ...

    async def advance(self, old: int, new: int, leader_epoch: int | None = None) -> None: ...

    def fault(self, error: BaseException) -> StoreError | None: ...


@runtime_checkable
class AsyncLetterTx(AsyncTx, Protocol):
    """As `LetterTx`, with methods that are awaited."""

    async def keep(self, table: str, letters: Sequence[Letter]) -> None: ...


@runtime_checkable
class AsyncOutboxTx(AsyncTx, Protocol):
    """As `OutboxTx`, with methods that are awaited."""

    async def post(self, outgoing: Sequence[Outgoing]) -> None: ...

    async def record_origins(self, origins: Sequence[str]) -> set[str]: ...

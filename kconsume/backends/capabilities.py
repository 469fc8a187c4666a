"""What a store offers beyond the three levels of `base`, declared as one value.

A store that offers more than its level has a property `capabilities` that returns a `Capabilities`. A store without
that property offers its level and nothing else. All other code asks `capabilities_of`: outside this module and the
conformance suite, no code tests a store or a transaction for a protocol or an attribute. The protocols below say what
each declared part must do. The conformance suite checks that a store does what it declares.
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
"""In `NamedStore.deleted`: there was no row when the partition was deleted, so the deletion holds at every epoch."""


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What one store offers.

    Only this class derives the level (`fenced`, `transactional`) from the methods of the store. The store declares the
    rest: `Capabilities(self, named=self, severs=True)`. The value of a part that consists of methods of the store is
    the store itself, typed by the protocol of that part, or None.
    """

    store: OffsetStore
    fenced: FencedStore | None = field(init=False)
    """The store, if it has the second level."""
    transactional: TransactionalStore | None = field(init=False)
    """The store, if it has the third level."""

    _: KW_ONLY
    async_transactional: AsyncTransactionalStore | None = None
    """The store has transactions that can be awaited on an event loop."""
    pipelining: PipeliningStore | None = None
    """The store can send the statements of a handler without waiting for each."""
    outbox: OutboxStore | None = None
    """The store keeps the records that handlers send until the broker has confirmed them; its transactions are
    `OutboxTx`."""
    noting: NotingStore | None = None
    """The store can keep a note beside a position, such as the number of attempts."""
    named: NamedStore | None = None
    """The store has an id of its own, and records which rows were deleted."""
    dry_run: DryRunStore | None = None
    """The store has transactions that are always rolled back, for `kconsume try`."""
    async_dry_run: AsyncDryRunStore | None = None
    """The store has awaited transactions that are always rolled back."""

    deciding: DecidingStore | None = None
    """The store can apply a record in part, and carries out what the user decides about the record."""

    keeps_letters: bool = False
    """The store's transactions can keep dead letters in a table: `LetterTx`."""
    severs: bool = False
    """The store's transactions can be taken away from a handler that hangs on a thread: `SeverableTx`."""
    finishes: bool = False
    """The store's transactions can move the offset in the round trip of the commit: `FinishingTx`."""
    durable: bool = True
    """False if the rows are forgotten when the process ends."""
    location: str | None = None
    """Where the rows are, if the address is not enough: a relative path is another file on another host."""

    def __post_init__(self) -> None:
        store = self.store
        object.__setattr__(self, "fenced", store if isinstance(store, FencedStore) else None)
        object.__setattr__(self, "transactional", store if isinstance(store, TransactionalStore) else None)

    @property
    def connection_types(self) -> tuple[type, ...]:
        """The annotations by which a handler asks for the transaction; none if the store has no transactions."""
        return () if self.transactional is None else self.transactional.connection_types

    @property
    def async_connection_types(self) -> tuple[type, ...] | None:
        """The `connection_types` that are for `async def` only. None if the store makes no difference."""
        return None if self.async_transactional is None else self.async_transactional.async_connection_types


@runtime_checkable
class DeclaringStore(OffsetStore, Protocol):
    """A store that declares what it offers beyond its level."""

    @property
    def capabilities(self) -> Capabilities: ...


def capabilities_of(store: OffsetStore) -> Capabilities:
    """The capabilities that the store declares; only its level for a store that declares nothing."""
    return store.capabilities if isinstance(store, DeclaringStore) else Capabilities(store)


# Parts of a store


@runtime_checkable
class AsyncTransactionalStore(TransactionalStore, Protocol):
    """Has transactions that are awaited. On other stores, an `async def` gets a blocking transaction, which another
    thread runs."""

    @property
    def async_connection_types(self) -> tuple[type, ...]:
        """The `connection_types` that are for `async def`; the other types are then for `def` only."""
        ...

    def async_transaction(self, group: str, partition: Partition, epoch: int) -> AbstractAsyncContextManager[AsyncTx]:
        """As `transaction`, on the running event loop."""
        ...


@runtime_checkable
class DecidingStore(FencedStore, Protocol):
    """A store that cannot undo a command. If it applied a record in part, the partition waits for the user to
    decide."""

    def failures(self, group: str) -> dict[Partition, FailedRecord]:
        """The failed record of each partition that waits for a decision."""
        ...

    def decide(self, group: str, partition: Partition, what: Decision, *, offset: int | None = None) -> None:
        """Carry out a decision.

        Args:
            what: the decision about the record.
            offset: the offset that the failed record must have; None for any.
        """
        ...


@runtime_checkable
class PipeliningStore(TransactionalStore, Protocol):
    """Can send the statements of a handler without waiting for each."""

    def pipelined(self, group: str, partition: Partition, epoch: int) -> AbstractContextManager[Tx]:
        """As `transaction`, but a failed statement or a stale epoch may be reported only at the end. The caller then
        runs the records again in a `transaction`, to learn which one failed."""
        ...


@runtime_checkable
class OutboxStore(TransactionalStore, Protocol):
    """Keeps the records that handlers send until the broker has confirmed them. Its transactions are `OutboxTx`.

    A row belongs to the partition of the record that the handler was handling. The row numbers of a partition grow in
    the order of its commits, because a partition has one transaction at a time.
    """

    def posted(
        self,
        group: str,
        epochs: Mapping[Partition, int],
        most: int,
        targets: Mapping[Partition, Targets] = NO_TARGETS,
    ) -> dict[Partition, list[Posted]]:
        """The first rows of each partition that is still under its given epoch, in order.

        Args:
            most: the highest number of rows for each partition.
            targets: for a partition named here, only these rows.
        """
        ...

    def delivered(self, group: str, numbers: Mapping[Partition, Sequence[int]]) -> None:
        """Delete these rows, which the broker has confirmed. A row that is already deleted is not an error."""
        ...

    def unowned_rows(self, owner: str, most: int, targets: Targets | None = None) -> list[Posted]:
        """The first rows that belong to no partition (`outbox.tables.UNOWNED`, of the empty group). Returns no row
        while another owner sends them.

        Args:
            owner: who asks; takes or renews the lease.
            most: the highest number of rows.
            targets: only these rows; None for all.
        """
        ...

    def insert_statement(self, outgoing: Outgoing) -> tuple[str, Any]:
        """The statement, with its parameters, that inserts a row without a partition in a transaction of the user's
        own. The tables exist when this returns."""
        ...

    def forget_origins(self) -> bool | None:
        """Delete expired origins, a bounded number of them. Returns True if there may be more."""
        ...


@runtime_checkable
class NotingStore(FencedStore, Protocol):
    """Can keep a note beside a position, for the next owner, who gets it as `Position.metadata`."""

    def note(self, group: str, partition: Partition, epoch: int, text: str) -> None:
        """Keep the note, unless the partition is under another epoch."""
        ...


@runtime_checkable
class NamedStore(OffsetStore, Protocol):
    """Has an id of its own and records which of its rows were deleted. So kconsume can detect a store that lost its
    rows, or another store at the same address."""

    def identity(self) -> str:
        """A random id that is kept beside the rows, and is copied, restored and replicated with them. The first call
        makes the id."""
        ...

    def deleted(self, group: str, partitions: Iterable[Partition]) -> dict[Partition, int]:
        """The epochs up to which `delete` deleted rows, for each partition for which that is known: the epoch of the
        deleted row, or `ALWAYS` if there was no row. The epochs of a row that was created again do not count as
        deleted."""
        ...


class DryRunTx(Protocol):
    """A transaction that is always rolled back."""

    @property
    def connection(self) -> object:
        """The connection that the handler gets."""
        ...


@runtime_checkable
class DryRunStore(TransactionalStore, Protocol):
    """Has transactions that change nothing, because they are rolled back."""

    def dry_run(self) -> AbstractContextManager[DryRunTx]:
        """A transaction as a handler gets it, rolled back at the end."""
        ...


@runtime_checkable
class AsyncDryRunStore(AsyncTransactionalStore, Protocol):
    """Has awaited transactions that change nothing, because they are rolled back."""

    def async_dry_run(self) -> AbstractAsyncContextManager[DryRunTx]:
        """As `DryRunStore.dry_run`, for an `async def`."""
        ...


# Parts of a transaction


@runtime_checkable
class FinishingTx(Tx, Protocol):
    """A transaction that can move its offset in the round trip of the commit."""

    def finish(self, old: int, new: int, leader_epoch: int | None = None) -> None:
        """As `advance`, if nothing follows in the transaction: a refusal may be raised only at the commit."""
        ...


@runtime_checkable
class SeverableTx(Tx, Protocol):
    """A transaction that can be taken away from a handler that hangs: `timeout=` on threads."""

    def sever(self) -> None:
        """Roll back now and release every lock, even while the handler's thread uses the connection. Later calls of the
        handler are refused. The connection is not used again. Called instead of `advance`; the block then ends with an
        error."""
        ...


@runtime_checkable
class LetterTx(Tx, Protocol):
    """A transaction that can store dead letters: `DeadLetter(table=...)`."""

    def keep(self, table: str, letters: Sequence[Letter]) -> None:
        """Write each letter once for its group and origin; make the table if it does not exist. Called before
        `advance`."""
        ...


@runtime_checkable
class OutboxTx(Tx, Protocol):
    """A transaction of an `OutboxStore`."""

    def post(self, outgoing: Sequence[Outgoing]) -> None:
        """Write encoded records, in this order, to be sent after the commit. Called before `advance`."""
        ...

    def record_origins(self, origins: Sequence[str]) -> set[str]:
        """Record that the group has handled these origins. Returns the origins that it had not handled before."""
        ...


class AsyncTx(Protocol):
    """An open transaction on an event loop. `Tx` documents the methods."""

    @property
    def connection(self) -> object: ...

    async def advance(self, old: int, new: int, leader_epoch: int | None = None) -> None: ...

    def fault(self, error: BaseException) -> StoreError | None: ...


@runtime_checkable
class AsyncLetterTx(AsyncTx, Protocol):
    """As `LetterTx`, awaited."""

    async def keep(self, table: str, letters: Sequence[Letter]) -> None: ...


@runtime_checkable
class AsyncOutboxTx(AsyncTx, Protocol):
    """As `OutboxTx`, awaited."""

    async def post(self, outgoing: Sequence[Outgoing]) -> None: ...

    async def record_origins(self, origins: Sequence[str]) -> set[str]: ...

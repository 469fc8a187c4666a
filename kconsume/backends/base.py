"""The contracts of an offset store, in three levels. A store implements one of these protocols.

    OffsetStore          keeps offsets                                         at least once
    FencedStore          also records which consumer owns a partition          at least once; a zombie cannot commit
    TransactionalStore   also commits handlers' writes and offsets together    exactly once

A store declares everything beyond its level in `Capabilities`.

All methods may block and may be called from several threads at once. No method is called on the thread that polls
Kafka. A store that cannot be reached raises `StoreUnavailable`, and the caller tries again. A store that finds a newer
epoch raises `Fenced`, and the caller stops consuming the partition.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import datetime
from typing import ClassVar, Protocol, TypeAlias, runtime_checkable

from kconsume.errors import KconsumeError, StoreError
from kconsume.records import Partition


@dataclass(frozen=True, slots=True)
class Position:
    """The position of a group in a partition: the row that a store keeps for the partition.

    Args:
        next_offset: the offset of the next record to handle.
        epoch: the fencing epoch. Every claim and every reset raises it.
        topic_id: the id of the topic; None if it is unknown. An unknown id never overwrites a known id.
        owner: the consumer that claimed the row last; None after a reset.
        leader_epoch: the leader epoch of the last handled record. The client uses it to detect a truncated log.
        metadata: a text for the next owner, stored beside the offset.
        updated_at: when the row was last changed.
        previous: used by `save` only: the offset that the row must have before the save.
        generation: the generation of the Kafka group at the last claim that gave one; None if no claim gave one.
        reset_epoch: the epoch of the last `reset`, or of a row that was created again after a `delete`; 0 if there was
            neither. Records that are handled again after a reset do not count as duplicates.
    """

    next_offset: int
    epoch: int = 0
    topic_id: str | None = None
    owner: str | None = None
    leader_epoch: int | None = None
    metadata: str = ""
    updated_at: datetime | None = None
    previous: int | None = None
    generation: int | None = None
    reset_epoch: int = 0


@dataclass(frozen=True, slots=True)
class ClaimTerms:
    """The conditions of a claim. A row that does not meet these conditions is not claimed, so that a late claim does
    not fence the current owner.

    Args:
        generation: the generation of the Kafka group (the member epoch under KIP-848), read together with the
            assignment. 0 if the claim only creates missing rows, which any member may claim later.
        epochs: the epochs of the rows, read before the broker confirmed the membership. If given, only the epochs are
            compared, because generations start again after a group was deleted, and differ on another cluster.
    """

    generation: int
    epochs: Mapping[Partition, int] | None = None


@dataclass(frozen=True, slots=True)
class Refused:
    """The result of a claim for a partition that was not claimed. The row of the partition is unchanged.

    Args:
        cause: the error that says why the partition was not claimed.
    """

    cause: KconsumeError


Positions: TypeAlias = Mapping[Partition, Position]
Start: TypeAlias = Callable[[Sequence[Partition]], Positions]
"""A function that `claim` calls with the partitions that have no row. It returns the positions to store for them."""


@runtime_checkable
class OffsetStore(Protocol):
    """Keeps one row for each group, topic and partition number."""

    address: str
    """The store's address as a user writes it, without the password."""

    guarantee: ClassVar[str]
    """The delivery guarantee in one sentence, for the text printed at the start and for `kconsume check`."""

    def load(self, group: str, partitions: Iterable[Partition]) -> dict[Partition, Position]:
        """Return the stored positions. A partition without a row is left out."""
        ...

    def save(self, group: str, positions: Positions) -> None:
        """Move offsets forward, for all partitions or for none.

        On a fenced store, each position has the epoch of the caller and, in `previous`, the offset last seen. The save
        raises `Fenced` if the row has another epoch, or if its offset is neither `previous` nor the new offset. The row
        already has the new offset if the answer to an earlier save was lost. A database that failed over and lost its
        last writes may still have the same epoch; only the comparison with `previous` detects the lost writes.
        """
        ...

    def reset(self, group: str, offsets: Mapping[Partition, int]) -> None:
        """Set offsets forward or back, as a user asked.

        Raises the epoch, which fences a running consumer, and stores the new epoch as `reset_epoch`. A store without
        epochs raises an error while a consumer runs. Removes the stored topic id, because the new offset is for the
        topic that exists at this moment.
        """
        ...

    def delete(self, group: str, partitions: Iterable[Partition] | None = None) -> None:
        """Delete rows that exist. Raises `StoreError` if the store cannot delete some of them.

        Args:
            partitions: the partitions whose rows are deleted; None for all rows of the group.
        """
        ...

    def groups(self) -> list[str]:
        """Return the names of the groups that have rows in this store, sorted."""
        ...

    def close(self) -> None:
        """Close the connections. Called after the last use; a later use opens them again."""
        ...


@runtime_checkable
class FencedStore(OffsetStore, Protocol):
    """Records the owner of each partition. Each new owner gets a higher epoch, and writes under a lower epoch fail."""

    def claim(
        self,
        group: str,
        partitions: Sequence[Partition],
        owner: str,
        start: Start,
        terms: ClaimTerms | None = None,
    ) -> dict[Partition, Position | Refused]:
        """Take ownership of partitions: raise the epoch of each and read its position, in one step for all partitions.

        The result has a `Position` for each claimed partition, and `Refused` for each other partition. When this method
        returns, no `save` and no transaction under an earlier epoch of a claimed partition can succeed.

        Args:
            owner: the name of the consumer that claims, shown to users.
            start: returns the positions to store for partitions that have no row. If the terms have epochs, such
                partitions are refused instead.
            terms: compared with each row first (`claim.accepts`). A row that is newer than the terms is unchanged, and
                its partition is `Refused` with `Fenced` as the cause. A claimed row gets the generation of the terms.
                Without terms no claim is refused, and each row keeps its generation.
        """
        ...

    def reclaim(self, group: str, epochs: Mapping[Partition, int], owner: str) -> dict[Partition, Position]:
        """Raise the epochs of partitions that the caller owns, and read their positions. Called when the outcome of a
        commit is unknown.

        Raises `Fenced` and changes no row if one of the partitions has another epoch or no row. When this method
        returns, every transaction under the old epochs has ended or can no longer commit.

        Args:
            epochs: the epoch of the caller for each partition.
            owner: the name of the caller.
        """
        ...


class Tx(Protocol):
    """An open transaction of the store."""

    @property
    def connection(self) -> object:
        """The object that the handler gets, for instance a `psycopg.Connection`."""
        ...

    def advance(self, old: int, new: int, leader_epoch: int | None = None) -> None:
        """Move the offset of the partition. Called once, as the last statement of the transaction.

        Raises `Fenced` if the row does not have the offset `old` and the epoch of this transaction.

        Args:
            old: the offset that the row must have.
            new: the offset after the last handled record.
            leader_epoch: the leader epoch of the last handled record; None if it is unknown.
        """
        ...

    def fault(self, error: BaseException) -> StoreError | None:
        """Decide whether the store caused the error that a handler raised. Called inside the transaction.

        Returns `StoreUnavailable` if the connection broke, `Conflict` if another transaction caused the rollback, and
        None if the handler itself caused the error.
        """
        ...


@runtime_checkable
class TransactionalStore(FencedStore, Protocol):
    """Gives its transaction to handlers, and moves the offset in the same transaction."""

    @property
    def connection_types(self) -> tuple[type, ...]:
        """The types of handler parameters that get the transaction, for instance `psycopg.Connection`."""
        ...

    @property
    def parallel(self) -> int | None:
        """How many transactions can run at the same time; None if there is no limit. More workers would only wait."""
        ...

    by_record: ClassVar[bool]
    """True if the store applies a transaction record by record. Then, if the handler takes single records,
    `tx.connection.next_record(offset)` must be called before each record."""

    def transaction(self, group: str, partition: Partition, epoch: int) -> AbstractContextManager[Tx]:
        """Run a transaction under `epoch`: committed if the block ends normally, rolled back if the block raises.

        Raises `Fenced` if the epoch is stale, and `StoreError` if the store fails. Any other error of the commit comes
        from what the handler wrote, for instance from a constraint that is checked at COMMIT.
        """
        ...

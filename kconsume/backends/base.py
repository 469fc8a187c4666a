"""The contracts of an offset store, in three levels. A store implements one of these protocols.

    OffsetStore          keeps offsets                               at least once
    FencedStore          and records who owns a partition            at least once; a zombie cannot commit
    TransactionalStore   and shares its transaction with handlers    exactly once

What a store offers beyond its level is declared: see `capabilities`.

All methods may block and may be called from several threads at once. No method is called on the thread that polls
Kafka. A store that cannot be reached raises `StoreUnavailable`, and the caller tries again. A store that finds a newer
epoch raises `Fenced`, and the caller gives the partition up.
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
        epoch: raised by every claim and every reset.
        topic_id: None if it is unknown. An unknown id never overwrites a known id.
        owner: who claimed the row last; None after a reset.
        leader_epoch: of the last handled record. By it the client detects that a log was truncated.
        metadata: a note for the next owner.
        updated_at: when the row was changed last.
        previous: for `save` only: the offset that the row must have.
        generation: of the Kafka group, at the last claim that named one; None if no claim has named one.
        reset_epoch: the epoch at which `reset` last set the offset, or at which the row was created again after a
            `delete`; 0 if never. A record that is handled again after that does not count as a repeat.
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
    """What a claim compares with each row, so that a late claim does not fence the current owner.

    Args:
        generation: of the Kafka group (the member epoch under KIP-848), read together with the assignment; above 0. It
            is 0 if rows are only pinned and any member may claim them later.
        epochs: the epochs of the rows, read before the broker confirmed the membership. If epochs are given, the claim
            compares only them: generations start again after a group was deleted, and differ on another cluster.
    """

    generation: int
    epochs: Mapping[Partition, int] | None = None


@dataclass(frozen=True, slots=True)
class Refused:
    """The result for a partition that was not claimed. Its row is unchanged.

    Args:
        cause: why it was not claimed.
    """

    cause: KconsumeError


Positions: TypeAlias = Mapping[Partition, Position]
Start: TypeAlias = Callable[[Sequence[Partition]], Positions]
"""Called by `claim` with the partitions that have no row. Returns the rows to pin."""


@runtime_checkable
class OffsetStore(Protocol):
    """Keeps one row for each group, topic and partition number."""

    address: str
    """How a user writes this store, without a password."""

    guarantee: ClassVar[str]
    """What the store promises a handler, in one sentence, for the start banner and `check`."""

    def load(self, group: str, partitions: Iterable[Partition]) -> dict[Partition, Position]:
        """The rows that exist. A partition without a row is left out."""
        ...

    def save(self, group: str, positions: Positions) -> None:
        """Move offsets forward, all or none.

        On a fenced store each position carries its epoch and, in `previous`, the offset last seen. The save raises
        `Fenced` if the row is under another epoch, or if its offset is neither `previous` nor the new offset. (The row
        is already at the new offset if the answer to an earlier save was lost.) A database that failed over to an
        earlier state keeps the epoch, and only this comparison protects the lost tail.
        """
        ...

    def reset(self, group: str, offsets: Mapping[Partition, int]) -> None:
        """Set offsets forward or back, for users.

        Raises the epoch, which fences a running consumer, and keeps the new epoch as `reset_epoch`. A store without
        epochs refuses while a consumer runs. Removes the topic id, because the offset is for the topic that exists now.
        """
        ...

    def delete(self, group: str, partitions: Iterable[Partition] | None = None) -> None:
        """Delete rows that exist. Raises `StoreError` if the store cannot delete some of them.

        Args:
            partitions: whose rows to delete; None for all of the group.
        """
        ...

    def groups(self) -> list[str]:
        """The groups that have rows here, sorted."""
        ...

    def close(self) -> None:
        """Close the connections. Called after the last use; a later use opens them again."""
        ...


@runtime_checkable
class FencedStore(OffsetStore, Protocol):
    """Records the owner of each partition by an epoch that only grows."""

    def claim(
        self,
        group: str,
        partitions: Sequence[Partition],
        owner: str,
        start: Start,
        terms: ClaimTerms | None = None,
    ) -> dict[Partition, Position | Refused]:
        """Raise the epoch of every partition and read its position, in one step for all partitions.

        Each partition has its own result. After the return, no `save` and no transaction under an earlier epoch of a
        claimed partition succeeds.

        Args:
            owner: the name of the claimant, shown to users.
            start: returns the rows to pin for partitions that have none. If the terms name epochs, partitions without
                a row are refused instead.
            terms: compared with each row first (`claim.accepts`). A row that is newer than the terms is unchanged, and
                its partition is `Refused` with `Fenced` as the cause. A claimed row gets the generation of the terms.
                Without terms no claim is refused, and each row keeps its generation.
        """
        ...

    def reclaim(self, group: str, epochs: Mapping[Partition, int], owner: str) -> dict[Partition, Position]:
        """Raise the epochs of partitions that we own under these epochs, and read their positions. Called when the
        outcome of a commit is unknown.

        Raises `Fenced`, and raises no epoch, if one of the partitions is under another epoch or has no row. At the
        return, every transaction under the old epochs has ended or can no longer commit.
        """
        ...


class Tx(Protocol):
    """An open transaction of the store."""

    @property
    def connection(self) -> object:
        """The object that the handler gets."""
        ...

    def advance(self, old: int, new: int, leader_epoch: int | None = None) -> None:
        """Move the offset of the partition. Raises `Fenced` if the row is not at `old` under our epoch. Called once, as
        the last statement of the transaction.

        Args:
            old: the offset that the row must have.
            new: the offset after the last handled record.
            leader_epoch: of the last handled record; None if it is unknown.
        """
        ...

    def fault(self, error: BaseException) -> StoreError | None:
        """The store's error, if the store caused the error with which a handler ended. Called inside the transaction.

        Returns `StoreUnavailable` if the connection broke, `Conflict` if another transaction caused the rollback, and
        None if the error is the handler's own.
        """
        ...


@runtime_checkable
class TransactionalStore(FencedStore, Protocol):
    """Hands its own transaction to handlers, and advances the offset in it."""

    @property
    def connection_types(self) -> tuple[type, ...]:
        """The annotations by which a handler asks for the transaction."""
        ...

    @property
    def parallel(self) -> int | None:
        """How many transactions can run at the same time; None for any number. Further workers would only wait."""
        ...

    by_record: ClassVar[bool]
    """True for a store that applies a transaction record by record. For a handler of single records,
    `tx.connection.next_record(offset)` must then be called before each record."""

    def transaction(self, group: str, partition: Partition, epoch: int) -> AbstractContextManager[Tx]:
        """Begin under `epoch`, or raise `Fenced` if it is stale. Commit at a normal exit, else roll back.

        Raises `StoreError` if the store fails. Any other error at the exit is attributed to what the handler wrote, for
        instance to a constraint that is checked at COMMIT.
        """
        ...

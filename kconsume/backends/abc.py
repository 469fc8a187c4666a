"""What an offset store is, in three levels. A store implements one of these protocols and nothing else.

    OffsetStore          keeps offsets                              at least once
    FencedStore          … and knows who owns a partition           at least once, a zombie cannot commit
    TransactionalStore   … and shares a transaction with handlers   exactly once

All methods may block and may be called from several threads at once; none is called on the thread that
polls Kafka. A store that cannot be reached raises `StoreUnavailable`: the caller tries again. A store that
finds a newer epoch raises `Fenced`: the caller gives the partition up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import datetime
from typing import ClassVar, Protocol, TypeAlias, runtime_checkable

from kconsume.records import Partition


@dataclass(frozen=True, slots=True)
class Position:
    """Where a group stands in a partition: the row that a store keeps for it.

    `topic_id` is None where it is unknown; an unknown id never overwrites a known one.
    """

    next_offset: int
    epoch: int = 0
    topic_id: str | None = None
    owner: str | None = None
    leader_epoch: int | None = None
    metadata: str = ""
    updated_at: datetime | None = None


Positions: TypeAlias = Mapping[Partition, Position]
Start: TypeAlias = Callable[[Sequence[Partition]], Positions]
"""Called by `claim` with the partitions that have no row; answers with the rows to pin."""


@runtime_checkable
class OffsetStore(Protocol):
    """Keeps one row a partition, by group, topic and partition number."""

    address: str
    """How a person writes this store, with no password in it."""

    guarantee: ClassVar[str]
    """What the store promises a handler, in one sentence, for the start banner and `check`."""

    def load(self, group: str, partitions: Iterable[Partition]) -> dict[Partition, Position]:
        """The rows that are there; a partition without one is left out."""
        ...

    def save(self, group: str, positions: Positions) -> None:
        """Move offsets forward, all or none. On a fenced store each position carries its epoch."""
        ...

    def reset(self, group: str, offsets: Mapping[Partition, int]) -> None:
        """Set offsets anywhere, for people. Raises the epoch, so that whoever runs now is fenced; a store that
        knows no epochs refuses while somebody runs."""
        ...

    def delete(self, group: str, partitions: Iterable[Partition] | None = None) -> None:
        """Forget rows, if they are there; all of the group's when no partitions are named. A store that cannot
        forget some of them raises `StoreError`."""
        ...

    def groups(self) -> list[str]:
        """The groups that have rows here, sorted."""
        ...

    def close(self) -> None:
        """Let go of connections. Called once, after the last use."""
        ...


@runtime_checkable
class FencedStore(OffsetStore, Protocol):
    """Knows the owner of each partition by an epoch that only grows."""

    def claim(self, group: str, partitions: Sequence[Partition], owner: str, start: Start) -> dict[Partition, Position]:
        """Raise the epoch of every partition and read its position, in one step for all.

        Rows that are missing are pinned at what `start` answers. From the moment this returns, no
        `save` and no transaction under an earlier epoch succeeds.
        """
        ...


class Tx(Protocol):
    """An open transaction of the store."""

    @property
    def connection(self) -> object:
        """What the handler gets."""
        ...

    def advance(self, old: int, new: int, leader_epoch: int | None = None) -> None:
        """Move the partition's offset from `old` to `new`; `Fenced` if it is not at `old` under our epoch.

        Called once, as the last thing before the transaction ends.
        """
        ...


@runtime_checkable
class TransactionalStore(FencedStore, Protocol):
    """Hands its own transaction to handlers, and advances the offset in it."""

    connection_types: ClassVar[tuple[type, ...]]
    """The annotations by which a handler asks for the transaction."""

    parallel: ClassVar[int | None]
    """How many transactions can run side by side; None for any number. More workers would only wait."""

    def transaction(self, group: str, partition: Partition, epoch: int) -> AbstractContextManager[Tx]:
        """Begin under `epoch` (`Fenced` if it is stale); commit at a normal exit, else roll back."""
        ...

"""Wrappers of a store. With a wrapper, the tests of a suite examine another form of the store's transactions.

This module only forwards calls. The awaited form is in `async_driver`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Generic, TypeVar, cast

from kconsume._kafka.outgoing import Outgoing
from kconsume.backends.base import ClaimTerms, OffsetStore, Position, Positions, Refused, Start, TransactionalStore, Tx
from kconsume.backends.capabilities import Capabilities, OutboxStore, PipeliningStore, capabilities_of
from kconsume.backends.outbox.tables import NO_TARGETS, Posted, Targets
from kconsume.records import Partition

S = TypeVar("S", bound=TransactionalStore)


class OtherForm(Generic[S]):
    """Forwards all calls to a store, except `transaction`, which is another form of the store's transactions."""

    def __init__(self, store: S) -> None:
        self.inner = store

    @property
    def address(self) -> str:
        return self.inner.address

    @property
    def guarantee(self) -> str:
        return self.inner.guarantee

    @property
    def capabilities(self) -> Capabilities:
        inner = capabilities_of(self.inner)
        return Capabilities(
            cast(OffsetStore, self),
            outbox=None if inner.outbox is None else cast(OutboxStore, self),
            keeps_letters=inner.keeps_letters,
        )

    @property
    def connection_types(self) -> tuple[type, ...]:
        return self.inner.connection_types

    @property
    def parallel(self) -> int | None:
        return self.inner.parallel

    def load(self, group: str, partitions: Iterable[Partition]) -> dict[Partition, Position]:
        return self.inner.load(group, partitions)

    def save(self, group: str, positions: Positions) -> None:
        self.inner.save(group, positions)

    def claim(
        self, group: str, partitions: Sequence[Partition], owner: str, start: Start, terms: ClaimTerms | None = None
    ) -> dict[Partition, Position | Refused]:
        return self.inner.claim(group, partitions, owner, start, terms)

    def reclaim(self, group: str, epochs: Mapping[Partition, int], owner: str) -> dict[Partition, Position]:
        return self.inner.reclaim(group, epochs, owner)

    def reset(self, group: str, offsets: Mapping[Partition, int]) -> None:
        self.inner.reset(group, offsets)

    def delete(self, group: str, partitions: Iterable[Partition] | None = None) -> None:
        self.inner.delete(group, partitions)

    def groups(self) -> list[str]:
        return self.inner.groups()

    def close(self) -> None:
        self.inner.close()

    @property
    def by_record(self) -> bool:
        return self.inner.by_record

    # For a store with an outbox

    def posted(
        self, group: str, epochs: Mapping[Partition, int], most: int, targets: Mapping[Partition, Targets] = NO_TARGETS
    ) -> dict[Partition, list[Posted]]:
        return self._outbox.posted(group, epochs, most, targets)

    def delivered(self, group: str, numbers: Mapping[Partition, Sequence[int]]) -> None:
        self._outbox.delivered(group, numbers)

    def unowned_rows(self, owner: str, most: int, targets: Targets | None = None) -> list[Posted]:
        return self._outbox.unowned_rows(owner, most, targets)

    def insert_statement(self, outgoing: Outgoing) -> tuple[str, Any]:
        return self._outbox.insert_statement(outgoing)

    def forget_origins(self) -> None:
        self._outbox.forget_origins()

    @property
    def _outbox(self) -> OutboxStore:
        return cast(OutboxStore, self.inner)


class _Pipelined(OtherForm[PipeliningStore]):
    def transaction(self, group: str, partition: Partition, epoch: int) -> AbstractContextManager[Tx]:
        return self.inner.pipelined(group, partition, epoch)


def pipelined(store: PipeliningStore) -> TransactionalStore:
    """Wrap a store so that a suite examines its `pipelined` transactions: `open=lambda: pipelined(MyStore(...))`.

    The subclass of the suite must set `fence_shows_at_the_end = True`.

    Args:
        store: the store to wrap.
    """
    return cast(TransactionalStore, _Pipelined(store))

"""Other forms of a store's transaction, for suites that know one: the same tests say what every form is.

Passes on what is asked, and decides nothing. The awaited form is in `asynchronous.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Generic, TypeVar, cast

from kconsume.backends.abc import (
    ClaimTerms,
    OutboxStore,
    PipeliningStore,
    Position,
    Positions,
    Refused,
    Start,
    TransactionalStore,
    Tx,
)
from kconsume.backends.outbox_table import NO_TARGETS, Posted, Targets
from kconsume.output import Outgoing
from kconsume.records import Partition

S = TypeVar("S", bound=TransactionalStore)


class OtherForm(Generic[S]):
    """A store in all but its transaction, which is another of the same store."""

    def __init__(self, store: S) -> None:
        self._store = store

    @property
    def address(self) -> str:
        return self._store.address

    @property
    def guarantee(self) -> str:
        return self._store.guarantee

    @property
    def connection_types(self) -> tuple[type, ...]:
        return self._store.connection_types

    @property
    def parallel(self) -> int | None:
        return self._store.parallel

    def load(self, group: str, partitions: Iterable[Partition]) -> dict[Partition, Position]:
        return self._store.load(group, partitions)

    def save(self, group: str, positions: Positions) -> None:
        self._store.save(group, positions)

    def claim(
        self, group: str, partitions: Sequence[Partition], owner: str, start: Start, terms: ClaimTerms | None = None
    ) -> dict[Partition, Position | Refused]:
        return self._store.claim(group, partitions, owner, start, terms)

    def reclaim(self, group: str, epochs: Mapping[Partition, int], owner: str) -> dict[Partition, Position]:
        return self._store.reclaim(group, epochs, owner)

    def reset(self, group: str, offsets: Mapping[Partition, int]) -> None:
        self._store.reset(group, offsets)

    def delete(self, group: str, partitions: Iterable[Partition] | None = None) -> None:
        self._store.delete(group, partitions)

    def groups(self) -> list[str]:
        return self._store.groups()

    def close(self) -> None:
        self._store.close()

    @property
    def by_record(self) -> bool:
        return self._store.by_record

    # Of a store that has an outbox

    def posted(
        self, group: str, epochs: Mapping[Partition, int], most: int, targets: Mapping[Partition, Targets] = NO_TARGETS
    ) -> dict[Partition, list[Posted]]:
        return self._outbox.posted(group, epochs, most, targets)

    def delivered(self, group: str, numbers: Mapping[Partition, Sequence[int]]) -> None:
        self._outbox.delivered(group, numbers)

    def strays(self, owner: str, most: int, targets: Targets | None = None) -> list[Posted]:
        return self._outbox.strays(owner, most, targets)

    def posting(self, outgoing: Outgoing) -> tuple[str, Any]:
        return self._outbox.posting(outgoing)

    def forget_origins(self) -> None:
        self._outbox.forget_origins()

    @property
    def _outbox(self) -> OutboxStore:
        return cast(OutboxStore, self._store)


class _Pipelined(OtherForm[PipeliningStore]):
    def transaction(self, group: str, partition: Partition, epoch: int) -> AbstractContextManager[Tx]:
        return self._store.pipelined(group, partition, epoch)


def pipelined(store: PipeliningStore) -> TransactionalStore:
    """A transactional store whose `transaction` is the `pipelined` of this one: `open=lambda: pipelined(MyStore(...))`.
    The suite is then told `fence_shows_at_the_end = True`."""
    return cast(TransactionalStore, _Pipelined(store))

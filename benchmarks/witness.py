"""Records each transaction of kconsume's stores after its commit: the number of its records, and the time.

The other side does the same after each of its own commits, so both are measured in the same way. This costs
kconsume's side some microseconds for each transaction, and the database nothing. The classes here wrap a store and its
transactions, as a third-party store could; nothing of kconsume is patched.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import cast

from benchmarks import marks
from kconsume._kafka.outgoing import Outgoing
from kconsume.backends.base import Tx
from kconsume.backends.capabilities import FinishingTx, OutboxTx
from kconsume.errors import StoreError


class WitnessedTx:
    """A transaction that records by how much it moves the offset."""

    __slots__ = ("_tx", "connection", "records")

    def __init__(self, tx: Tx) -> None:
        self.connection = tx.connection
        self.records = 0
        self._tx = tx

    def advance(self, old: int, new: int, leader_epoch: int | None = None) -> None:
        self._tx.advance(old, new, leader_epoch)
        self.records = new - old  # the topics of a run have no gaps

    def fault(self, error: BaseException) -> StoreError | None:
        return self._tx.fault(error)


class WitnessedPostgresTx(WitnessedTx):
    """Also has the optional methods of PostgreSQL's transactions."""

    __slots__ = ()

    def finish(self, old: int, new: int, leader_epoch: int | None = None) -> None:
        cast(FinishingTx, self._tx).finish(old, new, leader_epoch)
        self.records = new - old

    def post(self, outgoing: Sequence[Outgoing]) -> None:
        cast(OutboxTx, self._tx).post(outgoing)

    def record_origins(self, origins: Sequence[str]) -> set[str]:
        return cast(OutboxTx, self._tx).record_origins(origins)


@contextmanager
def witnessed(begun: AbstractContextManager[Tx]) -> Iterator[WitnessedTx]:
    """Yield the transaction in a wrapper, and count its records if it commits."""
    with begun as tx:
        seen = WitnessedPostgresTx(tx) if isinstance(tx, FinishingTx) else WitnessedTx(tx)
        yield seen
    if seen.records:
        marks.tally(seen.records)

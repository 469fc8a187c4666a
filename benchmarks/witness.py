"""Notes the transactions of kconsume's stores as they commit: how many records each had, and when it was done.

The other side does the same after each of its own commits, so both are measured by one clock. It costs ours some
microseconds a transaction and the database nothing. Only what every store of a third party may do is done here:
methods of the store protocol are passed on. Nothing of kconsume is patched.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

from benchmarks import marks
from kconsume.backends.abc import FinishingTx, OutboxTx, Tx
from kconsume.errors import StoreError
from kconsume.output import Outgoing


class WitnessedTx:
    """A transaction that remembers how far its offset went."""

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
    """One that has more than every transaction has."""

    __slots__ = ()

    def finish(self, old: int, new: int, leader_epoch: int | None = None) -> None:
        assert isinstance(self._tx, FinishingTx)
        self._tx.finish(old, new, leader_epoch)
        self.records = new - old

    def post(self, outgoing: Sequence[Outgoing]) -> None:
        assert isinstance(self._tx, OutboxTx)
        self._tx.post(outgoing)

    def take_in(self, origins: Sequence[str]) -> set[str]:
        assert isinstance(self._tx, OutboxTx)
        return self._tx.take_in(origins)


@contextmanager
def witnessed(begun: AbstractContextManager[Tx]) -> Iterator[WitnessedTx]:
    """The same transaction; tallied if it commits."""
    with begun as tx:
        seen = WitnessedPostgresTx(tx) if isinstance(tx, FinishingTx) else WitnessedTx(tx)
        yield seen
    if seen.records:
        marks.tally(seen.records)

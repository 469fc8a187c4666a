"""Transactional stores that are broken on purpose; see `broken_stores.py`, of which this is the third level."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

from kconsume.backends import Position
from kconsume.backends.capabilities import Capabilities
from kconsume.errors import Fenced, StoreUnavailable
from kconsume.records import Partition
from kconsume.testing.conformance import TransactionalSuite as T
from kconsume.testing.conformance.transactional import TX_CAPABILITIES
from tests.contract import broken_names  # noqa: F401  (adds its own)
from tests.contract.broken_stores import CONTROLS, Broken, fails, fails_in
from tests.contract.queue_store import Queue, QueueStore, QueueTx

__all__ = ["CONTROLS"]
"""Those of all levels, once this is imported."""


@fails(T.test_what_the_handler_writes_and_the_offset_commit_together)
class WritesAtOnce(QueueStore):
    @contextmanager
    def transaction(self, group: str, partition: Partition, epoch: int) -> Iterator[QueueTx]:
        with super().transaction(group, partition, epoch) as tx:
            tx.connection.numbers = self.effects
            yield tx
            tx.connection.numbers = []


@fails(T.test_many_records_share_a_transaction)
class LastOnly(QueueStore):
    def end(self, group: str, partition: Partition, epoch: int, tx: QueueTx) -> None:
        tx.connection.numbers = tx.connection.numbers[-1:]
        super().end(group, partition, epoch, tx)


@fails(
    T.test_a_handler_error_rolls_back_writes_and_offset_and_is_raised_unchanged,
    T.test_after_an_error_the_next_transaction_is_clean,
)
class CommitsAnyhow(QueueStore):
    @contextmanager
    def transaction(self, group: str, partition: Partition, epoch: int) -> Iterator[QueueTx]:
        tx = QueueTx(self)
        try:
            yield tx
        finally:
            self.end(group, partition, epoch, tx)


@fails(T.test_an_interrupt_rolls_back_writes_and_offset)
class ExpectsExceptions(QueueStore):
    @contextmanager
    def transaction(self, group: str, partition: Partition, epoch: int) -> Iterator[QueueTx]:
        tx, failed = QueueTx(self), False
        try:
            yield tx
        except Exception:
            failed = True
            raise
        finally:
            if not failed:
                self.end(group, partition, epoch, tx)


@fails(T.test_after_an_error_the_next_transaction_is_clean, T.test_a_transaction_that_has_failed_refuses_further_use)
class PoolsWhatFailed(QueueStore):
    """The connection of a transaction that failed is lent again as it is."""

    left: Queue | None = None

    @contextmanager
    def transaction(self, group: str, partition: Partition, epoch: int) -> Iterator[QueueTx]:
        tx = QueueTx(self)
        tx.connection, self.left = self.left or tx.connection, None
        try:
            yield tx
        except BaseException:
            self.left = tx.connection
            raise
        self.end(group, partition, epoch, tx)


@fails(T.test_an_advance_takes_offsets_above_32_bits)
class ThirtyTwoBitAdvance(QueueStore):
    def moved(self, row: Position, old: int, new: int, leader_epoch: int | None) -> Position:
        return super().moved(row, old, new & 0xFFFFFFFF, leader_epoch)


@fails(T.test_an_advance_keeps_the_topic_id_and_the_owner)
class NewRow(QueueStore):
    def moved(self, row: Position, old: int, new: int, leader_epoch: int | None) -> Position:
        return Position(super().moved(row, old, new, leader_epoch).next_offset, row.epoch, leader_epoch=leader_epoch)


@fails(T.test_a_handler_s_own_error_is_not_the_store_s_fault)
class BlamesItself(QueueStore):
    @contextmanager
    def transaction(self, group: str, partition: Partition, epoch: int) -> Iterator[QueueTx]:
        with super().transaction(group, partition, epoch) as tx:
            blaming: Any = tx
            blaming.fault = lambda error: StoreUnavailable(str(error)) if isinstance(error, OSError) else None
            yield tx


@fails(
    T.test_an_advance_from_a_wrong_offset_changes_nothing,
    T.test_a_commit_after_a_refused_advance_commits_nothing,
    T.test_a_refused_advance_raises_even_if_the_handler_ignores_it,
)
class AnyOffset(QueueStore):
    def moved(self, row: Position, old: int, new: int, leader_epoch: int | None) -> Position:
        return super().moved(row, row.next_offset, new, leader_epoch)


@fails(
    T.test_a_commit_after_a_refused_advance_commits_nothing,
    T.test_an_advance_from_a_wrong_offset_changes_nothing,
    T.test_a_claim_during_a_transaction_takes_effect_before_or_after_it,
)
class CommitBehindTheFence(QueueStore):
    """Effects and advance are sent together, and the commit behind them does not look."""

    def end(self, group: str, partition: Partition, epoch: int, tx: QueueTx) -> None:
        self.effects.extend(tx.connection.numbers)
        tx.connection.numbers = []
        super().end(group, partition, epoch, tx)


@fails(
    T.test_a_refused_advance_raises_even_if_the_handler_ignores_it,
    T.test_a_claim_during_a_transaction_takes_effect_before_or_after_it,
)
class SilentEnd(QueueStore):
    def end(self, group: str, partition: Partition, epoch: int, tx: QueueTx) -> None:
        try:
            super().end(group, partition, epoch, tx)
        except Fenced:
            return


@fails(
    T.test_a_transaction_without_a_row_does_not_begin,
    T.test_a_transaction_under_an_epoch_that_was_never_given_out_does_not_begin,
    T.test_a_transaction_does_not_begin_after_another_owner_has_claimed,
)
class BeginsWithoutLooking(QueueStore):
    def begin(self, group: str, partition: Partition, epoch: int) -> None: ...


@fails(
    T.test_a_claim_during_a_transaction_takes_effect_before_or_after_it,
    T.test_after_a_reclaim_the_transaction_under_the_old_epoch_has_ended_or_cannot_commit,
)
class LooksOnlyAtTheBegin(QueueStore):
    """A fence with a gap: the claim came after the look."""

    def end(self, group: str, partition: Partition, epoch: int, tx: QueueTx) -> None:
        super().end(group, partition, self._rows[group, partition].epoch, tx)


def before(step: Callable[..., None], look: Callable[[], None]) -> Callable[..., None]:
    def both(*arguments: object) -> None:
        look()
        step(*arguments)

    return both


class LooksOnceMore(QueueStore):
    """A fence that is read anew in the middle of the work, and believed from then on."""

    @contextmanager
    def transaction(self, group: str, partition: Partition, epoch: int) -> Iterator[QueueTx]:
        with self._lock:
            self.begin(group, partition, epoch)
        tx, believed = QueueTx(self), [epoch]
        self.watch(tx, lambda: believed.append(self._rows[group, partition].epoch))
        yield tx
        with self._lock:
            self.end(group, partition, believed[-1], tx)

    def watch(self, tx: Any, look: Callable[[], None]) -> None:
        raise NotImplementedError


@fails_in("begin", T.test_a_claim_during_a_transaction_takes_effect_before_or_after_it)
class LooksAtTheWrite(LooksOnceMore):
    def watch(self, tx: Any, look: Callable[[], None]) -> None:
        tx.connection.put = before(tx.connection.put, look)


@fails_in("write", T.test_a_claim_during_a_transaction_takes_effect_before_or_after_it)
class LooksAtTheAdvance(LooksOnceMore):
    def watch(self, tx: Any, look: Callable[[], None]) -> None:
        tx.advance = before(tx.advance, look)


@fails_in("advance", T.test_a_claim_during_a_transaction_takes_effect_before_or_after_it)
class ChecksAtTheAdvance(QueueStore):
    """And commits without another look."""

    @contextmanager
    def transaction(self, group: str, partition: Partition, epoch: int) -> Iterator[QueueTx]:
        with self._lock:
            self.begin(group, partition, epoch)
        checked: Any = QueueTx(self)
        checked.advance = before(checked.advance, lambda: self._check_epoch(group, partition, epoch))
        yield checked
        with self._lock:
            self.end(group, partition, self._rows[group, partition].epoch, checked)


@fails(
    T.test_the_transaction_of_a_zombie_changes_nothing_even_if_it_began,
    T.test_a_claim_during_a_transaction_takes_effect_before_or_after_it,
    T.test_after_a_reclaim_the_transaction_under_the_old_epoch_has_ended_or_cannot_commit,
    T.test_a_reset_during_a_transaction_takes_effect_before_or_after_it,
    T.test_claims_during_commits_leave_each_effect_once,
    T.test_two_owners_that_fence_each_other_end_with_one_owner_and_each_effect_once,
    T.test_after_16_concurrent_claims_exactly_one_owner_can_commit,
    T.test_a_transaction_works_with_any_group_and_topic_name,
)
class Unfenced(LooksOnlyAtTheBegin, BeginsWithoutLooking, AnyOffset):
    """What a person writes who keeps the offset beside the effect and thinks that this is all."""


@fails(
    T.test_a_transaction_that_has_ended_refuses_further_use, T.test_a_transaction_that_has_failed_refuses_further_use
)
class NeverOver(QueueStore):
    @contextmanager
    def transaction(self, group: str, partition: Partition, epoch: int) -> Iterator[QueueTx]:
        with super().transaction(group, partition, epoch) as tx:
            lasting: Any = tx.connection
            lasting.refuse_if_over = lambda: None
            yield tx


@fails(T.test_a_reader_does_not_wait_for_an_open_transaction)
class HoldsTheDoor(QueueStore):
    @contextmanager
    def transaction(self, group: str, partition: Partition, epoch: int) -> Iterator[QueueTx]:
        with self._lock, super().transaction(group, partition, epoch) as tx:
            yield tx


@fails(T.test_transactions_of_several_threads_all_commit)
class OneConnection(QueueStore):
    busy = False

    @contextmanager
    def transaction(self, group: str, partition: Partition, epoch: int) -> Iterator[QueueTx]:
        if self.busy:
            raise Broken("the connection is in use")
        self.busy = True
        with super().transaction(group, partition, epoch) as tx:
            time.sleep(0.002)  # the handler's work
            yield tx
        self.busy = False


def _declares(capability: str) -> type[QueueStore]:
    """A store that declares what its transactions do not have."""

    class Declares(QueueStore):
        @property
        def capabilities(self) -> Capabilities:
            declared: dict[str, Any] = {capability: self if capability == "outbox" else True}
            return replace(super().capabilities, **declared)

        @contextmanager
        def transaction(self, group: str, partition: Partition, epoch: int) -> Iterator[QueueTx]:
            with super().transaction(group, partition, epoch) as tx:
                yield cast(QueueTx, SimpleNamespace(connection=tx.connection, advance=tx.advance, fault=tx.fault))

    return Declares


for _capability in TX_CAPABILITIES:
    fails_in(_capability, T.test_a_transaction_has_what_the_store_declares)(_declares(_capability[0]))


@fails(T.test_a_severed_transaction_is_rolled_back_and_refuses_further_writes)
class LetsGoOfNothing(QueueStore):
    @contextmanager
    def transaction(self, group: str, partition: Partition, epoch: int) -> Iterator[QueueTx]:
        with super().transaction(group, partition, epoch) as tx:
            tx.sever = lambda: None  # type: ignore[method-assign]
            yield tx


@fails(T.test_a_severed_transaction_is_rolled_back_and_refuses_further_writes)
class OnlySaysSo(QueueStore):
    @contextmanager
    def transaction(self, group: str, partition: Partition, epoch: int) -> Iterator[QueueTx]:
        with super().transaction(group, partition, epoch) as tx:
            yield cast(QueueTx, SimpleNamespace(connection=tx.connection, advance=tx.advance, fault=tx.fault))


@fails(T.test_after_an_outage_both_writes_and_offset_are_committed_or_neither)
class HalfCommit(QueueStore):
    """Two places: the effects in one, the offset in the other."""

    @contextmanager
    def transaction(self, group: str, partition: Partition, epoch: int) -> Iterator[QueueTx]:
        tx = QueueTx(self)
        yield tx
        self.effects.extend(tx.connection.numbers)
        tx.connection.numbers = []
        with self._lock:
            self.end(group, partition, epoch, tx)

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
    T.test_an_error_of_the_handler_undoes_both_and_is_its_own,
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


@fails(T.test_an_interrupt_undoes_both)
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


@fails(T.test_after_an_error_the_next_transaction_is_clean, T.test_a_transaction_that_has_failed_is_not_used_again)
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


@fails(T.test_an_advance_of_32_bits_and_more)
class ThirtyTwoBitAdvance(QueueStore):
    def moved(self, row: Position, old: int, new: int, leader_epoch: int | None) -> Position:
        return super().moved(row, old, new & 0xFFFFFFFF, leader_epoch)


@fails(T.test_the_topic_s_id_and_owner_survive_an_advance)
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
    T.test_an_advance_from_where_we_are_not_leaves_nothing,
    T.test_a_commit_behind_an_advance_that_was_refused_commits_nothing,
    T.test_a_refused_advance_is_told_although_nobody_looked,
)
class AnyOffset(QueueStore):
    def moved(self, row: Position, old: int, new: int, leader_epoch: int | None) -> Position:
        return super().moved(row, row.next_offset, new, leader_epoch)


@fails(
    T.test_a_commit_behind_an_advance_that_was_refused_commits_nothing,
    T.test_an_advance_from_where_we_are_not_leaves_nothing,
    T.test_a_claim_during_a_transaction_goes_before_it_or_after_it,
)
class CommitBehindTheFence(QueueStore):
    """Effects and advance are sent together, and the commit behind them does not look."""

    def end(self, group: str, partition: Partition, epoch: int, tx: QueueTx) -> None:
        self.effects.extend(tx.connection.numbers)
        tx.connection.numbers = []
        super().end(group, partition, epoch, tx)


@fails(
    T.test_a_refused_advance_is_told_although_nobody_looked,
    T.test_a_claim_during_a_transaction_goes_before_it_or_after_it,
)
class SilentEnd(QueueStore):
    def end(self, group: str, partition: Partition, epoch: int, tx: QueueTx) -> None:
        try:
            super().end(group, partition, epoch, tx)
        except Fenced:
            return


@fails(
    T.test_a_transaction_where_no_row_is_does_not_begin,
    T.test_a_transaction_under_an_epoch_that_was_never_given_out_does_not_begin,
    T.test_a_transaction_begun_after_another_s_claim_does_not_begin,
)
class BeginsWithoutLooking(QueueStore):
    def begin(self, group: str, partition: Partition, epoch: int) -> None: ...


@fails(
    T.test_a_claim_during_a_transaction_goes_before_it_or_after_it,
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


@fails_in("begin", T.test_a_claim_during_a_transaction_goes_before_it_or_after_it)
class LooksAtTheWrite(LooksOnceMore):
    def watch(self, tx: Any, look: Callable[[], None]) -> None:
        tx.connection.put = before(tx.connection.put, look)


@fails_in("write", T.test_a_claim_during_a_transaction_goes_before_it_or_after_it)
class LooksAtTheAdvance(LooksOnceMore):
    def watch(self, tx: Any, look: Callable[[], None]) -> None:
        tx.advance = before(tx.advance, look)


@fails_in("advance", T.test_a_claim_during_a_transaction_goes_before_it_or_after_it)
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
    T.test_a_zombie_s_transaction_leaves_nothing_also_if_it_began,
    T.test_a_claim_during_a_transaction_goes_before_it_or_after_it,
    T.test_after_a_reclaim_the_transaction_under_the_old_epoch_has_ended_or_cannot_commit,
    T.test_a_reset_during_a_transaction_goes_before_it_or_after_it,
    T.test_claims_while_another_commits_leave_each_effect_once,
    T.test_two_owners_that_fence_each_other_end_with_one_and_no_effect_twice,
    T.test_of_16_claims_at_once_exactly_one_can_commit,
    T.test_a_transaction_knows_any_name,
)
class Unfenced(LooksOnlyAtTheBegin, BeginsWithoutLooking, AnyOffset):
    """What a person writes who keeps the offset beside the effect and thinks that this is all."""


@fails(T.test_a_transaction_that_has_ended_is_not_used_again, T.test_a_transaction_that_has_failed_is_not_used_again)
class NeverOver(QueueStore):
    @contextmanager
    def transaction(self, group: str, partition: Partition, epoch: int) -> Iterator[QueueTx]:
        with super().transaction(group, partition, epoch) as tx:
            lasting: Any = tx.connection
            lasting.refuse_if_over = lambda: None
            yield tx


@fails(T.test_a_reader_does_not_wait_for_the_transaction_that_runs)
class HoldsTheDoor(QueueStore):
    @contextmanager
    def transaction(self, group: str, partition: Partition, epoch: int) -> Iterator[QueueTx]:
        with self._lock, super().transaction(group, partition, epoch) as tx:
            yield tx


@fails(T.test_transactions_of_many_threads_all_get_their_turn)
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


@fails(T.test_a_transaction_that_is_taken_away_is_undone_and_its_handler_can_write_no_more)
class LetsGoOfNothing(QueueStore):
    @contextmanager
    def transaction(self, group: str, partition: Partition, epoch: int) -> Iterator[QueueTx]:
        with super().transaction(group, partition, epoch) as tx:
            tx.sever = lambda: None  # type: ignore[method-assign]
            yield tx


@fails(T.test_a_transaction_that_is_taken_away_is_undone_and_its_handler_can_write_no_more)
class OnlySaysSo(QueueStore):
    @contextmanager
    def transaction(self, group: str, partition: Partition, epoch: int) -> Iterator[QueueTx]:
        with super().transaction(group, partition, epoch) as tx:
            yield cast(QueueTx, SimpleNamespace(connection=tx.connection, advance=tx.advance, fault=tx.fault))


@fails(T.test_a_place_that_goes_inside_a_transaction_has_both_or_neither)
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

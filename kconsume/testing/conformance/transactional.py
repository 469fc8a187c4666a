"""`TransactionalSuite`: tests of a store that shares a transaction with handlers, so that effects and offset commit
together.

The tests do not assume when a write takes effect (it may be queued until the end), nor where a stale owner is refused
(at the advance or at the end). The tests check the rows that exist afterwards, seen from outside. `zombies` examines
claims while a transaction is open on the partition.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from kconsume.backends.base import OffsetStore, Position
from kconsume.backends.capabilities import (
    FinishingTx,
    LetterTx,
    OutboxTx,
    SeverableTx,
    capabilities_of,
)
from kconsume.errors import Fenced, StoreError
from kconsume.records import Partition
from kconsume.testing.conformance.fenced import FencedSuite
from kconsume.testing.conformance.harness import LONG, Bench, Handling, at_once, below, number, once_it_is_back
from kconsume.testing.conformance.offsets import ODD_NAMES, away
from kconsume.testing.conformance.zombies import Zombies

TX_CAPABILITIES: list[tuple[str, type]] = [
    ("outbox", OutboxTx),
    ("keeps_letters", LetterTx),
    ("severs", SeverableTx),
    ("finishes", FinishingTx),
]
"""The capabilities that a store may declare for its transactions, and the protocol that they must then implement."""


class TransactionalSuite(Zombies, FencedSuite):
    """Subclass it as `Test…`, with a fixture `subject` that returns a `Subject` with `write` and `effects`."""

    # Effects and offset: both or neither

    def test_what_the_handler_writes_and_the_offset_commit_together(self, bench: Bench) -> None:
        first, *_ = bench.partitions
        bench.me.claim(first)
        with bench.me.transaction(first) as handling:
            handling.write(0)
            handling.advance(0, 5)
            assert bench.effects() == [], "the write was visible before COMMIT"
            assert bench.open().load(bench.group, [first])[first].next_offset == 0, "the offset moved before COMMIT"
        assert (bench.effects(), bench.offsets()) == ([0], {first: 5})

    def test_many_records_share_a_transaction(self, bench: Bench) -> None:
        first, second, *_ = bench.partitions
        bench.me.claim(first, second)
        for _ in range(3):
            bench.me.handle(first, records=20)
            bench.me.handle(second)
        assert bench.offsets() == {first: 60, second: 3}
        assert bench.settled(first)
        assert bench.settled(second)

    def test_a_handler_error_rolls_back_writes_and_offset_and_is_raised_unchanged(self, bench: Bench) -> None:
        """The handler fails before or after the advance. A part of a record's effects must not be committed."""
        first, *_ = bench.partitions
        bench.me.claim(first)
        for advances in (False, True):
            with pytest.raises(LookupError, match="of the handler"):
                bench.me.run(first, _raising(LookupError("of the handler"), advances))
        assert (bench.effects(), bench.offsets()) == ([], {first: 0})

    def test_an_interrupt_rolls_back_writes_and_offset(self, bench: Bench) -> None:
        """A transaction may also end by an exception that is no `Exception`: Ctrl-C, or a cancelled task."""
        first, *_ = bench.partitions
        bench.me.claim(first)
        with pytest.raises(KeyboardInterrupt):
            bench.me.run(first, _raising(KeyboardInterrupt()))
        assert (bench.effects(), bench.offsets()) == ([], {first: 0})

    def test_after_an_error_the_next_transaction_is_clean(self, bench: Bench) -> None:
        """A connection must go back to its pool without any state of the failed transaction."""
        first, *_ = bench.partitions
        bench.me.claim(first)
        for _ in range(3):
            with pytest.raises(LookupError):
                bench.me.run(first, _raising(LookupError()))
        bench.me.handle(first)
        assert bench.settled(first)
        assert bench.offsets() == {first: 1}

    def test_an_advance_takes_offsets_above_32_bits(self, bench: Bench) -> None:
        first, *_ = bench.partitions
        bench.me.claim(first, at=2**53)
        bench.me.handle(first)
        assert bench.offsets() == {first: 2**53 + 1}
        assert bench.effects() == [number(first, 2**53)]

    @pytest.mark.parametrize("name", ODD_NAMES)
    def test_a_transaction_works_with_any_group_and_topic_name(self, bench: Bench, name: str) -> None:
        """A transaction builds its own statements, keys and locks from the names of the group and the topic."""
        odd, other = bench.of_group(f"{name}{bench.group}"), bench.of_group(bench.group)
        partition = Partition(name, 0)
        odd.me.claim(partition)
        other.me.claim(partition)
        odd.me.handle(partition)
        assert odd.store.load(odd.group, [partition])[partition].next_offset == 1
        assert other.store.load(other.group, [partition])[partition].next_offset == 0
        rival = odd.owner("rival")
        rival.claim(partition)
        with pytest.raises(Fenced):
            odd.me.handle(partition)
        assert bench.effects() == [number(partition, 0)]

    def test_an_advance_keeps_the_topic_id_and_the_owner(self, bench: Bench) -> None:
        """The topic id is compared with the cluster's at the next claim, and the owner is shown to users."""
        first, *_ = bench.partitions
        bench.me.claim(first)
        bench.me.save({first: 1}, topic_id="known")
        with bench.me.transaction(first) as handling:
            handling.advance(1, 5, 3)
        row = bench.rows()[first]
        assert (row.next_offset, row.topic_id, row.owner, row.leader_epoch) == (5, "known", "me", 3)

    def test_a_handler_s_own_error_is_not_the_store_s_fault(self, bench: Bench) -> None:
        """The runtime retries a fault of the store without end. A record that cannot be handled would then stop its
        partition."""
        first, *_ = bench.partitions
        bench.me.claim(first)
        with bench.me.transaction(first) as handling:
            for error in (LookupError("no such order"), ValueError(), TimeoutError(), ConnectionError(), OSError()):
                assert handling.tx.fault(error) is None
            handling.advance(0, 1)

    # The fence

    def test_an_advance_from_a_wrong_offset_changes_nothing(self, bench: Bench) -> None:
        """Otherwise records would be skipped, or would be handled again if the reply to their commit was lost."""
        first, *_ = bench.partitions
        bench.me.claim(first, at=1)
        for old in (0, 2):
            with pytest.raises(Fenced):
                bench.me.run(first, lambda handling, old=old: handling.handle(old))  # type: ignore[misc]
            assert (bench.effects(), bench.offsets()) == ([], {first: 1})

    def test_a_commit_after_a_refused_advance_commits_nothing(self, bench: Bench) -> None:
        """A COMMIT may be sent before the reply to the advance is read. Such a COMMIT must not commit the effect of a
        fenced owner, because the new owner commits the same effect again."""
        first, *_ = bench.partitions
        bench.me.claim(first, at=1)
        with contextlib.suppress(StoreError):
            bench.me.run(first, _not_looking)
        assert (bench.effects(), bench.offsets()) == ([], {first: 1})

    def test_a_refused_advance_raises_even_if_the_handler_ignores_it(self, bench: Bench) -> None:
        """Otherwise the caller would assume a commit, and would continue at a wrong offset."""
        first, *_ = bench.partitions
        bench.me.claim(first, at=1)
        with pytest.raises(StoreError):
            bench.me.run(first, _not_looking)

    def test_a_transaction_without_a_row_does_not_begin(self, bench: Bench) -> None:
        """The row was never claimed, or a user deleted it."""
        first, second, *_ = bench.partitions
        bench.me.claim(first)
        bench.store.delete(bench.group)
        bench.me.held[second] = Position(0)
        for partition in (first, second):
            self.does_not_begin(bench.me, partition)
        assert (bench.effects(), bench.rows()) == ([], {})

    def test_a_transaction_under_an_epoch_that_was_never_given_out_does_not_begin(self, bench: Bench) -> None:
        first, *_ = bench.partitions
        mine = bench.me.claim(first)[first]
        for epoch in (mine.epoch + 1, mine.epoch - 1, 0, -1):
            self.does_not_begin(bench.me, first, epoch)
        assert (bench.effects(), bench.offsets()) == ([], {first: 0})

    # The end of a transaction

    def test_a_transaction_that_has_ended_refuses_further_use(self, bench: Bench) -> None:
        """A thread or task that a handler left running would write outside of a transaction, or in another one."""
        first, *_ = bench.partitions
        bench.me.claim(first)
        bench.me.handle(first)
        with bench.me.transaction(first) as kept:
            kept.write(1)
            kept.advance(1, 2)
        bench.me.held[first] = replace(bench.me.held[first], next_offset=2)
        _is_refused(lambda: kept.write(2), "a write")
        _is_refused(lambda: kept.advance(2, 3), "an advance")
        assert bench.settled(first)
        assert bench.offsets() == {first: 2}
        bench.me.handle(first)
        assert bench.settled(first)

    def test_a_transaction_that_has_failed_refuses_further_use(self, bench: Bench) -> None:
        """A thread or task may also be left running by a handler that raised."""
        first, *_ = bench.partitions
        bench.me.claim(first)
        kept: list[Handling] = []

        def handler(handling: Handling) -> None:
            kept.append(handling)
            handling.write(0)
            raise LookupError

        with pytest.raises(LookupError):
            bench.me.run(first, handler)
        _is_refused(lambda: kept[0].write(1), "a write")
        _is_refused(lambda: kept[0].advance(0, 1), "an advance")
        bench.me.handle(first)
        assert bench.settled(first)

    def test_a_closed_store_can_begin_new_transactions(self, bench: Bench) -> None:
        """An app that runs again keeps its store object."""
        first, *_ = bench.partitions
        bench.me.claim(first)
        bench.me.handle(first)
        bench.store.close()
        bench.me.handle(first)
        assert bench.settled(first)
        assert bench.offsets() == {first: 2}

    # Concurrent use

    def test_a_reader_does_not_wait_for_an_open_transaction(self, bench: Bench) -> None:
        """A slow handler may delay writers, but must not delay `kconsume status`, which only reads."""
        first, *_ = bench.partitions
        bench.me.claim(first)
        other = bench.open()
        other.groups()
        with ThreadPoolExecutor(1) as pool, bench.me.transaction(first) as handling:
            handling.write(0)
            reading = pool.submit(other.load, bench.group, [first])
            try:
                assert reading.result(self.patience)[first].next_offset == 0
            except TimeoutError:
                pytest.fail(f"the reader still waits after {self.patience:g} s")
            handling.advance(0, 1)
        assert bench.settled(first)

    def test_transactions_of_several_threads_all_commit(self, bench: Bench) -> None:
        """The workers of a process share one store object."""
        bench.me.claim()
        times = 20

        def work(each: int, _gate: threading.Barrier) -> None:
            for _ in range(times):
                bench.me.handle(bench.partitions[each])

        at_once(4, work)
        assert bench.offsets() == dict.fromkeys(bench.partitions, times)
        assert bench.effects() == [number(p, at) for p in bench.partitions for at in range(times)]

    # What the store declares

    @pytest.mark.parametrize(("capability", "protocol"), TX_CAPABILITIES)
    def test_a_transaction_has_what_the_store_declares(self, bench: Bench, capability: str, protocol: type) -> None:
        """The runtime calls the declared methods without a check."""
        first, *_ = bench.partitions
        bench.me.claim(first)
        with bench.me.transaction(first) as handling:
            if getattr(capabilities_of(bench.store), capability):
                assert isinstance(below(handling), protocol), (
                    f"{type(bench.store).__name__} declares {capability}, and its transaction is no {protocol.__name__}"
                )
            handling.advance(0, 1)

    # A handler that hangs

    def test_a_severed_transaction_is_rolled_back_and_refuses_further_writes(self, bench: Bench) -> None:
        """After `timeout=` on threads, `sever` is called while the handler's thread still uses the transaction. The
        test is skipped for a store that does not declare `severs`."""
        if not capabilities_of(bench.store).severs:
            pytest.skip("the store does not declare severs")
        first, *_ = bench.partitions
        bench.me.claim(first)
        with ThreadPoolExecutor(1) as handler:

            def refused_late(handling: Handling, offset: int) -> None:
                late = handler.submit(handling.write, offset)
                _is_refused(lambda: late.result(LONG), "a write")

            def give_up(handling: Handling) -> None:
                handler.submit(handling.write, 0).result(LONG)
                assert isinstance(handling.tx, SeverableTx), (
                    "the store declares severs, and its transaction has no sever()"
                )
                handling.tx.sever()
                refused_late(handling, 1)
                raise _GivenUp(handling)

            with pytest.raises(_GivenUp) as given_up:
                bench.me.run(first, give_up)
            refused_late(given_up.value.handling, 2)
        assert (bench.effects(), bench.offsets()) == ([], {first: 0})
        bench.me.handle(first)
        assert bench.settled(first)

    # The place becomes unavailable

    def test_after_an_outage_both_writes_and_offset_are_committed_or_neither(self, bench: Bench) -> None:
        """The database restarts while a handler runs. Whether the transaction committed is unknown until the database
        is back."""
        first, *_ = bench.partitions
        bench.me.claim(first)
        bench.me.handle(first)
        going = away(bench)
        with contextlib.suppress(StoreError), contextlib.ExitStack() as until_it_is_over:
            with bench.me.transaction(first) as handling:
                handling.write(1)
                until_it_is_over.enter_context(going)
                handling.write(2)
                handling.advance(1, 3)
        once_it_is_back(lambda: bench.me.reclaim(first))
        assert bench.settled(first)
        bench.me.handle(first)
        assert bench.settled(first)

    def methods(self, bench: Bench) -> Mapping[str, Callable[[OffsetStore], object]]:
        first, *_ = bench.partitions
        return {**super().methods(bench), "transaction": lambda _: bench.me.handle(first)}


class _GivenUp(BaseException):
    """Raised to leave a severed transaction as the runtime does: `Tx.fault` is not called."""

    def __init__(self, handling: Handling) -> None:
        self.handling = handling


def _raising(error: BaseException, advances: bool = True) -> Callable[[Handling], object]:
    def handler(handling: Handling) -> None:
        handling.write(0)
        if advances:
            handling.advance(0, 1)
        raise error

    return handler


def _not_looking(handling: Handling) -> None:
    """A handler that advances from an offset that the row does not have, and ignores the refusal."""
    handling.write(0)
    with contextlib.suppress(Fenced):
        handling.advance(0, 1)


def _is_refused(use: Callable[[], object], what: str) -> None:
    try:
        use()
    except Exception:  # noqa: BLE001  (the error may be of the driver or of the store)
        return
    pytest.fail(f"{what} in a transaction that has ended was not refused")

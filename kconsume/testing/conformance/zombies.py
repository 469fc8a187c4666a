"""The third level, with concurrent owners: a partition is claimed while a transaction of another owner is open on it.

A store may grant the claim at once and refuse the transaction, or let the claim wait until the transaction has ended.
So each test checks the rows that exist afterwards: the claim came before the commit or after it, never in the middle.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import wait
from dataclasses import replace
from typing import ClassVar, Literal, TypeVar

import pytest

from kconsume.errors import Fenced, StoreUnavailable
from kconsume.records import Partition
from kconsume.testing.conformance.harness import LONG, NOT_OURS, Bench, Owner, at_once, meanwhile

_T = TypeVar("_T")
Moment = Literal["begin", "write", "advance"]
Outcome = Literal["committed", "fenced", "unknown"]


class Zombies:
    """Part of `TransactionalSuite`."""

    rounds: ClassVar[int] = 50
    """How often a rival claims a partition while its owner works on it."""

    patience: ClassVar[float] = 5.0
    """Seconds that the test waits for the rival, before it lets the open transaction continue."""

    fence_shows_at_the_end: ClassVar[bool] = False
    """True if a transaction under a stale epoch may begin and be refused at its end, as pipelined ones may."""

    def test_a_transaction_does_not_begin_after_another_owner_has_claimed(self, bench: Bench) -> None:
        """The handler is not called, so that a zombie makes no outside calls."""
        first, *_ = bench.partitions
        bench.me.claim(first)
        bench.me.handle(first)
        bench.owner("rival").claim(first)
        self.does_not_begin(bench.me, first)
        assert bench.settled(first)

    def test_the_transaction_of_a_zombie_changes_nothing_even_if_it_began(self, bench: Bench) -> None:
        first, *_ = bench.partitions
        rival = bench.owner("rival")
        for owner, zombie in ((bench.me, rival), (rival, bench.me)):
            zombie.claim(first)
            owner.claim(first)
            with pytest.raises(Fenced):
                zombie.handle(first)
            owner.handle(first)
            with pytest.raises(Fenced):
                zombie.handle(first)
        assert bench.offsets() == {first: 2}
        assert bench.settled(first)

    @pytest.mark.parametrize("moment", ["begin", "write", "advance"])
    def test_a_claim_during_a_transaction_takes_effect_before_or_after_it(self, bench: Bench, moment: Moment) -> None:
        """A zombie is frozen after the begin, in its handler, or before the COMMIT. Then its handler returns normally.
        The effect of the record must exist once: from the zombie or from the new owner."""
        first, *_ = bench.partitions
        rival = bench.owner("rival")
        bench.me.claim(first)
        bench.me.handle(first)
        outcome, claimed = self._during(bench.me, first, lambda: rival.claim(first)[first].next_offset, moment)
        assert claimed in {"committed": [2], "fenced": [1], "unknown": [1, 2]}[outcome]
        rival.handle(first)
        assert bench.offsets() == {first: claimed + 1}
        assert bench.settled(first)

    def test_after_a_reclaim_the_transaction_under_the_old_epoch_has_ended_or_cannot_commit(self, bench: Bench) -> None:
        """If the outcome of our own commit is unknown, a reclaim makes the outcome final."""
        first, *_ = bench.partitions
        again = bench.owner("me")
        bench.me.claim(first)
        again.held.update(bench.me.held)
        outcome, found = self._during(bench.me, first, lambda: again.reclaim(first)[first].next_offset)
        assert found in {"committed": [1], "fenced": [0], "unknown": [0, 1]}[outcome]
        with pytest.raises(Fenced):
            bench.me.handle(first)
        again.handle(first)
        assert bench.offsets() == {first: found + 1}
        assert bench.settled(first)

    def test_a_reset_during_a_transaction_takes_effect_before_or_after_it(self, bench: Bench) -> None:
        """An offset that a user has set stays set, even if a transaction ran at that moment."""
        first, *_ = bench.partitions
        tool = bench.open()
        bench.me.claim(first, at=5)
        outcome, _ = self._during(bench.me, first, lambda: tool.reset(bench.group, {first: 3}))
        assert bench.offsets() == {first: 3}
        assert len(bench.effects()) in {"committed": [1], "fenced": [0], "unknown": [0, 1]}[outcome]
        bench.me.held[first] = replace(bench.me.held[first], next_offset=3)  # the offset alone would be accepted
        with pytest.raises(Fenced):
            bench.me.handle(first)

    def test_claims_during_commits_leave_each_effect_once(self, bench: Bench) -> None:
        """One owner works as fast as it can. The other claims the partition many times, and works too. At the end there
        are as many effects as the offset says, and none twice."""
        first, *_ = bench.partitions
        worker, rival, over = bench.owner("worker"), bench.owner("rival"), threading.Event()
        worker.claim(first)

        def work() -> None:
            while not over.is_set():
                if not _handles(worker, first):
                    worker.claim(first)

        def take() -> None:
            try:
                for _ in range(self.rounds):
                    rival.claim(first)
                    _handles(rival, first)
            finally:
                over.set()

        at_once(2, lambda each, _: (work, take)[each]())
        assert bench.offsets()[first] > 0, "no transaction committed"
        assert bench.settled(first)

    def test_two_owners_that_fence_each_other_end_with_one_owner_and_each_effect_once(self, bench: Bench) -> None:
        """Two consumers claim in turn, each while the other one works. The last claimant continues, and the other is
        refused."""
        first, *_ = bench.partitions
        one, other = bench.owner("one"), bench.owner("other")
        one.claim(first)
        for _ in range(6):
            self._during(one, first, lambda other=other: other.claim(first))  # type: ignore[misc]
            one, other = other, one
        for _ in range(3):
            one.handle(first)
            with pytest.raises(Fenced):
                other.handle(first)
        assert bench.rows()[first].owner == one.name
        assert bench.settled(first)

    def test_after_16_concurrent_claims_exactly_one_owner_can_commit(self, bench: Bench) -> None:
        first, *_ = bench.partitions
        rivals = [bench.owner(f"rival-{n}") for n in range(16)]

        def rival(each: int, gate: threading.Barrier) -> bool:
            gate.wait()
            rivals[each].claim(first)
            gate.wait()
            return _handles(rivals[each], first)

        committed = at_once(16, rival)
        highest = max(range(16), key=lambda each: rivals[each].held[first].epoch)
        assert [each for each, did in enumerate(committed) if did] == [highest]
        assert bench.offsets() == {first: 1}
        assert bench.settled(first)

    def test_a_claim_of_one_partition_does_not_end_the_transaction_on_another(self, bench: Bench) -> None:
        """A partial revoke: the new owner of one partition must not end the work on the others."""
        first, second, *_ = bench.partitions
        rival = bench.owner("rival")
        bench.me.claim(first, second)
        outcome, _ = self._during(bench.me, first, lambda: rival.claim(second))
        assert outcome == "committed"
        rival.handle(second)
        with pytest.raises(Fenced):
            bench.me.handle(second)
        assert bench.offsets() == {first: 1, second: 1}
        assert bench.settled(first)
        assert bench.settled(second)

    def does_not_begin(self, owner: Owner, partition: Partition, epoch: int | None = None) -> None:
        """Assert that the transaction is fenced before the handler is called, or at its end if
        `fence_shows_at_the_end` is true."""
        began = False

        def transact() -> None:
            nonlocal began
            with owner.transaction(partition, epoch) as handling:
                began = True
                handling.handle(owner.held[partition].next_offset)

        with pytest.raises(Fenced):
            transact()
        assert self.fence_shows_at_the_end or not began

    def _during(
        self, owner: Owner, partition: Partition, act: Callable[[], _T], moment: Moment = "write"
    ) -> tuple[Outcome, _T]:
        """The owner handles a record, and the rival acts at the given moment. In a store with one writer at a time the
        rival cannot finish before the owner. In any other store the owner waits for the rival."""
        at, now = owner.held[partition].next_offset, threading.Event()

        def at_the_moment() -> _T:
            assert now.wait(LONG)
            return act()

        with meanwhile(at_the_moment) as doing:

            def come_to(this: Moment) -> None:
                if this == moment:
                    now.set()
                    if owner.transactional.parallel != 1:
                        wait([doing], timeout=self.patience)

            try:
                with owner.transaction(partition) as handling:
                    come_to("begin")
                    handling.write(at)
                    come_to("write")
                    handling.advance(at, at + 1)
                    come_to("advance")
            except Fenced:
                return "fenced", doing.result(LONG)
            except StoreUnavailable:  # its connection was cut
                return "unknown", doing.result(LONG)
            finally:
                now.set()
            owner.held[partition] = replace(owner.held[partition], next_offset=at + 1)
            return "committed", doing.result(LONG)


def _handles(owner: Owner, partition: Partition) -> bool:
    try:
        owner.handle(partition)
    except NOT_OURS:
        return False
    return True

"""The second level, with concurrent owners: claims at the same moment, and many partitions at once.

Each owner is a thread with a store object of its own. The tests check the outcome, never an order.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import ClassVar

import pytest

from kconsume.backends.base import Position, Positions
from kconsume.errors import Fenced
from kconsume.records import Partition
from kconsume.testing.conformance.harness import Bench, Owner, at_once

RIVALS = 16


class FencingRaces:
    """Part of `FencedSuite`."""

    round_trips_more: ClassVar[int] = 10
    """If round trips are counted: how many more a claim of 1,000 partitions may take than a claim of one partition."""

    time_of_1000: ClassVar[float] = 1 / 3
    """If round trips are not counted: the largest time of one claim of 1,000 partitions, as a share of the time of
    1,000 claims of one partition. 50 ms are always allowed, because 1,000 round trips take longer."""

    def test_16_concurrent_claims_get_16_epochs_and_one_start_offset(self, bench: Bench) -> None:
        """With one epoch for two owners, both could write. If a second claim stored another start offset, the offset
        would change after the first owner has read it."""
        claims = _claim_at_once(bench, [bench.owner(f"rival-{n}") for n in range(RIVALS)])
        for partition in bench.partitions:
            assert len({c[partition].epoch for c in claims}) == RIVALS
            assert len({c[partition].next_offset for c in claims}) == 1
            assert [c[partition].owner for c in claims] == [f"rival-{n}" for n in range(RIVALS)]

    def test_after_16_concurrent_claims_exactly_one_owner_can_save(self, bench: Bench) -> None:
        """Only the owner of the highest epoch can save. It has fenced all others, even if they do not know it."""
        rivals = [bench.owner(f"rival-{n}") for n in range(RIVALS)]
        bench.move(dict.fromkeys(bench.partitions, 100))
        _claim_at_once(bench, rivals)
        for partition in bench.partitions:
            highest = max(rivals, key=lambda rival: rival.held[partition].epoch)
            assert [rival.name for rival in rivals if _saves(rival, partition)] == [highest.name]

    def test_a_claim_of_several_partitions_is_atomic(self, bench: Bench) -> None:
        """Two concurrent claims have the same order in all partitions. Otherwise each would own half and fence the
        other."""
        first, second, *_ = bench.partitions
        rivals, times = [bench.owner(f"rival-{n}") for n in range(8)], 20

        def claim(number: int, gate: threading.Barrier) -> list[tuple[int, int]]:
            wanted = [first, second] if number % 2 else [second, first]
            gate.wait()
            claims = [rivals[number].claim(*wanted) for _ in range(times)]
            return [(claimed[first].epoch, claimed[second].epoch) for claimed in claims]

        epochs = sorted(pair for pairs in at_once(8, claim) for pair in pairs)
        assert len({one for one, _ in epochs}) == len({other for _, other in epochs}) == 8 * times
        assert [other for _, other in epochs] == sorted(other for _, other in epochs)
        rows = bench.rows()
        assert rows[first].owner == rows[second].owner

    def test_two_owners_that_claim_in_turn_end_with_one_owner(self, bench: Bench) -> None:
        """Each claim takes effect at once, and ends the claim before it at once."""
        first, *_ = bench.partitions
        one, other = bench.owner("one"), bench.owner("other")
        other.claim(first)
        for turn in range(10):
            one.claim(first)
            with pytest.raises(Fenced):
                other.save({first: 1000 + turn})
            one.save({first: turn})
            one, other = other, one
        assert bench.rows()[first].owner == other.name
        assert bench.offsets() == {first: 9}

    def test_a_concurrent_reclaim_and_claim_leave_one_owner(self, bench: Bench) -> None:
        """A reclaim before the claim is fenced by the claim. A reclaim after the claim is refused. In both cases the
        rival owns the partition."""
        first, *_ = bench.partitions
        one, rival = bench.owner("one"), bench.owner("rival")
        for turn in range(20):
            one.claim(first)

            def act(number: int, gate: threading.Barrier) -> None:
                gate.wait()
                if number:
                    rival.claim(first)
                else:
                    _reclaims(one, first)

            at_once(2, act)
            assert one.held[first].epoch != rival.held[first].epoch
            assert [_saves(one, first, turn), _saves(rival, first, turn)] == [False, True]

    def test_1000_partitions_are_claimed_together(self, bench: Bench) -> None:
        """With one round trip for each partition, a large group would need minutes to start."""
        many = [Partition(f"{bench.subject.topic}-many", number) for number in range(1000)]
        if bench.subject.round_trips is not None:
            self._are_asked_for_together(bench, bench.subject.round_trips, many)
        else:
            self._take_less_than_one_by_one(bench, many)
        rows = bench.store.load(bench.group, many)
        assert rows == {p: bench.me.held[p] for p in many}
        bench.store.delete(bench.group)

    def _are_asked_for_together(self, bench: Bench, asked: Callable[[], int], many: Sequence[Partition]) -> None:
        def round_trips(partitions: Sequence[Partition]) -> int:
            before = asked()
            bench.me.claim(*partitions)
            return asked() - before

        bench.me.claim(bench.partitions[0])  # the first use of a store needs more round trips
        one = round_trips(many[:1])
        assert one > 0, "round_trips= of the Subject does not count"
        for times in ("without rows", "with rows"):
            assert round_trips(many) <= one + self.round_trips_more, times

    def _take_less_than_one_by_one(self, bench: Bench, many: Sequence[Partition]) -> None:
        bench.me.claim(*many)
        one_by_one = sum(_time_of_claim(bench, [p]) for p in many[::10]) * 10
        together = min(_time_of_claim(bench, many) for _ in range(3))
        assert together < max(one_by_one * self.time_of_1000, 0.05)


def _claim_at_once(bench: Bench, rivals: Sequence[Owner]) -> list[dict[Partition, Position]]:
    def claim(number: int, gate: threading.Barrier) -> dict[Partition, Position]:
        def start(missing: Sequence[Partition]) -> Positions:
            return {p: Position(number) for p in missing}

        gate.wait()
        return rivals[number].claim_from(start, *bench.partitions)

    return at_once(len(rivals), claim)


def _saves(owner: Owner, partition: Partition, further: int = 0) -> bool:
    try:
        owner.save({partition: 1000 + further})
    except Fenced:
        return False
    return True


def _reclaims(owner: Owner, partition: Partition) -> bool:
    try:
        owner.reclaim(partition)
    except Fenced:
        return False
    return True


def _time_of_claim(bench: Bench, partitions: Sequence[Partition]) -> float:
    began = time.perf_counter()
    bench.me.claim(*partitions)
    return time.perf_counter() - began

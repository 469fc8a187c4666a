"""The second level, with late claims: the generation of the Kafka group shows which claim is from the rightful owner.

After a frozen process or a slow store, a claim can arrive when another member owns the partition already. The row keeps
the generation under which the partition was claimed, and a claim of an earlier generation is refused.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping

import pytest

from kconsume.backends.base import ClaimTerms, Position, Refused
from kconsume.errors import Fenced
from kconsume.records import Partition
from kconsume.testing.conformance.harness import Bench, Owner, at_once

RIVALS = 16


class ClaimOrder:
    """Part of `FencedSuite`."""

    def test_a_claim_of_an_earlier_generation_is_refused_and_changes_nothing(self, bench: Bench) -> None:
        """Such a claim would fence the rightful owner, to whom the broker has assigned the partition."""
        first, *_ = bench.partitions
        rightful = bench.owner("rightful")
        rightful.claim_under(ClaimTerms(8), first)
        before = bench.rows()
        for generation in (7, 1):
            assert str(first) in _refusal(bench.me.claim_under(ClaimTerms(generation), first), first)
        assert bench.rows() == before
        rightful.save({first: 5})

    def test_a_claim_of_a_later_generation_is_granted_and_its_generation_is_kept(self, bench: Bench) -> None:
        first, *_ = bench.partitions
        for name, generation in (("one", 1), ("two", 2), ("three", 2**31 - 1)):
            claimed = bench.owner(name).claim_under(ClaimTerms(generation), first)[first]
            assert isinstance(claimed, Position)
            assert (claimed.owner, claimed.generation) == (name, generation)
            assert bench.rows()[first] == claimed

    def test_generations_are_compared_as_numbers(self, bench: Bench) -> None:
        """As text, 10 comes before 9."""
        first, *_ = bench.partitions
        bench.me.claim_under(ClaimTerms(9), first)
        assert isinstance(bench.owner("later").claim_under(ClaimTerms(10), first)[first], Position)
        assert _refusal(bench.me.claim_under(ClaimTerms(9), first), first)

    def test_in_the_same_generation_only_the_owner_may_claim_again(self, bench: Bench) -> None:
        """Two processes with one instance id have the same generation; the broker decides which of them is the
        member."""
        first, *_ = bench.partitions
        bench.me.claim_under(ClaimTerms(3), first)
        assert isinstance(bench.me.claim_under(ClaimTerms(3), first)[first], Position)
        before = bench.rows()
        assert _refusal(bench.owner("twin").claim_under(ClaimTerms(3), first), first)
        assert bench.rows() == before

    def test_after_a_reset_the_owner_may_claim_and_an_earlier_generation_is_refused(self, bench: Bench) -> None:
        """A seek by the owner is a reset, followed by a claim under the same generation."""
        first, *_ = bench.partitions
        bench.me.claim_under(ClaimTerms(3), first)
        bench.store.reset(bench.group, {first: 30})
        assert _refusal(bench.owner("late").claim_under(ClaimTerms(2), first), first)
        claimed = bench.me.claim_under(ClaimTerms(3), first)[first]
        assert isinstance(claimed, Position)
        assert claimed.next_offset == 30

    def test_a_row_without_a_generation_may_be_claimed_under_any_generation(self, bench: Bench) -> None:
        """Such a row was claimed by a process of an earlier version, or by a process without a group."""
        first, *_ = bench.partitions
        assert bench.me.claim(first)[first].generation is None
        assert isinstance(bench.owner("member").claim_under(ClaimTerms(1), first)[first], Position)

    def test_a_claim_without_terms_is_granted_and_keeps_the_generation_of_the_row(self, bench: Bench) -> None:
        first, *_ = bench.partitions
        bench.owner("member").claim_under(ClaimTerms(5), first)
        assert bench.me.claim(first)[first].generation == 5
        assert bench.me.reclaim(first)[first].generation == 5
        assert _refusal(bench.owner("late").claim_under(ClaimTerms(4), first), first)

    def test_a_claim_has_a_separate_result_for_each_partition(self, bench: Bench) -> None:
        """A partition that another member owns must not stop the others."""
        first, second, third, fourth = bench.partitions
        rightful = bench.owner("rightful")
        rightful.claim_under(ClaimTerms(8), second)
        answers = bench.me.claim_under(ClaimTerms(7), third, second, first)
        assert {p for p, answer in answers.items() if isinstance(answer, Refused)} == {second}
        assert set(answers) == {first, second, third}
        bench.me.save({first: 5, third: 6})
        rightful.save({second: 7})
        assert bench.offsets() == {first: 5, second: 7, third: 6}
        assert fourth not in bench.rows()

    def test_a_claim_with_epochs_compares_only_the_epochs(self, bench: Bench) -> None:
        """After a group was deleted, and on another cluster, generations begin again at a low number. The epochs are
        enough, because the broker has confirmed the claimant after the epochs were read."""
        first, *_ = bench.partitions
        bench.owner("before").claim_under(ClaimTerms(40), first)
        epoch = bench.rows()[first].epoch
        claimed = bench.me.claim_under(ClaimTerms(2, {first: epoch}), first)[first]
        assert isinstance(claimed, Position)
        assert (claimed.owner, claimed.generation) == ("me", 2)
        bench.me.save({first: 5})

    def test_a_claim_with_epochs_is_refused_if_another_owner_has_claimed_since(self, bench: Bench) -> None:
        first, second, *_ = bench.partitions
        epochs = {p: position.epoch for p, position in bench.me.claim(first, second).items()}
        bench.owner("rival").claim_under(ClaimTerms(3), first)
        before = bench.rows()
        answers = bench.owner("confirmed").claim_under(ClaimTerms(9, epochs), first, second)
        assert _refusal(answers, first)
        assert isinstance(answers[second], Position)
        assert bench.rows()[first] == before[first]

    def test_a_claim_with_epochs_does_not_create_a_missing_row(self, bench: Bench) -> None:
        """The row was deleted after its epoch was read. A later claim without epochs calls `start`."""
        first, *_ = bench.partitions
        terms = ClaimTerms(9, {first: 0})
        answers = bench.me.claim_under(terms, first, start=lambda _: pytest.fail("`start` was called"))
        assert _refusal(answers, first)
        assert bench.rows() == {}

    def test_after_16_concurrent_claims_the_latest_generation_owns_the_partitions(self, bench: Bench) -> None:
        """Even if no row exists yet, and each claim tries to create the row."""
        rivals = [bench.owner(f"rival-{n}") for n in range(RIVALS)]

        def claim(number: int, gate: threading.Barrier) -> Mapping[Partition, Position | Refused]:
            gate.wait()
            return rivals[number].claim_under(ClaimTerms(number + 1))

        at_once(RIVALS, claim)
        for partition, row in bench.rows().items():
            assert (row.owner, row.generation) == (f"rival-{RIVALS - 1}", RIVALS)
            granted = sorted(
                (rival.held[partition].epoch, _generation(rival, partition))
                for rival in rivals
                if partition in rival.held
            )
            assert [generation for _, generation in granted] == sorted(generation for _, generation in granted)
        assert len(bench.rows()) == len(bench.partitions)


def _generation(rival: Owner, partition: Partition) -> int:
    return rival.held[partition].generation or 0


def _refusal(answers: Mapping[Partition, Position | Refused], partition: Partition) -> str:
    """The message of the refusal. Fails if the partition was granted."""
    answer = answers[partition]
    assert isinstance(answer, Refused), answer
    assert isinstance(answer.cause, Fenced)
    return str(answer.cause)

"""The second level: a store that records who owns a partition, by an epoch that only grows.

A fenced owner is a zombie: it may not know that it was fenced, and must not be able to change anything. `fencing_races`
examines owners that act at the same moment, `claim_order` examines claims that come too late.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from kconsume.backends.base import OffsetStore, Position, Positions
from kconsume.backends.capabilities import ALWAYS, NamedStore, capabilities_of
from kconsume.errors import Fenced, KconsumeError
from kconsume.records import Partition
from kconsume.testing.conformance.claim_order import ClaimOrder
from kconsume.testing.conformance.fencing_races import FencingRaces
from kconsume.testing.conformance.harness import Bench
from kconsume.testing.conformance.offsets import ODD_NAMES, OffsetsSuite

NAMES_THAT_MEET = [
    (("a:b", "c"), ("a", "b:c")),
    (("a", "b"), ("A", "b")),
    (("a", "b"), ("a ", "b")),
    (("a", "\u00e9"), ("a", "e\u0301")),
]
"""Two pairs of group and topic: different names that a joined key or a lenient comparison would confuse."""


class FencedSuite(ClaimOrder, FencingRaces, OffsetsSuite):
    """Subclass it as `Test…`, with a fixture `subject` that returns a `Subject`."""

    # The claim

    def test_every_claim_raises_the_epoch_even_by_the_same_owner(self, bench: Bench) -> None:
        """A process that lost a partition and got it back may still have old work running."""
        epochs = [bench.me.claim()[bench.partitions[2]].epoch for _ in range(5)]
        assert epochs == sorted(set(epochs))
        assert epochs[0] > 0

    def test_a_claim_returns_the_position_and_records_the_owner(self, bench: Bench) -> None:
        first, second, *_ = bench.partitions
        bench.move({first: 7, second: 9}, topic_id="known")
        claimed = bench.owner("host:1").claim(second, first)
        assert {p: position.next_offset for p, position in claimed.items()} == {first: 7, second: 9}
        assert {position.owner for position in claimed.values()} == {"host:1"}
        assert {position.topic_id for position in claimed.values()} == {"known"}
        assert bench.store.load(bench.group, [first, second]) == claimed

    def test_start_is_called_only_for_missing_rows_and_its_offsets_are_stored(self, bench: Bench) -> None:
        """If `start="latest"` were resolved again after each crash, records in between would be skipped."""
        first, second, third, _ = bench.partitions
        bench.move({second: 5})
        asked: list[Partition] = []

        def start(missing: Sequence[Partition]) -> Positions:
            asked.extend(missing)
            return {p: Position(100 + p.number, topic_id="id", leader_epoch=3) for p in missing}

        claimed = bench.me.claim_from(start, third, second, first)
        assert sorted(asked) == [first, third]
        assert {p: position.next_offset for p, position in claimed.items()} == {first: 100, second: 5, third: 102}
        assert (claimed[first].topic_id, claimed[first].leader_epoch) == ("id", 3)
        assert bench.offsets() == {first: 100, second: 5, third: 102}

    def test_start_is_not_called_when_no_row_is_missing(self, bench: Bench) -> None:
        """`start` sends requests to Kafka. In an app with `start="error"` it raises an error."""
        bench.me.claim()
        bench.me.claim_from(lambda _: pytest.fail("`start` was called without need"), *bench.partitions)

    def test_a_claim_whose_start_raises_claims_nothing(self, bench: Bench) -> None:
        """Otherwise the owner would be fenced by a claimant that does not take over."""
        first, second, *_ = bench.partitions
        before = bench.me.claim(first)

        def start(_: Sequence[Partition]) -> Positions:
            raise LookupError("the cluster does not answer")

        with pytest.raises(LookupError):
            bench.owner("rival").claim_from(start, first, second)
        assert bench.rows() == before

    def test_a_claim_of_no_partitions_returns_nothing(self, bench: Bench) -> None:
        assert bench.me.claim_from(lambda _: pytest.fail("`start` was called for no partition")) == {}

    def test_a_delete_while_start_runs_raises_only_a_kconsume_error(self, bench: Bench) -> None:
        """A user deletes the group while a consumer claims it."""
        first, second, *_ = bench.partitions
        bench.me.claim(first)

        def start(missing: Sequence[Partition]) -> Positions:
            bench.open().delete(bench.group)
            return {p: Position(0) for p in missing}

        with contextlib.suppress(KconsumeError):
            bench.me.claim_from(start, first, second)

    def test_a_claim_of_some_partitions_does_not_change_the_others(self, bench: Bench) -> None:
        """After a partial revoke a consumer keeps the other partitions. The claim of the new owner must not fence it
        there."""
        first, second, third, fourth = bench.partitions
        mine = bench.me.claim()
        bench.owner("rival").claim(second, third)
        assert {p: row for p, row in bench.rows().items() if p in (first, fourth)} == {
            p: mine[p] for p in (first, fourth)
        }
        bench.me.save({first: 5, fourth: 6})
        with pytest.raises(Fenced):
            bench.me.save({second: 5})
        assert bench.offsets() == {first: 5, second: 0, third: 0, fourth: 6}

    def test_a_claim_in_one_group_does_not_fence_the_owner_in_another_group(self, bench: Bench) -> None:
        first, *_ = bench.partitions
        bench.me.claim(first)
        bench.of_group(f"other-{bench.group}").me.claim(first)
        bench.me.save({first: 5})
        assert bench.offsets() == {first: 5}

    # The fence

    def test_a_stale_epoch_is_refused_and_changes_nothing(self, bench: Bench) -> None:
        """The zombie: a process that was frozen while another claimed its partition."""
        first, *_ = bench.partitions
        bench.me.claim(first)
        bench.owner("rival").claim(first)
        before = bench.rows()
        with pytest.raises(Fenced) as refused:
            bench.me.save({first: 50})
        assert str(first) in str(refused.value)
        assert bench.rows() == before

    def test_an_epoch_that_was_never_given_out_is_refused(self, bench: Bench) -> None:
        """A fence that compares with 'less than' would accept a wrong epoch."""
        first, *_ = bench.partitions
        mine = bench.me.claim(first)[first]
        for epoch in (mine.epoch + 1, mine.epoch - 1, 0, -1):
            with pytest.raises(Fenced):
                bench.store.save(bench.group, {first: replace(mine, epoch=epoch, next_offset=50)})
        assert bench.offsets() == {first: 0}

    def test_a_save_without_a_row_is_refused_and_creates_none(self, bench: Bench) -> None:
        """If a user deleted the row, or the database lost it, a save must not create it again."""
        first, *_ = bench.partitions
        for epoch in (0, 1):
            with pytest.raises(Fenced):
                bench.store.save(bench.group, {first: Position(5, epoch)})
        assert bench.rows() == {}

    def test_an_offset_that_would_go_backwards_is_refused(self, bench: Bench) -> None:
        first, *_ = bench.partitions
        bench.move({first: 10})
        bench.me.claim(first)
        with pytest.raises(Fenced):
            bench.me.save({first: 9})
        assert bench.offsets() == {first: 10}

    def test_a_save_is_refused_if_the_row_is_not_at_the_previous_offset(self, bench: Bench) -> None:
        """A database that failed over to an earlier state has the owner's epoch, but not the owner's last saves. A save
        on top of the lost saves would pass over their records."""
        first, second, *_ = bench.partitions
        bench.move({first: 10, second: 10})
        mine = bench.me.claim(first, second)
        before = bench.rows()
        for previous in (7, 13):
            ahead = replace(mine[first], next_offset=15, previous=previous)
            with pytest.raises(Fenced):
                bench.store.save(bench.group, {second: replace(mine[second], next_offset=11), first: ahead})
        assert bench.rows() == before
        bench.store.save(bench.group, {first: replace(mine[first], next_offset=15, previous=10)})
        assert bench.offsets() == {first: 15, second: 10}

    def test_a_save_whose_reply_was_lost_may_be_repeated(self, bench: Bench) -> None:
        first, *_ = bench.partitions
        mine = bench.me.claim(first)[first]
        for _ in range(2):
            bench.store.save(bench.group, {first: replace(mine, next_offset=5, previous=0)})
        assert bench.offsets() == {first: 5}

    def test_a_save_is_all_or_none(self, bench: Bench) -> None:
        """A caller that repeats a save does not know which partitions an incomplete save has stored."""
        first, second, third, fourth = bench.partitions
        bench.me.claim()
        bench.owner("rival").claim(third)
        before = bench.rows()
        for order in ([first, third, fourth], [third, first], [second, fourth, third]):
            with pytest.raises(Fenced):
                bench.me.save(dict.fromkeys(order, 50))
            assert bench.rows() == before

    # Reclaim

    def test_a_reclaim_raises_the_epoch_and_reads_the_position(self, bench: Bench) -> None:
        """After a COMMIT whose reply was lost, the stored offset shows whether it happened."""
        first, second, *_ = bench.partitions
        bench.move({first: 7, second: 9}, topic_id="known")
        before = dict(bench.me.held)
        claimed = bench.me.reclaim(second, first)
        assert {p: position.next_offset for p, position in claimed.items()} == {first: 7, second: 9}
        assert all(claimed[p].epoch > before[p].epoch for p in (first, second))
        assert {(position.owner, position.topic_id) for position in claimed.values()} == {("me", "known")}
        assert bench.store.load(bench.group, [first, second]) == claimed

    def test_after_a_reclaim_only_the_new_epoch_can_save(self, bench: Bench) -> None:
        """Statements under the old epoch may still arrive late, from a connection that was cut."""
        first, *_ = bench.partitions
        old = bench.me.claim(first)[first]
        bench.me.reclaim(first)
        with pytest.raises(Fenced):
            bench.store.save(bench.group, {first: replace(old, next_offset=50)})
        bench.me.save({first: 3})
        assert bench.offsets() == {first: 3}

    def test_a_reclaim_after_the_claim_of_another_owner_is_refused_and_raises_no_epoch(self, bench: Bench) -> None:
        """A zombie that wakes up and reclaims would take the partition from its owner."""
        first, second, third, _ = bench.partitions
        bench.me.claim()
        rival = bench.owner("rival")
        rival.claim(second)
        before = bench.rows()
        for order in ([first, second, third], [second, first], [third, second], [second]):
            with pytest.raises(Fenced):
                bench.me.reclaim(*order)
            assert bench.rows() == before
        rival.save({second: 5})

    def test_a_reclaim_without_a_row_is_refused_and_creates_none(self, bench: Bench) -> None:
        first, second, *_ = bench.partitions
        bench.me.claim(first)
        before = bench.rows()
        with pytest.raises(Fenced):
            bench.me.fenced.reclaim(bench.group, {first: bench.me.held[first].epoch, second: 0}, "me")
        assert bench.rows() == before

    def test_a_reclaim_of_no_partitions_returns_nothing(self, bench: Bench) -> None:
        assert bench.me.fenced.reclaim(bench.group, {}, "me") == {}

    # Resets and deletes by users

    def test_a_reset_raises_the_epoch_and_fences_a_running_owner(self, bench: Bench) -> None:
        """Otherwise the next save of a running consumer would silently undo the reset."""
        first, *_ = bench.partitions
        mine = bench.me.claim(first)[first]
        bench.store.reset(bench.group, {first: 3})
        row = bench.rows()[first]
        assert row.epoch > mine.epoch
        assert row.owner is None
        with pytest.raises(Fenced):
            bench.me.save({first: 50})
        with pytest.raises(Fenced):
            bench.me.reclaim(first)
        assert bench.rows()[first] == row
        assert bench.me.claim(first)[first].epoch > row.epoch

    def test_the_reset_epoch_changes_at_a_reset_and_not_at_a_claim_or_save(self, bench: Bench) -> None:
        """`reset_epoch` changes at a reset. Otherwise a record that a user wants handled again would be dropped as a
        repeat."""
        first, *_ = bench.partitions
        begun = bench.me.claim(first)[first].reset_epoch
        assert bench.me.claim(first)[first].reset_epoch == begun, "a claim changed reset_epoch"
        bench.me.save({first: 50})
        assert bench.rows()[first].reset_epoch == begun, "a save changed reset_epoch"
        bench.store.reset(bench.group, {first: 3})
        reset = bench.me.claim(first)[first].reset_epoch
        assert reset > begun
        bench.store.delete(bench.group)
        made_anew = bench.me.claim(first)[first].reset_epoch
        assert made_anew > reset
        bench.store.delete(bench.group, [first])
        bench.store.reset(bench.group, {first: 3})
        assert bench.rows()[first].reset_epoch > made_anew

    def test_a_reset_without_a_row_creates_one_for_the_next_claim(self, bench: Bench) -> None:
        first, *_ = bench.partitions
        bench.store.reset(bench.group, {first: 30})
        assert bench.me.claim(first, at=5)[first].next_offset == 30

    def test_a_zombie_from_before_a_delete_is_fenced_after_the_row_is_created_again(self, bench: Bench) -> None:
        """No epoch may be used twice: epochs that start again after a delete would reach the epoch of the zombie."""
        first, *_ = bench.partitions
        bench.me.claim(first)
        bench.store.delete(bench.group)
        bench.owner("rival").claim(first)
        with pytest.raises(Fenced):
            bench.me.save({first: 50})
        bench.store.delete(bench.group, [first])
        bench.store.reset(bench.group, {first: 0})
        with pytest.raises(Fenced):
            bench.me.save({first: 50})
        assert bench.offsets() == {first: 0}

    def test_after_a_delete_the_owner_is_fenced(self, bench: Bench) -> None:
        first, *_ = bench.partitions
        bench.me.claim(first)
        bench.store.delete(bench.group)
        with pytest.raises(Fenced):
            bench.me.save({first: 50})
        with pytest.raises(Fenced):
            bench.me.reclaim(first)
        assert bench.rows() == {}

    # Identity and deletions, for a store that declares `named`

    def test_all_store_objects_on_one_place_have_the_same_identity(self, bench: Bench) -> None:
        """Commits to the Kafka group name the identity of the store. With several identities, each start of an app
        would look like a start on another store."""
        named = _named(bench.store)
        name = named.identity()
        assert name
        assert [named.identity(), _named(bench.open()).identity()] == [name, name]
        bench.store.delete(bench.group)
        assert named.identity() == name

    def test_a_deleted_row_is_distinguished_from_a_lost_row(self, bench: Bench) -> None:
        named, (first, second, *others) = _named(bench.store), bench.partitions
        assert named.deleted(bench.group, bench.partitions) == {}
        epoch = max(bench.me.claim(first)[first].epoch for _ in range(2))
        bench.me.claim(second)
        bench.store.delete(bench.group, [first])
        assert named.deleted(bench.group, bench.partitions) == {first: epoch}
        assert named.deleted(f"{bench.group}-2", bench.partitions) == {}
        made = bench.me.claim(first)[first].epoch
        assert named.deleted(bench.group, [first])[first] < made, "the new row counts as deleted"
        bench.store.delete(bench.group)
        assert named.deleted(bench.group, [first, second])[first] == made
        assert named.deleted(bench.group, others) == dict.fromkeys(others, ALWAYS)

    @pytest.mark.parametrize("chosen", ["the group", "partitions"])
    def test_the_delete_of_a_missing_row_is_recorded_until_the_row_is_created(self, bench: Bench, chosen: str) -> None:
        """The error for lost rows tells the user to delete the rows, so a delete of missing rows must be recorded."""
        named, (first, second, *_) = _named(bench.store), bench.partitions
        bench.store.delete(bench.group, None if chosen == "the group" else [first, second])
        assert named.deleted(bench.group, [first, second]) == dict.fromkeys((first, second), ALWAYS)
        made = bench.me.claim(first)[first].epoch
        bench.store.reset(bench.group, {second: 3})
        left = named.deleted(bench.group, [first, second])
        assert left[first] < made
        assert left[second] < bench.rows()[second].epoch

    # The row

    @pytest.mark.parametrize("name", ODD_NAMES)
    def test_a_topic_may_have_any_name(self, bench: Bench, name: str) -> None:
        odd, first = Partition(name, 0), bench.partitions[0]
        bench.move({odd: 7, first: 1})
        assert bench.store.load(bench.group, [odd])[odd].next_offset == 7
        bench.store.delete(bench.group, [odd])
        assert bench.store.load(bench.group, [odd]) == {}
        assert bench.offsets() == {first: 1}

    @pytest.mark.parametrize(("one", "other"), NAMES_THAT_MEET)
    def test_similar_names_have_separate_rows(self, bench: Bench, one: tuple[str, str], other: tuple[str, str]) -> None:
        """If names are joined to a key, or compared leniently, one group can fence another."""
        for (group, topic), offset in ((one, 1), (other, 2)):
            bench.of_group(f"{bench.group}{group}").move({Partition(topic, 0): offset})
        for (group, topic), offset in ((one, 1), (other, 2)):
            bench_of = bench.of_group(f"{bench.group}{group}")
            assert bench_of.store.load(bench_of.group, [Partition(topic, 0)])[Partition(topic, 0)].next_offset == offset

    def test_a_row_has_the_time_of_its_last_change(self, bench: Bench) -> None:
        """The time has a time zone. The clock may be that of the server, so the test allows a difference of a
        minute."""
        first, *_ = bench.partitions
        steps: list[Callable[[], object]] = [
            lambda: bench.me.claim(first),
            lambda: bench.me.reclaim(first),
            lambda: bench.move({first: 7}),
            lambda: bench.store.reset(bench.group, {first: 3}),
        ]
        last = datetime.min.replace(tzinfo=UTC)
        for step in steps:
            step()
            moment = bench.rows()[first].updated_at
            assert moment is not None
            assert abs(moment - datetime.now(UTC)) < timedelta(minutes=1)
            assert moment >= last
            last = moment

    def methods(self, bench: Bench) -> Mapping[str, Callable[[OffsetStore], object]]:
        first, *_ = bench.partitions
        return {
            **super().methods(bench),
            "claim": lambda _: bench.me.claim(first),
            "reclaim": lambda _: bench.me.reclaim(first),
        }


def _named(store: OffsetStore) -> NamedStore:
    named = capabilities_of(store).named
    if named is None:
        pytest.skip("the store does not declare `named`, so a loss of its rows is not noticed")
    return named

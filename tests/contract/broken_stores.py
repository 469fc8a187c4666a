"""Stores that are broken on purpose, each in one way, and the tests of the suites that must notice.

A test that no broken store can fail guards nothing: `test_conformance.py` runs every pair that is listed here, and
names the tests that have none. What is broken is the guard that a person could forget, not the whole.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, NamedTuple, TypeVar

from kconsume.backends import MemoryStore, Position
from kconsume.backends.base import ClaimTerms, Positions, Refused, Start
from kconsume.backends.capabilities import ALWAYS, Capabilities
from kconsume.backends.claim import ClaimResults, granted
from kconsume.errors import Fenced, StoreUnavailable
from kconsume.records import Partition
from kconsume.testing.conformance import FencedSuite as F
from kconsume.testing.conformance import OffsetsSuite as L
from kconsume.testing.conformance import Subject
from kconsume.testing.conformance import TransactionalSuite as T
from kconsume.testing.conformance.offsets import PARTS
from tests.contract.queue_store import QueueStore, subject_of

Rows = dict[Partition, Position]
Promise = Callable[..., None]
Case = tuple[object, ...]
"""The arguments of a test that has several sets of them."""


class Broken(Exception):
    """What a broken store raises where a sound one raises nothing."""


class Control(NamedTuple):
    store: type[MemoryStore]
    promise: Promise
    case: Case | None = None
    """In which it must fail; None for any."""

    def __str__(self) -> str:
        return f"{self.store.__name__}-{self.promise.__name__}{'' if self.case is None else self.case}"

    def subject(self) -> Subject:
        if self.store is Lonely:
            return Subject(open=Lonely)
        if issubclass(self.store, QueueStore):
            return subject_of(self.store())
        store = self.store()
        if isinstance(store, Counted):
            return Subject(open=lambda: store, round_trips=lambda: store.asked)
        return Subject(open=lambda: store)


CONTROLS: list[Control] = []
_S = TypeVar("_S", bound=type[MemoryStore])


def fails(*promises: Promise) -> Callable[[_S], _S]:
    """The tests that must not pass on this store."""

    def listed(store: _S) -> _S:
        CONTROLS.extend(Control(store, promise) for promise in promises)
        return store

    return listed


def fails_in(case: object, *promises: Promise) -> Callable[[_S], _S]:
    """The same, for one case of those tests. One argument stands for itself."""
    only = case if isinstance(case, tuple) else (case,)

    def listed(store: _S) -> _S:
        CONTROLS.extend(Control(store, promise, only) for promise in promises)
        return store

    return listed


# Offsets


@fails(L.test_load_omits_a_partition_without_a_row)
class Inventive(MemoryStore):
    def load(self, group: str, partitions: Iterable[Partition]) -> Rows:
        wanted = list(partitions)
        return {**dict.fromkeys(wanted, Position(0)), **super().load(group, wanted)}


@fails(L.test_a_saved_offset_is_loaded, L.test_the_same_offset_may_be_saved_again)
class Forgetful(MemoryStore):
    def save(self, group: str, positions: Positions) -> None: ...


@fails(L.test_a_saved_offset_is_loaded_by_another_store_object)
class Lonely(MemoryStore):
    """Keeps its rows in the object, where two objects are meant to be on one place."""


@fails(L.test_several_store_objects_may_make_the_first_use_at_once)
class MakesItsTablesOnce(MemoryStore):
    made = False

    def load(self, group: str, partitions: Iterable[Partition]) -> Rows:
        if not self.made:
            time.sleep(0.05)  # all have looked, and found nothing
            if self.made:
                raise Broken("the table is there already")
            self.made = True
        return super().load(group, partitions)


@fails(L.test_load_returns_only_the_requested_partitions)
class Generous(MemoryStore):
    def load(self, group: str, partitions: Iterable[Partition]) -> Rows:
        list(partitions)
        return {p: row for (g, p), row in self._rows.items() if g == group}


@fails(L.test_load_and_save_of_no_partitions_do_nothing, F.test_a_reclaim_of_no_partitions_returns_nothing)
class EmptyIsASyntaxError(MemoryStore):
    def load(self, group: str, partitions: Iterable[Partition]) -> Rows:
        if not (wanted := list(partitions)):
            raise Broken("in ()")
        return super().load(group, wanted)

    def reclaim(self, group: str, epochs: Mapping[Partition, int], owner: str) -> Rows:
        if not epochs:
            raise Broken("in ()")
        return super().reclaim(group, epochs, owner)


@fails_in(2**31, L.test_an_offset_has_64_bits)
class ThirtyTwoBits(MemoryStore):
    def save(self, group: str, positions: Positions) -> None:
        super().save(group, {p: replace(row, next_offset=row.next_offset & 0x7FFFFFFF) for p, row in positions.items()})


@fails_in(2**62, L.test_an_offset_has_64_bits)
class Digits18(MemoryStore):
    """A column of text, as wide as somebody thought that it must be."""

    def save(self, group: str, positions: Positions) -> None:
        cut = {p: replace(row, next_offset=int(str(row.next_offset)[:18])) for p, row in positions.items()}
        super().save(group, cut)


@fails_in(2**53 + 1, L.test_an_offset_has_64_bits)
class Float(MemoryStore):
    def save(self, group: str, positions: Positions) -> None:
        super().save(group, {p: replace(row, next_offset=int(float(row.next_offset))) for p, row in positions.items()})


@fails(
    L.test_an_offset_never_goes_backwards,
    F.test_an_offset_that_would_go_backwards_is_refused,
    F.test_a_stale_epoch_is_refused_and_changes_nothing,
    F.test_an_epoch_that_was_never_given_out_is_refused,
    F.test_a_save_is_refused_if_the_row_is_not_at_the_previous_offset,
    F.test_a_save_is_all_or_none,
    F.test_a_reset_raises_the_epoch_and_fences_a_running_owner,
    F.test_a_claim_of_some_partitions_does_not_change_the_others,
    F.test_after_a_reclaim_only_the_new_epoch_can_save,
    F.test_after_16_concurrent_claims_exactly_one_owner_can_save,
    F.test_two_owners_that_claim_in_turn_end_with_one_owner,
    F.test_a_concurrent_reclaim_and_claim_leave_one_owner,
)
class Careless(MemoryStore):
    """The fence is off: a save is checked for nothing."""

    def _check(self, group: str, partition: Partition, position: Position) -> None: ...


@fails(F.test_a_save_is_refused_if_the_row_is_not_at_the_previous_offset)
class OverTheTail(MemoryStore):
    """A save only looks whether it goes forward."""

    def _check(self, group: str, partition: Partition, position: Position) -> None:
        super()._check(group, partition, replace(position, previous=None))


@fails(F.test_a_save_whose_reply_was_lost_may_be_repeated)
class OnlyOnce(MemoryStore):
    def _check(self, group: str, partition: Partition, position: Position) -> None:
        super()._check(group, partition, position)
        if position.previous is not None and self._rows[group, partition].next_offset != position.previous:
            raise Fenced("it is not where it was")


@fails(L.test_the_same_offset_may_be_saved_again)
class OnlyForward(MemoryStore):
    def _check(self, group: str, partition: Partition, position: Position) -> None:
        super()._check(group, partition, replace(position, next_offset=position.next_offset - 1))


@fails(L.test_a_save_that_is_not_stored_raises_an_error, F.test_a_stale_epoch_is_refused_and_changes_nothing)
class Silent(MemoryStore):
    def save(self, group: str, positions: Positions) -> None:
        try:
            super().save(group, positions)
        except Fenced:
            return


@fails(L.test_a_reset_can_set_any_offset)
class NeverBack(MemoryStore):
    def reset(self, group: str, offsets: Mapping[Partition, int]) -> None:
        rows = self.load(group, offsets)
        super().reset(group, {p: max(at, rows.get(p, Position(0)).next_offset) for p, at in offsets.items()})


@fails(L.test_after_a_reset_claim_and_save_continue_from_the_new_offset)
class HighWater(MemoryStore):
    highest = 0

    def save(self, group: str, positions: Positions) -> None:
        for row in positions.values():
            if row.next_offset < self.highest:
                raise Fenced("it was further already")
            self.highest = row.next_offset
        super().save(group, positions)


@fails(L.test_delete_removes_the_rows_of_one_group_only, L.test_the_groups_that_have_rows_are_listed_sorted)
class Hoarder(MemoryStore):
    def delete(self, group: str, partitions: Iterable[Partition] | None = None) -> None: ...


@fails(L.test_delete_removes_the_rows_of_one_group_only)
class Thorough(MemoryStore):
    def delete(self, group: str, partitions: Iterable[Partition] | None = None) -> None:
        self._rows.clear()


@fails(L.test_deleting_a_missing_group_is_no_error)
class Pedantic(MemoryStore):
    def delete(self, group: str, partitions: Iterable[Partition] | None = None) -> None:
        if group not in self.groups():
            raise Broken("no such group")
        super().delete(group, partitions)


@fails(L.test_delete_removes_only_the_given_partitions_or_raises)
class WholeGroup(MemoryStore):
    def delete(self, group: str, partitions: Iterable[Partition] | None = None) -> None:
        super().delete(group)


@fails(L.test_the_groups_that_have_rows_are_listed_sorted)
class Unsorted(MemoryStore):
    def groups(self) -> list[str]:
        return super().groups()[::-1]


class Renamed(MemoryStore):
    """Keeps rows under other names than those it is given."""

    def name(self, group: str) -> str:
        return group

    def topic(self, partition: Partition) -> Partition:
        return partition

    def load(self, group: str, partitions: Iterable[Partition]) -> Rows:
        name, wanted = self.name(group), list(partitions)
        rows = super().load(name, [self.topic(p) for p in wanted])
        return {p: rows[self.topic(p)] for p in wanted if self.topic(p) in rows}

    def save(self, group: str, positions: Positions) -> None:
        name = self.name(group)
        super().save(name, {self.topic(p): row for p, row in positions.items()})

    def claim(
        self, group: str, partitions: Sequence[Partition], owner: str, start: Start, terms: ClaimTerms | None = None
    ) -> ClaimResults:
        name = self.name(group)
        back = {self.topic(p): p for p in partitions}

        def renamed(missing: Sequence[Partition]) -> Positions:
            starts = start([back[p] for p in missing])
            return {p: starts[back[p]] for p in missing}

        return {back[p]: row for p, row in super().claim(name, list(back), owner, renamed, terms).items()}

    def delete(self, group: str, partitions: Iterable[Partition] | None = None) -> None:
        name = self.name(group)
        super().delete(name, None if partitions is None else [self.topic(p) for p in partitions])


@fails(
    L.test_groups_do_not_see_each_other_s_offsets,
    F.test_a_claim_in_one_group_does_not_fence_the_owner_in_another_group,
)
class OneForAll(Renamed):
    def name(self, group: str) -> str:
        return "the only group"


@fails(
    L.test_a_topic_s_id_is_kept_with_the_offset,
    L.test_an_unknown_topic_id_never_overwrites_a_known_one,
    L.test_a_known_topic_id_overwrites_an_unknown_one,
    L.test_a_recreated_topic_raises_an_error_and_keeps_the_offset,
)
class NoTopicIds(MemoryStore):
    def save(self, group: str, positions: Positions) -> None:
        super().save(group, {p: replace(row, topic_id=None) for p, row in positions.items()})

    def claim(
        self, group: str, partitions: Sequence[Partition], owner: str, start: Start, terms: ClaimTerms | None = None
    ) -> ClaimResults:
        without = lambda ps: {p: replace(row, topic_id=None) for p, row in start(ps).items()}  # noqa: E731
        return super().claim(group, partitions, owner, without, terms)


@fails(L.test_an_unknown_topic_id_never_overwrites_a_known_one)
class LastTopicId(MemoryStore):
    def save(self, group: str, positions: Positions) -> None:
        super().save(group, positions)
        for p, row in positions.items():
            self._rows[group, p] = replace(self._rows[group, p], topic_id=row.topic_id)


@fails(
    L.test_the_leader_epoch_is_kept_with_the_offset,
    F.test_start_is_called_only_for_missing_rows_and_its_offsets_are_stored,
)
class NoLeaderEpochs(MemoryStore):
    def save(self, group: str, positions: Positions) -> None:
        super().save(group, {p: replace(row, leader_epoch=None) for p, row in positions.items()})

    def claim(
        self, group: str, partitions: Sequence[Partition], owner: str, start: Start, terms: ClaimTerms | None = None
    ) -> ClaimResults:
        without = lambda ps: {p: replace(row, leader_epoch=None) for p, row in start(ps).items()}  # noqa: E731
        return super().claim(group, partitions, owner, without, terms)


@fails(L.test_a_reset_removes_the_leader_epoch)
class KeepsTheLeaderEpoch(MemoryStore):
    def reset(self, group: str, offsets: Mapping[Partition, int]) -> None:
        before = self.load(group, offsets)
        super().reset(group, offsets)
        for p, row in before.items():
            self._rows[group, p] = replace(self._rows[group, p], leader_epoch=row.leader_epoch)


@fails(L.test_a_reset_removes_the_topic_id)
class KeepsTheTopicId(MemoryStore):
    def reset(self, group: str, offsets: Mapping[Partition, int]) -> None:
        before = self.load(group, offsets)
        super().reset(group, offsets)
        for p, row in before.items():
            self._rows[group, p] = replace(self._rows[group, p], topic_id=row.topic_id)


@fails(
    L.test_a_closed_store_can_be_used_again,
    T.test_a_closed_store_can_begin_new_transactions,
)
class ClosedForGood(QueueStore):
    closed = False

    def load(self, group: str, partitions: Iterable[Partition]) -> Rows:
        self._refuse()
        return super().load(group, partitions)

    def begin(self, group: str, partition: Partition, epoch: int) -> None:
        self._refuse()
        super().begin(group, partition, epoch)

    def close(self) -> None:
        self.closed = True

    def _refuse(self) -> None:
        if self.closed:
            raise Broken("closed")


@fails(L.test_a_store_can_be_closed_unused_and_twice)
class ClosesOnce(MemoryStore):
    closed = False

    def close(self) -> None:
        if self.closed:
            raise Broken("closed already")
        self.closed = True


@fails(L.test_a_store_has_a_guarantee_and_an_address)
class Mute(MemoryStore):
    guarantee: ClassVar[str] = ""


@fails(L.test_an_outage_raises_store_unavailable_and_loses_no_offset)
class DriverErrors(QueueStore):
    """Lets through what its driver raises."""

    def groups(self) -> list[str]:
        try:
            return super().groups()
        except StoreUnavailable as error:
            raise ConnectionError from error


@fails(L.test_an_outage_raises_store_unavailable_and_loses_no_offset)
class Cached(QueueStore):
    """ClaimResults from memory what only the place can know."""

    def groups(self) -> list[str]:
        return []


# Fenced


@fails(
    F.test_every_claim_raises_the_epoch_even_by_the_same_owner,
    F.test_a_claim_returns_the_position_and_records_the_owner,
    F.test_16_concurrent_claims_get_16_epochs_and_one_start_offset,
    F.test_a_claim_of_several_partitions_is_atomic,
    F.test_after_16_concurrent_claims_exactly_one_owner_can_save,
    F.test_a_stale_epoch_is_refused_and_changes_nothing,
    F.test_a_reclaim_raises_the_epoch_and_reads_the_position,
    F.test_after_a_reclaim_only_the_new_epoch_can_save,
)
class NoEpochs(MemoryStore):
    def _claim(
        self, group: str, partition: Partition, owner: str, pinned: Positions, terms: ClaimTerms | None = None
    ) -> Position:
        row = self._rows.get((group, partition)) or replace(pinned[partition], epoch=1)
        self._rows[group, partition] = row
        return row


@fails(
    F.test_start_is_called_only_for_missing_rows_and_its_offsets_are_stored,
    F.test_start_is_not_called_when_no_row_is_missing,
    F.test_a_claim_of_no_partitions_returns_nothing,
)
class AsksForAll(MemoryStore):
    def claim(
        self, group: str, partitions: Sequence[Partition], owner: str, start: Start, terms: ClaimTerms | None = None
    ) -> ClaimResults:
        start(partitions)
        return super().claim(group, partitions, owner, start, terms)


@fails(F.test_a_claim_whose_start_raises_claims_nothing)
class ClaimsFirst(MemoryStore):
    def claim(
        self, group: str, partitions: Sequence[Partition], owner: str, start: Start, terms: ClaimTerms | None = None
    ) -> ClaimResults:
        there = [p for p in partitions if p in self.load(group, partitions)]
        super().claim(group, there, owner, start, terms)
        return super().claim(group, partitions, owner, start, terms)


@fails(F.test_a_delete_while_start_runs_raises_only_a_kconsume_error)
class Trusting(MemoryStore):
    """Believes that what was there is there."""

    def claim(
        self, group: str, partitions: Sequence[Partition], owner: str, start: Start, terms: ClaimTerms | None = None
    ) -> ClaimResults:
        known = self.load(group, partitions)
        missing = [p for p in partitions if p not in known]
        pinned = start(missing) if missing else {}
        if any((group, p) not in self._rows for p in known):
            raise Broken("the row has gone")
        return super().claim(group, partitions, owner, lambda ps: {p: pinned[p] for p in ps}, terms)


@fails(
    F.test_a_claim_of_some_partitions_does_not_change_the_others,
    T.test_a_claim_of_one_partition_does_not_end_the_transaction_on_another,
)
class FencesTheGroup(QueueStore):
    def claim(
        self, group: str, partitions: Sequence[Partition], owner: str, start: Start, terms: ClaimTerms | None = None
    ) -> ClaimResults:
        with self._lock:
            for key in [k for k in self._rows if k[0] == group and k[1] not in partitions]:
                self._rows[key] = replace(self._rows[key], epoch=self._rows[key].epoch + 1)
        return super().claim(group, partitions, owner, start, terms)


@fails(F.test_an_epoch_that_was_never_given_out_is_refused)
class AtLeast(MemoryStore):
    def _check(self, group: str, partition: Partition, position: Position) -> None:
        row = self._rows.get((group, partition))
        super()._check(group, partition, replace(position, epoch=min(position.epoch, row.epoch if row else 0)))


@fails(F.test_a_save_without_a_row_is_refused_and_creates_none, F.test_after_a_delete_the_owner_is_fenced)
class Upsert(MemoryStore):
    def save(self, group: str, positions: Positions) -> None:
        for p, row in positions.items():
            self._rows.setdefault((group, p), row)
        super().save(group, positions)


@fails(F.test_a_save_is_all_or_none)
class OneByOne(MemoryStore):
    def save(self, group: str, positions: Positions) -> None:
        for partition, position in positions.items():
            super().save(group, {partition: position})


@fails(F.test_a_reclaim_after_the_claim_of_another_owner_is_refused_and_raises_no_epoch)
class ReclaimsOneByOne(MemoryStore):
    def reclaim(self, group: str, epochs: Mapping[Partition, int], owner: str) -> Rows:
        return {p: super(ReclaimsOneByOne, self).reclaim(group, {p: epoch}, owner)[p] for p, epoch in epochs.items()}


@fails(
    F.test_a_reclaim_after_the_claim_of_another_owner_is_refused_and_raises_no_epoch,
    F.test_a_reclaim_without_a_row_is_refused_and_creates_none,
    F.test_a_concurrent_reclaim_and_claim_leave_one_owner,
    F.test_after_a_delete_the_owner_is_fenced,
    F.test_a_reset_raises_the_epoch_and_fences_a_running_owner,
)
class ReclaimsAnyhow(MemoryStore):
    def reclaim(self, group: str, epochs: Mapping[Partition, int], owner: str) -> Rows:
        waited_until = time.monotonic() + 0.2  # so that the race of the test has the outcome that it is about
        while time.monotonic() < waited_until and self.load(group, epochs).keys() == epochs.keys():
            if all(self.load(group, [p])[p].epoch != epoch for p, epoch in epochs.items()):
                break
        return granted(self.claim(group, list(epochs), owner, lambda ps: dict.fromkeys(ps, Position(0))))


@fails(F.test_a_reset_raises_the_epoch_and_fences_a_running_owner)
class ResetsUnderTheOwner(MemoryStore):
    def reset(self, group: str, offsets: Mapping[Partition, int]) -> None:
        before = self.load(group, offsets)
        super().reset(group, offsets)
        for p, row in before.items():
            self._rows[group, p] = replace(self._rows[group, p], epoch=row.epoch)


@fails(F.test_the_reset_epoch_changes_at_a_reset_and_not_at_a_claim_or_save)
class ResetsWithoutATrace(MemoryStore):
    """As every store did when the row had no place for it."""

    def reset(self, group: str, offsets: Mapping[Partition, int]) -> None:
        before = self.load(group, offsets)
        super().reset(group, offsets)
        for p in offsets:
            was = before[p].reset_epoch if p in before else 0
            self._rows[group, p] = replace(self._rows[group, p], reset_epoch=was)


@fails(F.test_the_reset_epoch_changes_at_a_reset_and_not_at_a_claim_or_save)
class TakesClaimsForResets(MemoryStore):
    def claim(
        self,
        group: str,
        partitions: Sequence[Partition],
        owner: str,
        start: Start,
        terms: ClaimTerms | None = None,
    ) -> ClaimResults:
        for p, row in granted(super().claim(group, partitions, owner, start, terms)).items():
            self._rows[group, p] = replace(row, reset_epoch=row.epoch)
        return {**self.load(group, partitions)}


@fails(F.test_the_reset_epoch_changes_at_a_reset_and_not_at_a_claim_or_save)
class ForgetsResetsWithTheRow(MemoryStore):
    def claim(
        self,
        group: str,
        partitions: Sequence[Partition],
        owner: str,
        start: Start,
        terms: ClaimTerms | None = None,
    ) -> ClaimResults:
        new = [p for p in partitions if p not in self.load(group, partitions)]
        super().claim(group, partitions, owner, start, terms)
        for p in new:
            self._rows[group, p] = replace(self._rows[group, p], reset_epoch=0)
        return {**self.load(group, partitions)}


@fails(F.test_all_store_objects_on_one_place_have_the_same_identity)
class NamesItselfAnew(MemoryStore):
    def identity(self) -> str:
        return f"{time.perf_counter_ns()}"


def _declares(part: str) -> type[MemoryStore]:
    """A store that declares a part whose methods it does not have."""

    class Declares(MemoryStore):
        identity: Any = None

        @property
        def capabilities(self) -> Capabilities:
            declared: dict[str, Any] = {"named": None, part: self}
            return replace(super().capabilities, **declared)

    return Declares


for _part in PARTS:
    fails_in(_part, L.test_a_declared_capability_is_implemented)(_declares(_part[0]))


@fails(F.test_a_deleted_row_is_distinguished_from_a_lost_row)
@fails_in("the group", F.test_the_delete_of_a_missing_row_is_recorded_until_the_row_is_created)
@fails_in("partitions", F.test_the_delete_of_a_missing_row_is_recorded_until_the_row_is_created)
class DeletesWithoutATrace(MemoryStore):
    def deleted(self, group: str, partitions: Iterable[Partition]) -> dict[Partition, int]:
        return {}


@fails(F.test_a_deleted_row_is_distinguished_from_a_lost_row)
@fails_in("the group", F.test_the_delete_of_a_missing_row_is_recorded_until_the_row_is_created)
@fails_in("partitions", F.test_the_delete_of_a_missing_row_is_recorded_until_the_row_is_created)
class StaysDeleted(MemoryStore):
    """What is lost later looks as if it had been deleted."""

    def deleted(self, group: str, partitions: Iterable[Partition]) -> dict[Partition, int]:
        return dict.fromkeys(super().deleted(group, partitions), ALWAYS)


@fails(F.test_a_reset_without_a_row_creates_one_for_the_next_claim)
class ResetsWhatIsThere(MemoryStore):
    def reset(self, group: str, offsets: Mapping[Partition, int]) -> None:
        rows = self.load(group, offsets)
        super().reset(group, {p: at for p, at in offsets.items() if p in rows})


@fails(F.test_a_zombie_from_before_a_delete_is_fenced_after_the_row_is_created_again)
class ForgetsEpochs(MemoryStore):
    def delete(self, group: str, partitions: Iterable[Partition] | None = None) -> None:
        super().delete(group, partitions)
        self._last_epoch = 0


@fails(F.test_a_row_has_the_time_of_its_last_change)
class Timeless(MemoryStore):
    def load(self, group: str, partitions: Iterable[Partition]) -> Rows:
        return {p: replace(row, updated_at=None) for p, row in super().load(group, partitions).items()}


@fails(F.test_16_concurrent_claims_get_16_epochs_and_one_start_offset)
class ReadsFirstWritesLater(MemoryStore):
    def __init__(self) -> None:
        super().__init__()
        self.met = threading.Barrier(16, timeout=20)

    def claim(
        self, group: str, partitions: Sequence[Partition], owner: str, start: Start, terms: ClaimTerms | None = None
    ) -> ClaimResults:
        rows = {**start(partitions), **self.load(group, partitions)}
        self.met.wait()
        for p, row in rows.items():
            self._rows[group, p] = replace(row, epoch=row.epoch + 1, owner=owner)
        return {p: self._rows[group, p] for p in partitions}


@fails(F.test_a_claim_of_several_partitions_is_atomic)
class ClaimsOneByOne(MemoryStore):
    def claim(
        self, group: str, partitions: Sequence[Partition], owner: str, start: Start, terms: ClaimTerms | None = None
    ) -> ClaimResults:
        rows: ClaimResults = {}
        for p in partitions:
            rows |= super().claim(group, [p], owner, start, terms)
            time.sleep(0.001)  # the round trip
        return rows


@fails(F.test_1000_partitions_are_claimed_together)
class RoundTrips(MemoryStore):
    """One for each partition, on a place that cannot count them."""

    def claim(
        self, group: str, partitions: Sequence[Partition], owner: str, start: Start, terms: ClaimTerms | None = None
    ) -> ClaimResults:
        for _ in partitions:
            time.sleep(0.002)  # each by itself: on a busy machine, all of them take longer
        return super().claim(group, partitions, owner, start, terms)


class Counted(MemoryStore):
    """Where a round trip takes no time, and is counted."""

    asked = 0

    def claim(
        self, group: str, partitions: Sequence[Partition], owner: str, start: Start, terms: ClaimTerms | None = None
    ) -> ClaimResults:
        self.asked += 2
        return super().claim(group, partitions, owner, start, terms)


@fails(F.test_1000_partitions_are_claimed_together)
class CountedRoundTrips(Counted):
    def claim(
        self, group: str, partitions: Sequence[Partition], owner: str, start: Start, terms: ClaimTerms | None = None
    ) -> ClaimResults:
        self.asked += len(partitions)
        return super().claim(group, partitions, owner, start, terms)


@fails(F.test_1000_partitions_are_claimed_together)
class PinnedOneByOne(Counted):
    """Only rows that are to be made take one each."""

    def claim(
        self, group: str, partitions: Sequence[Partition], owner: str, start: Start, terms: ClaimTerms | None = None
    ) -> ClaimResults:
        self.asked += len(partitions) - len(self.load(group, partitions))
        return super().claim(group, partitions, owner, start, terms)


# The order of claims


@fails(
    F.test_a_claim_of_an_earlier_generation_is_refused_and_changes_nothing,
    F.test_generations_are_compared_as_numbers,
    F.test_in_the_same_generation_only_the_owner_may_claim_again,
    F.test_after_a_reset_the_owner_may_claim_and_an_earlier_generation_is_refused,
    F.test_a_claim_without_terms_is_granted_and_keeps_the_generation_of_the_row,
    F.test_a_claim_has_a_separate_result_for_each_partition,
    F.test_a_claim_with_epochs_is_refused_if_another_owner_has_claimed_since,
    F.test_a_claim_with_epochs_does_not_create_a_missing_row,
    F.test_after_16_concurrent_claims_the_latest_generation_owns_the_partitions,
)
class GrantsAll(MemoryStore):
    """The order is off: whoever claims, has it."""

    def _accepts(self, row: Position | None, partition: Partition, owner: str, terms: ClaimTerms | None) -> bool:
        return True


@fails(
    F.test_a_claim_of_a_later_generation_is_granted_and_its_generation_is_kept,
    F.test_a_claim_of_an_earlier_generation_is_refused_and_changes_nothing,
    F.test_a_claim_with_epochs_compares_only_the_epochs,
)
class ForgetsGenerations(MemoryStore):
    def _claim(
        self, group: str, partition: Partition, owner: str, pinned: Positions, terms: ClaimTerms | None = None
    ) -> Position:
        return super()._claim(group, partition, owner, pinned)


@fails(F.test_generations_are_compared_as_numbers)
class ComparesText(MemoryStore):
    def _accepts(self, row: Position | None, partition: Partition, owner: str, terms: ClaimTerms | None) -> bool:
        if row is not None and row.generation is not None and terms is not None and row.owner != owner:
            return str(row.generation) <= str(terms.generation)
        return super()._accepts(row, partition, owner, terms)


@fails(F.test_in_the_same_generation_only_the_owner_may_claim_again)
class AsksForNoOwner(MemoryStore):
    def _accepts(self, row: Position | None, partition: Partition, owner: str, terms: ClaimTerms | None) -> bool:
        return super()._accepts(None if row is None else replace(row, owner=owner), partition, owner, terms)


@fails(F.test_after_a_reset_the_owner_may_claim_and_an_earlier_generation_is_refused)
class LastOwner(MemoryStore):
    """A reset takes the owner away, and this one asks for him all the same."""

    def _accepts(self, row: Position | None, partition: Partition, owner: str, terms: ClaimTerms | None) -> bool:
        nobody = row is not None and row.owner is None
        return super()._accepts(replace(row, owner="nobody") if row and nobody else row, partition, owner, terms)


@fails(F.test_a_row_without_a_generation_may_be_claimed_under_any_generation)
class RefusesOldRows(MemoryStore):
    def _accepts(self, row: Position | None, partition: Partition, owner: str, terms: ClaimTerms | None) -> bool:
        old = terms is not None and row is not None and row.generation is None
        return not old and super()._accepts(row, partition, owner, terms)


@fails(F.test_a_claim_without_terms_is_granted_and_keeps_the_generation_of_the_row)
class ErasesGenerations(MemoryStore):
    def _claim(
        self, group: str, partition: Partition, owner: str, pinned: Positions, terms: ClaimTerms | None = None
    ) -> Position:
        claimed = super()._claim(group, partition, owner, pinned, terms)
        self._rows[group, partition] = replace(claimed, generation=None if terms is None else terms.generation)
        return self._rows[group, partition]


@fails(F.test_a_claim_has_a_separate_result_for_each_partition)
class OneForAllOfThem(MemoryStore):
    """One partition that is refused condemns the others."""

    def claim(
        self, group: str, partitions: Sequence[Partition], owner: str, start: Start, terms: ClaimTerms | None = None
    ) -> ClaimResults:
        answers = super().claim(group, partitions, owner, start, terms)
        refused = [answer for answer in answers.values() if isinstance(answer, Refused)]
        return dict.fromkeys(answers, refused[0]) if refused else answers


@fails(F.test_a_claim_with_epochs_compares_only_the_epochs)
class AsksForBoth(MemoryStore):
    def _accepts(self, row: Position | None, partition: Partition, owner: str, terms: ClaimTerms | None) -> bool:
        earlier = terms is not None and row is not None and (row.generation or 0) > terms.generation
        return not earlier and super()._accepts(row, partition, owner, terms)


@fails(F.test_a_claim_with_epochs_does_not_create_a_missing_row)
class PinsWhatWasDeleted(MemoryStore):
    def _accepts(self, row: Position | None, partition: Partition, owner: str, terms: ClaimTerms | None) -> bool:
        return row is None or super()._accepts(row, partition, owner, terms)

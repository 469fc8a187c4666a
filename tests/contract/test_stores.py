"""What an offset store is: one suite in three levels, and every store passes that of its level.

    TestOffsets          memory, sqlite, kafka (on the real broker)
    TestFenced           memory, sqlite
    TestTransactional    sqlite
    TestSqlite           what only a file on this host can be asked

Beside each guard stands its negative control: the same test, on a store whose guard is off, must fail.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Consumer, KafkaException, TopicPartition

from kconsume.backends import FencedStore, KafkaStore, MemoryStore, OffsetStore, Position, SqliteStore, sqlite_door
from kconsume.backends import sqlite as implementation
from kconsume.backends.abc import Positions, Start
from kconsume.cluster import Cluster
from kconsume.errors import Fenced, KconsumeError, StoreError, StoreUnavailable, TransactionMisused
from kconsume.records import Partition
from tests.contract.sqlite_child import GROUP, ORDERS, switch_turnstile_off
from tests.fix_kafka import unique
from tests.waiting import eventually

_ROOT = Path(__file__).parent.parent.parent

ODD_NAMES = ["it's", 'say "hi"', "a;drop table kconsume_offsets;--", "ü/☕ b", "%_\\", "a\nb", "a:b:c", "x "]


@dataclass(frozen=True)
class Case:
    """A store under test, with a group and four partitions that it may use."""

    store: OffsetStore
    group: str
    partitions: list[Partition]

    @property
    def fenced(self) -> FencedStore:
        assert isinstance(self.store, FencedStore)
        return self.store

    def claim(self, *partitions: Partition, owner: str = "me", at: int = 0) -> dict[Partition, Position]:
        """Take partitions as a consumer does; where the store knows no owners, there is nothing to take."""
        chosen = partitions or tuple(self.partitions)
        if not isinstance(self.store, FencedStore):
            return {p: self.store.load(self.group, [p]).get(p, Position(at)) for p in chosen}
        return self.store.claim(self.group, chosen, owner, lambda ps: dict.fromkeys(ps, Position(at)))

    def move(self, offsets: Mapping[Partition, int], topic_id: str | None = None) -> None:
        """Save offsets as their owner."""
        owned = self.claim(*offsets)
        self.save({p: replace(owned[p], next_offset=offset, topic_id=topic_id) for p, offset in offsets.items()})

    def save(self, positions: Positions) -> None:
        self.store.save(self.group, positions)

    def rows(self) -> dict[Partition, Position]:
        return self.store.load(self.group, self.partitions)

    def offsets(self) -> dict[Partition, int]:
        return {p: position.next_offset for p, position in self.rows().items()}


def fails(promise: Callable[..., None], *arguments: object) -> None:
    """The negative control: with the guard off, the test that watches it must not pass."""
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        promise(*arguments)


def made_up(store: OffsetStore) -> Case:
    return Case(store, "shop", [Partition("orders", number) for number in range(4)])


@contextmanager
def opened(path: Path) -> Iterator[SqliteStore]:
    store = SqliteStore(path)
    try:
        yield store
    finally:
        store.close()


@pytest.fixture
def sqlite(tmp_path: Path) -> Iterator[SqliteStore]:
    with opened(tmp_path / "shop.db") as store:
        yield store


def case_of(kind: str, request: pytest.FixtureRequest) -> Case:
    if kind == "memory":
        return made_up(MemoryStore())
    if kind == "sqlite":
        return made_up(request.getfixturevalue("sqlite"))
    brokers = request.getfixturevalue("kafka").bootstrap
    topic = request.getfixturevalue("topic")(partitions=4)
    group = request.getfixturevalue("group")
    await_coordinator(brokers)
    return Case(KafkaStore(brokers), group, [Partition(topic, number) for number in range(4)])


@functools.cache
def await_coordinator(brokers: str) -> None:
    """A broker that has just been started makes its offsets topic when it is first asked."""
    consumer = Consumer({"bootstrap.servers": brokers, "group.id": unique("first"), "log_level": 0})

    def answers() -> bool:
        try:
            consumer.committed([TopicPartition("none", 0)], timeout=5)
        except KafkaException:
            return False
        return True

    try:
        eventually(answers, what="a group coordinator")
    finally:
        consumer.close()


@pytest.fixture(params=["memory", "sqlite", "kafka"])
def any_store(request: pytest.FixtureRequest) -> Case:
    return case_of(request.param, request)


@pytest.fixture(params=["memory", "sqlite"])
def fenced(request: pytest.FixtureRequest) -> Case:
    return case_of(request.param, request)


class TestOffsets:
    def test_a_partition_without_a_row_is_left_out(self, any_store: Case) -> None:
        assert any_store.rows() == {}
        any_store.move({any_store.partitions[1]: 7})
        assert any_store.offsets() == {any_store.partitions[1]: 7}

    def test_what_was_saved_is_loaded(self, any_store: Case) -> None:
        wanted = {p: 10 * p.number for p in any_store.partitions}
        any_store.move(wanted)
        assert any_store.offsets() == wanted

    def test_only_what_is_asked_for_is_loaded(self, any_store: Case) -> None:
        first, second, *_ = any_store.partitions
        any_store.move({first: 1, second: 2})
        assert any_store.store.load(any_store.group, iter([second])).keys() == {second}

    def test_nothing_asked_for_is_nothing_loaded_and_nothing_saved(self, any_store: Case) -> None:
        assert any_store.store.load(any_store.group, []) == {}
        any_store.save({})
        assert any_store.rows() == {}

    @pytest.mark.parametrize("offset", [2**31, 2**53 + 1, 2**62])
    def test_an_offset_has_64_bits(self, any_store: Case, offset: int) -> None:
        first, *_ = any_store.partitions
        any_store.move({first: offset})
        assert any_store.offsets() == {first: offset}

    def test_an_offset_never_goes_backwards(self, any_store: Case) -> None:
        first, *_ = any_store.partitions
        any_store.move({first: 10})
        with contextlib.suppress(KconsumeError):
            any_store.move({first: 9})
        assert any_store.offsets() == {first: 10}

    def test_the_same_offset_may_be_saved_again(self, any_store: Case) -> None:
        first, *_ = any_store.partitions
        any_store.move({first: 10})
        any_store.move({first: 10})
        assert any_store.offsets() == {first: 10}

    def test_a_save_that_is_not_kept_is_an_error(self, any_store: Case) -> None:
        """A partition that is not there, or not ours: whatever the store's reason, it says so."""
        unknown = Partition(any_store.partitions[0].topic, 99)
        with pytest.raises(KconsumeError):
            any_store.save({any_store.partitions[0]: Position(5), unknown: Position(5)})

    def test_a_reset_goes_anywhere(self, any_store: Case) -> None:
        first, second, *_ = any_store.partitions
        any_store.move({first: 10})
        any_store.store.reset(any_store.group, {first: 3, second: 2**40})
        assert any_store.offsets() == {first: 3, second: 2**40}

    def test_after_a_reset_it_goes_on_from_there(self, any_store: Case) -> None:
        first, *_ = any_store.partitions
        any_store.move({first: 10})
        any_store.store.reset(any_store.group, {first: 3})
        assert any_store.claim(first)[first].next_offset == 3
        any_store.move({first: 4})
        assert any_store.offsets() == {first: 4}

    def test_a_deleted_group_is_forgotten_and_no_other_is(self, any_store: Case) -> None:
        first, *_ = any_store.partitions
        other = replace(any_store, group=unique("other"))
        any_store.move({first: 1})
        other.move({first: 2})
        any_store.store.delete(any_store.group)
        assert any_store.rows() == {}
        assert other.offsets() == {first: 2}
        other.store.delete(other.group)

    def test_to_delete_what_is_not_there_is_no_error(self, any_store: Case) -> None:
        any_store.store.delete(any_store.group)
        any_store.store.delete(any_store.group)

    def test_chosen_partitions_are_forgotten_or_the_store_says_that_it_cannot(self, any_store: Case) -> None:
        first, second, *_ = any_store.partitions
        any_store.move({first: 1, second: 2})
        try:
            any_store.store.delete(any_store.group, [first])
        except KconsumeError:
            assert any_store.offsets() == {first: 1, second: 2}
        else:
            assert any_store.offsets() == {second: 2}

    def test_the_groups_that_have_rows_are_listed_sorted(self, any_store: Case) -> None:
        first, *_ = any_store.partitions
        other = replace(any_store, group=f"a-{any_store.group}")
        assert any_store.group not in any_store.store.groups()
        any_store.move({first: 1})
        other.move({first: 1})
        listed = any_store.store.groups()
        assert [g for g in listed if g in (any_store.group, other.group)] == [other.group, any_store.group]
        assert listed == sorted(listed)
        other.store.delete(other.group)
        assert other.group not in any_store.store.groups()

    def test_groups_do_not_see_each_other_s_offsets(self, any_store: Case) -> None:
        first, *_ = any_store.partitions
        any_store.move({first: 7})
        assert replace(any_store, group=unique("other")).rows() == {}

    @pytest.mark.parametrize("name", ODD_NAMES)
    def test_a_group_may_have_any_name(self, any_store: Case, name: str) -> None:
        first, *_ = any_store.partitions
        odd = replace(any_store, group=f"{name}{any_store.group}")
        odd.move({first: 7})
        assert odd.offsets() == {first: 7}
        assert odd.group in odd.store.groups()
        assert any_store.rows() == {}
        odd.store.delete(odd.group)
        assert odd.rows() == {}

    def test_a_topic_s_id_is_kept_with_the_offset(self, any_store: Case) -> None:
        first, *_ = any_store.partitions
        any_store.move({first: 7}, topic_id="Qm9v-aGFo_w")
        assert any_store.rows()[first].topic_id == "Qm9v-aGFo_w"

    def test_an_unknown_topic_id_never_overwrites_a_known_one(self, any_store: Case) -> None:
        first, *_ = any_store.partitions
        any_store.move({first: 7}, topic_id="known")
        any_store.move({first: 8}, topic_id=None)
        assert any_store.rows()[first].topic_id == "known"

    def test_a_known_topic_id_overwrites_an_unknown_one(self, any_store: Case) -> None:
        first, *_ = any_store.partitions
        any_store.move({first: 7})
        any_store.move({first: 8}, topic_id="known")
        assert any_store.rows()[first].topic_id == "known"

    def test_the_leader_epoch_is_kept_with_the_offset(self, any_store: Case) -> None:
        first, *_ = any_store.partitions
        owned = any_store.claim(first)[first]
        any_store.save({first: replace(owned, next_offset=7, leader_epoch=4)})
        assert any_store.rows()[first].leader_epoch == 4

    def test_the_leader_epoch_of_another_offset_does_not_survive_a_reset(self, any_store: Case) -> None:
        """With the old record's epoch the client would take the new place for a truncated log."""
        first, *_ = any_store.partitions
        owned = any_store.claim(first)[first]
        any_store.save({first: replace(owned, next_offset=7, leader_epoch=4)})
        any_store.store.reset(any_store.group, {first: 2})
        assert any_store.rows()[first].leader_epoch is None

    def test_it_can_be_used_again_after_it_was_closed(self, any_store: Case) -> None:
        """An app closes its stores at the end of a run, and may run again."""
        first, *_ = any_store.partitions
        any_store.move({first: 7})
        any_store.store.close()
        assert any_store.offsets() == {first: 7}

    def test_it_says_what_it_promises(self, any_store: Case) -> None:
        assert "once" in any_store.store.guarantee
        assert any_store.store.address.partition("://")[1] == "://"


class TestOffsetsControls:
    def test_control_without_the_comparison_an_offset_goes_backwards(
        self, sqlite: SqliteStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        switch_off(monkeypatch, "_SAVE", "and next_offset <= ?", "and ? is not null")
        fails(TestOffsets().test_an_offset_never_goes_backwards, made_up(sqlite))

    def test_control_without_coalesce_a_known_topic_id_is_lost(
        self, sqlite: SqliteStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        switch_off(monkeypatch, "_SAVE", "coalesce(?, topic_id)", "?")
        fails(TestOffsets().test_an_unknown_topic_id_never_overwrites_a_known_one, made_up(sqlite))

    def test_control_a_memory_store_that_checks_nothing_is_found_out(self) -> None:
        class Careless(MemoryStore):
            def _check(self, group: str, partition: Partition, position: Position) -> None: ...

        fails(TestOffsets().test_an_offset_never_goes_backwards, made_up(Careless()))


class TestFenced:
    def test_every_claim_raises_the_epoch_also_one_by_the_same_owner(self, fenced: Case) -> None:
        epochs = [fenced.claim()[fenced.partitions[2]].epoch for _ in range(5)]
        assert epochs == sorted(set(epochs))
        assert epochs[0] > 0

    def test_a_claim_reads_the_position_and_names_the_owner(self, fenced: Case) -> None:
        first, second, *_ = fenced.partitions
        fenced.move({first: 7, second: 9}, topic_id="known")
        claimed = fenced.claim(second, first, owner="host:1")
        assert {p: position.next_offset for p, position in claimed.items()} == {first: 7, second: 9}
        assert {position.owner for position in claimed.values()} == {"host:1"}
        assert {position.topic_id for position in claimed.values()} == {"known"}
        assert fenced.store.load(fenced.group, [first, second]) == claimed

    def test_missing_rows_are_pinned_at_what_start_answers_and_it_is_asked_for_no_other(self, fenced: Case) -> None:
        first, second, third, _ = fenced.partitions
        fenced.move({second: 5})
        asked: list[Partition] = []

        def start(missing: Sequence[Partition]) -> Positions:
            asked.extend(missing)
            return {p: Position(100 + p.number, topic_id="id", leader_epoch=3) for p in missing}

        claimed = fenced.fenced.claim(fenced.group, [third, second, first], "me", start)
        assert sorted(asked) == [first, third]
        assert {p: position.next_offset for p, position in claimed.items()} == {first: 100, second: 5, third: 102}
        assert (claimed[first].topic_id, claimed[first].leader_epoch) == ("id", 3)
        assert fenced.offsets() == {first: 100, second: 5, third: 102}

    def test_start_is_not_called_when_no_row_is_missing(self, fenced: Case) -> None:
        fenced.claim()
        fenced.fenced.claim(fenced.group, fenced.partitions, "me", lambda _: pytest.fail("asked without need"))

    def test_a_claim_for_which_no_start_is_found_claims_nothing(self, fenced: Case) -> None:
        first, second, *_ = fenced.partitions
        before = fenced.claim(first)

        def start(_: Sequence[Partition]) -> Positions:
            raise LookupError("the cluster does not answer")

        with pytest.raises(LookupError):
            fenced.fenced.claim(fenced.group, [first, second], "rival", start)
        assert fenced.rows() == before

    def test_nothing_to_claim_is_nothing_claimed(self, fenced: Case) -> None:
        assert fenced.fenced.claim(fenced.group, [], "me", lambda _: pytest.fail("asked for nothing")) == {}

    def test_a_row_that_goes_while_start_is_asked_ends_in_no_error_but_ours(self, fenced: Case) -> None:
        """A person deletes the group in the very moment in which a consumer claims it."""
        first, second, *_ = fenced.partitions
        fenced.claim(first)

        def start(missing: Sequence[Partition]) -> Positions:
            fenced.store.delete(fenced.group)
            return {p: Position(0) for p in missing}

        with contextlib.suppress(KconsumeError):
            fenced.fenced.claim(fenced.group, [first, second], "me", start)

    def test_a_stale_epoch_is_refused_and_changes_nothing(self, fenced: Case) -> None:
        first, *_ = fenced.partitions
        mine = fenced.claim(first)[first]
        fenced.claim(first, owner="rival")
        before = fenced.rows()
        with pytest.raises(Fenced, match=str(first)):
            fenced.save({first: replace(mine, next_offset=50)})
        assert fenced.rows() == before

    def test_an_epoch_that_was_never_given_out_is_refused(self, fenced: Case) -> None:
        first, *_ = fenced.partitions
        mine = fenced.claim(first)[first]
        for epoch in (mine.epoch + 1, mine.epoch - 1, 0, -1):
            with pytest.raises(Fenced):
                fenced.save({first: replace(mine, epoch=epoch, next_offset=50)})

    def test_nothing_is_saved_without_a_claim(self, fenced: Case) -> None:
        first, *_ = fenced.partitions
        for epoch in (0, 1):
            with pytest.raises(Fenced):
                fenced.save({first: Position(5, epoch)})
        assert fenced.rows() == {}

    def test_an_offset_that_would_go_backwards_is_refused(self, fenced: Case) -> None:
        first, *_ = fenced.partitions
        fenced.move({first: 10})
        mine = fenced.claim(first)[first]
        with pytest.raises(Fenced):
            fenced.save({first: replace(mine, next_offset=9)})
        assert fenced.offsets() == {first: 10}

    def test_a_save_is_all_or_none(self, fenced: Case) -> None:
        first, second, third, fourth = fenced.partitions
        mine = fenced.claim()
        fenced.claim(third, owner="rival")
        before = fenced.rows()
        for order in ([first, third, fourth], [third, first], [second, fourth, third]):
            with pytest.raises(Fenced):
                fenced.save({p: replace(mine[p], next_offset=50) for p in order})
            assert fenced.rows() == before

    def test_a_reset_is_a_new_epoch_so_that_whoever_runs_is_fenced(self, fenced: Case) -> None:
        first, *_ = fenced.partitions
        mine = fenced.claim(first)[first]
        fenced.store.reset(fenced.group, {first: 3})
        row = fenced.rows()[first]
        assert row.epoch > mine.epoch
        assert row.owner is None
        with pytest.raises(Fenced):
            fenced.save({first: replace(mine, next_offset=50)})
        assert fenced.claim(first)[first].epoch > row.epoch

    def test_a_reset_of_what_is_not_there_is_a_row_that_a_claim_takes_up(self, fenced: Case) -> None:
        first, *_ = fenced.partitions
        fenced.store.reset(fenced.group, {first: 30})
        assert fenced.claim(first, at=5)[first].next_offset == 30

    def test_a_zombie_from_before_a_delete_is_fenced_from_what_was_made_after_it(self, fenced: Case) -> None:
        """A deleted row must not let the epochs begin again where the zombie's was."""
        first, *_ = fenced.partitions
        zombie = fenced.claim(first)[first]
        fenced.store.delete(fenced.group)
        fenced.claim(first, owner="rival")
        with pytest.raises(Fenced):
            fenced.save({first: replace(zombie, next_offset=50)})

    def test_after_a_delete_the_owner_is_fenced(self, fenced: Case) -> None:
        first, *_ = fenced.partitions
        mine = fenced.claim(first)[first]
        fenced.store.delete(fenced.group)
        with pytest.raises(Fenced):
            fenced.save({first: replace(mine, next_offset=50)})
        assert fenced.rows() == {}

    @pytest.mark.parametrize("name", ODD_NAMES)
    def test_a_topic_may_have_any_name(self, fenced: Case, name: str) -> None:
        odd = Partition(name, 0)
        fenced.move({odd: 7, fenced.partitions[0]: 1})
        assert fenced.store.load(fenced.group, [odd])[odd].next_offset == 7
        fenced.store.delete(fenced.group, [odd])
        assert fenced.store.load(fenced.group, [odd]) == {}
        assert fenced.offsets() == {fenced.partitions[0]: 1}

    def test_a_row_says_when_it_was_changed(self, fenced: Case) -> None:
        first, *_ = fenced.partitions
        steps: list[Callable[[], object]] = [
            lambda: fenced.claim(first),
            lambda: fenced.move({first: 7}),
            lambda: fenced.store.reset(fenced.group, {first: 3}),
        ]
        for step in steps:
            before = datetime.now(UTC) - timedelta(seconds=1)
            step()
            moment = fenced.rows()[first].updated_at
            assert moment is not None
            assert before <= moment <= datetime.now(UTC) + timedelta(seconds=1)

    def test_of_16_claims_at_once_each_wins_an_epoch_and_the_start_is_pinned_once(self, fenced: Case) -> None:
        rivals, gate = 16, threading.Barrier(16, timeout=20)

        def rival(number: int) -> dict[Partition, Position]:
            def start(missing: Sequence[Partition]) -> Positions:
                return {p: Position(number) for p in missing}

            gate.wait()
            return fenced.fenced.claim(fenced.group, fenced.partitions, f"rival-{number}", start)

        with ThreadPoolExecutor(rivals) as pool:
            claims = list(pool.map(rival, range(rivals)))
        for partition in fenced.partitions:
            assert sorted(c[partition].epoch for c in claims) == list(range(1, rivals + 1))
            assert len({c[partition].next_offset for c in claims}) == 1
            assert sorted(str(c[partition].owner) for c in claims) == sorted(f"rival-{n}" for n in range(rivals))

    def test_a_claim_of_several_partitions_is_one_step(self, fenced: Case) -> None:
        """The partitions of two claims that meet all go to the same one, the later."""
        first, second, *_ = fenced.partitions
        gate = threading.Barrier(8, timeout=20)

        def rival(number: int) -> dict[Partition, Position]:
            wanted = [first, second] if number % 2 else [second, first]
            gate.wait()
            for _ in range(20):
                claimed = fenced.claim(*wanted, owner=f"rival-{number}")
            return claimed

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(rival, range(8)))
        rows = fenced.rows()
        assert rows[first].owner == rows[second].owner
        assert rows[first].epoch == rows[second].epoch == 160


class TestFencedControls:
    @pytest.mark.parametrize(
        "promise",
        [
            TestFenced().test_a_stale_epoch_is_refused_and_changes_nothing,
            TestFenced().test_an_epoch_that_was_never_given_out_is_refused,
            TestFenced().test_a_save_is_all_or_none,
            TestFenced().test_a_reset_is_a_new_epoch_so_that_whoever_runs_is_fenced,
        ],
    )
    def test_control_without_the_epoch_a_zombie_saves(
        self, sqlite: SqliteStore, monkeypatch: pytest.MonkeyPatch, promise: Callable[..., None]
    ) -> None:
        switch_off(monkeypatch, "_SAVE", "and epoch = ?", "and ? is not null")
        fails(promise, made_up(sqlite))

    def test_control_a_claim_that_does_not_raise_the_epoch(
        self, sqlite: SqliteStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        switch_off(monkeypatch, "_CLAIM", "epoch = epoch + 1", "epoch = 1")
        fails(TestFenced().test_every_claim_raises_the_epoch_also_one_by_the_same_owner, made_up(sqlite))
        fails(
            TestFenced().test_of_16_claims_at_once_each_wins_an_epoch_and_the_start_is_pinned_once,
            replace(made_up(sqlite), group="other"),
        )

    def test_control_a_reset_that_keeps_the_epoch(self, sqlite: SqliteStore, monkeypatch: pytest.MonkeyPatch) -> None:
        switch_off(monkeypatch, "_RESET", "epoch = epoch + 1", "epoch = epoch")
        fails(TestFenced().test_a_reset_is_a_new_epoch_so_that_whoever_runs_is_fenced, made_up(sqlite))

    def test_control_a_pin_that_the_next_one_overwrites(
        self, sqlite: SqliteStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        switch_off(
            monkeypatch,
            "_PIN",
            "on conflict do nothing",
            "on conflict do update set next_offset = excluded.next_offset",
        )
        monkeypatch.setattr(sqlite, "load", lambda *_: {})  # all find the row missing
        fails(claims_that_find_no_row_pin_one, made_up(sqlite))

    def test_claims_that_all_find_the_row_missing_pin_one(
        self, sqlite: SqliteStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The same without the control's change, so that it is the change that fails."""
        monkeypatch.setattr(sqlite, "load", lambda *_: {})
        claims_that_find_no_row_pin_one(made_up(sqlite))

    def test_control_a_save_of_one_after_the_other(self) -> None:
        class OneByOne(MemoryStore):
            def save(self, group: str, positions: Positions) -> None:
                for partition, position in positions.items():
                    super().save(group, {partition: position})

        fails(TestFenced().test_a_save_is_all_or_none, made_up(OneByOne()))

    def test_control_a_claim_that_reads_first_and_writes_later(self) -> None:
        met = threading.Barrier(16, timeout=20)

        class Hasty(MemoryStore):
            def claim(
                self, group: str, partitions: Sequence[Partition], owner: str, start: Start
            ) -> dict[Partition, Position]:
                rows = {**start(partitions), **self.load(group, partitions)}
                met.wait()
                for p, row in rows.items():
                    self._rows[group, p] = replace(row, epoch=row.epoch + 1, owner=owner)
                return {p: self._rows[group, p] for p in partitions}

        fails(TestFenced().test_of_16_claims_at_once_each_wins_an_epoch_and_the_start_is_pinned_once, made_up(Hasty()))

    def test_control_a_memory_store_that_checks_nothing(self) -> None:
        class Careless(MemoryStore):
            def _check(self, group: str, partition: Partition, position: Position) -> None: ...

        fails(TestFenced().test_a_stale_epoch_is_refused_and_changes_nothing, made_up(Careless()))
        fails(TestFenced().test_a_save_is_all_or_none, made_up(Careless()))


def claims_that_find_no_row_pin_one(case: Case) -> None:
    first, *_ = case.partitions
    offsets = [case.claim(first, at=at)[first].next_offset for at in (7, 8, 9)]
    assert offsets == [7, 7, 7]


@dataclass(frozen=True)
class Table:
    """A transactional store with a table for effects, and a partition that is claimed at offset 0."""

    store: SqliteStore
    epoch: int

    @contextmanager
    def transaction(self, epoch: int | None = None) -> Iterator[Any]:
        with self.store.transaction(GROUP, ORDERS, self.epoch if epoch is None else epoch) as tx:
            yield tx

    def refuses(self, kind: type[BaseException], handler: Callable[[Any], object], match: str | None = None) -> None:
        """A handler that must fail in its transaction, and leave neither an effect nor an offset."""
        with pytest.raises(kind, match=match), self.transaction() as tx:
            handler(tx)
        assert (self.effects(), self.offset()) == ([], 0)

    def effects(self) -> list[int]:
        return self._read("select id from effects order by id")

    def turns_of_the_other(self) -> int:
        return max(self._read("select next_offset from kconsume_offsets where partition = 1"), default=0)

    def _read(self, query: str) -> list[int]:
        reader = sqlite3.connect(self.store.path)
        try:
            return [row[0] for row in reader.execute(query)]
        finally:
            reader.close()

    def offset(self) -> int:
        return self.store.load(GROUP, [ORDERS])[ORDERS].next_offset


def table_in(store: SqliteStore) -> Table:
    epoch = claim_orders(store)
    maker = sqlite3.connect(store.path, isolation_level=None)
    maker.execute("create table if not exists effects (id integer primary key)")
    maker.close()
    return Table(store, epoch)


def claim_orders(store: SqliteStore, owner: str = "me") -> int:
    return store.claim(GROUP, [ORDERS], owner, lambda ps: dict.fromkeys(ps, Position(0)))[ORDERS].epoch


@pytest.fixture
def table(sqlite: SqliteStore) -> Table:
    return table_in(sqlite)


Misuse = Callable[[sqlite3.Connection], object]


def within_itself(connection: sqlite3.Connection) -> None:
    with connection:
        connection.execute("select 1")


MISUSES: dict[str, Misuse] = {
    "COMMIT": lambda c: c.execute("COMMIT"),
    "commit;": lambda c: c.execute("commit;"),
    "END": lambda c: c.execute("end transaction"),
    "ROLLBACK": lambda c: c.execute("ROLLBACK"),
    "BEGIN": lambda c: c.execute("BEGIN"),
    "BEGIN IMMEDIATE": lambda c: c.execute("begin immediate"),
    "commit()": lambda c: c.commit(),
    "rollback()": lambda c: c.rollback(),
    "with connection": within_itself,
    "executescript": lambda c: c.executescript("insert into effects values (2); insert into effects values (3);"),
    "cursor": lambda c: c.cursor().execute("COMMIT"),
}
misused = pytest.mark.parametrize("misuse", MISUSES.values(), ids=MISUSES.keys())


class TestTransactional:
    def test_what_the_handler_writes_and_the_offset_commit_together(self, table: Table) -> None:
        with table.transaction() as tx:
            tx.connection.execute("insert into effects values (1)")
            tx.advance(0, 5)
            assert table.effects() == [], "seen before it was committed"
        assert (table.effects(), table.offset()) == ([1], 5)

    def test_a_reader_does_not_wait_for_the_transaction_that_runs(self, table: Table) -> None:
        """A slow handler holds up those who write to the file, and not `status`, which only looks."""
        with opened(table.store.path) as other, ThreadPoolExecutor(1) as pool, table.transaction() as tx:
            reading = pool.submit(other.load, GROUP, [ORDERS])
            try:
                assert reading.result(timeout=5)[ORDERS].next_offset == 0
            except TimeoutError:
                pytest.fail("the reader still waits after 5 s")
            tx.advance(0, 1)

    def test_an_error_undoes_both(self, table: Table) -> None:
        def handler(tx: Any) -> None:
            tx.connection.execute("insert into effects values (1)")
            tx.advance(0, 5)
            raise LookupError

        table.refuses(LookupError, handler)

    def test_after_an_error_the_next_transaction_is_clean(self, table: Table) -> None:
        def handler(tx: Any) -> None:
            tx.connection.execute("insert into effects values (1)")
            raise LookupError

        for _ in range(3):
            table.refuses(LookupError, handler)
        with table.transaction() as tx:
            tx.connection.execute("insert into effects values (2)")
            tx.advance(0, 5)
        assert (table.effects(), table.offset()) == ([2], 5)

    def test_a_wrong_statement_is_the_handler_s_own_error(self, table: Table) -> None:
        with pytest.raises(sqlite3.OperationalError, match="no such table"), table.transaction() as tx:
            tx.connection.execute("insert into nowhere values (1)")

    def test_a_zombie_s_transaction_does_not_begin(self, table: Table) -> None:
        claim_orders(table.store, "rival")
        entered = False
        with pytest.raises(Fenced, match="orders/0"), table.transaction():
            entered = True
        assert not entered

    def test_a_transaction_on_a_partition_that_was_never_claimed_does_not_begin(self, table: Table) -> None:
        with pytest.raises(Fenced), table.store.transaction(GROUP, Partition("orders", 9), 0):
            pytest.fail("it began")

    def test_an_offset_that_is_not_where_we_think_undoes_all(self, table: Table) -> None:
        def handler(tx: Any) -> None:
            tx.connection.execute("insert into effects values (1)")
            tx.advance(1, 5)

        table.refuses(Fenced, handler, match="orders/0")

    def test_the_advance_of_a_zombie_undoes_all(self, table: Table) -> None:
        """SQLite has one writer, so nobody can claim meanwhile; the advance checks the epoch all the same."""

        def handler(tx: Any) -> None:
            tx.connection.execute("insert into effects values (1)")
            tx.connection.execute("update kconsume_offsets set epoch = epoch + 1")
            tx.advance(0, 5)

        table.refuses(Fenced, handler)

    def test_a_claim_waits_for_the_transaction_that_runs_and_sees_its_offset(self, table: Table) -> None:
        began, go_on = threading.Event(), threading.Event()

        def owner() -> None:
            with table.transaction() as tx:
                began.set()
                assert go_on.wait(20)
                tx.advance(0, 5)

        thread = threading.Thread(target=owner)
        thread.start()
        assert began.wait(20)
        with ThreadPoolExecutor(1) as pool:
            rival = pool.submit(lambda: table.store.claim(GROUP, [ORDERS], "rival", lambda _: {}))
            go_on.set()
            assert rival.result(20)[ORDERS].next_offset == 5
        thread.join(20)

    def test_the_topic_s_id_and_owner_survive_an_advance(self, table: Table) -> None:
        table.store.save(GROUP, {ORDERS: Position(1, table.epoch, topic_id="known")})
        with table.transaction() as tx:
            tx.advance(1, 5, 3)
        row = table.store.load(GROUP, [ORDERS])[ORDERS]
        assert (row.topic_id, row.owner, row.leader_epoch) == ("known", "me", 3)

    def test_a_handler_reads_its_own_writes(self, table: Table) -> None:
        with table.transaction() as tx:
            tx.connection.execute("insert into effects values (1)")
            assert tx.connection.execute("select count(*) from effects").fetchone() == (1,)
            tx.advance(0, 1)

    def test_transactions_of_many_threads_all_get_their_turn(self, table: Table) -> None:
        def lane(number: int) -> None:
            partition = Partition("lanes", number)
            epoch = table.store.claim(GROUP, [partition], "me", lambda ps: dict.fromkeys(ps, Position(0)))[
                partition
            ].epoch
            for at in range(20):
                with table.store.transaction(GROUP, partition, epoch) as tx:
                    tx.connection.execute("insert into effects values (?)", (100 * number + at,))
                    tx.advance(at, at + 1)

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lane, range(8)))
        assert table.effects() == [100 * number + at for number in range(8) for at in range(20)]

    @misused
    def test_a_handler_cannot_end_the_transaction(self, table: Table, misuse: Misuse) -> None:
        def handler(tx: Any) -> None:
            tx.connection.execute("insert into effects values (1)")
            misuse(tx.connection)
            tx.advance(0, 5)

        table.refuses(TransactionMisused, handler, match="must not begin, commit or roll back")

    @misused
    def test_a_handler_cannot_hide_that_it_tried(self, table: Table, misuse: Misuse) -> None:
        def handler(tx: Any) -> None:
            tx.connection.execute("insert into effects values (1)")
            with contextlib.suppress(sqlite3.Error):
                misuse(tx.connection)
            tx.advance(0, 5)

        table.refuses(TransactionMisused, handler)

    @misused
    def test_the_next_handler_is_not_blamed_for_it(self, table: Table, misuse: Misuse) -> None:
        with contextlib.suppress(TransactionMisused, sqlite3.Error), table.transaction() as tx:
            misuse(tx.connection)
        with pytest.raises(sqlite3.OperationalError, match="no such table"), table.transaction() as tx:
            tx.connection.execute("insert into nowhere values (1)")

    def test_a_statement_that_rolls_back_by_itself_is_noticed(self, table: Table) -> None:
        def handler(tx: Any) -> None:
            tx.connection.execute("insert into effects values (1)")
            with contextlib.suppress(sqlite3.IntegrityError):
                tx.connection.execute("insert or rollback into effects values (1)")
            tx.advance(0, 5)

        table.refuses(TransactionMisused, handler, match="INSERT OR ROLLBACK")

    @pytest.mark.parametrize(
        "again",
        ["insert into effects values (?) -- a new statement", "insert into effects values (?)"],
        ids=["a new statement", "one that was prepared before"],
    )
    def test_what_is_written_after_such_a_statement_is_undone_too(self, table: Table, again: str) -> None:
        """Outside a transaction each statement commits itself: the record's effect would be there twice."""

        def handler(tx: Any) -> None:
            tx.connection.execute("insert into effects values (?)", (1,))
            with contextlib.suppress(sqlite3.IntegrityError):
                tx.connection.execute("insert or rollback into effects values (1)")
            tx.connection.execute(again, (2,))
            tx.advance(0, 5)

        table.refuses(TransactionMisused, handler)

    def test_a_handler_that_closes_the_connection_passes_nothing(self, table: Table) -> None:
        def handler(tx: Any) -> None:
            tx.connection.execute("insert into effects values (1)")
            tx.connection.close()
            tx.advance(0, 5)

        table.refuses(TransactionMisused, handler)

    def test_a_savepoint_is_the_handler_s_to_use(self, table: Table) -> None:
        with table.transaction() as tx:
            tx.connection.execute("insert into effects values (1)")
            tx.connection.execute("savepoint mine")
            tx.connection.execute("insert into effects values (2)")
            tx.connection.execute("rollback to mine")
            tx.connection.execute("release mine")
            tx.advance(0, 5)
        assert (table.effects(), table.offset()) == ([1], 5)

    def test_a_savepoint_left_open_does_not_keep_the_offset_from_being_passed(self, table: Table) -> None:
        with table.transaction() as tx:
            tx.connection.execute("savepoint mine")
            tx.connection.execute("insert into effects values (1)")
            tx.advance(0, 5)
        assert (table.effects(), table.offset()) == ([1], 5)


class TestTransactionalControls:
    def test_control_a_transaction_that_begins_without_looking(
        self, table: Table, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        @contextmanager
        def unlooking(group: str, partition: Partition, epoch: int) -> Iterator[object]:
            with table.store._writing() as connection:
                yield implementation.SqliteTx(connection, group, partition, epoch)

        monkeypatch.setattr(table.store, "transaction", unlooking)
        fails(TestTransactional().test_a_zombie_s_transaction_does_not_begin, table)

    def test_control_an_advance_without_the_epoch(self, table: Table, monkeypatch: pytest.MonkeyPatch) -> None:
        switch_off(monkeypatch, "_ADVANCE", "and epoch = ?", "and ? is not null")
        fails(TestTransactional().test_the_advance_of_a_zombie_undoes_all, table)

    def test_control_an_advance_without_the_old_offset(self, table: Table, monkeypatch: pytest.MonkeyPatch) -> None:
        switch_off(monkeypatch, "_ADVANCE", "and next_offset = ?", "and ? is not null")
        fails(TestTransactional().test_an_offset_that_is_not_where_we_think_undoes_all, table)

    @pytest.mark.parametrize("name", ["COMMIT", "commit()", "ROLLBACK", "with connection", "executescript"])
    def test_control_without_the_authorizer_a_handler_ends_the_transaction(
        self, table: Table, monkeypatch: pytest.MonkeyPatch, name: str
    ) -> None:
        monkeypatch.setattr(sqlite_door.LentConnection, "_authorize", lambda *_: sqlite3.SQLITE_OK)
        table.store.close()
        fails(expecting_ours, TestTransactional().test_a_handler_cannot_end_the_transaction, table, MISUSES[name])

    def test_control_an_advance_that_does_not_ask_whether_there_is_a_transaction(
        self, table: Table, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def unasking(tx: Any, old: int, new: int, leader_epoch: int | None = None) -> None:
            tx.connection.execute("update kconsume_offsets set next_offset = ?", (new,))

        monkeypatch.setattr(implementation.SqliteTx, "advance", unasking)
        fails(expecting_ours, TestTransactional().test_a_statement_that_rolls_back_by_itself_is_noticed, table)

    def test_control_effects_outside_the_transaction_stay(self, table: Table, monkeypatch: pytest.MonkeyPatch) -> None:
        outside = sqlite3.connect(table.store.path, isolation_level=None)

        @contextmanager
        def elsewhere(group: str, partition: Partition, epoch: int) -> Iterator[object]:
            yield OutsideTx(outside)

        monkeypatch.setattr(table.store, "transaction", elsewhere)
        fails(TestTransactional().test_an_error_undoes_both, table)
        outside.close()


@dataclass(frozen=True)
class OutsideTx:
    connection: sqlite3.Connection

    def advance(self, old: int, new: int, leader_epoch: int | None = None) -> None: ...


def expecting_ours(promise: Callable[..., None], *arguments: object) -> None:
    """The promise, where an error of another class is a failure too."""
    try:
        promise(*arguments)
    except sqlite3.Error as error:
        pytest.fail(f"not an error of ours: {error!r}")


def switch_off(monkeypatch: pytest.MonkeyPatch, statement: str, guard: str, instead: str) -> None:
    """Take a guard out of a statement of the SQLite store; one that is not in it would control nothing."""
    text: str = getattr(implementation, statement)
    assert guard in text
    monkeypatch.setattr(implementation, statement, text.replace(guard, instead))


class Child:
    """Another process at the same file; `tests/contract/sqlite_child.py` says what it does."""

    def __init__(self, *arguments: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.contract.sqlite_child", *arguments],
            cwd=_ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def hears(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def go(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("go\n")
        self.process.stdin.flush()

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


class TestSqlite:
    def test_claims_of_four_processes_at_once_each_win_an_epoch_and_pin_the_start_once(self, tmp_path: Path) -> None:
        times, path = 25, str(tmp_path / "shop.db")
        with contextlib.ExitStack() as stack:
            children = [stack.enter_context(Child("claim", path, str(number), str(times))) for number in range(4)]
            assert [child.hears() for child in children] == ["ready"] * 4
            for child in children:
                child.go()
            said = [child.hears().split() for child in children for _ in range(times)]
        epochs, offsets = zip(*((int(epoch), int(offset)) for epoch, offset in said), strict=True)
        assert sorted(epochs) == list(range(1, 4 * times + 1))
        assert len(set(offsets)) == 1

    def test_kill_9_in_a_transaction_leaves_neither_the_row_nor_the_offset(self, table: Table) -> None:
        killed_while_it_holds(table, "inside")

    def test_control_kill_9_outside_the_transaction_leaves_the_row(self, table: Table) -> None:
        fails(killed_while_it_holds, table, "outside")

    def test_a_process_that_writes_without_a_pause_does_not_starve_another(self, table: Table) -> None:
        gets_in(table, turnstile="on", within=20.0)

    def test_control_without_the_turnstile_it_starves(self, table: Table, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(sqlite_door.Door, "turnstile", sqlite_door.Door.turnstile)  # put back afterwards
        switch_turnstile_off()
        fails(gets_in, table, "off", 3.0)

    def test_another_instance_on_the_same_file_is_fenced_too(self, table: Table) -> None:
        with opened(table.store.path) as rival:
            claim_orders(rival, "rival")
        with pytest.raises(Fenced), table.transaction():
            pytest.fail("it began")

    def test_a_claim_by_another_process_fences_this_one(self, table: Table) -> None:
        with Child("claim", str(table.store.path), "7", "1") as child:
            assert child.hears() == "ready"
            child.go()
            assert child.hears() == f"{table.epoch + 1} 0"
        with pytest.raises(Fenced), table.transaction():
            pytest.fail("it began")

    def test_the_table_has_the_pinned_columns(self, table: Table) -> None:
        reader = sqlite3.connect(table.store.path)
        columns = [row[1] for row in reader.execute("pragma table_info(kconsume_offsets)")]
        reader.close()
        assert columns == [
            "group_id", "topic", "partition", "next_offset", "epoch", "topic_id", "owner", "leader_epoch",
            "metadata", "updated_at",
        ]  # fmt: skip

    def test_the_person_s_own_tables_are_left_alone(self, tmp_path: Path) -> None:
        own = sqlite3.connect(tmp_path / "shop.db")
        own.execute("create table stock (sku text)")
        own.commit()
        with opened(tmp_path / "shop.db") as store:
            made_up(store).claim()
        names = {row[0] for row in own.execute("select name from sqlite_master where type = 'table'")}
        own.close()
        assert names == {"stock", "kconsume_offsets", "kconsume_schema"}

    def test_a_file_of_another_version_is_refused_with_both(self, table: Table) -> None:
        writer = sqlite3.connect(table.store.path)
        writer.execute("update kconsume_schema set version = 99")
        writer.commit()
        writer.close()
        with pytest.raises(StoreError, match="schema version 99, and this kconsume writes version 1"):
            SqliteStore(table.store.path).groups()

    def test_a_writer_that_does_not_queue_is_waited_for_and_then_named(
        self, table: Table, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The sqlite3 shell, say: it does not know the turnstile."""
        table.store.close()
        stranger = sqlite3.connect(table.store.path, isolation_level=None)
        stranger.execute("begin immediate")
        impatient = sqlite3.connect
        monkeypatch.setattr(sqlite3, "connect", lambda *args, **kwargs: impatient(*args, **{**kwargs, "timeout": 0.1}))
        with pytest.raises(StoreUnavailable, match=r"shop\.db"):
            table.store.reset(GROUP, {ORDERS: 1})
        stranger.execute("rollback")
        stranger.close()
        table.store.reset(GROUP, {ORDERS: 1})


def killed_while_it_holds(table: Table, where: str) -> None:
    with Child("hold", str(table.store.path), where) as child:
        assert child.hears() == "holding"
        child.kill()
    assert (table.effects(), table.offset()) == ([], 0)
    epoch = claim_orders(table.store, "next")
    with table.transaction(epoch) as tx:
        tx.connection.execute("insert into effects values (1)")
        tx.advance(0, 1)
    assert (table.effects(), table.offset()) == ([1], 1)


def gets_in(table: Table, turnstile: str, within: float, times: int = 20) -> None:
    """Between two busy turns of the other process, each time anew; one long gap would prove nothing."""
    deadline = time.monotonic() + within
    got_in = 0
    with Child("busy", str(table.store.path), turnstile) as child:
        assert child.hears() == "busy"
        while got_in < times and time.monotonic() < deadline:
            turns = table.turns_of_the_other()
            with contextlib.suppress(StoreUnavailable), table.transaction() as tx:
                tx.advance(got_in, got_in + 1)
                got_in += 1
            eventually(lambda turns=turns: table.turns_of_the_other() > turns, what="a turn of the other")  # type: ignore[misc]
    assert got_in == times, f"got in {got_in} of {times} times within {within:g} s"


# In a process of its own: to change the user, the C library interrupts every thread of the process, and librdkafka's
# mock cluster does not survive that ("failed to poll: Interrupted system call", then its memory is freed).
_AS_NOBODY = """
import os, sys
from kconsume.backends import SqliteStore
from kconsume.errors import StoreUnavailable
from kconsume.records import Partition

if os.geteuid() == 0:
    os.seteuid(65534)
store = SqliteStore(sys.argv[2])
try:
    store.groups() if sys.argv[1] == "groups" else store.reset("shop", {Partition("orders", 0): 1})
except StoreUnavailable as error:
    print(error)
"""


def as_nobody(method: str, path: Path) -> str:
    """What a store says to somebody who may not write there: without root's right to write everywhere."""
    done = subprocess.run(
        [sys.executable, "-c", _AS_NOBODY, method, str(path)], capture_output=True, text=True, check=True, timeout=60
    )
    return done.stdout


class TestAway:
    """A store that cannot be reached says so, in every method, as `StoreUnavailable`: the caller tries again."""

    METHODS: Mapping[str, Callable[[OffsetStore], object]] = {
        "load": lambda store: store.load(GROUP, [ORDERS]),
        "save": lambda store: store.save(GROUP, {ORDERS: Position(1)}),
        "reset": lambda store: store.reset(GROUP, {ORDERS: 1}),
        "delete": lambda store: store.delete(GROUP),
        "groups": lambda store: store.groups(),
    }
    every_method = pytest.mark.parametrize("method", METHODS.values(), ids=METHODS.keys())

    @every_method
    def test_a_broker_that_does_not_answer(self, method: Callable[[OffsetStore], object]) -> None:
        nowhere = "127.0.0.1:1"
        store = KafkaStore(nowhere, cluster=Cluster(nowhere, {}, patience=0.5))
        with pytest.raises(StoreUnavailable, match=nowhere):
            method(store)

    @every_method
    def test_a_folder_that_is_not_there(self, method: Callable[[OffsetStore], object], tmp_path: Path) -> None:
        with pytest.raises(StoreUnavailable, match=r"missing/shop\.db"):
            method(SqliteStore(tmp_path / "missing" / "shop.db"))

    def test_a_folder_that_may_not_be_written(self, tmp_path: Path) -> None:
        closed = tmp_path / "closed"
        closed.mkdir(mode=0o500)
        assert "closed/shop.db" in as_nobody("groups", closed / "shop.db")

    def test_a_file_that_may_only_be_read(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            os.chmod(folder, 0o777)
            path = Path(folder) / "shop.db"
            with opened(path) as store:
                made_up(store).claim()
            for file in Path(folder).iterdir():
                file.chmod(0o444)
            assert "shop.db" in as_nobody("reset", path)

    def test_a_file_that_is_no_database(self, tmp_path: Path) -> None:
        path = tmp_path / "shop.db"
        path.write_bytes(b"this is a text, and longer than the header of a database would be " * 20)
        before = path.read_bytes()
        with pytest.raises(StoreUnavailable, match=r"shop\.db.*not a database"):
            SqliteStore(path).groups()
        assert path.read_bytes() == before

    def test_a_folder_where_the_file_should_be(self, tmp_path: Path) -> None:
        (tmp_path / "shop.db").mkdir()
        with pytest.raises(StoreUnavailable, match=r"shop\.db"):
            SqliteStore(tmp_path / "shop.db").groups()

    def test_what_was_opened_in_vain_is_closed(self, tmp_path: Path) -> None:
        """It is tried again for as long as the file is not a database."""
        (tmp_path / "shop.db").write_bytes(b"no database " * 400)
        store = SqliteStore(tmp_path / "shop.db")
        gc.disable()  # what only the collector would close is not closed
        try:
            before = len(os.listdir("/proc/self/fd"))
            for _ in range(10):
                with pytest.raises(StoreUnavailable):
                    store.groups()
            assert len(os.listdir("/proc/self/fd")) <= before + 1
        finally:
            gc.enable()

    def test_it_is_found_again_once_it_is_there(self, tmp_path: Path) -> None:
        store = SqliteStore(tmp_path / "later" / "shop.db")
        with pytest.raises(StoreUnavailable):
            store.groups()
        (tmp_path / "later").mkdir()
        assert store.groups() == []
        store.close()


class TestKafka:
    """What only the group's own offsets can be asked."""

    @pytest.fixture
    def case(self, request: pytest.FixtureRequest) -> Case:
        return case_of("kafka", request)

    def test_a_reset_while_the_group_runs_is_an_error_and_not_a_silent_nothing(self, case: Case) -> None:
        """The broker refuses it; a person who believes that it was done would wait for records in vain."""
        first, *_ = case.partitions
        case.move({first: 10})
        with member_of(case), pytest.raises(KconsumeError, match=case.group):
            case.store.reset(case.group, {first: 3})
        assert case.offsets() == {first: 10}

    def test_deleting_while_the_group_runs_is_an_error_that_says_why(self, case: Case) -> None:
        first, *_ = case.partitions
        case.move({first: 10})
        with member_of(case), pytest.raises(KconsumeError) as refused:
            case.store.delete(case.group)
        assert "no broker answered" not in str(refused.value)

    @pytest.mark.parametrize("error", ["NOT_COORDINATOR", "COORDINATOR_NOT_AVAILABLE", "COORDINATOR_LOAD_IN_PROGRESS"])
    def test_a_coordinator_that_moves_is_not_the_end_of_the_process(self, error: str) -> None:
        """In a process of its own: librdkafka's admin client crashes on the first two (its issue 5040)."""
        done = subprocess.run(
            [sys.executable, "-c", _COORDINATOR_MOVES, error],
            cwd=_ROOT,
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        assert (done.returncode, done.stdout.strip()) in [(0, "{}"), (0, "StoreUnavailable")], done

    def test_the_metadata_of_another_tool_is_read_as_no_topic_id(self, case: Case) -> None:
        first, *_ = case.partitions
        assert isinstance(case.store, KafkaStore)
        case.store._cluster.set_committed(case.group, {first: (7, "written by flink")})
        row = case.rows()[first]
        assert (row.next_offset, row.topic_id) == (7, None)


_COORDINATOR_MOVES = """
import sys
from confluent_kafka import KafkaError
from kconsume.backends import KafkaStore
from kconsume.cluster import Cluster
from kconsume.errors import StoreUnavailable
from kconsume.records import Partition
from kconsume.testing import EmbeddedKafka

with EmbeddedKafka({"orders": 1}) as kafka:
    store = KafkaStore(kafka.bootstrap, cluster=Cluster(kafka.bootstrap, {}, patience=5.0))
    assert store.load("shop", [Partition("orders", 0)]) == {}
    kafka.fail_next("OffsetFetch", getattr(KafkaError, sys.argv[1]))
    try:
        print(store.load("shop", [Partition("orders", 0)]))
    except StoreUnavailable as error:
        print(type(error).__name__)
"""


@contextmanager
def member_of(case: Case) -> Iterator[None]:
    """A consumer of the group that has its partitions."""
    assert isinstance(case.store, KafkaStore)
    consumer = Consumer(
        {
            "bootstrap.servers": case.store._cluster.brokers,
            "group.id": case.group,
            "auto.offset.reset": "earliest",
            "enable.auto.commit": False,
            "log_level": 0,
        }
    )
    try:
        consumer.subscribe([case.partitions[0].topic])
        eventually(lambda: consumer.poll(0.05) or consumer.assignment(), what="a member with partitions")
        yield
    finally:
        consumer.close()

"""Redis cannot undo: a record that fails half-way is named, nothing goes past it, and a person decides.

Beside each guard stands its negative control: the same test, with the guard taken out of the script, must fail.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from kconsume.backends import Position, RedisStore
from kconsume.errors import ConfigurationError, StoreError, Undecided
from kconsume.records import Partition
from kconsume.testing.services import LocalRedis
from tests.contract.redis_shop import (
    GROUP,
    ORDERS,
    OTHERS,
    Shop,
    claim,
    emptied,
    fails,
    push,
    shop_at,
    switch_off,
    wrong,
)

FRESH = Partition("orders", 5)


@pytest.fixture(scope="module")
def server() -> Iterator[LocalRedis]:
    """This file's own: it is emptied."""
    with LocalRedis() as local:
        yield local


@pytest.fixture
def url(server: LocalRedis) -> str:
    return emptied(server)


@pytest.fixture
def shop(url: str) -> Iterator[Shop]:
    with shop_at(url) as opened:
        yield opened


class TestFailed:
    """Redis cannot undo: the record that failed is named, and nothing goes past it."""

    def test_the_offset_stays_at_the_record_that_failed_and_nothing_behind_it_is_applied(self, shop: Shop) -> None:
        shop.break_at_12()
        assert (shop.effects(), shop.offset()) == ([0, 1, 2], 12)

    def test_it_is_kept_with_command_index_and_error(self, shop: Shop) -> None:
        shop.break_at_12()
        (failed,) = shop.store.failures(GROUP).values()
        assert (failed.partition, failed.offset, failed.end) == (ORDERS, 12, 13)
        assert (failed.index, failed.of, failed.command) == (2, 3, "SADD effects")
        assert failed.error is not None
        assert failed.error.startswith("WRONGTYPE")
        assert failed.at is not None

    def test_the_partition_stays_stopped_also_for_those_who_start_later(self, shop: Shop, url: str) -> None:
        stays_stopped(shop, url)

    @pytest.mark.parametrize("script", ["CLAIM", "RECLAIM"])
    def test_control_without_the_state_it_would_be_handled_again(
        self, shop: Shop, url: str, monkeypatch: pytest.MonkeyPatch, script: str
    ) -> None:
        switch_off(monkeypatch, script, "if held[2] then", "if false then")
        fails(stays_stopped, shop, url)

    def test_control_a_script_that_does_not_stop_at_an_error(self, shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
        switch_off(monkeypatch, "APPLY", "type(reply) == 'table' and reply.err", "false")
        fails(shop.break_at_12)

    def test_other_partitions_of_the_claim_are_not_touched_and_can_be_had_without_it(self, shop: Shop) -> None:
        before = claim(shop.store, OTHERS)[OTHERS]
        shop.break_at_12()
        with pytest.raises(Undecided, match="orders/3@12") as refused:
            claim(shop.store, OTHERS, ORDERS, FRESH)
        assert refused.value.partitions == {ORDERS}
        assert shop.store.load(GROUP, [OTHERS, FRESH]) == {OTHERS: before}
        assert claim(shop.store, OTHERS, FRESH).keys() == {OTHERS, FRESH}

    @pytest.mark.parametrize("step", ["claim", "reclaim"])
    def test_all_partitions_that_wait_for_a_person_are_named_at_once(self, shop: Shop, step: str) -> None:
        epochs = {p: row.epoch for p, row in claim(shop.store, OTHERS, FRESH).items()} | {ORDERS: shop.epoch}
        shop.break_at_12()
        with pytest.raises(Undecided), shop.store.transaction(GROUP, FRESH, epochs[FRESH]) as tx:  # noqa: PT012
            tx.connection.sadd("effects", 1)
            tx.advance(10, 11)
        with pytest.raises(Undecided, match=r"orders/3@12: .*; orders/5@10: .*orders/3, orders/5 of 'shop'") as refused:
            claim(shop.store, *epochs) if step == "claim" else shop.store.reclaim(GROUP, epochs, "me")
        assert refused.value.partitions == {ORDERS, FRESH}
        assert shop.store.load(GROUP, [OTHERS])[OTHERS].epoch == epochs[OTHERS]

    def test_a_transaction_and_a_save_name_it_too(self, shop: Shop) -> None:
        shop.break_at_12()
        steps: list[Callable[[], object]] = [
            lambda: shop.handle((12, [])),
            lambda: shop.store.save(GROUP, {ORDERS: Position(20, shop.epoch)}),
        ]
        for step in steps:
            with pytest.raises(Undecided) as refused:
                step()
            assert refused.value.partitions == {ORDERS}

    def test_its_own_epoch_applies_and_saves_nothing_either(self, shop: Shop) -> None:
        shop.break_at_12()
        with pytest.raises(Undecided), shop.store.transaction(GROUP, ORDERS, shop.epoch):
            pytest.fail("it began")
        saves_nothing(shop)

    def test_control_a_save_that_does_not_look_for_the_state(self, shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
        shop.break_at_12()
        switch_off(monkeypatch, "SAVE", "if held[3] then", "if false then")
        fails(saves_nothing, shop)

    def test_a_transaction_that_was_open_when_it_failed_is_not_applied(self, shop: Shop) -> None:
        open_meanwhile(shop)

    def test_control_a_script_that_does_not_look_for_the_state(
        self, shop: Shop, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        switch_off(monkeypatch, "APPLY", "if held[3] then", "if false then")
        fails(open_meanwhile, shop)

    def test_retry_goes_on_at_the_record_under_a_new_epoch(self, shop: Shop) -> None:
        shop.break_at_12()
        shop.store.decide(GROUP, ORDERS, "retry")
        assert shop.store.failures(GROUP) == {}
        row = claim(shop.store)[ORDERS]
        assert (row.next_offset, row.epoch) == (12, shop.epoch + 2)
        shop.handle((12, [push(2)]), (13, [push(3)]), old=12, epoch=row.epoch)
        assert shop.offset() == 14

    def test_skip_goes_on_behind_it(self, shop: Shop) -> None:
        shop.break_at_12()
        shop.store.decide(GROUP, ORDERS, "skip", offset=12)
        assert claim(shop.store)[ORDERS].next_offset == 13

    def test_a_batch_fails_and_is_skipped_as_a_whole(self, shop: Shop) -> None:
        with pytest.raises(Undecided, match="orders/3@10 to 19"):  # noqa: PT012
            with shop.store.transaction(GROUP, ORDERS, shop.epoch) as tx:
                tx.connection.rpush("effects", 1)
                tx.connection.sadd("effects", 2)
                tx.advance(10, 20)
        shop.store.decide(GROUP, ORDERS, "skip")
        assert shop.offset() == 20

    def test_the_leader_epoch_of_another_offset_does_not_survive_a_decision(self, shop: Shop) -> None:
        decided_without_leader_epoch(shop)

    def test_control_a_decision_that_keeps_it(self, shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
        switch_off(monkeypatch, "DECIDE", "'owner', 'leader_epoch'", "'owner'")
        fails(decided_without_leader_epoch, shop)

    def test_a_decision_about_another_record_is_refused(self, shop: Shop) -> None:
        shop.break_at_12()
        with pytest.raises(StoreError, match="the failed record is orders/3@12"):
            shop.store.decide(GROUP, ORDERS, "skip", offset=11)
        with pytest.raises(ConfigurationError):
            shop.store.decide(GROUP, ORDERS, "forget")  # type: ignore[arg-type]
        assert shop.offset() == 12

    def test_to_decide_where_nothing_failed_is_an_error(self, shop: Shop) -> None:
        with pytest.raises(StoreError, match="nothing to decide"):
            shop.store.decide(GROUP, ORDERS, "retry")

    def test_a_reset_and_a_delete_are_decisions_too(self, shop: Shop) -> None:
        shop.break_at_12()
        shop.store.reset(GROUP, {ORDERS: 30})
        assert claim(shop.store)[ORDERS].next_offset == 30
        assert shop.store.failures(GROUP) == {}

    def test_a_script_that_breaks_off_leaves_its_records_undecided(
        self, shop: Shop, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Whatever breaks it (here a fault of Lua's): the mark stands before the first command. It is one for all the
        records of the script, because one for each would cost as much as the commands."""
        broken_off(shop, monkeypatch)

    def test_control_without_the_mark_it_would_be_applied_again(
        self, shop: Shop, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        switch_off(monkeypatch, "APPLY", "redis.call('HSET', key, 'failed_offset', ARGV[2], 'failed_end', ARGV[3])")
        fails(broken_off, shop, monkeypatch)


def saves_nothing(shop: Shop) -> None:
    with pytest.raises(Undecided):
        shop.store.save(GROUP, {ORDERS: Position(20, shop.epoch)})
    assert shop.offset() == 12


def open_meanwhile(shop: Shop) -> None:
    """Two of one owner, after an answer that was lost: the offset stays at the failed record, so it tells nothing."""
    with pytest.raises(Undecided), shop.store.transaction(GROUP, ORDERS, shop.epoch) as tx:  # noqa: PT012
        tx.connection.rpush("effects", 9)
        tx.advance(10, 11)
        with pytest.raises(Undecided):
            shop.handle((10, [push(0), wrong()]))
    assert shop.effects() == [0]


def decided_without_leader_epoch(shop: Shop) -> None:
    shop.store.save(GROUP, {ORDERS: Position(10, shop.epoch, leader_epoch=4)})
    shop.break_at_12()
    shop.store.decide(GROUP, ORDERS, "skip")
    assert shop.store.load(GROUP, [ORDERS])[ORDERS].leader_epoch is None


def stays_stopped(shop: Shop, url: str) -> None:
    shop.break_at_12()
    later = RedisStore(url)
    steps: list[Callable[[], object]] = [
        lambda: claim(later),
        lambda: later.reclaim(GROUP, {ORDERS: shop.epoch}, "me"),
    ]
    for step in steps:
        with pytest.raises(Undecided, match=r"orders/3@12.*kconsume failed show APP orders/3"):
            step()
    assert later.load(GROUP, [ORDERS])[ORDERS].epoch == shop.epoch
    later.close()


def broken_off(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    switch_off(
        monkeypatch, "APPLY", "local command = record[i]", "local command = record[i]; if i == 4 then error() end"
    )
    with pytest.raises(StoreError):
        shop.handle((10, [push(0)]), (11, [push(1), push(2)]))
    assert shop.effects() == [0, 1]
    with pytest.raises(Undecided, match="orders/3@10 to 11: Redis broke off while it applied"):
        claim(shop.store)

"""The Redis store on a real server: the suite of its level, then what its script promises.

A record that fails half-way is in `test_redis_failed.py`, servers and clusters in files of their own.

Beside each guard stands its negative control: the same test, with the guard taken out of the script, must fail.
"""

from __future__ import annotations

import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import NamedTuple, cast

import pytest
import redis

from kconsume.backends import Position, RedisStore
from kconsume.backends.redis import scripts
from kconsume.errors import (
    Fenced,
    StoreUnavailable,
    TransactionMisused,
)
from kconsume.records import Partition
from kconsume.testing.conformance import Bench, Subject, TransactionalSuite
from kconsume.testing.services import LocalRedis
from tests.contract.forms import for_async_handlers, only_transactions
from tests.contract.redis_proxy import Cut, RedisProxy
from tests.contract.redis_shop import (
    GROUP,
    ORDERS,
    ROOT,
    Shop,
    claim,
    emptied,
    fails,
    push,
    shop_at,
    switch_off,
)
from tests.waiting import eventually


@pytest.fixture(scope="module")
def server() -> Iterator[LocalRedis]:
    """This file's own: a proxy stands before it, and it is emptied."""
    with LocalRedis() as local:
        yield local


@pytest.fixture
def url(server: LocalRedis) -> str:
    return emptied(server)


@pytest.fixture
def shop(url: str) -> Iterator[Shop]:
    with shop_at(url) as opened:
        yield opened


class TestRedisConforms(TransactionalSuite):
    @pytest.fixture
    def subject(self, subject_in_redis: Subject) -> Subject:
        return subject_in_redis


@only_transactions
class TestRedisForAsyncHandlers(TransactionalSuite):
    @pytest.fixture
    def subject(self, subject_in_redis: Subject) -> Subject:
        return replace(subject_in_redis, open=lambda: for_async_handlers(cast(RedisStore, subject_in_redis.open())))


@pytest.fixture
def subject_in_redis(url: str, server: LocalRedis) -> Iterator[Subject]:
    with redis.Redis.from_url(url) as client, RedisProxy(server.port, b"never") as proxy:

        @contextmanager
        def away() -> Iterator[None]:
            proxy.down()
            try:
                yield
            finally:
                proxy.up()

        yield Subject(
            lambda: RedisStore(proxy.url),
            write=lambda pipeline, number: pipeline.rpush("effects", number),
            effects=lambda: [int(number) for number in client.lrange("effects", 0, -1)],
            away=away,
            round_trips=lambda: proxy.requests,
        )


class Guard(NamedTuple):
    """A line of a script, what stands there when it is off, and the promise that must then be broken."""

    script: str
    line: str
    instead: str
    promise: Callable[..., None]


def pinned_by_who_came_first(bench: Bench) -> None:
    """Both find no row; one is still asking where to start when the other has pinned it."""
    first, rival = bench.partitions[0], bench.owner("rival")

    def start(missing: Sequence[Partition]) -> dict[Partition, Position]:
        rival.claim(first, at=7)
        return dict.fromkeys(missing, Position(8))

    claimed = bench.me.claim_from(start, first)[first]
    assert (claimed.next_offset, claimed.epoch) == (7, 2)


def test_a_row_that_another_pinned_meanwhile_is_kept(subject_in_redis: Subject) -> None:
    with Bench(subject_in_redis) as bench:
        pinned_by_who_came_first(bench)


SUITE = TransactionalSuite()
GUARDS = {
    "a save under another epoch": Guard(
        "SAVE", "held[1] ~= ARGV[at]", "false", SUITE.test_a_stale_epoch_is_refused_and_changes_nothing
    ),
    "a save of one after the other": Guard(
        "SAVE", "return {'fenced', {i}, {row_of(key)}}", "if i == 1 then return {'fenced', {i}, {row_of(key)}} end",
        SUITE.test_a_save_is_all_or_none,
    ),
    "a save from another offset": Guard(
        "SAVE", "or not seen then", "then",
        SUITE.test_a_save_is_refused_if_the_row_is_not_at_the_previous_offset,
    ),
    "a save that goes backwards": Guard(
        "SAVE", "below(ARGV[at + 1], held[2])", "false", SUITE.test_an_offset_never_goes_backwards
    ),
    "a comparison of texts": Guard(
        "SAVE", "#a < #b or (#a == #b and a < b)", "a < b", SUITE.test_an_offset_that_would_go_backwards_is_refused
    ),
    "a topic's id that is forgotten": Guard(
        "SAVE", "if ARGV[at + 2] ~= '' then", "if true then",
        SUITE.test_an_unknown_topic_id_never_overwrites_a_known_one,
    ),
    "a claim that raises nothing": Guard(
        "CLAIM", "redis.call('HINCRBY', key, 'epoch', 1)", "",
        SUITE.test_every_claim_raises_the_epoch_even_by_the_same_owner,
    ),
    "a claim that pins again": Guard(
        "CLAIM", "redis.call('EXISTS', key) == 0", "ARGV[at + 1] ~= ''",
        pinned_by_who_came_first,
    ),
    "a claim of an earlier generation": Guard(
        "CLAIM", "if not accepts(", "if false and not accepts(",
        SUITE.test_a_claim_of_an_earlier_generation_is_refused_and_changes_nothing,
    ),
    "a comparison of generations as texts": Guard(
        "CLAIM", "tonumber(row_generation) < tonumber(generation)", "row_generation < generation",
        SUITE.test_generations_are_compared_as_numbers,
    ),
    "a claim of the same generation by another": Guard(
        "CLAIM", "not row_owner or row_owner == owner", "true",
        SUITE.test_in_the_same_generation_only_the_owner_may_claim_again,
    ),
    "a claim after a reset": Guard(
        "CLAIM", "not row_owner or row_owner == owner", "row_owner == owner",
        SUITE.test_after_a_reset_the_owner_may_claim_and_an_earlier_generation_is_refused,
    ),
    "a claim by the epoch that asks for the generation": Guard(
        "CLAIM", "if expected ~= '' then", "if false then",
        SUITE.test_a_claim_with_epochs_compares_only_the_epochs,
    ),
    "a claim that forgets the generation": Guard(
        "CLAIM", "redis.call('HSET', key, 'generation', ARGV[5])", "redis.call('EXISTS', key)",
        SUITE.test_a_claim_of_a_later_generation_is_granted_and_its_generation_is_kept,
    ),
    "a reclaim of anybody's": Guard(
        "RECLAIM", "held[1] ~= ARGV[2 + i]", "false",
        SUITE.test_a_reclaim_after_the_claim_of_another_owner_is_refused_and_raises_no_epoch,
    ),
    "a reclaim that raises nothing": Guard(
        "RECLAIM", "redis.call('HINCRBY', key, 'epoch', 1)", "",
        SUITE.test_after_a_reclaim_only_the_new_epoch_can_save,
    ),
    "a reset under the same epoch": Guard(
        "RESET", "redis.call('HINCRBY', key, 'epoch', 1)", "",
        SUITE.test_a_reset_raises_the_epoch_and_fences_a_running_owner,
    ),
    "a reset that keeps the leader's epoch": Guard(
        "RESET", "'owner', 'leader_epoch'", "'owner'",
        SUITE.test_a_reset_removes_the_leader_epoch,
    ),
    "a delete that forgets the epoch": Guard(
        "DELETE", "redis.call('HSET', KEYS[1], 'last_epoch', last_epoch)", "",
        SUITE.test_a_zombie_from_before_a_delete_is_fenced_after_the_row_is_created_again,
    ),
}  # fmt: skip


@pytest.mark.parametrize("guard", GUARDS.values(), ids=GUARDS.keys())
def test_control_with_the_guard_off_the_suite_finds_it(
    subject_in_redis: Subject, monkeypatch: pytest.MonkeyPatch, guard: Guard
) -> None:
    switch_off(monkeypatch, guard.script, guard.line, guard.instead)
    with Bench(subject_in_redis) as bench:
        fails(guard.promise, bench)


class TestTogether:
    def test_records_of_one_transaction_are_applied_in_order_and_the_offset_behind_the_last(self, shop: Shop) -> None:
        shop.handle((10, [push(0), push(1)]), (12, []), (15, [push(2)]))
        assert (shop.effects(), shop.offset()) == ([0, 1, 2], 16)

    def test_a_zombie_s_queue_is_not_applied(self, shop: Shop) -> None:
        zombie_writes_nothing(shop)

    def test_control_without_the_epoch_it_is(self, shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
        switch_off(monkeypatch, "APPLY", "held[1] ~= ARGV[1]", "false")
        fails(zombie_writes_nothing, shop)

    def test_a_range_is_applied_once_whoever_sends_it_again(self, shop: Shop) -> None:
        applied_once(shop)

    def test_control_without_the_offset_it_is_applied_twice(self, shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
        switch_off(monkeypatch, "APPLY", "held[2] ~= ARGV[2]", "false")
        fails(applied_once, shop)

    @pytest.mark.parametrize("by", ["save", "transaction"])
    def test_the_leader_epoch_of_another_offset_does_not_stay_with_a_new_one(self, shop: Shop, by: str) -> None:
        leader_epoch_goes(shop, by)

    @pytest.mark.parametrize(("by", "script"), [("save", "SAVE"), ("transaction", "APPLY")])
    def test_control_a_step_that_keeps_it(
        self, shop: Shop, monkeypatch: pytest.MonkeyPatch, by: str, script: str
    ) -> None:
        switch_off(monkeypatch, script, "redis.call('HDEL', key, 'leader_epoch')")
        fails(leader_epoch_goes, shop, by)

    def test_arguments_travel_as_they_are(self, shop: Shop) -> None:
        """Any bytes, long ones, and numbers that Lua cannot hold."""
        binary, long = bytes(range(256)), b"\xff" * 70_000
        shop.handle((10, [("SET", b"\x00\xfe", binary), ("SET", "long", long), ("SET", "big", 2**62 + 1)]))
        assert shop.client.mget(b"\x00\xfe", "long", "big") == [binary, long, b"4611686018427387905"]

    def test_offsets_have_64_bits_in_the_script_too(self, shop: Shop) -> None:
        shop.store.reset(GROUP, {ORDERS: 2**62})
        epoch = claim(shop.store)[ORDERS].epoch
        shop.handle((2**62, [push(0)]), (2**62 + 1, [push(1)]), old=2**62, epoch=epoch)
        assert shop.offset() == 2**62 + 2

    def test_a_command_may_have_many_arguments(self, shop: Shop) -> None:
        shop.handle((10, [("RPUSH", "effects", *range(6990))]))
        assert len(shop.effects()) == 6990

    def test_a_queue_without_an_offset_is_refused_and_not_applied(self, shop: Shop) -> None:
        with pytest.raises(TransactionMisused), shop.store.transaction(GROUP, ORDERS, shop.epoch) as tx:
            tx.connection.rpush("effects", 1)
        assert shop.effects() == []

    def test_a_key_that_only_the_server_can_find_in_a_command_is_not_ours(self, shop: Shop) -> None:
        """SORT of nothing into a key deletes it: the offset's row was gone, and the record handled again."""
        row = "kconsume:offset:shop:orders:3"
        with pytest.raises(TransactionMisused, match="what kconsume keeps there"):
            shop.handle((10, [("SORT", "nothing", "STORE", row)]))
        with pytest.raises(TransactionMisused, match="does not find the keys"):
            shop.handle((10, [("MIGRATE", "h", "1", "", "0", "5", "KEYS")]))
        assert shop.offset() == 10
        shop.handle((10, [("RPUSH", "unsorted", 2, 1), ("SORT", "unsorted", "STORE", "effects")]))
        assert (shop.effects(), shop.offset()) == ([1, 2], 11)

    @pytest.mark.parametrize("jump", [timedelta(days=40_000), timedelta(days=-15_000)])
    def test_a_clock_that_jumps_changes_nothing(self, shop: Shop, jump: timedelta) -> None:
        """`updated_at` is for people; who owns a partition and where it stands never depends on it."""
        moment = datetime.now(UTC) + jump
        shop.client.hset("kconsume:offset:shop:orders:3", "updated_at", moment.isoformat())
        assert shop.store.load(GROUP, [ORDERS])[ORDERS].updated_at == moment
        shop.store.save(GROUP, {ORDERS: Position(10, shop.epoch)})
        shop.client.hset("kconsume:offset:shop:orders:3", "updated_at", moment.isoformat())
        shop.handle((10, [push(0)]))
        assert claim(shop.store, owner="rival")[ORDERS].epoch == shop.epoch + 1
        with pytest.raises(Fenced):
            shop.handle((11, [push(1)]), old=11)
        assert (shop.effects(), shop.offset()) == ([0], 11)

    def test_a_server_that_has_forgotten_the_scripts_is_told_them_again(self, shop: Shop) -> None:
        shop.client.script_flush()
        shop.handle((10, [push(0)]))
        assert (shop.effects(), shop.offset()) == ([0], 11)

    def test_a_thousand_partitions_are_claimed_in_one_step(self, shop: Shop) -> None:
        partitions = [Partition("wide", number) for number in range(1000)]
        claimed = claim(shop.store, *partitions)
        assert {position.epoch for position in claimed.values()} == {1}
        assert shop.store.load(GROUP, partitions) == claimed

    def test_a_kill_of_the_server_leaves_both_or_neither(self) -> None:
        with LocalRedis() as server:
            with shop_at(server.url) as shop:
                shop.handle((10, [push(0)]))
            server.kill()
            server.start()
            with shop_at(server.url) as shop:
                assert (shop.effects(), shop.offset()) == ([0], 11)

    def test_a_consumer_that_is_killed_at_any_moment_leaves_one_effect_a_record(self, shop: Shop, url: str) -> None:
        seed = random.randrange(2**32)
        chance = random.Random(seed)
        for _ in range(8):
            before = shop.offset()
            child = subprocess.Popen([sys.executable, "-c", _CHILD, url], cwd=ROOT)
            eventually(lambda before=before: shop.offset() > before, what="a child that works")  # type: ignore[misc]
            time.sleep(chance.random() / 50)  # somewhere in a round of about a millisecond
            child.kill()
            child.wait(20)
            claim(shop.store, owner="next")  # from here on the child's last words are a zombie's
            assert shop.effects() == list(range(10, shop.offset())), f"seed {seed}"


_CHILD = """
import sys
from kconsume.backends import RedisStore
from kconsume.records import Partition

orders, store = Partition("orders", 3), RedisStore(sys.argv[1])
row = store.claim("shop", [orders], "child", lambda missing: {})[orders]
at = row.next_offset
while True:
    with store.transaction("shop", orders, row.epoch) as tx:
        for offset in range(at, at + 5):
            tx.connection.next_record(offset)
            tx.connection.rpush("effects", offset)
        tx.advance(at, at + 5)
    at += 5
"""


def zombie_writes_nothing(shop: Shop) -> None:
    with pytest.raises(Fenced, match="orders/3"):  # noqa: PT012
        with shop.store.transaction(GROUP, ORDERS, shop.epoch) as tx:
            tx.connection.rpush("effects", 1)
            tx.advance(10, 11)
            claim(shop.store, owner="rival")
    assert (shop.effects(), shop.offset()) == ([], 10)


def leader_epoch_goes(shop: Shop, by: str) -> None:
    """With it, the client would take the next place for a log that was truncated."""
    shop.store.save(GROUP, {ORDERS: Position(10, shop.epoch, leader_epoch=4)})
    if by == "save":
        shop.store.save(GROUP, {ORDERS: Position(11, shop.epoch)})
    else:
        shop.handle((10, [push(0)]))
    row = shop.store.load(GROUP, [ORDERS])[ORDERS]
    assert (row.next_offset, row.leader_epoch) == (11, None)


def applied_once(shop: Shop) -> None:
    shop.handle((10, [push(0)]))
    with pytest.raises(Fenced):
        shop.handle((10, [push(0)]))
    assert (shop.effects(), shop.offset()) == ([0], 11)


class TestUnknownOutcome:
    @pytest.mark.parametrize("cut", [Cut.BEFORE, Cut.AFTER])
    def test_a_line_that_broke_is_no_verdict_and_reclaim_says_which_it_was(
        self, url: str, server: LocalRedis, cut: Cut
    ) -> None:
        with RedisProxy(server.port, scripts.APPLY.digest.encode()) as proxy, shop_at(url) as outside:
            store = RedisStore(proxy.url)
            shop = Shop(store, outside.client, claim(store)[ORDERS].epoch)
            shop.handle((10, [push(0)]))
            proxy.cut = cut
            with pytest.raises(StoreUnavailable):
                shop.handle((11, [push(1)]), old=11)
            assert proxy.cuts == 1, "the script was sent again"
            proxy.cut = Cut.PASS
            stored = store.reclaim(GROUP, {ORDERS: shop.epoch}, "me")[ORDERS]
            store.close()
        assert stored.next_offset == (11 if cut is Cut.BEFORE else 12)
        assert stored.epoch == shop.epoch + 1

    def test_what_is_still_under_way_finds_itself_fenced(self, shop: Shop) -> None:
        """A request that was held up in the network arrives after the reclaim."""
        with pytest.raises(Fenced), shop.store.transaction(GROUP, ORDERS, shop.epoch) as tx:  # noqa: PT012
            tx.connection.rpush("effects", 1)
            tx.advance(10, 11)
            shop.store.reclaim(GROUP, {ORDERS: shop.epoch}, "me")
        assert shop.effects() == []

    def test_a_server_that_hangs_is_not_waited_for(self) -> None:
        with LocalRedis() as server, shop_at(f"{server.url}?socket_timeout=0.3") as shop:
            server.freeze()
            with pytest.raises(StoreUnavailable):
                shop.offset()
            server.thaw()
            assert shop.offset() == 10

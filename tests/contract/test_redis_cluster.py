"""The Redis store on a cluster: one slot for offsets and effects, and what happens while it moves. Real nodes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import redis
from redis.client import Pipeline
from redis.crc import key_slot

from kconsume.backends import Position, RedisStore
from kconsume.backends.claim import granted
from kconsume.backends.redis import scripts
from kconsume.errors import ConfigurationError, StoreUnavailable, TransactionMisused, Undecided
from kconsume.testing.services import LocalRedis
from kconsume.testing.services.ports import free_port, reserve
from tests.contract.redis_shop import GROUP, ORDERS, claim, fails
from tests.waiting import eventually

TAG = "shop"
SLOT = key_slot(TAG.encode())


class TestCluster:
    @pytest.fixture
    def cluster(self) -> Iterator[LocalRedis]:
        with node() as server:
            with redis.Redis.from_url(server.url) as client:
                ask(client, "CLUSTER ADDSLOTS", *range(16384))
                serves(client)
            yield server

    def test_without_a_tag_it_is_refused_with_the_fix(self, cluster: LocalRedis) -> None:
        with pytest.raises(ConfigurationError, match=r"tag=shop"):
            RedisStore(cluster.url).groups()

    def test_with_a_tag_it_keeps_offsets_and_effects_together(self, cluster: LocalRedis) -> None:
        with redis.Redis.from_url(cluster.url) as client:
            store = RedisStore(cluster.url, tag="shop")
            with store.transaction(GROUP, ORDERS, claim(store)[ORDERS].epoch) as tx:
                tx.connection.rpush("{shop}:effects", 1)
                tx.connection.set("{shop}:a", 2)
                tx.advance(10, 11)
            assert client.lrange("{shop}:effects", 0, -1) == [b"1"]
            assert store.load(GROUP, [ORDERS])[ORDERS].next_offset == 11

    def test_a_key_of_another_slot_is_refused_while_the_handler_runs(self, cluster: LocalRedis) -> None:
        store = RedisStore(cluster.url, tag="shop")
        epoch = claim(store)[ORDERS].epoch
        queues: list[Callable[[Pipeline], object]] = [
            lambda pipeline: pipeline.rpush("effects", 1),
            lambda pipeline: pipeline.zunionstore("{shop}:a", ["{shop}:b", "c"]),
        ]
        for queue in queues:
            with pytest.raises(TransactionMisused, match=r"\{tag\}:"), store.transaction(GROUP, ORDERS, epoch) as tx:
                queue(tx.connection)
        assert store.load(GROUP, [ORDERS])[ORDERS].next_offset == 10

    def test_it_follows_to_the_node_that_has_the_slot(self, pair: Pair) -> None:
        stores = [RedisStore(node.url, tag=TAG) for node in (pair.one, pair.two)]
        assert [claim(store)[ORDERS].epoch for store in stores] == [1, 2]


class TestMovingSlot:
    """While a slot is being moved, keys of it are on two nodes. Redis looks for those that a script names."""

    def test_a_record_is_put_off_and_not_failed_while_its_slot_is_moved(self, pair: Pair) -> None:
        put_off(pair, lambda pipeline: pipeline.rpush("{shop}:fresh", 1))

    def test_also_where_all_keys_are_here_and_the_record_takes_one_away(self, pair: Pair) -> None:
        """It begins with a key that is there and writes it anew: in between it is not there."""
        pair.first.set("{shop}:kept", 1)

        def handler(pipeline: Pipeline) -> None:
            pipeline.delete("{shop}:kept")
            pipeline.set("{shop}:kept", 2)

        put_off(pair, handler)
        assert pair.first.get("{shop}:kept") == b"2"

    def test_control_a_script_that_names_its_row_alone_fails_the_record(
        self, pair: Pair, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        run = RedisStore._run

        def naming_its_row_alone(self: RedisStore, script: scripts.Script, keys: Sequence[Any], *rest: Any) -> Any:
            return run(self, script, keys[:1] if script is scripts.APPLY else keys, *rest)

        monkeypatch.setattr(RedisStore, "_run", naming_its_row_alone)
        fails(undecided_is_a_failure, pair)

    def test_afterwards_it_goes_on_where_the_slot_is(self, pair: Pair) -> None:
        """By the book: the keys are moved one by one, then both nodes are told whose the slot is."""
        store = RedisStore(pair.one.url, tag=TAG)
        epoch = claim(store)[ORDERS].epoch
        pair.begin_to_move()
        for key in ask(pair.first, "CLUSTER", "GETKEYSINSLOT", SLOT, 100):
            pair.first.migrate("127.0.0.1", pair.two.port, key, 0, 5000)
        with pytest.raises(StoreUnavailable, match="slot of the tag is being moved"):
            push(store, epoch, 10)
        pair.give_to(pair.second)
        push(store, epoch, 10)
        assert pair.second.lrange("{shop}:effects", 0, -1) == [b"10"]
        assert store.load(GROUP, [ORDERS])[ORDERS].next_offset == 11


class TestLostNode:
    def test_it_goes_back_to_its_own_address_when_the_node_it_followed_to_is_gone(self, pair: Pair) -> None:
        """As after a failover: the slot is the first node's now, which only the first node can tell."""
        pair.give_to(pair.second)
        store = RedisStore(pair.one.url, tag=TAG)
        assert claim(store)[ORDERS].epoch == 1
        pair.first.config_set("cluster-require-full-coverage", "no")
        pair.two.kill()
        with pytest.raises(StoreUnavailable):
            claim(store)
        ask(pair.first, "CLUSTER SETSLOT", SLOT, "NODE", id_of(pair.first))
        assert eventually(lambda: claimed_by(store), what="it asks at its own address") == 1

    def test_two_nodes_that_send_it_to_each_other_are_tried_again(self, pair: Pair) -> None:
        """Between two lines of a resharding each may believe that the slot is the other's."""
        store = RedisStore(pair.one.url, tag=TAG)
        ask(pair.first, "CLUSTER SETSLOT", SLOT, "NODE", id_of(pair.second))
        with pytest.raises(StoreUnavailable, match="slot of the tag is being moved"):
            claim(store)
        pair.give_to(pair.first)
        assert claim(store)[ORDERS].epoch == 1

    def test_a_node_is_looked_at_before_it_is_used_like_the_first(self, pair: Pair) -> None:
        """It may have settings of its own, by which it would throw offsets away."""
        pair.give_to(pair.second)
        pair.second.config_set("maxmemory", "100mb")
        pair.second.config_set("maxmemory-policy", "allkeys-lru")
        store = RedisStore(pair.one.url, tag=TAG)
        with pytest.raises(ConfigurationError, match="maxmemory-policy noeviction"):
            claim(store)
        pair.second.config_set("maxmemory-policy", "noeviction")
        assert claim(store)[ORDERS].epoch == 1


@dataclass(frozen=True)
class Pair:
    """Two nodes, of which the first has every slot at the beginning; and clients that look at one of them each."""

    one: LocalRedis
    two: LocalRedis
    first: redis.Redis
    second: redis.Redis

    def begin_to_move(self) -> None:
        ask(self.second, "CLUSTER SETSLOT", SLOT, "IMPORTING", id_of(self.first))
        ask(self.first, "CLUSTER SETSLOT", SLOT, "MIGRATING", id_of(self.second))

    def stay(self) -> None:
        for client in (self.first, self.second):
            ask(client, "CLUSTER SETSLOT", SLOT, "STABLE")

    def give_to(self, owner: redis.Redis) -> None:
        for client in (self.second, self.first):
            ask(client, "CLUSTER SETSLOT", SLOT, "NODE", id_of(owner))


@pytest.fixture
def pair() -> Iterator[Pair]:
    with node() as one, node() as two, redis.Redis.from_url(one.url) as first, redis.Redis.from_url(two.url) as second:
        ask(first, "CLUSTER ADDSLOTS", *range(16384))
        ask(first, "CLUSTER MEET", "127.0.0.1", two.port)
        serves(first)
        serves(second)
        yield Pair(one, two, first, second)


def put_off(pair: Pair, handler: Callable[[Pipeline], object]) -> None:
    store = RedisStore(pair.one.url, tag=TAG)
    epoch = claim(store)[ORDERS].epoch

    def handle() -> None:
        with store.transaction(GROUP, ORDERS, epoch) as tx:
            tx.connection.next_record(10)
            handler(tx.connection)
            tx.advance(10, 11)

    pair.begin_to_move()
    with pytest.raises(StoreUnavailable, match="slot of the tag is being moved"):
        handle()
    assert store.failures(GROUP) == {}
    pair.stay()
    handle()
    assert store.load(GROUP, [ORDERS])[ORDERS].next_offset == 11


def undecided_is_a_failure(pair: Pair) -> None:
    try:
        put_off(pair, lambda pipeline: pipeline.rpush("{shop}:fresh", 1))
    except Undecided as error:
        pytest.fail(f"a healthy record was failed: {error}")


def push(store: RedisStore, epoch: int, offset: int) -> None:
    with store.transaction(GROUP, ORDERS, epoch) as tx:
        tx.connection.next_record(offset)
        tx.connection.rpush("{shop}:effects", offset)
        tx.advance(offset, offset + 1)


def claimed_by(store: RedisStore) -> int | None:
    try:
        return granted(store.claim(GROUP, [ORDERS], "me", lambda missing: dict.fromkeys(missing, Position(10))))[
            ORDERS
        ].epoch
    except StoreUnavailable:
        return None


def ask(client: redis.Redis, *words: str | int) -> Any:
    return client.execute_command(*words)  # type: ignore[no-untyped-call]


def id_of(client: redis.Redis) -> str:
    said = ask(client, "CLUSTER MYID")
    return said.decode() if isinstance(said, bytes) else str(said)


def node() -> LocalRedis:
    """Of a cluster. Its nodes talk on a second port, 10,000 above the first, which must be free as well,
    and is taken from below those that the kernel gives to outgoing connections."""
    port = next(port for port in iter(free_port, None) if port < 22_700 and reserve(port + 10_000))
    return LocalRedis(port=port, overrides={"cluster-enabled": "yes"})


def serves(client: redis.Redis) -> None:
    eventually(lambda: client.cluster("INFO")["cluster_state"] == "ok", within=30, what="a cluster that serves")

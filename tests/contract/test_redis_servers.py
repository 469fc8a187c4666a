"""Which Redis servers keep offsets, what their errors mean, what is stored there, and the samples of docs/redis.md."""

from __future__ import annotations

import logging
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from kconsume import App
from kconsume.backends import RedisStore, TransactionalStore
from kconsume.backends.capabilities import ALWAYS
from kconsume.backends.redis.rows import Names
from kconsume.backends.redis.server_checks import RIGHTS
from kconsume.errors import (
    ConfigurationError,
    StoreError,
    StoreUnavailable,
    TransactionMisused,
    Undecided,
)
from kconsume.testing import EmbeddedKafka
from kconsume.testing.services import LocalRedis
from tests.contract.redis_shop import (
    GROUP,
    ORDERS,
    ROOT,
    Shop,
    claim,
    emptied,
    push,
    shop_at,
)
from tests.fix_kafka import produce
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


@pytest.fixture(scope="module")
def rights_server() -> Iterator[LocalRedis]:
    with LocalRedis() as local:
        yield local


def with_user(server: LocalRedis, *rules: str) -> str:
    """A user with these rules, as an address has it."""
    with redis.Redis.from_url(server.url) as client:
        client.execute_command("ACL", "SETUSER", "shop", "reset", "on", ">s3cret", *rules)
    return "shop:s3cret@"


class TestServers:
    """What a server must be like to keep offsets, and what its errors mean."""

    def test_no_memory_is_found_before_the_first_write(self) -> None:
        with LocalRedis() as server, shop_at(server.url) as shop:
            shop.client.config_set("maxmemory", 1)
            with pytest.raises(StoreUnavailable, match="OOM"):
                shop.handle((10, [push(0)]), (11, [push(1)]))
            shop.client.config_set("maxmemory", 0)
            assert (shop.effects(), shop.offset(), shop.store.failures(GROUP)) == ([], 10, {})

    @pytest.mark.parametrize(("policy", "fits"), [("allkeys-lru", False), ("volatile-lru", True), ("noeviction", True)])
    def test_a_server_that_would_evict_offsets_is_refused(self, policy: str, fits: bool) -> None:
        with LocalRedis(overrides={"maxmemory": "100mb", "maxmemory-policy": policy}) as server:
            if fits:
                assert RedisStore(server.url).groups() == []
            else:
                with pytest.raises(ConfigurationError, match="maxmemory-policy noeviction"):
                    RedisStore(server.url).groups()

    def test_where_nothing_is_shown_it_is_warned_once(self, caplog: pytest.LogCaptureFixture) -> None:
        with LocalRedis() as server:
            with redis.Redis.from_url(server.url) as client:
                client.execute_command("ACL", "SETUSER", "shy", "on", ">s3cret", "~*", "+@all", "-info", "-config")
            store = RedisStore(server.url.replace("//", "//shy:s3cret@"))
            with caplog.at_level(logging.WARNING, "kconsume"):
                assert store.groups() == store.groups() == []
        assert [r.getMessage() for r in caplog.records if "noeviction" in r.getMessage()] == [caplog.messages[0]]

    def test_a_replica_is_tried_again(self) -> None:
        with LocalRedis() as server, shop_at(server.url) as shop:
            shop.client.replicaof("127.0.0.1", "1")
            with pytest.raises(StoreUnavailable):
                shop.handle((10, [push(0)]))
            left = [connection._sock for connection in shop.store._connection.pool._available_connections]
            assert left == [None], "it would never find the new primary under the same name"
            shop.client.replicaof("NO", "ONE")
            assert (shop.effects(), shop.offset()) == ([], 10)

    def test_a_disk_that_is_full_is_tried_again(self) -> None:
        """Redis refuses writes once a snapshot has failed."""
        with LocalRedis() as server, shop_at(server.url) as shop:
            shop.client.config_set("save", "3600 1000000")
            shop.client.config_set("dbfilename", "missing.rdb")
            (server.folder / "temp").mkdir()
            shop.client.config_set("dir", str(server.folder / "temp"))
            (server.folder / "temp").rmdir()
            with pytest.raises(redis.ResponseError):
                shop.client.save()
            if shop.client.info("persistence")["rdb_last_bgsave_status"] == "ok":
                shop.client.bgsave()
                eventually(
                    lambda: shop.client.info("persistence")["rdb_last_bgsave_status"] == "err", what="a failed snapshot"
                )
            with pytest.raises(StoreUnavailable, match="MISCONF"):
                shop.handle((10, [push(0)]))
            assert (shop.effects(), shop.offset()) == ([], 10)
            shop.client.config_set("save", "")  # else it would not end without a snapshot

    @pytest.mark.parametrize("user", ["shop:wr0ng@", "", ":wr0ng@"])
    def test_a_wrong_password_is_said_without_the_password(self, user: str) -> None:
        with LocalRedis() as server:
            with redis.Redis.from_url(server.url) as client:
                client.config_set("requirepass", "s3cret")
            with pytest.raises(ConfigurationError, match="check user and password") as refused:
                RedisStore(server.url.replace("//", f"//{user}")).groups()
            with redis.Redis.from_url(server.url, password="s3cret") as client:
                client.config_set("requirepass", "")
        assert "wr0ng" not in str(refused.value)

    def test_a_user_without_permission_is_a_matter_of_configuration(self) -> None:
        with LocalRedis() as server:
            with redis.Redis.from_url(server.url) as client:
                client.execute_command("ACL", "SETUSER", "shy", "on", ">s3cret", "~*", "+@all", "-evalsha", "-eval")
            with pytest.raises(ConfigurationError, match=r"ACL SETUSER name ~kconsume:\* \+eval"):
                claim(RedisStore(server.url.replace("//", "//shy:s3cret@")))

    def test_a_server_that_does_not_show_its_commands_is_refused_with_the_fix(self, rights_server: LocalRedis) -> None:
        """Without its table nothing is refused while the handler runs: what fails then, fails half-way."""
        user = with_user(rights_server, "~*", "+@all", "-command")
        with pytest.raises(ConfigurationError, match=r"table of commands.*ACL SETUSER name \+command"):
            claim(RedisStore(rights_server.url.replace("//", f"//{user}")))

    def test_the_rights_that_the_docs_list_are_all_that_is_needed(self) -> None:
        (said,) = re.findall(r"ACL SETUSER shop (.*)\n", (ROOT / "docs" / "redis.md").read_text())
        with LocalRedis() as server:
            url = server.url.replace("//", f"//{with_user(server, *said.split())}")
            store = RedisStore(url)
            store.try_rights()
            with redis.Redis.from_url(server.url) as client:
                assert client.keys("*") == [], "something is left of the trial"
                shop = Shop(store, client, claim(store)[ORDERS].epoch)
                shop.handle((10, [("RPUSH", "shop:effects", 1)]))
                shop.store.reclaim(GROUP, {ORDERS: shop.epoch}, "me")
                client.set("shop:text", 1)
                with pytest.raises(Undecided):
                    shop.handle((11, [("RPUSH", "shop:effects", 1), ("RPUSH", "shop:text", 1)]), old=11, epoch=2)
                assert store.failures(GROUP).keys() == {ORDERS}
                store.decide(GROUP, ORDERS, "retry")
                store.reset(GROUP, {ORDERS: 3})
                assert store.groups() == [GROUP]
                store.delete(GROUP)

    @pytest.mark.parametrize(
        "right", [right for right in RIGHTS.split() if right not in ("+info", "+config|get", "+select")]
    )
    def test_a_right_that_is_missing_is_found_by_trying(self, rights_server: LocalRedis, right: str) -> None:
        others = [each for each in RIGHTS.split() if each != right]
        user = with_user(rights_server, "~kconsume:*", *others)
        store = RedisStore(rights_server.url.replace("//", f"//{user}"))
        with pytest.raises(ConfigurationError, match=r"ACL SETUSER name"):
            store.try_rights()
        with redis.Redis.from_url(rights_server.url) as client:
            assert client.keys("*") == []

    def test_a_database_that_is_not_there_is_a_matter_of_configuration(self, server: LocalRedis) -> None:
        with pytest.raises(ConfigurationError, match="no database of that number"):
            RedisStore(f"redis://{server.address}/99").groups()

    def test_nobody_there_is_tried_again(self) -> None:
        with pytest.raises(StoreUnavailable, match=r"127\.0\.0\.1:1"):
            RedisStore("redis://127.0.0.1:1/0").groups()

    def test_offsets_of_another_version_are_refused(self, shop: Shop, url: str) -> None:
        shop.client.hset(Names(None).meta, "version", "99")
        with pytest.raises(StoreError, match="schema version 99, and this kconsume writes version 1"):
            RedisStore(url).groups()

    def test_a_key_of_somebody_else_s_is_an_error_and_not_a_guess(self, url: str) -> None:
        with redis.Redis.from_url(url) as client:
            client.set(Names(None).row(GROUP, ORDERS), "mine")
        with pytest.raises(StoreError, match="used by something else"):
            claim(RedisStore(url))


class TestKeys:
    def test_a_row_is_a_hash_with_the_pinned_fields_and_no_expiry(self, shop: Shop) -> None:
        shop.handle((10, [push(0)]))
        key = "kconsume:offset:shop:orders:3"
        fields = {b"next", b"epoch", b"owner", b"metadata", b"updated_at", b"reset_epoch"}
        assert set(shop.client.hgetall(key)) == fields
        assert shop.client.ttl(key) == -1
        assert set(shop.client.keys("kconsume:*")) == {
            key.encode(), b"kconsume:meta", b"kconsume:groups", b"kconsume:partitions:shop",
        }  # fmt: skip

    def test_stores_with_different_tags_do_not_see_each_other(self, shop: Shop, url: str) -> None:
        assert RedisStore(url, tag="a").groups() == []
        claim(RedisStore(f"{url}?tag=a"))
        assert RedisStore(url, tag="a").groups() == [GROUP]
        assert RedisStore(url, tag="b").groups() == []
        assert shop.client.exists("kconsume:{a}:offset:shop:orders:3") == 1

    def test_nothing_is_left_of_a_deleted_group_but_the_last_epoch_and_that_it_was_deleted(self, shop: Shop) -> None:
        shop.store.delete(GROUP)
        assert shop.client.keys("kconsume:*") == [b"kconsume:meta"]
        deletions = {b"deleted:shop:": str(ALWAYS).encode(), b"deleted:shop:orders/3": b"1"}
        assert shop.client.hgetall("kconsume:meta") == {b"version": b"1", b"last_epoch": b"1", **deletions}


class TestClients:
    def test_a_person_s_own_client_is_used_and_left_open(self, url: str) -> None:
        with redis.Redis.from_url(url, socket_timeout=5, decode_responses=True) as client:
            store = RedisStore(client=client, tag="shop")
            shop = Shop(store, client, claim(store)[ORDERS].epoch)
            shop.handle((10, [push(0)]))
            store.close()
            assert (shop.effects(), shop.offset()) == ([0], 11)
            assert store.address == f"{url}?tag=shop"

    def test_a_socket_of_this_machine_will_do(self, tmp_path: Path) -> None:
        with LocalRedis(overrides={"unixsocket": str(tmp_path / "redis.sock")}):
            assert claim(RedisStore(f"unix://{tmp_path}/redis.sock?db=1&tag=shop"))[ORDERS].epoch == 1

    def test_a_client_that_waits_without_end_is_refused(self, url: str) -> None:
        with redis.Redis.from_url(url, socket_timeout=None) as client, pytest.raises(ConfigurationError, match="=5"):
            RedisStore(client=client)

    def test_a_dry_run_leaves_nothing(self, shop: Shop) -> None:
        before = shop.client.keys()
        with shop.store.dry_run() as rehearsed:
            rehearsed.connection.rpush("effects", 1)
        assert shop.client.keys() == before
        with pytest.raises(TransactionMisused), shop.store.dry_run() as rehearsed:
            rehearsed.connection.execute()

    def test_it_is_a_transactional_store_that_goes_record_by_record(self) -> None:
        assert isinstance(RedisStore("redis://localhost"), TransactionalStore)
        assert RedisStore.by_record


class TestSamples:
    """The code of docs/redis.md, as it stands there."""

    @pytest.fixture
    def samples(self, url: str) -> Iterator[tuple[EmbeddedKafka, list[App]]]:
        texts = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "redis.md").read_text(), re.DOTALL)
        with EmbeddedKafka({"orders": 1}) as broker:
            apps = []
            for text in texts:
                names: dict[str, object] = {"__name__": "sample"}
                here = textwrap.dedent(text)
                exec(here.replace("localhost:9092", broker.bootstrap).replace("redis://localhost:6379/0", url), names)
                assert isinstance(names["app"], App)
                apps.append(names["app"])
            yield broker, apps

    def test_they_work(self, samples: tuple[EmbeddedKafka, list[App]], url: str) -> None:
        broker, (inventory, prices) = samples
        with redis.Redis.from_url(url) as client:
            produce(broker.bootstrap, "orders", ['{"id": 1, "sku": "cup", "quantity": 3}'] * 20)
            inventory.catch_up(idle=0.1)
            assert client.hgetall("reserved") == {b"cup": b"60"}
            assert client.llen("orders:cup") == 20
            client.hset("prices", '{"id": 1, "sku": "cup", "quantity": 3}', "1.5")
            prices.catch_up(idle=0.1)
            assert client.get("turnover") == b"30"

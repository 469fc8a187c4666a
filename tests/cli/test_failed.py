"""`kconsume failed`: a record that Redis applied in part is shown, and goes on only as a person says."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import cast

import pytest
import redis
from confluent_kafka import TIMESTAMP_CREATE_TIME, Message, Producer

from kconsume._embedded.named_broker import attach
from kconsume.backends import Position, RedisStore
from kconsume.backends.claim import granted
from kconsume.backends.redis.server_checks import RedisServerFacts
from kconsume.cli.check.redis import of_server
from kconsume.errors import Undecided
from kconsume.records import Headers, Partition
from kconsume.testing.services import KafkaService, LocalRedis
from tests.cli.conftest import Shop
from tests.contract.test_output import everything
from tests.fix_kafka import MakeTopic, unique

ORDERS = Partition("orders", 1)
AN_HOUR_AGO = int(time.time() - 3600) * 1000 + 123
"""In milliseconds, as a producer writes it; of longer ago, a broker deletes them."""

APP = """
    from redis.client import Pipeline
    from kconsume import App

    app = App("embedded://shop", group="shop", offsets="{url}")

    @app.consume("orders")
    def reserve(order: bytes, tx: Pipeline) -> None:
        tx.rpush("reserved", order)
"""


@dataclass
class Stopped:
    """A shop whose group stopped at orders/1@1, of 3 orders, in the second command of that record."""

    shop: Shop
    store: RedisStore
    url: str

    def failed(self, action: str, *words: str) -> str:
        done = self.shop.run("failed", action, "shop:app", *words)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def shown(self, partition: str) -> list[dict[str, str]]:
        records: list[dict[str, str]] = json.loads(self.failed("show", partition, "--json"))["records"]
        return records

    def offset(self) -> int:
        return self.store.load("shop", [ORDERS])[ORDERS].next_offset


@pytest.fixture(scope="module")
def server() -> Iterator[LocalRedis]:
    with LocalRedis() as local:
        yield local


@pytest.fixture
def stopped(shop: Shop, server: LocalRedis) -> Iterator[Stopped]:
    with redis.Redis.from_url(server.url) as client:
        client.flushall()
    shop.broker(orders=2, **{"orders.dlq": 1})
    sell(attach("shop").bootstrap, "orders", b"cup", b"mug", b"pot", partition=1)
    shop.write("shop", APP.format(url=server.url))
    store = RedisStore(server.url)
    break_at_1(store)
    yield Stopped(shop, store, server.url)
    store.close()


def sell(bootstrap: str, topic: str, *values: bytes, partition: int = 0, transactional: bool = False) -> None:
    """Orders with a key, a header and a time of their own; if transactional, each in a transaction, whose mark is a gap
    in the log behind it."""
    settings = {"bootstrap.servers": bootstrap, **({"transactional.id": unique("sale")} if transactional else {})}
    producer = Producer(settings)
    if transactional:
        producer.init_transactions(20)
    for number, value in enumerate(values):
        if transactional:
            producer.begin_transaction()
        producer.produce(
            topic, value, f"sku-{number}".encode(), partition, headers=[("trace", b"7")], timestamp=AN_HOUR_AGO
        )
        if transactional:
            producer.commit_transaction(20)
    assert producer.flush(20) == 0


def headers_of(letter: Message) -> dict[str, str]:
    """Those that the dead letter has of kconsume."""
    pairs = cast(Headers, letter.headers())
    return {n.removeprefix("kconsume-"): v.decode() for n, v in pairs if n.startswith("kconsume-")}


def break_at_1(store: RedisStore) -> None:
    epoch = granted(store.claim("shop", [ORDERS], "me", lambda missing: dict.fromkeys(missing, Position(0))))[
        ORDERS
    ].epoch
    with pytest.raises(Undecided), store.transaction("shop", ORDERS, epoch) as tx:  # noqa: PT012
        for offset, order in enumerate([b"cup", b"mug", b"pot"]):
            tx.connection.next_record(offset)
            tx.connection.rpush("reserved", order)
            if offset == 1:
                tx.connection.sadd("reserved", order)
        tx.advance(0, 3)


def test_it_is_listed_with_command_and_error(stopped: Stopped) -> None:
    assert "orders/1@1: command 2 of 2 (SADD reserved): WRONGTYPE" in stopped.failed("list")
    (listed,) = json.loads(stopped.failed("list", "--json"))
    assert (listed["record"], listed["group"], listed["index"], listed["of"]) == ("orders/1@1", "shop", 2, 2)


def test_the_order_of_earlier_versions_still_works_with_a_hint(stopped: Stopped) -> None:
    now, before = (
        stopped.shop.run("failed", *words, "--json") for words in (("list", "shop:app"), ("shop:app", "list"))
    )
    assert (before.returncode, before.stdout) == (now.returncode, now.stdout) == (0, now.stdout)
    assert before.stderr == "hint: the command comes first: kconsume failed list shop:app --json\n"
    assert now.stderr == ""
    skipped = stopped.shop.run("failed", "shop:app", "skip", "orders/1", "--yes")
    assert "skipped orders/1@1" in skipped.stdout


def test_show_fetches_the_record_itself_and_names_the_choices(stopped: Stopped) -> None:
    said = stopped.failed("show", "orders/1")
    assert said.startswith("orders/1@1  20")
    assert "value    mug" in said
    assert "commands before it, which are applied: 1" in said
    assert "kconsume failed skip shop:app orders/1 --yes" in said
    (record,) = json.loads(stopped.failed("show", "orders/1", "--json"))["records"]
    assert record["value"] == "mug"
    assert stopped.offset() == 1


def test_retry_lets_the_group_handle_it_again(stopped: Stopped) -> None:
    assert "orders/1@1 will be handled again" in stopped.failed("retry", "orders/1")
    assert stopped.store.failures("shop") == {}
    assert stopped.offset() == 1


def test_skip_only_says_what_it_would_do_until_it_is_told_to(stopped: Stopped) -> None:
    assert "would skip orders/1@1: group shop continues at orders/1@2; add --yes" in stopped.failed("skip", "orders/1")
    assert stopped.store.failures("shop").keys() == {ORDERS}
    assert "skipped orders/1@1" in stopped.failed("skip", "orders/1", "--yes")
    assert (stopped.store.failures("shop"), stopped.offset()) == ({}, 2)


def test_a_dead_letter_is_confirmed_with_its_headers_before_the_record_is_skipped(stopped: Stopped) -> None:
    assert "written to orders.dlq/0@0" in stopped.failed("dead-letter", "orders/1", "--to", "orders.dlq")
    (letter,) = everything(attach("shop").bootstrap, "orders.dlq")
    headers = headers_of(letter)
    (mug,) = [order for order in everything(attach("shop").bootstrap, "orders") if order.value() == b"mug"]
    assert (letter.value(), letter.key()) == (b"mug", b"sku-1")
    assert cast(Headers, letter.headers())[0] == ("trace", b"7")
    assert letter.timestamp() == mug.timestamp() == (TIMESTAMP_CREATE_TIME, AN_HOUR_AGO)
    assert set(headers) == {
        "topic", "partition", "offset", "timestamp", "group", "attempts", "exception", "message", "trace", "origin",
    }  # fmt: skip
    assert (headers["topic"], headers["partition"], headers["offset"]) == ("orders", "1", "1")
    assert headers["exception"] == "kconsume.errors.Undecided"
    assert headers["message"].startswith("WRONGTYPE")
    assert stopped.offset() == 2


class TestRanges:
    """A batch, or a script that broke off: several records are one failure, and the log may have gaps among them."""

    def test_all_records_of_a_batch_are_shown_and_written_with_what_they_had(self, stopped: Stopped) -> None:
        stopped.store.reset("shop", {ORDERS: 0})
        break_batch(stopped.store, ORDERS, 0, 3)
        assert [record["value"] for record in stopped.shown("orders/1")] == ["cup", "mug", "pot"]
        said = stopped.failed("dead-letter", "orders/1", "--to", "orders.dlq")
        assert [f"written to orders.dlq/0@{offset}" in said for offset in range(3)] == [True] * 3
        letters = everything(attach("shop").bootstrap, "orders.dlq")
        assert [(letter.value(), letter.key()) for letter in letters] == [
            (b"cup", b"sku-0"), (b"mug", b"sku-1"), (b"pot", b"sku-2"),
        ]  # fmt: skip
        assert {letter.timestamp()[1] for letter in letters} == {AN_HOUR_AGO}
        assert [headers_of(letter)["offset"] for letter in letters] == ["0", "1", "2"]
        assert stopped.offset() == 3

    def test_records_of_a_script_that_broke_off_are_shown_and_written(self, stopped: Stopped) -> None:
        with redis.Redis.from_url(stopped.url) as client:
            row = "kconsume:offset:shop:orders:1"
            client.hdel(row, "failed_index", "failed_of", "failed_command", "failed_error", "failed_at")
            client.hset(row, mapping={"failed_offset": 0, "failed_end": 2, "next": 0})
        said = stopped.failed("show", "orders/1")
        assert "value    cup" in said
        assert "value    mug" in said
        assert "how much was applied is not known" in said
        assert "written to orders.dlq/0@1" in stopped.failed("dead-letter", "orders/1", "--to", "orders.dlq")
        assert stopped.offset() == 2

    def test_gaps_are_passed_over_wherever_they_are(
        self, shop: Shop, kafka: KafkaService, topic: MakeTopic, server: LocalRedis
    ) -> None:
        """Orders at 0, 2 and 4, and the marks of transactions behind each: a range may begin and end with one."""
        with redis.Redis.from_url(server.url) as client:
            client.flushall()
        name = topic(1)
        sell(kafka.bootstrap, name, b"cup", b"mug", b"pot", transactional=True)
        store, partition = RedisStore(server.url), Partition(name, 0)
        where = ("--brokers", kafka.bootstrap, "--group", "shop", "--offsets", server.url, "--json")
        for (start, end), values in {(1, 6): ["mug", "pot"], (0, 4): ["cup", "mug"], (5, 6): []}.items():
            store.reset("shop", {partition: start})
            break_batch(store, partition, start, end)
            done = shop.run("failed", "show", str(partition), *where)
            assert done.returncode == 0, done.stderr
            assert [record["value"] for record in json.loads(done.stdout)["records"]] == values
        done = shop.run("failed", "dead-letter", str(partition), "--to", name, *where)
        assert (done.returncode, "there is nothing to write" in done.stderr) == (2, True), done.stderr
        store.close()


def break_batch(store: RedisStore, partition: Partition, start: int, end: int) -> None:
    """The records from `start` up to `end`, handled as one and failed as one."""
    claimed = granted(store.claim("shop", [partition], "me", lambda missing: dict.fromkeys(missing, Position(start))))
    with pytest.raises(Undecided), store.transaction("shop", partition, claimed[partition].epoch) as tx:  # noqa: PT012
        tx.connection.rpush("batch", 1)
        tx.connection.sadd("batch", 1)
        tx.advance(start, end)


def test_without_a_topic_nothing_is_written_and_nothing_skipped(stopped: Stopped) -> None:
    done = stopped.shop.run("failed", "dead-letter", "shop:app", "orders/1")
    assert (done.returncode, "add --to" in done.stderr) == (2, True)
    assert stopped.store.failures("shop").keys() == {ORDERS}


def test_it_can_be_told_where_to_look_instead_of_an_app(stopped: Stopped) -> None:
    where = ("--brokers", "embedded://shop", "--group", "shop", "--offsets", stopped.url)
    done = stopped.shop.run("failed", "show", "orders/1", *where)
    assert "value    mug" in done.stdout, done.stderr


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("show", "shop:app", "orders/0"), "partitions that have one are: orders/1"),
        (("show", "shop:app"), "no partition was named"),
        (("shop:app",), "The commands are: list, show, retry, skip, dead-letter."),
        (("lits", "shop:app"), "Did you mean 'list'?"),
        (("show", "shop:app", "orders"), "more than one app"),
        (("show", "shop:app", "orders/1", "orders/0"), "more than one"),
    ],
)
def test_what_is_not_there_or_not_said_is_an_error_with_the_fix(
    stopped: Stopped, words: tuple[str, ...], says: str
) -> None:
    done = stopped.shop.run("failed", *words)
    assert (done.returncode, says in done.stderr) == (2, True), done.stderr


def test_a_store_that_undoes_has_nothing_to_decide(shop: Shop) -> None:
    shop.broker(orders=1)
    shop.write("shop")
    done = shop.run("failed", "list", "shop")
    assert (done.returncode, "there is nothing to decide" in done.stderr) == (2, True), done.stderr


def test_try_runs_the_handler_and_leaves_nothing_in_redis(stopped: Stopped) -> None:
    tried = stopped.shop.run("try", "shop:app", "orders/1@2")
    assert tried.returncode == 0, tried.stdout + tried.stderr
    with redis.Redis.from_url(stopped.url) as client:
        assert client.lrange("reserved", 0, -1) == [b"cup", b"mug"]


def test_check_says_what_this_redis_cannot_promise(stopped: Stopped) -> None:
    sheet = json.loads(stopped.shop.run("check", "shop:app", "--json").stdout)
    assert "redis-fsync" in {finding["code"] for finding in sheet["findings"]}
    offline = json.loads(stopped.shop.run("check", "shop:app", "--json", "--offline").stdout)
    assert not any(finding["code"].startswith("redis") for finding in offline["findings"])


def test_check_finds_a_redis_that_is_not_there(shop: Shop) -> None:
    shop.write("shop", APP.format(url="redis://127.0.0.1:1/0"))
    sheet = json.loads(shop.run("check", "shop:app", "--json").stdout)
    assert "store-unreachable" in {finding["code"] for finding in sheet["findings"] if finding["level"] == "error"}


def test_check_tries_the_rights_of_the_user(shop: Shop, server: LocalRedis) -> None:
    with redis.Redis.from_url(server.url) as client:
        client.execute_command("ACL", "SETUSER", "shy", "reset", "on", ">s3cret", "~*", "+@all", "-eval", "-evalsha")
    shop.write("shop", APP.format(url=server.url.replace("//", "//shy:s3cret@")))
    sheet = json.loads(shop.run("check", "shop:app", "--json").stdout)
    (found,) = [finding for finding in sheet["findings"] if finding["code"] == "store-unusable"]
    assert "does not allow its user" in found["problem"]
    assert "ACL SETUSER name ~kconsume:* +eval" in found["fix"]


GOOD = RedisServerFacts("7.2.4", role="master", maxmemory=0, policy="noeviction", appendonly=True, appendfsync="always")


@pytest.mark.parametrize(
    ("facts", "found"),
    [
        (GOOD, []),
        (RedisServerFacts(role="master", policy="noeviction", appendonly=False), [("warning", "redis-not-persistent")]),
        (RedisServerFacts(policy="noeviction", appendonly=True, appendfsync="no"), [("warning", "redis-fsync")]),
        (RedisServerFacts(policy="noeviction", appendonly=True, appendfsync="everysec"), [("note", "redis-fsync")]),
        (RedisServerFacts(policy="noeviction", replicas=2), [("note", "redis-failover")]),
        (RedisServerFacts(policy="allkeys-lru", maxmemory=0), [("note", "redis-eviction")]),
        (RedisServerFacts(), [("warning", "redis-eviction-unknown")]),
        (RedisServerFacts(role="slave", policy="noeviction"), [("error", "redis-replica")]),
    ],
)
def test_what_each_setting_loses_is_told(facts: RedisServerFacts, found: list[tuple[str, str]]) -> None:
    assert [(finding.level, finding.code) for finding in of_server("redis://db", facts)] == found

"""Apps on Redis: what becomes of a chunk, a batch and a partition when a handler, or Redis, fails in the middle."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Literal, cast

import pytest
import redis
from redis.client import Pipeline

from kconsume import App, BatchError, Batching, Record
from kconsume._kafka.commit_result import OffsetToCommit
from kconsume._kafka.consumer import KafkaConsumer
from kconsume._runtime.assignment.claiming import Claiming
from kconsume._runtime.loop import COMMIT_EVERY
from kconsume.backends import Position, RedisStore
from kconsume.errors import Undecided
from kconsume.records import Partition
from kconsume.testing import EmbeddedKafka
from kconsume.testing.services import LocalRedis
from tests.contract.redis_shop import GROUP, emptied
from tests.fix_arena import QUICK
from tests.fix_kafka import produce
from tests.waiting import eventually

ORDERS = [str(number) for number in range(30)]
ALL_BUT_17 = [order for order in ORDERS if order != "17"]


@dataclass(frozen=True)
class Shop:
    """A broker with orders, and a Redis that is empty."""

    broker: str
    url: str
    client: redis.Redis

    def app(self) -> App:
        return App(self.broker, group=GROUP, offsets=self.url, kafka=QUICK)

    def effects(self, partition: int = 0) -> list[str]:
        items = cast("list[bytes]", self.client.lrange(f"effects:{partition}", 0, -1))
        return [item.decode() for item in items]

    def offset(self) -> int:
        return int(self.client.hget(f"kconsume:offset:{GROUP}:orders:0", "next") or 0)


@pytest.fixture(scope="module")
def server() -> Iterator[LocalRedis]:
    with LocalRedis() as local:
        yield local


@pytest.fixture
def shop(server: LocalRedis) -> Iterator[Shop]:
    url = emptied(server)
    with EmbeddedKafka({"orders": 3}) as broker, redis.Redis.from_url(url) as client:
        produce(broker.bootstrap, "orders", ORDERS, partition=0)
        yield Shop(broker.bootstrap, url, client)


def push(tx: Pipeline, order: str) -> None:
    tx.rpush("effects:0", order)
    if order == "17":
        raise ValueError("no such sku")


def sync_handler(app: App, on_error: Literal["skip", "stop"], chunk: int | None) -> None:
    @app.consume("orders", on_error=on_error, chunk=chunk)
    def reserve(order: str, tx: Pipeline) -> None:
        push(tx, order)


def async_handler(app: App, on_error: Literal["skip", "stop"], chunk: int | None) -> None:
    @app.consume("orders", on_error=on_error, chunk=chunk)
    async def reserve(order: str, tx: Pipeline) -> None:
        await asyncio.sleep(0)
        push(tx, order)


both_kinds = pytest.mark.parametrize("consume", [sync_handler, async_handler])


@pytest.mark.dense
@both_kinds
@pytest.mark.parametrize("chunk", [None, 1, 7])
def test_a_record_that_is_skipped_in_the_middle_of_a_chunk_leaves_nothing_and_its_neighbours_once(
    shop: Shop, consume: Callable[..., None], chunk: int | None
) -> None:
    app = shop.app()
    consume(app, "skip", chunk)
    app.catch_up(idle=0.1)
    assert (shop.effects(), shop.offset()) == (ALL_BUT_17, 30)


@pytest.mark.dense
@both_kinds
def test_a_record_that_stops_the_run_leaves_nothing_and_those_before_it_once(
    shop: Shop, consume: Callable[..., None]
) -> None:
    for _ in range(2):
        app = shop.app()
        consume(app, "stop", None)
        with pytest.raises(Exception, match="no such sku"):
            app.catch_up(idle=0.1)
        assert (shop.effects(), shop.offset()) == (ORDERS[:17], 17)


@pytest.mark.dense
def test_records_that_a_batch_names_are_skipped_and_the_others_have_one_effect(shop: Shop) -> None:
    app = shop.app()

    @app.consume("orders", batch=Batching(records=10, wait=0.2), on_error="skip")
    def reserve(orders: list[str], tx: Pipeline) -> None:
        for order in orders:
            tx.rpush("effects:0", order)
        if "17" in orders:
            raise BatchError({orders.index("17"): ValueError("no such sku")})

    app.catch_up(idle=0.3)
    assert (shop.effects(), shop.offset()) == (ALL_BUT_17, 30)


@pytest.mark.dense
@both_kinds
def test_a_run_ends_at_the_record_that_redis_failed_at(shop: Shop, consume: Callable[..., None]) -> None:
    app = shop.app()
    if consume is sync_handler:

        @app.consume("orders")
        def reserve(order: str, tx: Pipeline) -> None:
            push_and_break(tx, order)

    else:

        @app.consume("orders")
        async def reserve_async(order: str, tx: Pipeline) -> None:
            push_and_break(tx, order)

    with pytest.raises(Undecided, match="orders/0@17: command 2 of 2"):
        app.catch_up(idle=0.1)
    assert (shop.effects(), shop.offset()) == (ORDERS[:18], 17)


def push_and_break(tx: Pipeline, order: str, partition: int = 0) -> None:
    tx.rpush(f"effects:{partition}", order)
    if order == "17":
        tx.sadd(f"effects:{partition}", order)


@pytest.mark.dense
def test_a_partition_that_waits_for_a_person_does_not_stop_the_others_and_goes_on_once_they_decided(
    shop: Shop, caplog: pytest.LogCaptureFixture
) -> None:
    for partition in (1, 2):
        produce(shop.broker, "orders", ["a", "b"], partition=partition)

    def app() -> App:
        made = shop.app()

        @made.consume("orders")
        def reserve(order: str, record: Record, tx: Pipeline) -> None:
            push_and_break(tx, order, record.partition)

        return made

    with pytest.raises(Undecided):
        app().catch_up(idle=0.2)
    for partition in (1, 2):
        produce(shop.broker, "orders", ["c"], partition=partition)
    store = RedisStore(shop.url)
    with app().running():
        for partition in (1, 2):
            eventually(lambda p=partition: shop.effects(p) == ["a", "b", "c"], what="the others go on")  # type: ignore[misc]
        held = 'partition held partition=orders/0 code=held cause="orders/0@17: command 2 of 2'
        eventually(lambda: held in caplog.text, what="the reason is in the log")
        assert shop.effects() == ORDERS[:18]
        store.decide(GROUP, Partition("orders", 0), "skip")
        eventually(lambda: shop.effects() == ORDERS, what="it goes on by itself")
    store.close()


def test_with_on_error_hold_a_record_that_redis_fails_at_holds_its_partition_alone(shop: Shop) -> None:
    app = shop.app()

    @app.consume("orders", on_error="hold")
    def reserve(order: str, record: Record, tx: Pipeline) -> None:
        push_and_break(tx, order, record.partition)

    store = RedisStore(shop.url)
    with app.running():
        eventually(lambda: shop.effects() == ORDERS[:18], what="those before it have their effect")
        produce(shop.broker, "orders", ["a", "b"], partition=1)
        eventually(lambda: shop.effects(1) == ["a", "b"], what="the other goes on")
        eventually(lambda: _held(app) == {Partition("orders", 0): "held"}, what="it is held")
        store.decide(GROUP, Partition("orders", 0), "skip")
        eventually(lambda: shop.effects() == ORDERS, what="decided, it goes on by itself")
    store.close()


@pytest.mark.dense
def test_catching_up_ends_with_a_record_that_waits_for_a_decision(shop: Shop) -> None:
    def app() -> App:
        made = shop.app()

        @made.consume("orders")
        def reserve(order: str, record: Record, tx: Pipeline) -> None:
            push_and_break(tx, order, record.partition)

        return made

    with pytest.raises(Undecided):
        app().catch_up(idle=0.2)
    produce(shop.broker, "orders", ["a"], partition=1)
    with pytest.raises(Undecided, match="orders/0@17: command 2 of 2"):
        app().catch_up(idle=0.2)
    assert shop.effects(1) == ["a"], "the others are read to their end"


def _held(app: App) -> dict[Partition, str]:
    supervisor = app._supervisor
    consumers = supervisor.consumers if supervisor is not None else ()
    return {p: trouble.code for consumer in consumers for p, trouble in consumer.loop.snapshot.held.items()}


@pytest.mark.dense
def test_a_fenced_partition_does_not_take_the_offset_of_its_group_back(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While its next claim waits, what we saw of its row last is behind what another has made of it."""
    app, sent, partition = shop.app(), list[int](), Partition("orders", 0)
    commit, backoff = KafkaConsumer.commit, Claiming._backoff

    def noted(source: KafkaConsumer, marks: Mapping[Partition, OffsetToCommit]) -> None:
        sent.extend(mark.offset for p, mark in marks.items() if p == partition)
        commit(source, marks)

    # Longer than it is from one commit to the next.
    monkeypatch.setattr(
        Claiming, "_backoff", lambda self, owned_partitions: backoff(self, owned_partitions) + 2 * COMMIT_EVERY
    )
    monkeypatch.setattr(KafkaConsumer, "commit", noted)

    @app.consume("orders", chunk=1)
    def handle(record: Record, tx: Pipeline) -> None:
        tx.rpush("effects:0", record.offset)
        if record.offset == 4:
            with closing(RedisStore(shop.url)) as store:
                claimed = store.claim(GROUP, [partition], "rival", lambda _: {})[partition]
                assert isinstance(claimed, Position)
                store.save(GROUP, {partition: replace(claimed, next_offset=20, previous=claimed.next_offset)})

    with app.running():
        eventually(lambda: shop.offset() == len(ORDERS), what="the rest is handled")
        eventually(lambda: sent[-1:] == [len(ORDERS)], what="and the group told")
    assert 20 in sent, "by this commit the broker confirmed us"
    assert sent == sorted(sent)

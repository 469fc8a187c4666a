"""What people write, and the types that they get: no checker may find anything here, and it can be imported."""

# pyright: strict

from __future__ import annotations

import sqlite3
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Literal, assert_type

from kconsume import App, Batch, BatchError, Batching, Outgoing, Partition, Rate, Record, Report, Router, Sender
from kconsume.backends import MemoryStore, OffsetStore
from kconsume.testing import EmbeddedKafka, Fed, afeed, feed, override
from kconsume.testing.plugin import Override
from kconsume.testing.services import KafkaService


@dataclass
class Order:
    id: int
    sku: str = "chair"


class Client:
    def reserve(self, order: int) -> None: ...


class FakeClient(Client): ...


class Session: ...


app = App("localhost:9092", group="shop", offsets="sqlite:///shop.db", kafka={"session.timeout.ms": 9000})
App("localhost:9092", group="shop", offsets=MemoryStore(), shutdown=10, memory=1_000_000)


# Resources and wraps


@app.resource
def client() -> Iterator[Client]:
    yield Client()


@app.resource
async def session(client: Client) -> AsyncIterator[Session]:
    yield Session()


@app.resource
def settings() -> Mapping[str, int]:
    return {"limit": 5}


@app.wrap
def around(record: Record) -> Iterator[None]:
    assert_type(record.timestamp, datetime | None)
    assert_type(record.headers, tuple[tuple[str, bytes], ...])
    yield


@app.wrap
def around_both(subject: Record | Batch) -> Iterator[None]:
    yield


assert_type(client(), Iterator[Client])
assert_type(session(Client()), AsyncIterator[Session])
assert_type(settings(), Mapping[str, int])
assert_type(around(Record()), Iterator[None])


# A decorated function stays what it was.


@app.consume("orders", "more-orders", on_error="skip", rate=Rate(50, per=60.0), start="latest", to="reserved")
def reserve(order: Order, tx: sqlite3.Connection, record: Record | None = None, *, loud: bool = False) -> str:
    return order.sku


@app.consume("payments", group="pays", executor="inline", partitions=[0, 1], chunk=10, concurrency=2, decode=int)
def pay(amount: int) -> None: ...


@app.consume("shipments", to="shipped", group="ships", offsets="memory://")
async def ship(order: Order, client: Client) -> Outgoing:
    client.reserve(order.id)
    return Outgoing({"id": order.id}, key=str(order.id), headers={"trace": b"1", "by": "ship"}, topic="elsewhere")


@app.consume("clicks", batch=Batching(records=100, wait=0.5))
def count(clicks: list[dict[str, int]], batch: Batch, sender: Sender) -> None:
    sender.send("counts", len(clicks), key=b"all", headers=[("first", str(batch.first))])
    raise BatchError({0: ValueError("bad")})


def called_like_any_function(tx: sqlite3.Connection) -> None:
    assert_type(reserve(Order(1), tx), str)
    assert_type(reserve(order=Order(1), tx=tx, record=None, loud=True), str)
    pay(5)


async def awaited_like_any_function() -> None:
    assert_type(await ship(Order(1), client=Client()), Outgoing)
    await audit(Order(1), note="seen")


# Routers

router = Router(group="audit")


@router.consume("orders")
async def audit(order: Order, *, note: str = "") -> None: ...


@router.wrap
async def around_async() -> AsyncIterator[None]:
    yield


@router.resource
def audited() -> Iterator[FakeClient]:
    yield FakeClient()


app.include(router)
app.include(Router(), group="other", offsets=MemoryStore())
assert_type(audited(), Iterator[FakeClient])


# Running


def run() -> None:
    assert_type(app.run(), None)
    assert_type(app.catch_up(idle=0.5), Report)
    with app.running() as running:
        assert_type(running, App)
        running.pause("orders/3", Partition("orders", 4))
        running.send("orders", {"id": 1}, key="1")


async def run_on_a_loop() -> None:
    async with app.running() as running:
        assert_type(running, App)


# Values

assert_type(Rate(50).per, float)
assert_type(Batching().records, int)
assert_type(Outgoing(None).key, bytes | str | None)
assert_type(Outgoing(None).topic, str | None)
assert_type(BatchError({0: ValueError()}).errors, dict[int, BaseException])


def of_a_batch(batch: Batch) -> None:
    assert_type(batch[0], Record)
    assert_type(batch[1:], Batch)
    assert_type(batch.keys, list[bytes | None])
    for record in batch:
        assert_type(record.id, str)


# The testing kit


def test_reserve(tx: sqlite3.Connection) -> None:
    fed = feed(app, "orders", Order(1), key="1", headers=[("trace", "1")], tx=tx, resources={Client: FakeClient()})
    assert_type(fed, Fed)
    assert_type(fed.outcome, Literal["handled", "skipped", "dead_lettered", "failed"])
    assert_type(fed.error, BaseException | None)
    assert_type(fed.sent, list[Outgoing])
    assert_type(fed.dead_letters, list[Outgoing])
    fakes = {Client: FakeClient()}
    feed(app, "orders", None, resources=fakes, group="shop")


async def test_ship() -> None:
    assert_type(await afeed(app, "shipments", b"{}", headers={"trace": "1"}), Fed)


def test_a_run(kconsume_embedded: EmbeddedKafka, kconsume_override: Override) -> None:
    assert_type(kconsume_embedded.bootstrap, str)
    assert_type(kconsume_override(app, brokers=kconsume_embedded.bootstrap, resources={Client: FakeClient()}), App)
    with override(app, offsets=MemoryStore(), group="test", kafka={}) as overridden:
        assert_type(overridden, App)


def test_on_a_real_kafka(kconsume_kafka: KafkaService) -> None:
    assert_type(kconsume_kafka.bootstrap, str)


def takes_a_store(store: OffsetStore) -> None: ...


takes_a_store(MemoryStore())

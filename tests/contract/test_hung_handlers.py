"""A handler call that never returns does not keep its partition from going on when that comes back (P3, P12)."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Callable

import psycopg
import pytest

from kconsume import App, Partition
from kconsume._runtime.lanes.lane import Lane
from kconsume.backends import open_store
from kconsume.errors import TooManyFailures
from kconsume.testing.services import KafkaService
from tests.fix_arena import STEADY
from tests.fix_kafka import MakeTopic, produce
from tests.liveness import assert_app_lives
from tests.waiting import eventually

VALUES = [str(n) for n in range(6)]


class Shop:
    """One member whose handler hangs on the record "2" the first time. Its partition leaves and returns meanwhile."""

    def __init__(self, kafka: KafkaService, topic: MakeTopic, group: str, offsets: str) -> None:
        self.topic, self.other = topic(1), topic(1)
        self.seen: list[str] = []
        self.hangs, self.end = threading.Event(), threading.Event()
        self.bootstrap, self.group = kafka.bootstrap, group
        self.offsets = open_store(offsets, brokers=kafka.bootstrap)  # `memory://` is looked at by the store itself
        self.app = App(kafka.bootstrap, group=group, offsets=self.offsets, kafka=STEADY, shutdown=2.0)
        produce(kafka.bootstrap, self.topic, VALUES, partition=0)

    def handle(self, value: str) -> None:
        if value == "2" and not self.hangs.is_set():
            self.hangs.set()
            self.end.wait(120)
        self.seen.append(value)

    def leave_and_return(self) -> None:
        eventually(self.hangs.is_set, what="the handler hangs")
        self.app.subscribe(self.other)
        eventually(lambda: self.owned() == {Partition(self.other, 0)}, what="the partition went")
        self.app.subscribe(self.topic)

    def owned(self) -> set[Partition]:
        supervisor = self.app._supervisor
        assert supervisor is not None
        return {p for consumer in supervisor.consumers for p in consumer.loop.snapshot.assigned}


@pytest.fixture
def make_shop(
    kafka: KafkaService, topic: MakeTopic, group: str, sqlite_url: str, postgres_url: str
) -> Callable[[str], Shop]:
    def make(store: str) -> Shop:
        offsets = {"postgres": postgres_url, "sqlite": sqlite_url}.get(store, f"{store}://")
        return Shop(kafka, topic, group, offsets)

    return make


def comes_back(shop: Shop) -> None:
    with shop.app.running():
        try:
            shop.leave_and_return()
            eventually(lambda: shop.seen[-4:] == VALUES[2:], what="it goes on where the hung call began")
            assert_app_lives(
                shop.app,
                bootstrap=shop.bootstrap,
                topic=shop.topic,
                group=shop.group,
                offsets=shop.offsets,
                partitions=1,
            )
        finally:
            shop.end.set()


@pytest.mark.parametrize("store", ["memory", "sqlite", "postgres"])
def test_on_a_fenced_store_it_goes_on_beside_the_hung_call(make_shop: Callable[[str], Shop], store: str) -> None:
    shop = make_shop(store)

    @shop.app.consume(shop.topic)
    def handle(value: str) -> None:
        shop.handle(value)

    comes_back(shop)


def test_inside_a_transaction_of_postgres_too(make_shop: Callable[[str], Shop]) -> None:
    shop = make_shop("postgres")

    @shop.app.consume(shop.topic)
    def handle(value: str, tx: psycopg.Connection) -> None:
        tx.execute("select 1")
        shop.handle(value)

    comes_back(shop)


def test_control_without_the_rule_it_stands_still(
    make_shop: Callable[[str], Shop], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Lane, "occupied", property(lambda lane: lane.busy))
    shop = make_shop("memory")

    @shop.app.consume(shop.topic)
    def handle(value: str) -> None:
        shop.handle(value)

    with shop.app.running():
        shop.leave_and_return()
        consumer = shop.app._supervisor.consumers[0]  # type: ignore[union-attr]
        eventually(lambda: consumer.assignment.abandoned, what="the call was given up")
        assert VALUES[-1] not in shop.seen
        shop.end.set()


@pytest.mark.parametrize("store", ["kafka", "sqlite"])
def test_where_nothing_fences_it_or_it_holds_the_file_the_process_ends_and_says_why(
    make_shop: Callable[[str], Shop], store: str
) -> None:
    shop = make_shop(store)
    if store == "kafka":

        @shop.app.consume(shop.topic)
        def plain(value: str) -> None:
            shop.handle(value)

    else:

        @shop.app.consume(shop.topic)
        def within(value: str, tx: sqlite3.Connection) -> None:
            shop.handle(value)

    def run() -> None:
        with shop.app.running():
            shop.leave_and_return()
            eventually(lambda: False, what="the failure ends this")

    try:
        with pytest.raises(TooManyFailures, match=r"has not returned.*Give the handler a timeout="):
            run()
    finally:
        shop.end.set()

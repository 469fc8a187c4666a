"""`override`: another broker, store, group, client or resource for an app, while a test lasts."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from kconsume import App, Record
from kconsume.backends import MemoryStore
from kconsume.errors import ConfigurationError, ResourceFailed
from kconsume.testing import EmbeddedKafka, feed, override


class Client:
    """Something a handler calls."""

    def __init__(self) -> None:
        self.calls: list[str] = []


@pytest.fixture
def app() -> App:
    app = App("prod:9092", group="shop", offsets="memory://", kafka={"session.timeout.ms": 9000})

    @app.resource
    def client() -> Client:
        raise AssertionError("not built")

    @app.consume("orders")
    def reserve(record: Record, client: Client) -> None:
        client.calls.append(record.id)

    @app.consume("payments", group="audit", offsets="kafka://")
    def audit(payment: bytes) -> None: ...

    return app


def test_it_replaces_and_puts_back(app: App) -> None:
    mine, before = MemoryStore(), [(r.group, r.store) for r in app.registrations]
    with override(app, brokers="b:1", offsets=mine, group="test", kafka={"client.id": "t"}) as overridden:
        assert overridden is app
        assert (app.brokers, app.offsets, app.group, app.kafka) == ("b:1", mine, "test", {"client.id": "t"})
        assert [(r.group, r.store) for r in app.registrations] == [("test", mine), before[1]]
    assert (app.brokers, app.offsets, app.group) == ("prod:9092", "memory://", "shop")
    assert app.kafka == {"session.timeout.ms": 9000}
    assert [(r.group, r.store) for r in app.registrations] == before


def test_it_is_put_back_after_an_error_too(app: App) -> None:
    with pytest.raises(ValueError, match="a test failed"), override(app, group="test"):
        raise ValueError("a test failed")
    assert app.group == "shop"


def test_a_handler_that_names_what_the_app_has_goes_with_the_app(app: App) -> None:
    @app.consume("stock", group="shop", offsets="memory://")
    def count(stock: bytes) -> None: ...

    with override(app, group="test", offsets=MemoryStore()):
        reserve, _, counted = app.registrations
        assert (counted.group, counted.store) == (reserve.group, reserve.store)
        assert len(app.plans()) == 2


def test_an_address_is_a_new_store_each_time(app: App) -> None:
    stores = {id(app.registrations[0].store)}
    kept = [app.registrations[0].store]
    for _ in range(2):
        with override(app, offsets="memory://"):
            kept.append(app.registrations[0].store)
            stores.add(id(kept[-1]))
    assert len(stores) == 3


def test_resources_are_replaced_for_feed_and_for_runs(app: App) -> None:
    fake = Client()
    with override(app, resources={Client: fake}, group="test"):
        assert feed(app, "orders", b"").outcome == "handled"
    assert fake.calls == ["test:orders:0:0"]
    with pytest.raises(ResourceFailed):
        feed(app, "orders", b"")


def test_what_a_handler_cannot_do_with_is_refused_and_nothing_stays(tmp_path: Path) -> None:
    shop = App("prod:9092", group="shop", offsets=f"sqlite:///{tmp_path}/shop.db")

    @shop.consume("orders")
    def reserve(order: bytes, tx: sqlite3.Connection) -> None: ...

    before = list(shop.registrations)
    with pytest.raises(ConfigurationError, match="memory://, which has no such transaction"):
        with override(shop, offsets="memory://"):
            pass
    assert shop.registrations == before
    with override(shop, offsets=f"sqlite:///{tmp_path}/test.db"):
        assert shop.registrations[0].store.address.endswith("/test.db")


@pytest.mark.parametrize(
    ("replaced", "told"),
    [
        ({"brokers": ""}, "no address"),
        ({"group": ""}, "group"),
        ({"offsets": "nosuch://x"}, "nosuch"),
        ({"kafka": {"group.id": "x"}}, "group.id"),
        ({"resources": {int: 1}}, "resources= has int"),
        ({"group": "audit", "offsets": MemoryStore()}, "share group 'audit'"),
    ],
)
def test_what_an_app_would_refuse_is_refused(app: App, replaced: dict[str, object], told: str) -> None:
    before = list(app.registrations)
    with pytest.raises(ConfigurationError, match=told):
        with override(app, **replaced):  # type: ignore[arg-type]
            pass
    assert (app.brokers, app.group, app.offsets, app.declared.ready_resources) == ("prod:9092", "shop", "memory://", {})
    assert app.registrations == before


def test_a_handler_that_is_added_meanwhile_stays_on_the_apps_own_terms(app: App) -> None:
    with override(app, group="test", offsets="memory://"):

        @app.consume("late")
        def late(value: bytes) -> None: ...

        assert app.registrations[-1].group == "test"
    assert [r.name for r in app.registrations] == ["reserve", "audit", "late"]
    assert (app.registrations[-1].group, app.registrations[-1].store) == ("shop", app.registrations[0].store)


def test_overrides_can_be_nested(app: App) -> None:
    with override(app, group="outer"):
        with override(app, brokers="inner:1"):
            assert (app.group, app.brokers) == ("outer", "inner:1")
        assert (app.group, app.brokers) == ("outer", "prod:9092")
    assert app.group == "shop"


QUICK: dict[str, str | int | float | bool] = {"session.timeout.ms": 2000, "heartbeat.interval.ms": 250}


def test_a_whole_run_goes_to_the_other_broker_and_the_given_resources() -> None:
    app, fake = App("prod:9092", group="shop", kafka={"security.protocol": "SASL_SSL"}), Client()

    @app.resource
    def client() -> Client:
        raise AssertionError("not built")

    @app.consume("orders")
    def reserve(order: str, client: Client) -> None:
        client.calls.append(order)

    outlet = app._producer
    with EmbeddedKafka({"orders": 1}) as kafka:
        with override(app, brokers=kafka.bootstrap, group="test", kafka=QUICK, resources={Client: fake}):
            app.send("orders", "one")
            app.send("orders", "two")
            report = app.catch_up(idle=0.1)
    assert fake.calls == ["one", "two"]
    assert report.handled == 2
    assert (app.brokers, app._producer) == ("prod:9092", outlet)


def test_what_was_sent_before_has_its_own_way_out_again() -> None:
    app = App("embedded://", group="shop")
    app.send("orders", "one")
    before = app._producer
    with override(app, group="test"):
        app.send("orders", "two")
        assert app._producer not in (None, before)
    assert app._producer is before
    app.send("orders", "three")


def test_an_app_that_runs_is_not_overridden() -> None:
    app = App("embedded://", group="shop")

    @app.consume("orders")
    def reserve(order: str) -> None: ...

    with app.running():
        with pytest.raises(ConfigurationError, match="running"), override(app, group="test"):
            pass

"""`kconsume check`: what it finds out about real apps, and what it keeps to itself."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from typing import Any

import pytest

from kconsume.testing.services import KafkaService
from tests.cli.conftest import APP, Shop
from tests.fix_kafka import MakeTopic

NOWHERE = "127.0.0.1:1"

SECRETIVE = """
    from kconsume import App
    from kconsume.backends import MemoryStore

    store = MemoryStore()
    store.address = "postgresql://shop:geheim@db/shop"
    app = App("127.0.0.1:1", group="shop", offsets=store, kafka={
        "security.protocol": "SASL_SSL",
        "sasl.mechanism": "PLAIN",
        "sasl.username": "shop",
        "sasl.password": "geheim",
        "ssl.key.password": "geheim",
        "sasl.oauthbearer.client.secret": "geheim",
        "sasl.oauthbearer.assertion.private.key.passphrase": "geheim",
        "ssl.key.pem": "geheim",
    })

    @app.consume("orders")
    def reserve(order: bytes) -> None: ...
"""


def sheet(shop: Shop, *arguments: str) -> tuple[int, dict[str, Any]]:
    done = shop.run("check", *arguments, "--json")
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


def codes(document: dict[str, Any], level: str | None = None) -> set[str]:
    return {finding["code"] for finding in document["findings"] if level in (None, finding["level"])}


def app_with(arguments: str = "", consume: str = "", source: str = APP) -> str:
    """The good app with other arguments, at an address where nobody is."""
    source = source.replace("embedded://shop", NOWHERE)
    source = source.replace('group="shop"', f'group="shop", {arguments}' if arguments else 'group="shop"')
    return source.replace('("orders")', f'("orders", {consume})' if consume else '("orders")')


def test_a_good_app_is_ready_and_its_sheet_is_complete(shop: Shop) -> None:
    shop.broker(orders=3)
    shop.write("shop")
    code, document = sheet(shop, "shop:app")
    (handler,) = document["handlers"]

    assert code == 0
    assert document["ok"] is True
    assert codes(document) == {"relative-file"}
    assert document["app"] == "shop:app"
    assert document["topics"] == {"orders": 3}
    assert handler["name"] == "reserve"
    assert handler["gets"] == "Order"
    assert handler["transaction"] == "sqlite3.Connection"
    assert handler["guarantee"].startswith("exactly once")
    assert handler["on_error"].startswith("a record that fails stops the process")
    assert (handler["start"], handler["executor"], handler["concurrency"]) == ("earliest", "thread", None)


def test_the_client_is_shown_with_the_reason_for_every_default_that_is_not_its_own(shop: Shop) -> None:
    shop.write("shop", app_with('kafka={"session.timeout.ms": 10000}'))
    _, document = sheet(shop, "shop", "--offline")
    properties = {each["name"]: each for each in document["kafka"]}

    backoff = properties["fetch.queue.backoff.ms"]
    assert (backoff["value"], backoff["librdkafka"], backoff["set_by"]) == (5, 1000, "kconsume")
    assert backoff["why"]
    session = properties["session.timeout.ms"]
    assert (session["value"], session["kconsume"], session["set_by"]) == (10000, 45000, "you")
    assert properties["enable.auto.commit"]["set_by"] == "promise"
    assert properties["group.id"] == {
        "name": "group.id", "value": "shop", "set_by": "app", "librdkafka": None, "kconsume": None, "why": None,
    }  # fmt: skip


def test_a_person_reads_it_on_one_page(shop: Shop) -> None:
    shop.broker(orders=3)
    shop.write("shop")
    shown = shop.run("check", "shop")

    assert shown.returncode == 0
    for told in (
        "orders  3 partitions",
        "exactly once: what the handler writes and the offset commit together",
        "Order, and the transaction (sqlite3.Connection)",
        "fetch.queue.backoff.ms = 5",
        "instead of 1000",
        "Ready to run: 1 note",
    ):
        assert told in shown.stdout
    assert "\x1b" not in shown.stdout


@pytest.mark.parametrize(
    ("concurrency", "shown"),
    [(1, "loop, one partition at a time"), (3, "loop, up to 3 partitions at a time")],
)
def test_it_is_shown_how_much_an_event_loop_does_at_once(shop: Shop, concurrency: int, shown: str) -> None:
    shop.write(
        "shop",
        f"""
        from kconsume import App

        app = App("{NOWHERE}", group="shop", offsets="memory://")

        @app.consume("orders", concurrency={concurrency})
        async def reserve(order: bytes) -> None: ...
    """,
    )
    assert shown in shop.run("check", "shop", "--offline").stdout


@pytest.mark.parametrize(
    ("source", "code"),
    [
        (app_with('kafka={"session.timeout.ms": 400000}'), "session-over-poll-interval"),
        (app_with('kafka={"heartbeat.interval.ms": 50000}'), "heartbeat-too-slow"),
        (app_with('kafka={"fetch.wait.max.msec": 1}'), "client-refuses"),
        (app_with('kafka={"max.poll.interval.ms": "soon"}'), "client-refuses"),
        (app_with(source=APP.replace("///shop.db", "///not/there/shop.db")), "store-unusable"),
        (app_with(source=APP.partition("@app.consume")[0]), "no-handler"),
    ],
)
def test_what_cannot_work_is_an_error_and_ends_with_2(shop: Shop, source: str, code: str) -> None:
    shop.write("shop", source)
    exit_code, document = sheet(shop, "shop", "--offline")

    assert exit_code == 2
    assert document["ok"] is False
    assert codes(document, "error") == {code}
    assert all(finding["fix"] for finding in document["findings"])


@pytest.mark.parametrize(
    ("source", "code"),
    [
        (app_with("shutdown=2"), "shutdown-too-short"),
        (app_with('kafka={"heartbeat.interval.ms": 20000}'), "heartbeat-too-slow"),
        (app_with('kafka={"linger.ms": 5}'), "client-ignores"),
        (app_with("memory=1024"), "queue-over-memory"),
        (app_with(consume='executor="inline"'), "inline-executor"),
        (app_with(source=APP.replace(", tx: sqlite3.Connection", "")), "transaction-not-taken"),
        (app_with(source=APP.replace(", tx: sqlite3.Connection", "").replace("sqlite:///shop.db", "memory://")),
         "memory-store"),
    ],
)  # fmt: skip
def test_what_will_hurt_is_a_warning_and_ends_with_0(shop: Shop, source: str, code: str) -> None:
    shop.write("shop", source)
    exit_code, document = sheet(shop, "shop", "--offline")

    assert exit_code == 0
    assert codes(document, "warning") == {code}


def test_offsets_in_kafka_are_noted_to_expire(shop: Shop) -> None:
    shop.write(
        "shop", app_with(source=APP.replace(", tx: sqlite3.Connection", "").replace("sqlite:///shop.db", "kafka://"))
    )
    exit_code, document = sheet(shop, "shop", "--offline")

    assert exit_code == 0
    assert codes(document) == {"kafka-offsets-expire"}


def test_a_broker_that_does_not_answer_is_an_error_unless_offline(shop: Shop) -> None:
    shop.write("shop", app_with())
    exit_code, document = sheet(shop, "shop")

    assert exit_code == 2
    assert codes(document, "error") == {"broker-unreachable"}
    assert document["topics"] is None
    assert sheet(shop, "shop", "--offline")[0] == 0


def test_a_topic_that_is_missing_on_the_cluster_is_an_error(shop: Shop, kafka: KafkaService, topic: MakeTopic) -> None:
    orders = topic(2)
    shop.write("right", app_with(source=APP.replace('"orders"', repr(orders))).replace(NOWHERE, kafka.bootstrap))
    shop.write("wrong", app_with(source=APP.replace('"orders"', repr(f"{orders}x"))).replace(NOWHERE, kafka.bootstrap))
    right, wrong = sheet(shop, "right"), sheet(shop, "wrong")

    assert right[0] == 0
    assert right[1]["topics"] == {orders: 2}
    assert wrong[0] == 2
    assert wrong[1]["topics"] == {f"{orders}x": None}
    (finding,) = (f for f in wrong[1]["findings"] if f["level"] == "error")
    assert finding["code"] == "topic-missing"
    assert finding["fix"] == f"did you mean {orders!r}?"


def test_checking_starts_nothing_and_makes_no_file(shop: Shop) -> None:
    shop.write("shop")
    _, document = sheet(shop, "shop")

    assert codes(document, "note") == {"broker-not-running", "relative-file"}
    assert shop.processes() == []
    assert [path.name for path in shop.folder.iterdir() if path.suffix.startswith(".db")] == []


@pytest.mark.parametrize("form", [[], ["--json"]])
def test_no_secret_is_shown(shop: Shop, form: list[str]) -> None:
    shop.write("shop", SECRETIVE)
    shown = shop.run("check", "shop", "--offline", *form)

    assert "geheim" not in shown.stdout + shown.stderr
    assert "postgresql://shop:********@db/shop" in shown.stdout
    assert shown.stdout.count("********") >= 6


def test_an_sqlite_file_of_another_version_is_found(shop: Shop) -> None:
    shop.write("shop")
    with closing(sqlite3.connect(shop.folder / "shop.db")) as database:
        database.execute("create table kconsume_schema (version integer)")
        database.execute("insert into kconsume_schema values (99)")
        database.commit()
    done = shop.run("check", "shop", "--json")
    (found,) = [finding for finding in json.loads(done.stdout)["findings"] if finding["code"] == "store-unusable"]
    assert (done.returncode, "schema version 99" in found["problem"]) == (2, True)
    assert "this kconsume writes version 2" in found["problem"]
    assert found["fix"] == "upgrade kconsume here"


def test_an_sqlite_file_of_an_older_version_is_no_trouble_and_left_as_it_is(shop: Shop) -> None:
    shop.write("shop")
    with closing(sqlite3.connect(shop.folder / "shop.db")) as database:
        database.execute("create table kconsume_schema (version integer)")
        database.execute("insert into kconsume_schema values (1)")
        database.commit()
        _, document = sheet(shop, "shop")
        assert "store-unusable" not in {finding["code"] for finding in document["findings"]}
        assert database.execute("select * from kconsume_schema").fetchall() == [(1,)]

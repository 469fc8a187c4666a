"""docs/failures.md: its programs run as they stand, its tables name what is there, and what it says is refused is."""

from __future__ import annotations

import json
import re
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any, cast

import psycopg
import pytest
from confluent_kafka import Consumer, TopicPartition
from tenacity import stop_never

from kconsume import App, BatchError, ConfigurationError, DeadLetter, Record, Retry, RetryTopics
from kconsume._embedded.controls import KafkaControls
from kconsume._embedded.named_broker import attach
from kconsume.failures.letter_headers import letter_of
from kconsume.testing import EmbeddedKafka, feed
from tests.fix_kafka import produce, unique
from tests.integration.test_programs import SAMPLE, run_pytest, running, send
from tests.unit.fakes import FakeMessage
from tests.waiting import eventually

PAGE = (Path(__file__).parents[2] / "docs" / "failures.md").read_text()
PROGRAMS: dict[str, str] = dict(re.findall(SAMPLE, PAGE, re.DOTALL))
SOON: dict[str, int] = {"session.timeout.ms": 2000}
"""How long the embedded broker waits before the next member gets what one that left had."""


@pytest.fixture
def broker() -> Iterator[KafkaControls]:
    broker = attach(unique("failures"), until_exit=True)
    yield broker
    broker.stop()


@pytest.fixture
def here(tmp_path: Path) -> Path:
    for name, code in PROGRAMS.items():
        (tmp_path / name).write_text(code)
    return tmp_path


@contextmanager
def bank(answers: Callable[[str, int], int]) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """Answers a charge by its account and by how often it was asked for it. Gives its address, and account and key of
    each question."""
    asked: list[tuple[str, str]] = []

    class Bank(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            account = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["account"]
            asked.append((account, self.headers["Idempotency-Key"]))
            self.send_response(answers(account, sum(name == account for name, _ in asked)))
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            """Not to standard error."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Bank)
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", asked
    finally:
        server.shutdown()
        server.server_close()


def written(broker: KafkaControls, topic: str, count: int) -> list[dict[str, str]]:
    """The dead letters of partition 0, once there are so many: their headers, and beside them key and value."""
    consumer = Consumer({"bootstrap.servers": broker.bootstrap, "group.id": unique("look"), "log_level": 0})
    try:
        consumer.assign([TopicPartition(topic, 0, 0)])
        found = consumer.consume(count, 5.0)
    finally:
        consumer.close()
    texts = []
    for message in found:
        headers = cast("list[tuple[str, bytes]]", message.headers())
        marks = {name: value.decode() for name, value in headers}
        texts.append({**marks, "key": (message.key() or b"").decode(), "value": (message.value() or b"").decode()})
    return texts


def charge(account: str) -> tuple[str, str]:
    return account, json.dumps({"account": account, "cents": 5})


def test_a_bank_that_is_busy_is_asked_again_and_what_it_declines_is_a_dead_letter(
    broker: KafkaControls, here: Path
) -> None:
    broker.create_topic("charges", 1)
    broker.create_topic("charges.dlq", 1)
    send(broker, "charges", charge("good"), charge("poor"), charge("busy"), ("odd", "no charge"), charge("last"))

    def answers(account: str, times: int) -> int:
        return {"poor": 402, "busy": 503 if times < 3 else 201}.get(account, 201)

    with bank(answers) as (address, asked), running("charges.py", here, broker, BANK=address):
        eventually(lambda: asked and asked[-1][0] == "last", what="the last is charged")
        letters = written(broker, "charges.dlq", 2)
    assert [account for account, _ in asked] == ["good", "poor", "busy", "busy", "busy", "last"], "in order"
    assert len({key for account, key in asked if account == "busy"}) == 1, "with one idempotency key"
    assert [letter["key"] for letter in letters] == ["poor", "odd"]
    assert [letter["value"] for letter in letters] == [charge("poor")[1], "no charge"]
    assert [letter["kconsume-exception"] for letter in letters] == ["__main__.Declined", "kconsume.errors.DecodeError"]
    assert [letter["kconsume-offset"] for letter in letters] == ["1", "3"]
    assert re.fullmatch(r"charges:[^:]+:0:1", letters[0]["kconsume-origin"])


def test_a_program_that_waits_to_try_again_is_stopped_and_the_next_begins_with_the_record(
    broker: KafkaControls, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KCONSUME_KAFKA_SESSION_TIMEOUT_MS", "2000")
    broker.create_topic("charges", 1)
    broker.create_topic("charges.dlq", 1)
    send(broker, "charges", charge("busy"))
    with bank(lambda *_: 503) as (address, asked), running("charges.py", here, broker, BANK=address):
        eventually(lambda: len(asked) == 2, what="it waits for its third attempt")
    with bank(lambda *_: 201) as (address, again), running("charges.py", here, broker, BANK=address):
        eventually(lambda: again, what="it is charged by the next")
    assert [key for _, key in again] == [asked[0][1]], "the same record"


def test_a_failed_booking_is_a_row_and_a_restart_adds_none(
    broker: KafkaControls, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KCONSUME_KAFKA_SESSION_TIMEOUT_MS", "2000")
    broker.create_topic("bookings", 1)
    guests = [(1, "Ada"), (2, "Bo"), (1, "Cy"), (3, "Di")]
    send(broker, "bookings", *((None, json.dumps({"room": room, "guest": guest})) for room, guest in guests))
    send(broker, "bookings", ("k", "no booking"))
    with running("bookings.py", here, broker):
        eventually(lambda: passed(here) == 5, what="all passed")
    send(broker, "bookings", (None, json.dumps({"room": 4, "guest": "Ed"})))
    with running("bookings.py", here, broker):
        eventually(lambda: passed(here) == 6, what="the last passed")
    assert rows(here, "select * from bookings") == [(1, "Ada"), (2, "Bo"), (3, "Di"), (4, "Ed")]
    failed = rows(here, "select record_offset, exception, key, group_id, attempts, redriven from failed_bookings")
    assert failed == [
        (2, "sqlite3.IntegrityError", None, "bookings", 1, 0),
        (4, "kconsume.errors.DecodeError", b"k", "bookings", 1, 0),
    ]


def passed(here: Path) -> int:
    return sum(row[0] for row in rows(here, "select next_offset from kconsume_offsets"))


def rows(here: Path, query: str) -> list[tuple[Any, ...]]:
    with closing(sqlite3.connect(here / "hotel.db")) as hotel:
        try:
            return hotel.execute(query).fetchall()
        except sqlite3.OperationalError:
            return []  # not there yet


def test_a_parcel_whose_street_is_unknown_is_routed_once_it_is_told_of_and_others_do_not_wait(
    broker: KafkaControls, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KCONSUME_KAFKA_SESSION_TIMEOUT_MS", "2000")
    for topic in ("parcels", *(f"parcels.routing.retry.{n}" for n in (1, 2, 3))):
        broker.create_topic(topic, 1)
    parcels = [(1, "High Street"), (2, "New Road"), (3, "High Street")]
    send(broker, "parcels", *((None, json.dumps({"id": n, "street": street})) for n, street in parcels))
    send(broker, "parcels", (None, "no parcel"))

    def look(query: str) -> list[tuple[Any, ...]]:
        with closing(sqlite3.connect(here / "depots.db", timeout=30)) as depots:
            try:
                return depots.execute(query).fetchall()
            except sqlite3.OperationalError:
                return []

    with closing(sqlite3.connect(here / "depots.db")) as depots:
        depots.executescript(
            "create table streets (name text, depot text); create table routed (id integer, depot text);"
            "insert into streets values ('High Street', 'north');"
        )
    with running("parcels.py", here, broker):
        eventually(lambda: len(look("select * from lost_parcels")) == 1, what="what is no parcel is dead at once")
        assert look("select * from routed") == [(1, "north"), (3, "north")]
        with closing(sqlite3.connect(here / "depots.db", timeout=30, isolation_level=None)) as depots:
            depots.execute("insert into streets values ('New Road', 'south')")
        eventually(lambda: len(look("select * from routed")) == 3, what="it is routed later")
    assert look("select * from routed") == [(1, "north"), (3, "north"), (2, "south")]
    said = (here / "err.txt").read_text()
    assert (
        'retry later to=parcels.routing.retry.1 record=parcels/0@1 cause="LookupError: no depot for street New Road"'
        in said
    )


def test_the_samples_about_testing_pass(here: Path) -> None:
    assert "4 passed" in run_pytest(here, "test_charges.py")


def test_the_sample_with_objects_of_tenacity_is_taken() -> None:
    (sample,) = re.findall(r"```python\n(from tenacity.*?)```", PAGE, re.DOTALL)
    names: dict[str, Any] = {"Retry": Retry}
    exec(sample, names)
    assert names["retry"].pause(1, OSError("busy"), 0.0) is not None
    assert names["retry"].pause(1, OSError("gone"), 0.0) is None
    assert names["retry"].pause(1, OSError("busy"), 61.0) is None


def test_a_record_that_waits_holds_its_partition_and_not_the_only_worker() -> None:
    with EmbeddedKafka({"orders": 2}) as broker:
        app, seen = App(broker.bootstrap, group="shop"), list[tuple[int, int]]()

        @app.consume("orders", concurrency=1, retry=Retry(2, wait=60))
        def reserve(record: Record) -> None:
            if record.value == b"bad":
                raise ValueError(record.attempt)
            seen.append((record.partition, record.offset))

        produce(broker.bootstrap, "orders", ["bad", "behind"], partition=0)
        with app.running():
            eventually(lambda: app.rebalances(), what="it has joined")
            produce(broker.bootstrap, "orders", ["a", "b", "c"], partition=1)
            eventually(lambda: len(seen) == 3, what="the other partition goes on")
    assert seen == [(1, 0), (1, 1), (1, 2)]


@pytest.mark.parametrize("to", [None, "reserved"])
def test_named_records_are_tried_again_alone_unless_the_others_were_undone(to: str | None) -> None:
    app, calls = App("localhost:9092", group="shop"), list[tuple[int, list[bytes | None]]]()

    @app.consume("orders", to=to, retry=Retry(2), on_error=DeadLetter("orders.dlq"))
    def reserve(orders: list[Record]):  # type: ignore[no-untyped-def]
        calls.append((orders[0].attempt, [order.value for order in orders]))
        if bad := {i: ValueError("bad") for i, order in enumerate(orders) if order.value == b"bad"}:
            raise BatchError(bad)

    fed = feed(app, "orders", [b"a", b"bad", b"c"])
    assert (fed.outcome, len(fed.dead_letters)) == ("dead_lettered", 1)
    whole, good = [b"a", b"bad", b"c"], [b"a", b"c"]
    assert calls == ([(1, whole), (2, [b"bad"])] if to is None else [(1, whole), (2, whole), (2, good)])


def test_whether_named_records_are_tried_again_is_decided_by_the_first() -> None:
    for first, calls in ((ValueError(), 3), (KeyError(), 1)):
        app, attempts = App("localhost:9092", group="shop"), list[int]()

        @app.consume("orders", retry=Retry(3, give_up_on=KeyError), on_error="skip")
        def reserve(orders: list[Record], seen: list[int] = attempts, first: Exception = first) -> None:
            seen.append(orders[0].attempt)
            raise BatchError({0: first, 1: ValueError()})

        feed(app, "orders", [b"a", b"b"])
        assert len(attempts) == calls


def test_a_variable_replaces_a_dead_letter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KCONSUME_HANDLER_RESERVE_ON_ERROR", "skip")
    app = App("localhost:9092", group="shop")
    app.consume("orders", on_error=DeadLetter("orders.dlq"))(reserve)
    fed = feed(app, "orders", b"")
    assert (fed.outcome, fed.dead_letters) == ("skipped", [])


# What stands in tables


def column(title: str) -> list[str]:
    """The names in the first column of the table that begins so."""
    table = PAGE.partition(f"| {title} |")[2].partition("\n\n")[0]
    return [name for line in table.splitlines()[2:] for name in re.findall(r"`([^`]+)`", line.split(" | ")[0])]


def test_the_headers_on_the_page_are_those_that_are_added() -> None:
    letter = letter_of(FakeMessage(b"v"), LookupError("no"), group="g", scope="g:T", attempts=1, reset_epoch=3)
    assert column("header") == [name for name, _ in letter.added_headers]


def test_the_columns_on_the_page_are_those_of_the_table_with_sqlite(tmp_path: Path) -> None:
    run_once(f"sqlite:///{tmp_path}/shop.db")
    with closing(sqlite3.connect(tmp_path / "shop.db")) as shop:
        assert [row[1] for row in shop.execute("pragma table_info(failed_orders)")] == column("column")
        assert shop.execute("select record_offset, attempts from failed_orders").fetchall() == [(1, 2)]


def test_the_columns_on_the_page_are_those_of_the_table_with_postgresql(
    postgres_url: str, database: psycopg.Connection
) -> None:
    run_once(postgres_url)
    found = database.execute("select * from failed_orders")
    assert [each.name for each in found.description or ()] == column("column")
    assert database.execute("select record_offset, attempts, value from failed_orders").fetchall() == [(1, 2, b"bad")]
    assert database.execute("select sum(next_offset) from kconsume_offsets").fetchall() == [(3,)]


def run_once(offsets: str) -> None:
    """An app that fails on the second of three records, with its dead letters in a table; twice, to the end."""
    with EmbeddedKafka({"orders": 1}) as broker:
        produce(broker.bootstrap, "orders", ["a", "bad", "c"])
        for _ in range(2):
            app = App(broker.bootstrap, group="shop", offsets=offsets, kafka=SOON)

            @app.consume("orders", retry=Retry(2, wait=0), on_error=DeadLetter(table="failed_orders"))
            def reserve(order: str) -> None:
                if order == "bad":
                    raise ValueError(order)

            app.catch_up(idle=0.2)


REFUSED = re.findall(r"^\| `(\w+=.*?)` \| (?!.*default)", PAGE.partition("## What is refused")[2], re.MULTILINE)


def reserve(record: Record) -> None:
    raise ValueError(record.attempt)


@pytest.mark.parametrize("written_", REFUSED)
def test_what_the_page_says_is_refused_is(written_: str) -> None:
    names = {"Retry": Retry, "RetryTopics": RetryTopics, "DeadLetter": DeadLetter, "stop_never": stop_never}
    app = App("localhost:9092", group="shop")
    with pytest.raises(ConfigurationError):
        app.consume("orders", **eval(f"dict({written_})", names))(reserve)


def test_all_that_is_refused_was_found_on_the_page() -> None:
    assert len(REFUSED) == PAGE.partition("## What is refused")[2].count("\n| `")


def test_what_is_not_refused_is_not() -> None:
    """The control of the above: the function is no reason to refuse anything."""
    app = App("localhost:9092", group="shop")
    app.consume("orders", retry=Retry(2, wait=0), on_error=DeadLetter("orders.dlq", limit=0.5))(reserve)
    assert str(feed(app, "orders", b"").error) == "2"

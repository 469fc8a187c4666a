"""`feed` and `afeed`: the whole path of a record, with no broker."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import sqlite3
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import psycopg
import pyarrow
import pydantic
import pytest

import kconsume.testing
from kconsume import App, Batch, BatchError, Batching, DeadLetter, DecodeError, Outgoing, Rate, Record, Router, Sender
from kconsume.backends import MemoryStore
from kconsume.errors import ConfigurationError, ResourceFailed, SendFailed, TransactionMisused
from kconsume.testing import Fed, afeed, feed
from tests.unit.fakes import ListStore, Writes
from tests.waiting import eventually


class Order(msgspec.Struct):
    id: int
    sku: str = "chair"


@dataclasses.dataclass
class Plain:
    id: int


class Model(pydantic.BaseModel):
    id: int


class Client:
    """Something a handler calls."""

    def __init__(self) -> None:
        self.calls: list[int] = []
        self.closed = False


@pytest.fixture
def app() -> App:
    return App("nowhere.invalid:1", group="shop")


@pytest.fixture
def shop(tmp_path: Path) -> App:
    """Its offsets are in a file that `feed` must never make."""
    return App("nowhere.invalid:1", group="shop", offsets=f"sqlite:///{tmp_path}/never.db")


@pytest.fixture
def tx() -> Iterator[sqlite3.Connection]:
    with closing(sqlite3.connect(":memory:")) as connection:
        connection.execute("create table reserved (id integer primary key)")
        yield connection


def reserved(tx: sqlite3.Connection) -> list[int]:
    return [row[0] for row in tx.execute("select id from reserved order by id")]


class TestOutcomes:
    def test_a_handler_that_returns_has_handled_its_record(self, app: App) -> None:
        seen: list[Order] = []

        @app.consume("orders")
        def reserve(order: Order) -> None:
            seen.append(order)

        assert feed(app, "orders", b'{"id": 7}') == Fed("handled", None, [], [])
        assert seen == [Order(7)]

    def test_a_handler_that_raises_is_an_outcome_and_not_a_raise(self, app: App) -> None:
        @app.consume("orders")
        def reserve(order: bytes) -> None:
            raise ValueError("no such sku")

        fed = feed(app, "orders", b"")
        assert fed.outcome == "failed"
        assert isinstance(fed.error, ValueError)

    def test_a_record_that_is_skipped_says_why_and_is_logged_as_in_a_run(
        self, app: App, caplog: pytest.LogCaptureFixture
    ) -> None:
        @app.consume("orders", on_error="skip")
        def reserve(order: bytes) -> None:
            raise ValueError("no such sku")

        with caplog.at_level(logging.WARNING, "kconsume"):
            fed = feed(app, "orders", b"")
        assert fed.outcome == "skipped"
        assert isinstance(fed.error, ValueError)
        assert caplog.messages == ['record skipped record=orders/0@0 cause="ValueError: no such sku"']

    @pytest.mark.parametrize("on_error", ["stop", "skip"])
    def test_a_payload_that_does_not_fit_is_a_decode_error(self, app: App, on_error: str) -> None:
        @app.consume("orders", on_error=on_error)  # type: ignore[arg-type]
        def reserve(order: Order) -> None:
            raise AssertionError("not reached")

        fed = feed(app, "orders", b'{"id": "seven"}')
        assert fed.outcome == {"stop": "failed", "skip": "skipped"}[on_error]
        assert isinstance(fed.error, DecodeError)

    def test_none_is_a_tombstone(self, app: App) -> None:
        seen: list[object] = []

        @app.consume("orders")
        def strict(order: Order) -> None: ...

        @app.consume("stock")
        def lenient(order: Order | None) -> None:
            seen.append(order)

        assert isinstance(feed(app, "orders", None).error, DecodeError)
        assert feed(app, "stock", None).outcome == "handled"
        assert seen == [None]

    def test_sys_exit_is_a_failure_that_no_policy_skips(self, app: App) -> None:
        @app.consume("orders", on_error="skip")
        def reserve(order: bytes) -> None:
            raise SystemExit(3)

        fed = feed(app, "orders", b"")
        assert fed.outcome == "failed"
        assert isinstance(fed.error, SystemExit)

    @pytest.mark.parametrize("topic", ["orders", "payments"])
    @pytest.mark.parametrize("meant_for_the_test", [KeyboardInterrupt(), pytest.fail.Exception("out of time")])
    def test_what_ends_a_test_is_raised(self, app: App, meant_for_the_test: BaseException, topic: str) -> None:
        @app.consume("orders")
        def reserve(order: bytes) -> None:
            raise meant_for_the_test

        @app.consume("payments")
        async def pay(payment: bytes) -> None:
            raise meant_for_the_test

        with pytest.raises(type(meant_for_the_test)):
            feed(app, topic, b"")

    def test_the_repr_says_what_a_failed_assertion_should(self, app: App, monkeypatch: pytest.MonkeyPatch) -> None:
        @app.consume("orders", to="shipped")
        def ship(order: Order) -> bytes:
            if order.id == 8:
                raise ValueError("no such sku")
            return b"done"

        assert repr(feed(app, "orders", {"id": 7})) == (
            "Fed('handled', sent=[Outgoing(value=b'done', key=None, headers=(), topic='shipped', timestamp=None)])"
        )
        failed = feed(app, "orders", {"id": 8})
        monkeypatch.chdir("/")
        assert repr(failed).startswith(f"Fed('failed', error=ValueError('no such sku') at {__file__[1:]}:")

    def test_fed_is_frozen(self) -> None:
        with pytest.raises(dataclasses.FrozenInstanceError):
            Fed("handled").outcome = "failed"  # type: ignore[misc]


class TestRecords:
    @pytest.mark.parametrize(
        ("value", "came"),
        [
            (b"\xff", b"\xff"),
            ("text", b"text"),
            ({"id": 7}, b'{"id":7}'),
            ([1, 2], b"[1,2]"),
            (Order(7), b'{"id":7,"sku":"chair"}'),
            (Plain(7), b'{"id":7}'),
            (Model(id=7), b'{"id":7}'),
        ],
    )
    def test_a_value_is_encoded_as_if_it_were_sent(self, app: App, value: object, came: bytes) -> None:
        seen: list[bytes] = []

        @app.consume("orders")
        def reserve(order: bytes) -> None:
            seen.append(order)

        assert feed(app, "orders", value).outcome == "handled"
        assert seen == [came]

    def test_a_record_has_everything_that_a_record_has(self, app: App) -> None:
        seen: list[Record] = []

        @app.consume("orders")
        def reserve(record: Record) -> None:
            seen.append(record)

        before = time.time()
        feed(app, "orders", b"v", key="k", headers={"trace": "1"})
        (record,) = seen
        assert record.timestamp is not None
        assert before - 1 < record.timestamp.timestamp() < before + 60
        record.timestamp = None
        assert record == Record("orders", 0, 0, b"k", b"v", (("trace", b"1"),), None, 1, "shop:orders:0:0")

    def test_a_key_and_headers_can_be_bytes_pairs_or_nothing(self, app: App) -> None:
        seen: list[tuple[bytes | None, object]] = []

        @app.consume("orders")
        def reserve(record: Record) -> None:
            seen.append((record.key, record.headers))

        feed(app, "orders", b"", key=b"\xff", headers=[("a", b"1"), ("a", "2")])
        feed(app, "orders", b"")
        assert seen == [(b"\xff", (("a", b"1"), ("a", b"2"))), (None, ())]

    def test_what_kafka_would_refuse_is_refused(self, app: App) -> None:
        @app.consume("orders")
        def reserve(order: bytes) -> None: ...

        with pytest.raises(SendFailed, match="cannot be encoded"):
            feed(app, "orders", object())
        with pytest.raises(SendFailed, match="2,000,000 bytes"):
            feed(app, "orders", bytes(2_000_000))

    def test_a_decoder_of_ones_own_is_used(self, app: App) -> None:
        seen: list[int] = []

        @app.consume("orders", decode=int)
        def reserve(order: int) -> None:
            seen.append(order)

        assert feed(app, "orders", b"7").outcome == "handled"
        assert isinstance(feed(app, "orders", b"seven").error, DecodeError)
        assert seen == [7]

    def test_a_log_line_of_the_handler_knows_its_record(self, app: App) -> None:
        from kconsume._log_context import here

        places: list[str] = []

        @app.consume("orders")
        def reserve(order: bytes) -> None:
            places.append(str(here()))

        feed(app, "orders", b"")
        assert places == ["orders/0@0"]

    def test_a_rate_is_not_waited_for(self, app: App) -> None:
        @app.consume("orders", rate=Rate(1, per=3600.0))
        def reserve(order: bytes) -> None: ...

        assert [feed(app, "orders", b"").outcome for _ in range(3)] == ["handled"] * 3


class TestWhichHandler:
    def test_a_topic_without_a_handler_is_an_error_that_names_those_there_are(self, app: App) -> None:
        @app.consume("orders", "payments")
        def reserve(order: bytes) -> None: ...

        with pytest.raises(ConfigurationError, match="no handler for topic 'order': it handles orders, payments"):
            feed(app, "order", b"")

    def test_a_topic_with_handlers_in_two_groups_asks_which(self, app: App) -> None:
        ran: list[str] = []

        @app.consume("orders")
        def reserve(record: Record) -> None:
            ran.append(record.id)

        @app.consume("orders", group="audit")
        def audit(record: Record) -> None:
            ran.append(record.id)

        with pytest.raises(ConfigurationError, match=r"group='shop' \(reserve\) or group='audit' \(audit\)"):
            feed(app, "orders", b"")
        with pytest.raises(ConfigurationError, match="no handler in group 'other'"):
            feed(app, "orders", b"", group="other")
        feed(app, "orders", b"", group="audit")
        assert ran == ["audit:orders:0:0"]

    def test_a_handler_of_a_router_is_fed_through_its_app(self, app: App) -> None:
        router, ran = Router(group="audit"), list[str]()

        @router.consume("orders")
        def audit(record: Record) -> None:
            ran.append(record.id)

        app.include(router)
        feed(app, "orders", b"")
        assert ran == ["audit:orders:0:0"]


class TestSending:
    def test_what_is_sent_comes_as_bytes_and_in_order(self, app: App) -> None:
        @app.consume("orders", to="shipped")
        def ship(order: Order, sender: Sender) -> list[Outgoing]:
            sender.send("audit", {"saw": order.id}, key="k", headers={"h": "1"})
            return [Outgoing({"id": order.id}, key=str(order.id)), Outgoing(None, key="gone", topic="other")]

        assert feed(app, "orders", {"id": 7}).sent == [
            Outgoing(b'{"saw":7}', b"k", (("h", b"1"),), "audit"),
            Outgoing(b'{"id":7}', b"7", (), "shipped"),
            Outgoing(None, b"gone", (), "other"),
        ]

    @pytest.mark.parametrize("on_error", ["stop", "skip"])
    def test_a_record_that_fails_sends_nothing(self, app: App, on_error: str) -> None:
        @app.consume("orders", on_error=on_error)  # type: ignore[arg-type]
        def ship(order: bytes, sender: Sender) -> None:
            sender.send("audit", order)
            raise ValueError

        assert feed(app, "orders", b"").sent == []

    def test_a_record_that_can_never_be_sent_is_the_handlers_failure(self, app: App) -> None:
        @app.consume("orders")
        def ship(order: bytes, sender: Sender) -> None:
            sender.send("no topic", order)

        assert isinstance(feed(app, "orders", b"").error, SendFailed)

    def test_what_one_stage_sends_can_be_fed_to_the_next(self, app: App) -> None:
        seen: list[bytes] = []

        @app.consume("orders", to="shipped")
        def ship(order: bytes) -> bytes:
            return order * 2

        @app.consume("shipped")
        def tell(shipped: bytes) -> None:
            seen.append(shipped)

        for sent in feed(app, "orders", b"x").sent:
            assert sent.topic is not None
            feed(app, sent.topic, sent.value, key=sent.key)
        assert seen == [b"xx"]


class TestTransactions:
    @pytest.fixture(autouse=True)
    def handlers(self, shop: App) -> None:
        @shop.consume("orders")
        def reserve(order: Order, tx: sqlite3.Connection) -> None:
            tx.execute("insert into reserved values (?)", (order.id,))
            if order.sku == "broken":
                raise ValueError("no such sku")

    def test_the_writes_are_in_the_callers_own_transaction(self, shop: App, tx: sqlite3.Connection) -> None:
        assert feed(shop, "orders", {"id": 7}, tx=tx).outcome == "handled"
        assert tx.in_transaction
        assert reserved(tx) == [7]
        tx.rollback()
        assert reserved(tx) == []

    @pytest.mark.parametrize("isolation_level", ["DEFERRED", None])
    def test_nothing_is_committed_however_the_connection_was_opened(
        self, shop: App, tmp_path: Path, isolation_level: str | None
    ) -> None:
        with closing(sqlite3.connect(tmp_path / "mine.db", isolation_level=isolation_level)) as mine:  # type: ignore[arg-type]
            mine.execute("create table reserved (id integer primary key)")
            feed(shop, "orders", {"id": 7}, tx=mine)
            feed(shop, "orders", {"id": 8, "sku": "broken"}, tx=mine)
            assert reserved(mine) == [7]
            with closing(sqlite3.connect(tmp_path / "mine.db")) as other:
                assert reserved(other) == []
            mine.commit()
            with closing(sqlite3.connect(tmp_path / "mine.db")) as other:
                assert reserved(other) == [7]

    def test_a_handler_that_fails_has_its_writes_undone_and_nobody_elses(
        self, shop: App, tx: sqlite3.Connection
    ) -> None:
        tx.execute("insert into reserved values (1)")
        feed(shop, "orders", {"id": 7}, tx=tx)
        fed = feed(shop, "orders", {"id": 8, "sku": "broken"}, tx=tx)
        assert isinstance(fed.error, ValueError)
        assert reserved(tx) == [1, 7]

    def test_a_constraint_that_the_database_refuses_is_an_outcome(self, shop: App, tx: sqlite3.Connection) -> None:
        feed(shop, "orders", {"id": 7}, tx=tx)
        assert isinstance(feed(shop, "orders", {"id": 7}, tx=tx).error, sqlite3.IntegrityError)
        assert reserved(tx) == [7]

    def test_the_apps_own_store_is_not_touched(self, shop: App, tx: sqlite3.Connection, tmp_path: Path) -> None:
        feed(shop, "orders", {"id": 7}, tx=tx)
        assert list(tmp_path.iterdir()) == []

    @pytest.mark.parametrize("misuse", ["tx.commit()", "tx.rollback()", "tx.execute('commit')", "tx.executescript('')"])
    def test_a_handler_that_ends_the_transaction_fails_as_in_a_run(
        self, shop: App, tx: sqlite3.Connection, misuse: str
    ) -> None:
        @shop.consume("payments")
        def pay(order: bytes, tx: sqlite3.Connection) -> None:
            tx.execute("insert into reserved values (9)")
            eval(misuse, {"tx": tx})

        tx.execute("insert into reserved values (1)")
        fed = feed(shop, "payments", b"", tx=tx)
        assert fed.outcome == "failed"
        assert isinstance(fed.error, TransactionMisused)
        assert reserved(tx) == [1]
        tx.rollback()
        assert reserved(tx) == []

    def test_a_handler_that_hides_the_refusal_fails_too_and_sends_nothing(
        self, shop: App, tx: sqlite3.Connection
    ) -> None:
        @shop.consume("payments")
        def pay(order: bytes, tx: sqlite3.Connection, sender: Sender) -> None:
            sender.send("audit", order)
            with pytest.raises(sqlite3.DatabaseError):
                tx.commit()

        fed = feed(shop, "payments", b"", tx=tx)
        assert isinstance(fed.error, TransactionMisused)
        assert fed.sent == []

    def test_a_statement_that_rolls_everything_back_is_the_handlers_error(
        self, shop: App, tx: sqlite3.Connection
    ) -> None:
        @shop.consume("payments")
        def pay(order: bytes, tx: sqlite3.Connection) -> None:
            for _ in range(2):
                tx.execute("insert or rollback into reserved values (9)")

        assert isinstance(feed(shop, "payments", b"", tx=tx).error, sqlite3.IntegrityError)
        assert reserved(tx) == []

    def test_a_savepoint_of_the_handlers_own_is_allowed(self, shop: App, tx: sqlite3.Connection) -> None:
        @shop.consume("payments")
        def pay(order: bytes, tx: sqlite3.Connection) -> None:
            tx.execute("savepoint mine")
            tx.execute("insert into reserved values (9)")
            tx.execute("rollback to mine")
            tx.execute("release mine")

        assert feed(shop, "payments", b"", tx=tx).outcome == "handled"
        assert reserved(tx) == []

    def test_a_missing_connection_is_an_error_that_names_the_fix(self, shop: App) -> None:
        with pytest.raises(ConfigurationError, match=r"feed\(\.\.\., tx=connection\).*Connection"):
            feed(shop, "orders", {"id": 7})

    @pytest.mark.parametrize("form", ["one", "async", "awaited", "batch"])
    @pytest.mark.parametrize(
        ("on_error", "outcome"),
        [
            ("stop", "failed"),
            ("skip", "skipped"),
            (DeadLetter("dead"), "dead_lettered"),
            (DeadLetter(table="dead"), "dead_lettered"),
        ],
    )
    def test_a_payload_that_cannot_be_decoded_is_named_before_a_missing_connection(
        self, form: str, on_error: Any, outcome: str
    ) -> None:
        """The handler would not be called, and nobody would look at the connection."""
        app = App("nowhere.invalid:1", group="shop", offsets="postgresql://nowhere.invalid/shop")

        def one(order: Order, tx: psycopg.Connection) -> None: ...
        async def awaited(order: Order, tx: psycopg.AsyncConnection) -> None: ...
        def batch(orders: list[Order], tx: psycopg.Connection) -> None: ...

        handlers: dict[str, Any] = {"one": one, "async": awaited, "awaited": awaited, "batch": batch}
        app.consume("orders", on_error=on_error)(handlers[form])
        value: Any = [b"{", b'{"id": "x"}'] if form == "batch" else b"{"
        fed = asyncio.run(afeed(app, "orders", value)) if form == "awaited" else feed(app, "orders", value)
        assert isinstance(fed.error, DecodeError)
        assert fed.outcome == outcome
        assert len(fed.dead_letters) == (0 if outcome != "dead_lettered" else 2 if form == "batch" else 1)
        whole = [b"{", {"id": 1}] if form == "batch" else {"id": 1}
        with pytest.raises(ConfigurationError, match=r"feed\(\.\.\., tx=connection\)"):
            feed(app, "orders", whole)

    def test_a_decoder_of_ones_own_is_asked_too(self, shop: App) -> None:
        def refuse(value: bytes) -> Order:
            raise LookupError("no schema")

        @shop.consume("returns", decode=refuse)
        def take(order: Order, tx: sqlite3.Connection) -> None: ...

        assert "no schema" in str(feed(shop, "returns", b"").error)

    def test_a_null_that_the_handler_does_not_take_is_named_first_too(self, shop: App) -> None:
        assert "tombstone" in str(feed(shop, "orders", None).error)

    def test_the_apps_own_store_lends_a_transaction_of_which_nothing_stays(self, tmp_path: Path) -> None:
        file = tmp_path / "shop.db"
        with closing(sqlite3.connect(file)) as database:
            database.execute("create table reserved (id integer primary key)")
        app, seen = App("nowhere.invalid:1", group="shop", offsets=f"sqlite:///{file}"), []

        @app.consume("orders")
        def reserve(order: Order, tx: sqlite3.Connection) -> None:
            tx.execute("insert into reserved values (?)", (order.id,))
            seen.append(reserved(tx))

        for _ in range(2):
            assert feed(app, "orders", {"id": 7}, tx="rollback").outcome == "handled"
        assert seen == [[7], [7]]
        with closing(sqlite3.connect(file)) as database:
            assert reserved(database) == []

    def test_a_store_that_is_not_there_lends_none_and_the_error_says_what_to_do(self) -> None:
        app = App("nowhere.invalid:1", group="shop", offsets="postgresql://127.0.0.1:1/shop")

        @app.consume("orders")
        def reserve(order: Order, tx: psycopg.Connection) -> None: ...

        with pytest.raises(
            ConfigurationError, match=r"could not begin one .*start that store, or give it a connection of your own"
        ):
            feed(app, "orders", {"id": 7}, tx="rollback")

    def test_a_connection_of_another_type_is_refused(self, shop: App) -> None:
        with pytest.raises(ConfigurationError, match=r"reserve takes a .*Connection, and tx= is a list"):
            feed(shop, "orders", {"id": 7}, tx=[])

    def test_a_closed_connection_is_an_error_and_no_outcome(self, shop: App) -> None:
        closed = sqlite3.connect(":memory:")
        closed.close()
        with pytest.raises(ConfigurationError, match="cannot begin a transaction"):
            feed(shop, "orders", {"id": 7}, tx=closed)

    def test_a_connection_that_nobody_takes_is_refused(self, app: App, tx: sqlite3.Connection) -> None:
        @app.consume("orders")
        def reserve(order: bytes) -> None: ...

        with pytest.raises(ConfigurationError, match="takes no transaction"):
            feed(app, "orders", b"", tx=tx)


class Ledger:
    """A connection to some database, which writes down what it is told."""

    def __init__(self, autocommit: bool = False) -> None:
        self.autocommit = autocommit
        self.told: list[str] = []
        self.refuses: set[str] = set()

    def execute(self, query: str) -> None:
        self.told.append(query)
        if query.split()[0] in self.refuses:
            raise RuntimeError("no such savepoint")

    def cursor(self) -> None: ...

    def commit(self) -> None:
        raise AssertionError("never")


class LedgerStore(MemoryStore):
    connection_types = (Ledger,)
    parallel = None
    by_record = False

    def transaction(self, *_: object) -> None:
        raise AssertionError("the app's own store is not asked")


class TestOtherDatabases:
    @pytest.fixture
    def books(self) -> App:
        app = App("nowhere.invalid:1", group="shop", offsets=LedgerStore())

        @app.consume("orders")
        def reserve(order: str, tx: Ledger) -> None:
            tx.execute("insert")
            if order == "broken":
                raise ValueError

        return app

    MARK = "SAVEPOINT kconsume_feed"

    def test_a_savepoint_goes_around_the_handler(self, books: App) -> None:
        ledger = Ledger()
        assert feed(books, "orders", "fine", tx=ledger).outcome == "handled"
        assert ledger.told == [self.MARK, "insert", f"RELEASE {self.MARK}"]

    def test_a_handler_that_fails_is_undone_to_it(self, books: App) -> None:
        ledger = Ledger()
        assert isinstance(feed(books, "orders", "broken", tx=ledger).error, ValueError)
        assert ledger.told == [self.MARK, "insert", f"ROLLBACK TO {self.MARK}", f"RELEASE {self.MARK}"]

    def test_with_autocommit_a_transaction_is_begun_first(self, books: App) -> None:
        ledger = Ledger(autocommit=True)
        feed(books, "orders", "fine", tx=ledger)
        assert ledger.told[0] == "BEGIN"

    @pytest.mark.parametrize("order", ["fine", "broken"])
    def test_a_transaction_that_is_gone_was_misused(self, books: App, order: str) -> None:
        ledger = Ledger()
        ledger.refuses = {"RELEASE", "ROLLBACK"}
        fed = feed(books, "orders", order, tx=ledger)
        assert isinstance(fed.error, TransactionMisused)

    def test_control_what_is_no_connection_to_a_database_keeps_what_a_failed_handler_wrote(self) -> None:
        app, writes = App("nowhere.invalid:1", group="shop", offsets=ListStore()), Writes()

        @app.consume("orders")
        def reserve(order: bytes, tx: Writes) -> None:
            tx.append(7)
            raise ValueError

        assert feed(app, "orders", b"", tx=writes).outcome == "failed"
        assert writes == [7]


class TestResources:
    @pytest.fixture
    def made(self, app: App) -> list[Client]:
        made: list[Client] = []

        @app.resource
        def client() -> Iterator[Client]:
            made.append(Client())
            yield made[-1]
            made[-1].closed = True

        @app.consume("orders")
        def reserve(order: Order, client: Client) -> None:
            assert not client.closed
            client.calls.append(order.id)

        return made

    def test_a_given_one_takes_the_place_of_the_declared_one_and_is_not_closed(
        self, app: App, made: list[Client]
    ) -> None:
        fake = Client()
        assert feed(app, "orders", {"id": 7}, resources={Client: fake}).outcome == "handled"
        assert (fake.calls, fake.closed, made) == ([7], False, [])

    def test_what_is_not_given_is_built_and_closed_before_feed_returns(self, app: App, made: list[Client]) -> None:
        feed(app, "orders", {"id": 7})
        feed(app, "orders", {"id": 8})
        assert [(client.calls, client.closed) for client in made] == [([7], True), ([8], True)]

    def test_it_is_closed_also_when_the_handler_fails(self, app: App, made: list[Client]) -> None:
        assert feed(app, "orders", b"{").outcome == "failed"
        assert [client.closed for client in made] == [True]

    def test_a_type_that_nobody_provides_is_refused_by_name(self, app: App, made: list[Client]) -> None:
        with pytest.raises(ConfigurationError, match=r"resources= has .*Order.*the app has .*Client"):
            feed(app, "orders", {"id": 7}, resources={Order: Order(1)})

    def test_one_that_is_made_from_another_gets_the_given_one(self, app: App) -> None:
        class Stock:
            def __init__(self, client: Client) -> None:
                self.client = client

        @app.resource
        def client() -> Client:
            raise AssertionError("not built")

        @app.resource
        def stock(client: Client) -> Iterator[Stock]:
            yield Stock(client)

        @app.consume("orders")
        def reserve(order: bytes, stock: Stock) -> None:
            stock.client.calls.append(1)

        fake = Client()
        assert feed(app, "orders", b"", resources={Client: fake}).outcome == "handled"
        assert fake.calls == [1]

    def test_an_async_one_lives_on_a_loop_beside_a_plain_handler(self, app: App) -> None:
        events: list[str] = []

        @app.resource
        async def client() -> AsyncIterator[Client]:
            await asyncio.sleep(0)
            yield Client()
            events.append("closed")

        @app.consume("orders")
        def reserve(order: bytes, client: Client) -> None:
            events.append("called")

        assert feed(app, "orders", b"").outcome == "handled"
        assert events == ["called", "closed"]

    def test_one_that_cannot_be_built_or_closed_is_an_error_and_no_outcome(self, app: App) -> None:
        def connect() -> None:
            raise OSError("no network")

        @app.resource
        def client() -> Iterator[Client]:
            connect()
            yield Client()

        @app.resource
        def order() -> Iterator[Order]:
            yield Order(1)
            connect()

        @app.consume("orders")
        def reserve(value: bytes, client: Client) -> None: ...

        @app.consume("payments")
        def pay(value: bytes, order: Order) -> None: ...

        with pytest.raises(ResourceFailed, match="client could not be built: OSError: no network"):
            feed(app, "orders", b"")
        with pytest.raises(ResourceFailed, match="order could not be closed"):
            feed(app, "payments", b"")

    def test_no_thread_is_left_behind(self, app: App, made: list[Client]) -> None:
        @app.resource
        async def order() -> Order:
            return Order(1)

        @app.consume("payments")
        async def pay(value: bytes, order: Order, client: Client) -> None: ...

        before = set(threading.enumerate())
        for _ in range(3):
            feed(app, "orders", {"id": 7})
            feed(app, "orders", {"id": 7}, resources={Client: Client()})
            feed(app, "payments", b"")
        eventually(lambda: set(threading.enumerate()) <= before, what="only the threads from before")


class TestWraps:
    def test_they_go_around_the_call_and_see_the_record(self, app: App) -> None:
        events: list[str] = []

        @app.wrap
        def around(record: Record) -> Iterator[None]:
            events.append(f"before {record.id}")
            try:
                yield
            except ValueError:
                events.append("failed")
                raise

        @app.consume("orders")
        def reserve(order: bytes) -> None:
            events.append("called")
            raise ValueError

        assert feed(app, "orders", b"").outcome == "failed"
        assert events == ["before shop:orders:0:0", "called", "failed"]


class TestBatches:
    def test_a_list_is_a_batch(self, app: App) -> None:
        seen: list[list[Order]] = []

        @app.consume("orders")
        def reserve(orders: list[Order], batch: Batch) -> None:
            assert batch.id == "shop:orders:0:0-1"
            seen.append(orders)

        assert feed(app, "orders", [{"id": 1}, b'{"id": 2}']).outcome == "handled"
        assert seen == [[Order(1), Order(2)]]

    def test_anything_else_is_a_batch_of_one(self, app: App) -> None:
        seen: list[object] = []

        @app.consume("orders")
        def reserve(batch: Batch) -> None:
            seen.extend(batch.values)

        feed(app, "orders", "one", key="k")
        feed(app, "orders", None)
        assert seen == [b"one", None]

    def test_items_can_have_keys_of_their_own(self, app: App) -> None:
        seen: list[list[bytes | None]] = []

        @app.consume("orders")
        def reserve(batch: Batch) -> None:
            seen.append(batch.keys)

        feed(app, "orders", [Outgoing("a", key="1"), Outgoing("b", key="2"), "c"], key="3")
        assert seen == [[b"1", b"2", b"3"]]
        with pytest.raises(ConfigurationError, match="has topic='other'"):
            feed(app, "orders", [Outgoing("a", topic="other")])

    def test_a_table_has_a_row_for_each(self, app: App) -> None:
        seen: list[int] = []

        @app.consume("orders")
        def reserve(table: pyarrow.Table) -> None:
            seen.append(table.num_rows)

        assert feed(app, "orders", ["a", "b", "c"]).outcome == "handled"
        assert seen == [3]

    def test_a_list_for_a_handler_of_one_record_is_one_value(self, app: App) -> None:
        seen: list[bytes] = []

        @app.consume("orders")
        def reserve(order: bytes) -> None:
            seen.append(order)

        feed(app, "orders", ["a", "b"])
        assert seen == [b'["a","b"]']

    def test_more_than_a_batch_holds_are_several_batches(self, app: App) -> None:
        sizes: list[int] = []

        @app.consume("orders", batch=Batching(records=2))
        def reserve(orders: list[bytes]) -> None:
            sizes.append(len(orders))

        feed(app, "orders", ["a", "b", "c"])
        assert sizes == [2, 1]

    def test_an_empty_batch_never_comes(self, app: App) -> None:
        @app.consume("orders")
        def reserve(orders: list[bytes]) -> None: ...

        with pytest.raises(ConfigurationError, match="never gets an empty batch"):
            feed(app, "orders", [])

    def test_a_bad_record_is_found_skipped_and_the_others_pass(self, app: App) -> None:
        passed: list[bytes] = []

        @app.consume("orders", on_error="skip", to="shipped")
        def reserve(orders: list[bytes]) -> list[bytes]:
            if b"bad" in orders:
                raise ValueError("bad")
            passed.extend(orders)
            return orders

        fed = feed(app, "orders", ["a", "b", "bad", "c"])
        assert fed.outcome == "skipped"
        assert isinstance(fed.error, ValueError)
        assert passed == [b"a", b"b", b"c"]
        assert [sent.value for sent in fed.sent] == passed

    def test_those_before_the_one_that_stops_have_passed(self, shop: App, tx: sqlite3.Connection) -> None:
        @shop.consume("orders")
        def reserve(orders: list[Order], tx: sqlite3.Connection) -> None:
            for order in orders:
                tx.execute("insert into reserved values (?)", (order.id,))
                if order.id == 3:
                    raise ValueError

        fed = feed(shop, "orders", [{"id": n} for n in (1, 2, 3, 4)], tx=tx)
        assert fed.outcome == "failed"
        assert reserved(tx) == [1, 2]

    def test_the_records_that_a_handler_names_are_skipped(self, shop: App, tx: sqlite3.Connection) -> None:
        @shop.consume("orders", on_error="skip")
        def reserve(orders: list[Order], tx: sqlite3.Connection) -> None:
            bad = {index: ValueError(order.id) for index, order in enumerate(orders) if order.id > 8}
            tx.executemany("insert into reserved values (?)", [(order.id,) for order in orders])
            if bad:
                raise BatchError(bad)

        fed = feed(shop, "orders", [{"id": n} for n in (1, 9, 2, 10)], tx=tx)
        assert fed.outcome == "skipped"
        assert str(fed.error) == "9"
        assert reserved(tx) == [1, 2]


class TestAsync:
    @pytest.fixture
    def ships(self, app: App) -> App:
        @app.consume("orders", to="shipped")
        async def ship(order: Order) -> str:
            await asyncio.sleep(0)
            if order.sku == "broken":
                raise ValueError("no such sku")
            return f"shipped {order.id}"

        return app

    def test_feed_gives_it_an_event_loop_of_its_own(self, ships: App) -> None:
        assert feed(ships, "orders", {"id": 7}).sent == [Outgoing(b"shipped 7", None, (), "shipped")]
        assert isinstance(feed(ships, "orders", {"id": 7, "sku": "broken"}).error, ValueError)

    def test_feed_leaves_the_threads_event_loop_as_it_was(self, ships: App) -> None:
        mine = asyncio.new_event_loop()
        asyncio.set_event_loop(mine)
        try:
            feed(ships, "orders", {"id": 7})
            assert asyncio.get_event_loop() is mine
        finally:
            asyncio.set_event_loop(None)
            mine.close()

    def test_inside_a_loop_feed_refuses_and_names_afeed(self, ships: App) -> None:
        async def test() -> None:
            with pytest.raises(ConfigurationError, match=r"await afeed\(\.\.\.\)"):
                feed(ships, "orders", {"id": 7})

        asyncio.run(test())

    def test_inside_a_loop_feed_takes_a_plain_handler_all_the_same(self, app: App) -> None:
        @app.consume("orders")
        def ship(order: bytes) -> None: ...

        async def test() -> Fed:
            return feed(app, "orders", b"")

        assert asyncio.run(test()).outcome == "handled"

    def test_afeed_runs_it_on_the_callers_loop(self, app: App) -> None:
        loops: list[object] = []

        @app.consume("orders")
        async def ship(order: bytes) -> None:
            loops.append(asyncio.get_running_loop())

        async def test() -> None:
            assert (await afeed(app, "orders", b"")).outcome == "handled"
            assert loops == [asyncio.get_running_loop()]

        asyncio.run(test())

    def test_afeed_runs_a_plain_handler_where_it_is_called(self, app: App) -> None:
        threads: list[object] = []

        @app.consume("orders")
        def ship(order: bytes) -> None:
            threads.append(threading.current_thread())

        assert asyncio.run(afeed(app, "orders", b"")).outcome == "handled"
        assert threads == [threading.current_thread()]

    def test_its_resources_and_wraps_live_on_the_same_loop(self, app: App) -> None:
        events: list[tuple[str, object]] = []

        def note(what: str) -> None:
            events.append((what, asyncio.get_running_loop()))

        @app.resource
        async def client() -> AsyncIterator[Client]:
            note("built")
            yield Client()
            note("closed")

        @app.wrap
        async def around() -> AsyncIterator[None]:
            note("before")
            yield
            note("after")

        @app.consume("orders")
        async def ship(order: bytes, client: Client) -> None:
            note("called")

        assert feed(app, "orders", b"").outcome == "handled"
        assert [what for what, _ in events] == ["built", "before", "called", "after", "closed"]
        assert len({loop for _, loop in events}) == 1

    @pytest.mark.parametrize("order", [7, 8])
    def test_a_connection_that_belongs_to_this_thread_will_do(
        self, shop: App, tx: sqlite3.Connection, order: int
    ) -> None:
        @shop.consume("orders")
        async def reserve(order: Order, tx: sqlite3.Connection) -> None:
            tx.execute("insert into reserved values (?)", (order.id,))
            await asyncio.sleep(0)
            if order.id == 8:
                raise ValueError

        expected = {7: ("handled", [7]), 8: ("failed", [])}[order]
        assert (feed(shop, "orders", {"id": order}, tx=tx).outcome, reserved(tx)) == expected
        tx.rollback()
        assert (asyncio.run(afeed(shop, "orders", {"id": order}, tx=tx)).outcome, reserved(tx)) == expected

    def test_a_cancelled_afeed_is_cancelled_and_has_closed_what_it_built(
        self, shop: App, tx: sqlite3.Connection
    ) -> None:
        closed: list[bool] = []
        begun = asyncio.Event()

        @shop.resource
        async def client() -> AsyncIterator[Client]:
            yield Client()
            closed.append(True)

        @shop.consume("orders")
        async def reserve(order: bytes, tx: sqlite3.Connection, client: Client) -> None:
            tx.execute("insert into reserved values (7)")
            begun.set()
            await asyncio.Event().wait()

        async def test() -> None:
            task = asyncio.create_task(afeed(shop, "orders", b"", tx=tx))
            await begun.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

        asyncio.run(test())
        assert closed == [True]
        assert reserved(tx) == []

    def test_a_cancellation_of_the_handlers_own_is_its_failure(self, app: App) -> None:
        @app.consume("orders")
        async def ship(order: bytes) -> None:
            raise asyncio.CancelledError

        assert isinstance(feed(app, "orders", b"").error, asyncio.CancelledError)


def test_the_names_of_the_kit_are_these() -> None:
    assert kconsume.testing.__all__ == ["EmbeddedKafka", "Fed", "afeed", "feed", "override"]
    assert all(hasattr(kconsume.testing, name) for name in kconsume.testing.__all__)
    assert {*kconsume.testing.__all__} <= {*dir(kconsume.testing)}
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        kconsume.testing.nothing  # noqa: B018

"""`kconsume dlq`: what failed for good, by cause and one by one; nothing is changed by looking."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any, cast
from urllib.parse import urlsplit

import psycopg
import pytest
from confluent_kafka import Producer

from kconsume._embedded.named_broker import attach
from kconsume._kafka.cluster import Cluster
from kconsume.backends import PostgresStore, SqliteStore, TransactionalStore
from kconsume.backends.base import Position
from kconsume.backends.capabilities import LetterTx
from kconsume.backends.claim import granted
from kconsume.backends.dead_letters.sender import sender_in
from kconsume.cli.dlq.as_test import source_of
from kconsume.failures.letter_headers import Letter
from kconsume.records import Partition
from kconsume.testing.services import KafkaService
from tests.cli.conftest import Shop
from tests.cli.test_failed import sell
from tests.fix_kafka import MakeTopic, produce

ORDERS = Partition("orders", 3)
NOW = datetime.now(UTC).replace(microsecond=0)
BAD = Letter(
    ORDERS, 1042, "shop", "shop:T1:3:1042", 3, "builtins.KeyError", "'sku'",
    "Traceback (most recent call last):\n  File shop.py\nKeyError: 'sku'\n", b"k-7", b'{"id": 7}', NOW,
    (("trace", b"\x80"), ("tenant", b"eu")),
)  # fmt: skip
OLD = replace(BAD, offset=7, origin="shop:T1:3:7", timestamp=NOW - timedelta(hours=3))
OTHER = replace(
    BAD, partition=Partition("returns", 0), offset=5, origin="audit:T2:0:5", group="audit", value=b"\xff\x00",
    exception="kconsume.errors.DecodeError", message="not \x1b[31mJSON",
)  # fmt: skip

TO_TOPIC = """
    from kconsume import App, DeadLetter

    app = App("embedded://shop", group="shop")

    @app.consume("orders", on_error=DeadLetter("orders.dlq"))
    def reserve(order: dict) -> None:
        order["sku"]
"""
TAKER = """
    import sqlite3
    from collections.abc import Iterator
    import psycopg
    from redis.client import Pipeline
    from kconsume import App, Batch, Record, Sender

    app = App("embedded://shop", group="shop", offsets=OFFSETS)

    class Prices: ...

    @app.resource
    def prices() -> Iterator[Prices]:
        yield Prices()

    INSERT = "insert into reserved values (7)"
"""
TAKING = {
    "plain": ("kafka://", """
    @app.consume("orders")
    def reserve(order: dict, record: Record, prices: Prices, sender: Sender) -> None: ...
    """),
    "awaited": ("kafka://", """
    @app.consume("orders")
    async def reserve(order: dict, record: Record, prices: Prices, sender: Sender) -> None: ...
    """),
    "batch": ("kafka://", """
    @app.consume("orders")
    async def reserve(orders: list[dict], batch: Batch, prices: Prices, sender: Sender) -> None: ...
    """),
    "sqlite": ("sqlite:///shop.db", """
    @app.consume("orders")
    def reserve(order: dict, tx: sqlite3.Connection, record: Record, prices: Prices) -> None:
        tx.execute(INSERT)
    """),
    "sqlite_awaited": ("sqlite:///shop.db", """
    @app.consume("orders")
    async def reserve(orders: list[dict], tx: sqlite3.Connection, sender: Sender) -> None:
        tx.execute(INSERT)
    """),
    "postgres": ("postgresql", """
    @app.consume("orders")
    def reserve(order: dict, record: Record, tx: psycopg.Connection, prices: Prices) -> None:
        tx.execute(INSERT)
    """),
    "postgres_awaited": ("postgresql", """
    @app.consume("orders")
    async def reserve(order: dict, tx: psycopg.AsyncConnection, sender: Sender) -> None:
        await tx.execute(INSERT)
    """),
    "postgres_batch": ("postgresql", """
    @app.consume("orders")
    async def reserve(orders: list[dict], batch: Batch, tx: psycopg.AsyncConnection) -> None:
        await tx.execute(INSERT)
    """),
    "redis": ("redis", """
    @app.consume("orders")
    def reserve(order: dict, tx: Pipeline) -> None:
        tx.incr("reserved")
    """),
}  # fmt: skip
"""Handlers that take the record: by name, where their offsets are, and what they get."""

TO_TABLE = """
    import sqlite3
    from kconsume import App, DeadLetter

    app = App("embedded://shop", group="shop", offsets="{offsets}")

    @app.consume("orders", on_error=DeadLetter(table="failed_orders"))
    def reserve(order: dict{parameter}) -> None:
        order["sku"]
"""


def post(*letters: Letter, topic: str = "orders.dlq", partition: int = 0) -> None:
    producer = Producer({"bootstrap.servers": attach("shop").bootstrap})
    for letter in letters:
        millis = int(cast(datetime, letter.timestamp).timestamp() * 1000)
        headers: list[tuple[str, str | bytes | None]] = [*letter.headers, *letter.added_headers]
        producer.produce(topic, letter.value, letter.key, partition, headers=headers, timestamp=millis)
        assert producer.flush(20) == 0


def keep(store: TransactionalStore, letters: Sequence[Letter], table: str = "failed_orders") -> None:
    epoch = granted(store.claim("shop", [ORDERS], "me", lambda missing: dict.fromkeys(missing, Position(0))))[
        ORDERS
    ].epoch
    with store.transaction("shop", ORDERS, epoch) as tx:
        assert isinstance(tx, LetterTx)
        tx.keep(table, letters)
        tx.advance(0, 1)
    store.close()


@pytest.fixture
def with_topic(shop: Shop) -> Shop:
    """Two partitions of dead letters: two KeyErrors of the shop and one of another group, and a stranger."""
    shop.broker(**{"orders": 1, "orders.dlq": 2, "empty.dlq": 1})
    shop.write("shop", TO_TOPIC)
    post(OLD, BAD)
    post(OTHER, partition=1)
    produce(attach("shop").bootstrap, "orders.dlq", [b"hello"], partition=1)
    return shop


@pytest.fixture
def with_table(shop: Shop) -> Shop:
    shop.write("shop", TO_TABLE.format(offsets="sqlite:///shop.db", parameter=", tx: sqlite3.Connection"))
    keep(SqliteStore(shop.folder / "shop.db"), [OLD, BAD, OTHER])
    return shop


def said(shop: Shop, *arguments: str) -> str:
    done = shop.run("dlq", *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


def listed(shop: Shop, *arguments: str) -> dict[str, int]:
    """How many for each cause."""
    listing = json.loads(said(shop, "list", *arguments, "--json"))
    found = {cause["cause"].rpartition(".")[2]: cause["count"] for cause in listing["places"][0]["causes"]}
    assert listing["total"] == sum(found.values())
    return found


def document(shop: Shop, *arguments: str) -> dict[str, Any]:
    return cast("dict[str, Any]", json.loads(said(shop, "show", *arguments, "--json")))


class TestATopic:
    def test_letters_are_grouped_by_where_they_came_from_and_why(self, with_topic: Shop) -> None:
        told = said(with_topic, "list", "shop:app")
        key_error, decode_error = (line.split() for line in told.splitlines() if ".dlq/" in line)
        times = f"{OLD.timestamp:%Y-%m-%d %H:%M:%S} {NOW:%Y-%m-%d %H:%M:%S}".split()
        assert key_error == ["2", "0", "orders", *times, "orders.dlq/0@1", "builtins.KeyError"]
        assert (decode_error[:3], decode_error[-1]) == (["1", "0", "returns"], "kconsume.errors.DecodeError")
        assert "times in UTC, of the record" in told
        assert "other records, without the header kconsume-origin of a dead letter: 1" in told
        assert told.endswith("total 3 dead letters\n")

    @pytest.mark.parametrize(
        ("options", "counts"),
        [
            ((), {"KeyError": 2, "DecodeError": 1}),
            (("--since", "1h"), {"KeyError": 1, "DecodeError": 1}),
            (("--since", f"{NOW - timedelta(hours=4):%Y-%m-%dT%H:%M:%S}"), {"KeyError": 2, "DecodeError": 1}),
            (("--cause", "KeyError"), {"KeyError": 2}),
            (("--cause", "kconsume.errors.DecodeError"), {"DecodeError": 1}),
            (("--cause", "Error"), {}),
            (("--group", "audit"), {"DecodeError": 1}),
        ],
    )
    def test_only_what_is_asked_for_is_counted(
        self, with_topic: Shop, options: tuple[str, ...], counts: dict[str, int]
    ) -> None:
        where = ("--brokers", "embedded://shop", "--topic", "orders.dlq")
        assert listed(with_topic, *where, *options) == counts
        if "--group" not in options:
            assert listed(with_topic, "shop:app", *options) == counts

    def test_an_empty_one_is_no_error(self, with_topic: Shop) -> None:
        told = said(with_topic, "list", "shop:app", "--topic", "empty.dlq")
        assert "the topic is empty: no record failed for good, or the topic's retention has deleted the letters" in told
        assert told.endswith("total 0 dead letters\n")

    def test_one_of_the_app_that_is_missing_is_told_and_not_made(self, shop: Shop) -> None:
        broker = shop.broker(orders=1)
        shop.write("shop", TO_TOPIC)
        assert "topic 'orders.dlq' is not on the cluster" in said(shop, "list", "shop:app")
        assert "orders.dlq" not in broker.topics()

    def test_one_letter_is_shown_with_all_that_is_known_of_it(self, with_topic: Shop) -> None:
        told = said(with_topic, "show", "shop:app", "orders.dlq/0@1")
        assert told.startswith("orders.dlq/0@1  from orders/3@1042, failed in group shop (attempts: 3)\n")
        for line in (
            "error    builtins.KeyError: 'sku'",
            "key      k-7",
            "header   trace = (hex) 80",
            "header   tenant = eu",
            'value    {"id": 7}',
            "Traceback (most recent call last):",
        ):
            assert f"\n  {line}\n" in told
        assert "kconsume-" not in told

    def test_bytes_that_are_no_text_are_hex_and_nothing_reaches_the_terminal(self, with_topic: Shop) -> None:
        told = said(with_topic, "show", "--brokers", "embedded://shop", "orders.dlq/1@0")
        assert "value    (hex) ff00\n" in told
        assert r"DecodeError: not \x1b[31mJSON" in told

    def test_a_long_payload_is_cut_and_json_has_all_of_it(self, with_topic: Shop) -> None:
        post(replace(BAD, value=b"x" * 5000))
        assert "x … (5,000 characters in all" in said(with_topic, "show", "shop:app", "orders.dlq/0@2")
        assert document(with_topic, "shop:app", "orders.dlq/0@2")["value"] == {"text": "x" * 5000}

    def test_as_json_one_document_has_it(self, with_topic: Shop) -> None:
        shown = document(with_topic, "shop:app", "orders.dlq/0@1")
        assert (shown["record"], shown["origin"], shown["attempts"]) == ("orders/3@1042", "shop:T1:3:1042", 3)
        assert shown["headers"] == [["trace", {"hex": "80"}], ["tenant", {"text": "eu"}]]
        assert datetime.fromisoformat(shown["timestamp"]) == NOW
        assert (shown["failed_at"], shown["test"]) == (None, None)


class TestATable:
    def test_letters_are_grouped_and_shown_by_their_row(self, with_table: Shop) -> None:
        told = said(with_table, "list", "shop:app")
        assert "failed_orders  table in sqlite:///shop.db; times in UTC, of the failure" in told
        assert told.endswith("total 3 dead letters\n")
        assert listed(with_table, "shop:app") == {"KeyError": 2, "DecodeError": 1}
        shown = said(with_table, "show", "shop:app", "2")
        assert shown.startswith("2  from orders/3@1042, failed in group shop (attempts: 3), at 20")
        assert "\n  header   trace = (hex) 80\n" in shown

    @pytest.mark.parametrize(
        ("options", "counts"),
        [
            (("--since", "1h"), {"KeyError": 2, "DecodeError": 1}),
            (("--since", "2999-01-01"), {}),
            (("--cause", "DecodeError"), {"DecodeError": 1}),
            (("--group", "audit", "--since", "1h"), {"DecodeError": 1}),
        ],
    )
    def test_only_what_is_asked_for_is_counted(
        self, with_table: Shop, options: tuple[str, ...], counts: dict[str, int]
    ) -> None:
        assert listed(with_table, "--offsets", "sqlite:///shop.db", "--table", "failed_orders", *options) == counts

    def test_one_that_is_not_there_yet_is_told_and_not_made(self, shop: Shop) -> None:
        shop.write("shop", TO_TABLE.format(offsets="sqlite:///shop.db", parameter=""))
        assert "the table does not exist yet: the first dead letter creates it" in said(shop, "list", "shop:app")
        assert not (shop.folder / "shop.db").exists()

    def test_what_a_run_wrote_is_found(self, shop: Shop) -> None:
        shop.broker(orders=1)
        shop.order(b'{"id": 7}')
        shop.write("shop", TO_TABLE.format(offsets="sqlite:///shop.db", parameter=", tx: sqlite3.Connection"))
        caught_up = "import shop; shop.app.catch_up(0.1)"
        subprocess.run([sys.executable, "-c", caught_up], cwd=shop.folder, env={**_path(shop)}, check=True)
        assert listed(shop, "shop:app") == {"KeyError": 1}
        assert document(shop, "shop:app", "1")["record"] == "orders/0@0"

    def test_on_postgres_it_is_the_same_and_the_password_is_not_shown(self, shop: Shop, postgres_url: str) -> None:
        url = _with_password(postgres_url)
        shop.write("shop", TO_TABLE.format(offsets=url, parameter="").replace("import sqlite3", ""))
        before = said(shop, "list", "shop:app")
        with psycopg.connect(postgres_url) as database:
            assert database.execute("select to_regclass('failed_orders')").fetchone() == (None,)
        keep(PostgresStore(postgres_url), [OLD, BAD, OTHER])
        after = said(shop, "list", "--offsets", url, "--table", "failed_orders", "--since", "1h")

        assert "the table does not exist yet" in before
        assert after.endswith("total 3 dead letters\n")
        assert listed(shop, "shop:app", "--group", "shop") == {"KeyError": 2}
        shown = document(shop, "shop:app", "2")
        assert (shown["record"], shown["value"]) == ("orders/3@1042", {"text": '{"id": 7}'})
        assert shown["headers"] == [["trace", {"hex": "80"}], ["tenant", {"text": "eu"}]]
        with psycopg.connect(postgres_url, autocommit=True) as database:
            database.execute("create table plain (id int)")
        missing = shop.run("dlq", "show", "--offsets", url, "--table", "failed_orders", "99")
        other = shop.run("dlq", "list", "--offsets", url, "--table", "plain")
        assert (missing.returncode, "has no row 99" in missing.stderr) == (2, True), missing.stderr
        assert (other.returncode, "is not a table of dead letters" in other.stderr) == (2, True), other.stderr
        assert "s3cret" not in before + after + missing.stderr + other.stderr


class TestAsATest:
    """The very record, as a test that fails until the handler is mended."""

    def test_it_fails_today_and_passes_once_the_handler_is_mended(self, with_topic: Shop) -> None:
        told = said(with_topic, "show", "shop:app", "orders.dlq/0@1", "--as-test")
        assert "written to test_orders_3_1042.py: it fails until" in told
        failed = _pytest(with_topic, "test_orders_3_1042.py")
        assert (failed.returncode, "KeyError('sku')" in failed.stdout) == (1, True), failed.stdout
        with_topic.write("shop", TO_TOPIC.replace('order["sku"]', 'order["id"]'))
        passed = _pytest(with_topic, "test_orders_3_1042.py")
        assert passed.returncode == 0, passed.stdout

    def test_a_handler_with_an_sqlite_transaction_gets_an_empty_database(self, with_table: Shop) -> None:
        said(with_table, "show", "shop:app", "2", "--as-test", "test_mine.py")
        source = (with_table.folder / "test_mine.py").read_text()
        assert "# The database is empty: make the tables here that reserve uses" in source
        assert _pytest(with_table, "test_mine.py").returncode == 1
        mended = TO_TABLE.replace('order["sku"]', 'tx.execute("select 1")')
        with_table.write("shop", mended.format(offsets="sqlite:///shop.db", parameter=", tx: sqlite3.Connection"))
        passed = _pytest(with_table, "test_mine.py")
        assert passed.returncode == 0, passed.stdout

    def test_it_passes_as_it_is_written_if_the_handler_takes_the_record(
        self, shop: Shop, monkeypatch: pytest.MonkeyPatch, postgres_url: str, redis_url: str
    ) -> None:
        """Whatever the handler is and gets, and with the tables that it uses."""
        monkeypatch.syspath_prepend(shop.folder)
        monkeypatch.chdir(shop.folder)
        shop.make_table()
        with psycopg.connect(postgres_url, autocommit=True) as database:
            database.execute("create table reserved (id int)")
        written = {}
        for name, (offsets, handler) in TAKING.items():
            address = {"postgresql": postgres_url, "redis": redis_url}.get(offsets, offsets)
            module = f"{name}_{shop.mark}"
            shop.write(module, TAKER.replace("OFFSETS", repr(address)) + handler)
            app = importlib.import_module(module).app
            written[f"test_{name}.py"] = source_of(app, f"{module}:app", BAD, "orders.dlq/0@1")
        for file, source in written.items():
            (shop.folder / file).write_text(source)
        passed = _pytest(shop, *written)
        assert (passed.returncode, f"{len(TAKING)} passed" in passed.stdout) == (0, True), passed.stdout
        assert shop.reserved() == []
        with psycopg.connect(postgres_url) as database:
            assert database.execute("select count(*) from reserved").fetchone() == (0,)

    def test_the_transaction_of_another_store_is_asked_for_in_words(self, with_topic: Shop) -> None:
        source = TO_TOPIC.replace('group="shop"', 'group="shop", offsets="postgresql://u:s3cret@127.0.0.1:1/shop"')
        with_topic.write(
            "shop", "\n    import psycopg" + source.replace("order: dict", "order: dict, tx: psycopg.Connection")
        )
        said(with_topic, "show", "shop:app", "orders.dlq/0@1", "--as-test", "test_mine.py")
        written = (with_topic.folder / "test_mine.py").read_text()
        assert "# reserve takes a transaction: give tx= an open Connection to a database for tests" in written
        assert "s3cret" not in written
        assert "give it a connection of your own" in _pytest(with_topic, "test_mine.py").stdout

    def test_whatever_the_record_holds_is_in_it_byte_by_byte(self, with_topic: Shop) -> None:
        odd = bytes(range(256)) + b'"""\\' * 30
        post(replace(BAD, value=odd, key=None, headers=(('a"b', b"\x00"),), message='"""\n#\\', offset=1))
        said(with_topic, "show", "shop:app", "orders.dlq/0@2", "--as-test", "test_mine.py")
        names: dict[str, object] = {}
        exec((with_topic.folder / "test_mine.py").read_text().partition("import app\n")[2], names)
        assert (names["VALUE"], names["KEY"], names["HEADERS"]) == (odd, None, [('a"b', b"\x00")])
        assert callable(names["test_orders_3_1_is_handled"])

    @pytest.mark.parametrize(
        ("arguments", "says"),
        [
            (
                ("shop:app", "orders.dlq/0@1", "--as-test", "shop.py"),
                "shop.py exists already, and is not overwritten",
            ),
            (("shop:app", "orders.dlq/0@1", "--as-test", "no/t.py"), "no/t.py cannot be written"),
            (("--as-test", "shop:app", "orders.dlq/0@1"), "write FILE.py, or put --as-test last"),
            (("--brokers", "embedded://shop", "orders.dlq/0@1", "--as-test"), "--as-test needs the app"),
            (("shop:app", "orders.dlq/1@0", "--as-test"), "no handler for topic 'returns' in group 'audit'"),
        ],
    )
    def test_what_cannot_be_one_is_an_error_with_the_fix(
        self, with_topic: Shop, arguments: tuple[str, ...], says: str
    ) -> None:
        _refused(with_topic, "show", *arguments, says=says)
        assert not list(with_topic.folder.glob("test_*.py"))


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("list", "--brokers", "embedded://shop", "--topic", "order.dlq"), "did you mean 'orders.dlq'?"),
        (("show", "shop:app", "orders.dlq/1@1"), "is not a dead letter, because it has no header kconsume-origin"),
        (("show", "shop:app", "orders.dlq/0@9"), "there is no record orders.dlq/0@9"),
        (("show", "shop:app", "orders.dlq/0@1", "--group", "audit"), "failed in group 'shop', not 'audit'"),
    ],
)
def test_what_is_not_there_is_an_error_with_the_fix(with_topic: Shop, arguments: tuple[str, ...], says: str) -> None:
    _refused(with_topic, *arguments, says=says)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (
            ("list", "--brokers", "embedded://shop", "--topic", "orders.dlq"),
            "the embedded broker 'shop' is not running",
        ),
        (("list", "--brokers", "embedded://shop", "--topic", "a b"), "names no topic"),
        (("list", "--offsets", "sqlite:///none.db", "--table", "failed_orders"), "has no table failed_orders"),
        (("list", "--offsets", "sqlite:///none.db", "--table", "x; drop"), "names no table"),
        (("list", "--offsets", "redis://:s3cret@db", "--table", "failed_orders"), "redis://db:6379/0 has no tables"),
        (("list", "shop:app", "--table", "failed_orders"), "only DeadLetter('orders.dlq'): correct --table"),
        (("list", "shop:app", "--group", "nobody"), "the app has no group 'nobody'"),
        (("list", "shop:app", "--since", "soon"), "'soon' is not a time: write 2026-11-17"),
        (("list", "shop:app", "--brokers", "embedded://shop"), "give one of the two"),
        (("list", "shop:app", "--topic", "orders.dlq", "--table", "t"), "give one of the two"),
        (("list", "--brokers", "embedded://shop"), "or give --brokers and --topic, or --offsets and --table"),
        (("list",), "no topic or table was named: write MODULE:APP"),
        (("list", "plain:app"), "no handler of the app has on_error=DeadLetter(...)"),
        (("show", "shop:app"), "'shop:app' is not the place of a dead letter"),
        (("show",), "no dead letter was named"),
        (("show", "shop:app", "7"), "the app writes its dead letters to topics"),
        (("show", "orders.dlq/0@1"), "no cluster was named"),
        (("show", "--table", "failed_orders", "7"), "no table was named"),
    ],
)
def test_what_cannot_be_asked_is_an_error_with_the_fix(shop: Shop, arguments: tuple[str, ...], says: str) -> None:
    shop.write("shop", TO_TOPIC)
    shop.write("plain", TO_TOPIC.replace(', on_error=DeadLetter("orders.dlq")', ""))
    _refused(shop, *arguments, says=says)
    assert not list(shop.folder.glob("*.db"))


def test_a_real_topic_is_read_to_its_end_past_gaps_and_no_group_is_made(
    shop: Shop, kafka: KafkaService, topic: MakeTopic
) -> None:
    """Behind each record is the mark of its transaction, also at the end, where no record comes any more."""
    name = topic(2)
    sell(kafka.bootstrap, name, b"cup", b"mug", transactional=True)
    groups = set(Cluster(kafka.bootstrap).groups())
    listing = json.loads(said(shop, "list", "--brokers", kafka.bootstrap, "--topic", name, "--json"))
    assert (listing["total"], listing["places"][0]["others"]) == (0, 2)
    assert not {group for group in set(Cluster(kafka.bootstrap).groups()) - groups if group.startswith("kconsume-")}


def test_the_app_can_come_from_the_environment(with_topic: Shop) -> None:
    done = with_topic.run("dlq", "show", "orders.dlq/0@1", KCONSUME_APP="shop:app")
    assert (done.returncode, "from orders/3@1042" in done.stdout) == (0, True), done.stderr


def _refused(shop: Shop, *arguments: str, says: str) -> None:
    done = shop.run("dlq", *arguments)
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    assert says in " ".join(done.stderr.split()), done.stderr
    assert "s3cret" not in done.stderr


def _path(shop: Shop) -> dict[str, str]:
    return shop._environment({})


def _pytest(shop: Shop, *files: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files]
    return subprocess.run(command, cwd=shop.folder, env=_path(shop), capture_output=True, text=True, check=False)


def _with_password(url: str) -> str:
    """The same database with a password in its address, which a server that trusts us does not ask for."""
    parts = urlsplit(url)
    if parts.password is not None:
        return url
    return parts._replace(netloc=f"{parts.username or 'postgres'}:s3cret@{parts.netloc.rpartition('@')[2]}").geturl()


SENT_BACK = "orders.shop.redrive"


def send_back(shop: Shop, *letters: Letter) -> None:
    """As `kconsume dlq redrive --yes` does."""
    shop.broker(**{SENT_BACK: 1})
    post(*(replace(letter, redriven=letter.redriven + 1) for letter in letters), topic=SENT_BACK)


def mark_sent_back(shop: Shop, *rows: int) -> None:
    store = SqliteStore(shop.folder / "shop.db")
    sender = sender_in(store, "failed_orders")
    sender.prepare()
    assert sender.send_back(rows, lambda letter: letter.outgoing(SENT_BACK)) == len(rows)
    store.close()


def sent_back(shop: Shop) -> dict[str, int]:
    """How many were sent back, for each cause."""
    (place,) = json.loads(said(shop, "list", "shop:app", "--json"))["places"]
    return {cause["cause"].rpartition(".")[2]: cause["sent_back"] for cause in place["causes"]}


class TestLettersThatWereSentBack:
    def test_a_letter_of_a_topic_says_that_it_was_sent_back(self, with_topic: Shop) -> None:
        assert sent_back(with_topic) == {"KeyError": 0, "DecodeError": 0}
        send_back(with_topic, BAD)
        assert sent_back(with_topic) == {"KeyError": 1, "DecodeError": 0}
        assert said(with_topic, "list", "shop:app").endswith("total 3 dead letters, 1 of them sent back\n")
        told = said(with_topic, "show", "shop:app", "orders.dlq/0@1")
        assert "  it was sent back to group shop, and has not failed since\n" in told
        places = ("orders.dlq/0@0", "orders.dlq/0@1")
        assert [document(with_topic, "shop:app", place)["sent_back"] for place in places] == [False, True]

    def test_a_letter_that_failed_again_is_another_one(self, with_topic: Shop) -> None:
        send_back(with_topic, BAD)
        post(replace(BAD, redriven=1))
        assert sent_back(with_topic) == {"KeyError": 1, "DecodeError": 0}
        assert document(with_topic, "shop:app", "orders.dlq/0@2")["sent_back"] is False

    def test_a_letter_of_a_table_says_that_it_was_sent_back(self, with_table: Shop) -> None:
        assert sent_back(with_table) == {"KeyError": 0, "DecodeError": 0}
        mark_sent_back(with_table, 2)
        assert sent_back(with_table) == {"KeyError": 1, "DecodeError": 0}
        assert "it was sent back to group shop" in said(with_table, "show", "shop:app", "2")
        assert [document(with_table, "shop:app", row)["sent_back"] for row in ("1", "2")] == [False, True]


def purged(shop: Shop, *options: str) -> dict[str, Any]:
    (place,) = json.loads(said(shop, "purge", *options, "--json"))["places"]
    return cast("dict[str, Any]", place)


class TestPurge:
    def test_rows_that_were_sent_back_are_deleted_with_yes_only(self, with_table: Shop) -> None:
        mark_sent_back(with_table, 1, 3)
        told = said(with_table, "purge", "shop:app", "--sent-back")
        assert "  would delete 2 of 3 letters\n" in told
        assert told.endswith("nothing was deleted: add --yes to delete 2\n")
        assert sum(listed(with_table, "shop:app").values()) == 3
        done = purged(with_table, "shop:app", "--sent-back", "--yes")
        assert (done["letters"], done["selected"], done["deleted"]) == (3, 2, 2)
        assert listed(with_table, "shop:app") == {"KeyError": 1}
        assert said(with_table, "purge", "shop:app", "--sent-back").endswith("nothing to delete\n")

    def test_rows_are_deleted_by_age_and_by_group(self, with_table: Shop) -> None:
        assert purged(with_table, "shop:app", "--before", "1h", "--yes")["deleted"] == 0
        where = ("--offsets", "sqlite:///shop.db", "--table", "failed_orders")
        assert purged(with_table, *where, "--before", "2999-01-01", "--group", "audit", "--yes")["deleted"] == 1
        assert listed(with_table, "shop:app") == {"KeyError": 2}
        assert purged(with_table, "shop:app", "--before", "2999-01-01", "--sent-back", "--yes")["deleted"] == 0

    def test_of_a_topic_the_beginning_is_deleted_and_what_is_behind_stays(self, with_topic: Shop) -> None:
        """OLD, BAD, and another old one behind it, which Kafka cannot delete before BAD."""
        post(replace(OLD, offset=8, origin="shop:T1:3:8"))
        told = said(with_topic, "purge", "shop:app", "--before", "1h")
        assert "  would delete 1 of 4 letters\n  1 more stay: they are behind a record that stays" in told
        done = purged(with_topic, "shop:app", "--before", "1h", "--yes")
        assert (done["selected"], done["behind"], done["deleted"]) == (1, 1, 1)
        assert listed(with_topic, "shop:app") == {"KeyError": 2, "DecodeError": 1}
        assert with_topic.run("dlq", "show", "shop:app", "orders.dlq/0@0").returncode == 2
        assert document(with_topic, "shop:app", "orders.dlq/0@1")["origin"] == BAD.origin

    def test_of_a_topic_letters_that_were_sent_back_are_deleted(self, with_topic: Shop) -> None:
        send_back(with_topic, OLD, BAD)
        assert purged(with_topic, "shop:app", "--sent-back", "--yes")["deleted"] == 2
        assert listed(with_topic, "shop:app") == {"DecodeError": 1}

    def test_a_record_that_is_no_dead_letter_is_never_deleted(self, with_topic: Shop) -> None:
        produce(attach("shop").bootstrap, "empty.dlq", [b"hello"])
        done = purged(with_topic, "shop:app", "--topic", "empty.dlq", "--before", "2999-01-01", "--yes")
        assert (done["letters"], done["deleted"]) == (0, 0)
        listing = json.loads(said(with_topic, "list", "shop:app", "--topic", "empty.dlq", "--json"))
        assert listing["places"][0]["others"] == 1

    def test_without_a_choice_nothing_is_deleted(self, with_topic: Shop) -> None:
        _refused(with_topic, "purge", "shop:app", "--yes", says="add --sent-back, or --before TIME")
        assert sum(listed(with_topic, "shop:app").values()) == 3

    def test_a_real_topic_loses_its_beginning(self, shop: Shop, kafka: KafkaService, topic: MakeTopic) -> None:
        name = topic(1)
        shop.write("shop", TO_TOPIC.replace("embedded://shop", kafka.bootstrap).replace("orders.dlq", name))
        producer = Producer({"bootstrap.servers": kafka.bootstrap})
        for letter in (OLD, BAD):
            millis = int(cast(datetime, letter.timestamp).timestamp() * 1000)
            headers: list[tuple[str, str | bytes | None]] = [*letter.headers, *letter.added_headers]
            producer.produce(name, letter.value, letter.key, 0, headers=headers, timestamp=millis)
        assert producer.flush(20) == 0
        assert purged(shop, "shop:app", "--before", "1h", "--yes")["deleted"] == 1
        partition = Partition(name, 0)
        assert Cluster(kafka.bootstrap).edges([partition], "earliest") == {partition: 1}
        assert listed(shop, "shop:app") == {"KeyError": 1}

    def test_on_postgres_rows_are_deleted_too(self, shop: Shop, postgres_url: str) -> None:
        shop.write("shop", TO_TABLE.format(offsets=postgres_url, parameter="").replace("import sqlite3", ""))
        keep(PostgresStore(postgres_url), [OLD, BAD, OTHER])
        assert sent_back(shop) == {"KeyError": 0, "DecodeError": 0}
        store = PostgresStore(postgres_url)
        sender = sender_in(store, "failed_orders")
        sender.prepare()
        assert sender.send_back([2], lambda letter: letter.outgoing(SENT_BACK)) == 1
        store.close()
        assert sent_back(shop) == {"KeyError": 1, "DecodeError": 0}
        assert document(shop, "shop:app", "2")["sent_back"] is True
        assert purged(shop, "shop:app", "--sent-back")["selected"] == 1
        assert purged(shop, "shop:app", "--sent-back", "--yes")["deleted"] == 1
        assert purged(shop, "shop:app", "--before", "2999-01-01", "--yes")["deleted"] == 2
        assert listed(shop, "shop:app") == {}

"""docs/outbox.md: its programs run as they stand, its table names what is there, and its statements are right."""

from __future__ import annotations

import json
import re
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import psycopg
import pytest
from confluent_kafka import Producer
from sqlalchemy.exc import SQLAlchemyError

from kconsume import App
from kconsume._embedded.controls import KafkaControls
from kconsume._embedded.named_broker import attach
from kconsume._runtime.output import outbox_relay
from kconsume.backends import Outbox
from kconsume.backends.outbox import tables
from tests.fix_arena import QUICK
from tests.fix_kafka import unique
from tests.integration.postgres_roles import a_role
from tests.integration.test_failures_docs import written
from tests.integration.test_programs import SAMPLE, running
from tests.waiting import eventually

PAGE = (Path(__file__).parents[2] / "docs" / "outbox.md").read_text()
PROGRAMS: dict[str, str] = dict(re.findall(SAMPLE, PAGE, re.DOTALL))
STATEMENTS: list[str] = re.findall(r"```sql\n(.*?)```", PAGE, re.DOTALL)
ORDERS = "create table orders (sku text, quantity integer)"


@pytest.fixture
def broker() -> Iterator[KafkaControls]:
    broker = attach(unique("outbox"), until_exit=True)
    yield broker
    broker.stop()


def test_a_handler_that_sends_reserves_once_what_comes_twice(
    broker: KafkaControls, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KCONSUME_KAFKA_SESSION_TIMEOUT_MS", "2000")
    (tmp_path / "stock.py").write_text(PROGRAMS["stock.py"])
    broker.create_topic("orders", 1)
    broker.create_topic("reserved", 1)
    with closing(sqlite3.connect(tmp_path / "stock.db")) as stock, stock:
        stock.execute("create table stock (sku text primary key, left integer)")
        stock.execute("insert into stock values ('cup', 10)")
    producer = Producer({"bootstrap.servers": broker.bootstrap, "log_level": 0})
    for origin in ("a", "b", "a", "b"):
        producer.produce("orders", json.dumps({"sku": "cup", "quantity": 2}), headers={"kconsume-origin": origin})
    assert producer.flush(20) == 0
    with running("stock.py", tmp_path, broker):
        eventually(lambda: passed(tmp_path) == 4, what="all are passed")
        sent = written(broker, "reserved", 2)
    with closing(sqlite3.connect(tmp_path / "stock.db")) as stock:
        assert stock.execute("select left from stock").fetchall() == [(6,)]
        assert stock.execute("select count(*) from kconsume_outbox").fetchall() == [(0,)]
    assert [json.loads(each["value"]) for each in sent] == [{"sku": "cup", "quantity": 2}] * 2
    assert [re.fullmatch(r"stock:[^:]+:0:(\d)#0", each["kconsume-origin"]) is not None for each in sent] == [True] * 2


def passed(here: Path) -> int:
    with closing(sqlite3.connect(here / "stock.db", timeout=30)) as stock:
        try:
            return int(stock.execute("select coalesce(sum(next_offset), 0) from kconsume_offsets").fetchone()[0])
        except sqlite3.OperationalError:
            return 0  # not there yet


@pytest.mark.parametrize("name", ["place.py", "place_sqlite.py", "place_sqlalchemy.py"])
def test_a_program_that_is_no_handler_leaves_a_row_with_its_own_and_an_app_sends_it(
    request: pytest.FixtureRequest, broker: KafkaControls, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    url = f"sqlite:///{tmp_path}/shop.db"
    if name == "place_sqlite.py":
        with closing(sqlite3.connect("shop.db")) as connection:
            connection.execute(ORDERS)
    else:
        url = request.getfixturevalue("postgres_url")
        monkeypatch.setenv("SHOP", url)
        with psycopg.connect(url, autocommit=True) as database:
            database.execute(ORDERS)
    names: dict[str, Any] = {}
    exec(PROGRAMS[name], names)
    names["place"]("cup", 2)
    with pytest.raises((psycopg.Error, sqlite3.Error, SQLAlchemyError)):
        names["place"]("pot", Refused())  # nothing leaves of it
    broker.create_topic("orders", 1)
    broker.create_topic("other", 1)
    app = App(broker.bootstrap, group="any", offsets=url, kafka=QUICK)
    app.consume("other")(handle)
    with app.running():
        (sent,) = written(broker, "orders", 1)
    names["outbox"].close()
    if "engine" in names:
        names["engine"].dispose()  # its connections are the program's to close
    assert (sent["key"], json.loads(sent["value"])) == ("cup", {"sku": "cup", "quantity": 2})
    assert re.fullmatch(r"outbox:[0-9a-f]{32}#0", sent["kconsume-origin"])


class Refused:
    """What no database takes for a number."""


def handle(value: bytes) -> None: ...


def column(title: str) -> list[str]:
    table = PAGE.partition(f"| {title} |")[2].partition("\n\n")[0]
    return [name for line in table.splitlines()[2:] for name in re.findall(r"`([^`]+)`", line.split(" | ")[0])]


def test_the_columns_on_the_page_are_those_of_the_table(tmp_path: Path, postgres_url: str) -> None:
    with closing(Outbox(f"sqlite:///{tmp_path}/shop.db")) as outbox:
        with closing(sqlite3.connect(tmp_path / "shop.db")) as shop:
            outbox.send(shop, "orders", "text")
            assert [row[1] for row in shop.execute("pragma table_info(kconsume_outbox)")] == column("column")
    with psycopg.connect(postgres_url) as database, closing(Outbox(postgres_url)) as outbox:
        outbox.send(database, "orders", "text", key="k")
        found = database.execute("select * from kconsume_outbox")
        assert [each.name for each in found.description or ()] == column("column")
        waits, rows, *_ = STATEMENTS
        ((target, count, since),) = database.execute(waits).fetchall()
        assert (target, count, since is not None) == ("orders", 1, True)
        assert [row[1:] for row in database.execute(rows).fetchall()] == [("orders", "k", "text")]


def test_the_grants_on_the_page_are_enough_to_put_rows_there_and_all_are_needed(postgres_url: str) -> None:
    with closing(Outbox(postgres_url)) as outbox, psycopg.connect(postgres_url) as database:
        outbox.send(database, "orders", b"of the owner")  # the tables are made with the first
    grants = STATEMENTS[-1].split(";")[:2]
    with a_role(postgres_url) as web, psycopg.connect(postgres_url, autocommit=True) as owner:
        for grant in grants:
            with pytest.raises(Exception, match=r"(?i)permission|right|grant"), psycopg.connect(web.url) as connection:
                put(web.url, connection)
            owner.execute(grant.replace("to web", f"to {web.name}"))
        with psycopg.connect(web.url) as connection:
            put(web.url, connection)
        assert owner.execute("select count(*) from kconsume_outbox").fetchall() == [(2,)]


def put(url: str, connection: psycopg.Connection) -> None:
    with closing(Outbox(url)) as outbox:
        outbox.send(connection, "orders", b"of the web")


def test_the_numbers_on_the_page_are_those_of_the_code() -> None:
    assert f"When {outbox_relay.FULL:,} rows of a partition wait" in PAGE
    assert f"known for {tables.KEPT_DAYS} days" in PAGE.replace("\n", " ")
    code = Path(outbox_relay.__file__).read_text()
    for said in re.findall(
        r"kconsume\.outbox (outbox waits) partitions?=\S+ rows=\d+ (?:again_in=1 )?cause=(.*)", PAGE
    ):
        assert said[0] in code
        assert said[1].strip('…"') in code

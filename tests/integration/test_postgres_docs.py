"""docs/exactly-once.md and docs/postgres.md: their statements are those that are sent, and their samples run."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path

import psycopg
import pytest

from kconsume import App
from kconsume._embedded.named_broker import attach
from kconsume.backends import PostgresStore
from kconsume.backends.base import Position
from kconsume.backends.claim import granted
from kconsume.backends.postgres.connection import HandlerConnection
from kconsume.backends.postgres.tx_statements import Statement
from kconsume.errors import StoreUnavailable
from kconsume.records import Partition
from kconsume.testing import EmbeddedKafka
from tests.fix_kafka import produce, unique
from tests.integration.postgres_roles import a_role
from tests.waiting import eventually

DOCS = Path(__file__).parents[2] / "docs"
LINES = (DOCS / "exactly-once.md").read_text()
GUIDE = (DOCS / "postgres.md").read_text()
PROGRAMS: dict[str, str] = dict(re.findall(r"```python\n# (\S+\.py)\n(.*?)```", LINES + GUIDE, re.DOTALL))
ORDERS = Partition("orders", 0)


def blocks(page: str) -> list[str]:
    return re.findall(r"```sql\n(.*?)```", page, re.DOTALL)


def statements(block: str) -> list[str]:
    """Between two comments stands one statement, or several of which each begins at the margin."""
    code = "\n".join(line for line in block.splitlines() if not line.startswith("--"))
    return [plain(text) for text in re.split(r"\n(?![\s)])", code) if text.strip()]


def plain(text: str) -> str:
    """With `:name` for parameters, and without the schema, of which the page says that it is always there."""
    return " ".join(re.sub(r"%\((\w+)\)s", r":\1", text).replace('"public".', "").split())


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Every statement that any connection of this process sends."""
    seen: list[str] = []
    execute: Callable[..., object] = psycopg.Cursor.execute

    def noted(cursor: object, query: object, *rest: object, **named: object) -> object:
        if isinstance(query, str):  # what a test composes for itself is not of interest
            seen.append(plain(query))
        return execute(cursor, query, *rest, **named)

    def noted_at_once(connection: HandlerConnection, *statements: Statement) -> bool:
        seen.extend(plain(text) for text, _ in statements)
        return execute_together(connection, *statements)

    execute_together = HandlerConnection.execute_together
    monkeypatch.setattr(psycopg.Cursor, "execute", noted)
    monkeypatch.setattr(HandlerConnection, "execute_together", noted_at_once)
    return seen


@pytest.fixture
def store(postgres_url: str) -> Iterator[PostgresStore]:
    store = PostgresStore(postgres_url)
    store.claim("shop", [ORDERS], "me", start)
    yield store
    store.close()


def start(partitions: Sequence[Partition]) -> dict[Partition, Position]:
    return {partition: Position(0) for partition in partitions}


def own(store: PostgresStore) -> int:
    return granted(store.claim("shop", [ORDERS], "me", start))[ORDERS].epoch


@pytest.mark.parametrize("pipelined", [False, True])
def test_the_transaction_on_the_page_is_the_one_that_is_sent(
    store: PostgresStore, sent: list[str], pipelined: bool
) -> None:
    epoch = own(store)
    with store.transaction("shop", ORDERS, epoch):
        pass  # the connection is open now
    sent.clear()
    begin = store.pipelined if pipelined else store.transaction
    with begin("shop", ORDERS, epoch) as tx:
        tx.advance(0, 1)
    assert sent == statements(blocks(LINES)[0])


def test_the_claim_on_the_page_is_the_one_that_is_sent(store: PostgresStore, sent: list[str]) -> None:
    own(store)
    assert sent == statements(blocks(LINES)[1])


def test_who_is_in_the_way_is_ended_by_the_statement_that_the_page_names(
    store: PostgresStore, postgres_url: str, sent: list[str]
) -> None:
    zombie = PostgresStore(postgres_url)

    def freeze_and_go_on() -> None:
        with zombie.transaction("shop", ORDERS, own(store)) as tx:
            sent.clear()
            own(store)
            looked = statements(blocks(LINES)[1])[-1]
            ends = looked.replace("select l.pid ", "select l.pid, pg_terminate_backend(l.pid) ", 1)
            assert sent[-1] == f"{ends} and l.pid = :pid"
            tx.advance(0, 1)

    with pytest.raises(StoreUnavailable):
        freeze_and_go_on()
    zombie.close()


def test_who_keeps_a_row_is_looked_for_by_the_statement_on_the_page(
    store: PostgresStore, postgres_url: str, sent: list[str]
) -> None:
    with closing(psycopg.connect(postgres_url)) as person:
        person.execute("select * from kconsume_offsets for update")
        own(store)
    assert statements(blocks(LINES)[2])[0] in sent


@pytest.mark.parametrize(("revoked", "limit"), [(False, "1h"), (True, "30s")])
def test_the_limit_that_the_page_names_is_the_one_that_is_set(
    store: PostgresStore, postgres_url: str, database: psycopg.Connection, revoked: bool, limit: str
) -> None:
    words = {"1h": "is 1 h where the role may call", "30s": "`:idle` is 30 s"}
    assert words[limit] in LINES
    with a_role(postgres_url) as role:
        database.execute(blocks(GUIDE)[0].replace("shop_service", role.name))
        if revoked:
            database.execute("revoke execute on function pg_terminate_backend(integer, bigint) from public")
        theirs = PostgresStore(role.url)
        with theirs.transaction("shop", ORDERS, own(theirs)) as tx:
            connection = tx.connection
            assert isinstance(connection, psycopg.Connection)
            assert connection.execute("show idle_in_transaction_session_timeout").fetchone() == (limit,)
            tx.advance(0, 0)
        theirs.close()
    assert store.groups() == ["shop"]


def test_what_serializable_adds_is_what_the_page_says(postgres_url: str, sent: list[str]) -> None:
    store = PostgresStore(postgres_url, isolation="serializable")
    with store.transaction("shop", ORDERS, own(store)) as tx:
        sent.clear()
        tx.advance(0, 1)
    with store.transaction("shop", ORDERS, own(store)) as tx:
        tx.advance(1, 1)
    store.close()
    off = "set_config('enable_seqscan', 'off', true)"
    assert [off in text for text in sent if "advisory_xact" in text or "'10s', true" in text] == [True, True, True]
    assert [
        text for text in sent if text.startswith("select next_offset, set_config('enable_seqscan', current_setting(")
    ]


def test_a_page_with_another_statement_would_be_noticed(store: PostgresStore, sent: list[str]) -> None:
    own(store)
    assert sent != statements(blocks(LINES)[1].replace("for update of o", ""))


def test_what_the_pages_offer_to_look_with_can_be_run(store: PostgresStore, database: psycopg.Connection) -> None:
    who, inside, waiting, take = blocks(LINES)[3:]
    with store.transaction("shop", ORDERS, own(store)) as tx:
        assert [row[:5] for row in database.execute(who)] == [("shop", "orders", 0, 0, 2)]
        assert [row[2] for row in database.execute(inside)] == ["idle in transaction"]
        database.execute(waiting)
        tx.advance(0, 1)
    assert database.execute(inside).fetchall() == []
    assert database.execute(take).rowcount == 0
    for statement in blocks(GUIDE)[1].split(";\n"):
        if statement.strip():
            database.execute(statement)


def test_the_rights_on_the_page_are_enough(
    store: PostgresStore, postgres_url: str, database: psycopg.Connection
) -> None:
    with a_role(postgres_url) as role:
        database.execute(blocks(GUIDE)[0].replace("shop_service", role.name))
        theirs = PostgresStore(role.url)
        with theirs.transaction("shop", ORDERS, own(theirs)) as tx:
            tx.advance(0, 1)
        theirs.reset("shop", {ORDERS: 0})
        theirs.delete("shop")
        theirs.close()
    assert store.groups() == []


# Programs


def ran(name: str, url: str, topic: str, values: Sequence[str]) -> None:
    """The program of the page as it stands, up to the end of what was produced; only the addresses are ours."""
    with EmbeddedKafka({topic: 1}) as broker:
        produce(broker.bootstrap, topic, values)
        names: dict[str, object] = {"__name__": name}
        code = PROGRAMS[name].replace("localhost:9092", broker.bootstrap)
        assert "postgresql://shop@localhost/shop" in code
        exec(code.replace("postgresql://shop@localhost/shop", url), names)
        app = names["app"]
        assert isinstance(app, App)
        app.catch_up(idle=0.1)


def test_there_are_five_programs_and_each_has_its_test() -> None:
    assert list(PROGRAMS) == ["ledger.py", "reserve.py", "billing.py", "bookings.py", "clicks.py"]


def test_stock_is_reserved(postgres_url: str, database: psycopg.Connection) -> None:
    database.execute("create table stock (sku text, reserved int); insert into stock values ('cup', 1)")
    ran("reserve.py", postgres_url, "orders", ['{"sku": "cup", "quantity": 3}', '{"sku": "cup", "quantity": 4}'])
    assert database.execute("select reserved from stock").fetchall() == [(8,)]


def test_a_bill_is_made_once_and_then_raised_in_a_schema_of_its_own(
    postgres_url: str, database: psycopg.Connection
) -> None:
    database.execute("create table invoices (customer text, total int)")
    ran("billing.py", postgres_url, "orders", ["ann", "bob", "ann"])
    assert database.execute("select * from invoices order by 1").fetchall() == [("ann", 2), ("bob", 1)]
    assert database.execute("select next_offset from billing.kconsume_offsets").fetchall() == [(3,)]


def test_rooms_are_booked_by_an_async_handler(postgres_url: str, database: psycopg.Connection) -> None:
    database.execute("create table rooms (room int, guest text); insert into rooms (room) values (1), (2)")
    ran("bookings.py", postgres_url, "bookings", ["ann", "bob", "eve"])
    assert database.execute("select * from rooms order by 1").fetchall() == [(1, "ann"), (2, "bob")]


def test_clicks_are_copied(postgres_url: str, database: psycopg.Connection) -> None:
    database.execute("create table clicks (page text, at float)")
    ran("clicks.py", postgres_url, "clicks", [f'{{"page": "/{n}", "at": {n}.5}}' for n in range(700)])
    assert database.execute("select count(*), count(distinct page) from clicks").fetchone() == (700, 700)


def test_the_ledger_has_each_record_once_however_often_it_is_killed(
    postgres_url: str, database: psycopg.Connection, tmp_path: Path
) -> None:
    database.execute("create table ledger (number int, place bigint)")
    (tmp_path / "ledger.py").write_text(PROGRAMS["ledger.py"])
    name, records = unique("ledger"), 20_000
    broker = attach(name, until_exit=True)
    broker.create_topic("orders", 4)
    for number in range(4):
        produce(broker.bootstrap, "orders", [str(n) for n in range(records // 4)], partition=number)
    variables = {"KCONSUME_BROKERS": f"embedded://{name}", "KCONSUME_OFFSETS": postgres_url}

    def booked() -> int:
        row = database.execute("select count(*) from ledger").fetchone()
        return 0 if row is None else int(row[0])

    try:
        for kill in (True, True, False):
            before = booked()
            with (tmp_path / "err").open("w") as err:
                process = subprocess.Popen(
                    [sys.executable, "ledger.py"], cwd=tmp_path, env={**os.environ, **variables}, stderr=err
                )
            try:
                enough = min(before + 1, records) if kill else records
                eventually(lambda wanted=enough: booked() >= wanted, within=60, what=f"{enough} rows")  # type: ignore[misc]
                process.send_signal(signal.SIGKILL if kill else signal.SIGTERM)
                assert process.wait(30) == (-signal.SIGKILL if kill else 0)
            finally:
                process.kill()
                process.wait(10)
    finally:
        broker.stop()
    count = database.execute("select count(*), count(distinct (number, place)) from ledger").fetchone()
    assert count == (records, records)

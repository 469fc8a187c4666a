"""examples/orders: the books balance while its processes are killed, and books that do not are found out."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psycopg
import pytest

from examples.orders import books, demand
from kconsume.testing.services import KafkaService, PostgresService

ROOT = Path(__file__).parents[2]
ORDERS = 60


@pytest.mark.timeout(400)
def test_the_books_balance_while_processes_are_killed(kafka: KafkaService, postgres: PostgresService) -> None:
    where = ("--brokers", kafka.bootstrap, "--database", postgres.url)
    code, said = run("orders", *where, "--orders", "150", "--kills", "5", "--session", "2")
    assert code == 0, said
    assert said.count("kill -9 ") == 5
    assert said.count("│ balances") == 7


@pytest.mark.timeout(400)
def test_an_embedded_broker_will_do(postgres: PostgresService) -> None:
    code, said = run("orders", "--database", postgres.url, "--orders", "40", "--kills", "0", "--session", "2")
    assert code == 0, said
    assert said.count("│ balances") == 7


def run(example: str, *options: str) -> tuple[int, str]:
    """As a person would: the exit code, and what was said."""
    process = subprocess.Popen(
        [sys.executable, "-m", f"examples.{example}", *options],
        cwd=ROOT,
        env={**os.environ, "COLUMNS": "100"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        said, _ = process.communicate(timeout=350)
        return process.returncode, said
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)  # with all that it has started
            process.wait(10)


@pytest.fixture
def shop(postgres_url: str) -> str:
    """Books as they should be, written by hand."""
    books.prepare(postgres_url)
    with psycopg.connect(postgres_url) as tx, tx.cursor() as cursor:
        tx.execute("create table unfilled (value bytea)")
        tx.execute("create table kconsume_outbox (id int)")
        for number in demand.numbers(ORDERS):
            order = demand.order(number)
            cursor.execute("insert into orders values (%s, %s, %s)", (number, order.sku, order.quantity))
        for number, quantity in demand.ledger(ORDERS):
            cursor.execute("insert into ledger values (%s, %s, %s, 1)", (number, demand.order(number).sku, quantity))
        for sku, pieces in demand.reserved(ORDERS).items():
            cursor.execute("update stock set reserved = %s where sku = %s", (pieces, sku))
        for number in demand.unfilled(ORDERS):
            cursor.execute("insert into unfilled values (%s)", (f'{{"number": {number}}}'.encode(),))
        for key, (number, what) in enumerate(demand.events(ORDERS)):
            text = "is reserved" if what == "reserved" else "is cancelled"
            cursor.execute("insert into letters values (%s, %s, %s)", (str(key), number, text))
            cursor.execute("update orders set answers = answers + 1 where number = %s", (number,))
    return postgres_url


WRONG = {
    "an order is lost": ("orders accepted", "delete from orders where number = 1 and answers = 1"),
    "a reservation is lost": ("lines in the ledger", "delete from ledger where number = 1"),
    "a reservation is made twice": ("lines in the ledger", "insert into ledger select * from ledger where number = 1"),
    "pieces are reserved twice": ("pieces reserved", "update stock set reserved = reserved + 1 where sku = 'cup'"),
    "pieces went the wrong way": ("pieces reserved", "update stock set reserved = -1 where sku = 'cup'"),
    "a dead letter is lost": ("orders for unknown articles", "truncate unfilled"),
    "a dead letter is there twice": ("orders for unknown articles", "insert into unfilled table unfilled"),
    "an answer is noted twice": ("answers recorded", "update orders set answers = 2 where number = 1"),
    "a letter is lost": ("letters", "delete from letters where key = '5'"),
    "two letters for one event": ("letters", "insert into letters select key || '!', number, text from letters"),
    "an event is not sent": ("events not sent yet", "insert into kconsume_outbox values (1)"),
}  # fmt: skip


def test_books_that_were_tampered_with_do_not_balance(shop: str, capsys: pytest.CaptureFixture[str]) -> None:
    with psycopg.connect(shop) as tx:
        for what, (book, statement) in WRONG.items():
            assert not wrong(tx), "as they should be"
            assert tx.execute(statement.encode()).rowcount != 0
            assert book in wrong(tx), what
            tx.rollback()
    assert books.main(shop, str(ORDERS)) == 0
    with psycopg.connect(shop) as tx:
        tx.execute("update stock set reserved = reserved + 1")
    assert books.main(shop, str(ORDERS)) == 1, "the checker's exit code"
    assert "does not balance" in capsys.readouterr().out


def wrong(tx: psycopg.Connection) -> list[str]:
    return [book.name for book in books.open_books(tx, ORDERS) if not book.balances]

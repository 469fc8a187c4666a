"""The six programs of docs/programs.md, run as they stand: only the broker's address comes from outside."""

from __future__ import annotations

import json
import os
import re
import signal
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pyarrow.parquet
import pytest
from confluent_kafka import Consumer, Producer, TopicPartition

from kconsume._embedded.controls import KafkaControls
from kconsume._embedded.named_broker import attach
from tests.fix_kafka import unique
from tests.waiting import eventually

PAGE = (Path(__file__).parents[2] / "docs" / "programs.md").read_text()
SAMPLE = r"```python\n# (\S+\.py)\n(.*?)```"
PROGRAMS: dict[str, str] = dict(re.findall(SAMPLE, PAGE, re.DOTALL))


@pytest.fixture
def broker() -> Iterator[KafkaControls]:
    """Each program with a broker of its own: they name their topics themselves."""
    broker = attach(unique("programs"), until_exit=True)
    yield broker
    broker.stop()


@pytest.fixture
def here(tmp_path: Path) -> Path:
    for name, code in PROGRAMS.items():
        (tmp_path / name).write_text(code)
    return tmp_path


@contextmanager
def running(name: str, here: Path, broker: KafkaControls, **variables: str) -> Iterator[Path]:
    """The program as a process, stopped as an operator would; it must end with 0. Gives the file of its output."""
    out = here / "out.txt"
    environment = {**os.environ, "KCONSUME_BROKERS": broker.bootstrap, "PYTHONUNBUFFERED": "1", **variables}
    with out.open("w") as stdout, (here / "err.txt").open("w") as stderr:
        process = subprocess.Popen([sys.executable, name], cwd=here, env=environment, stdout=stdout, stderr=stderr)
    try:
        yield out
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0, (here / "err.txt").read_text()
    finally:
        process.kill()
        process.wait(10)


def send(broker: KafkaControls, topic: str, *records: tuple[str | None, str | None]) -> None:
    producer = Producer({"bootstrap.servers": broker.bootstrap, "log_level": 0})
    for key, value in records:
        producer.produce(topic, value, key=key)
    assert producer.flush(20) == 0


def test_there_are_six_programs_and_each_has_its_test() -> None:
    assert list(PROGRAMS) == [
        "printer.py", "stock.py", "lake.py", "payments.py", "billing.py", "shipping.py", "shop.py", "test_stock.py",
    ]  # fmt: skip


def test_one_prints_text(broker: KafkaControls, here: Path) -> None:
    broker.create_topic("greetings", 1)
    send(broker, "greetings", (None, "hello"), (None, "wörld"))
    with running("printer.py", here, broker) as out:
        eventually(lambda: out.read_text() == "hello\nwörld\n", what="both printed")


def test_two_books_events_and_tombstones_exactly_once(broker: KafkaControls, here: Path) -> None:
    broker.create_topic("orders", 1)
    send(
        broker,
        "orders",
        ("1", '{"type": "Placed", "id": 1, "sku": "cup", "quantity": 2}'),
        ("2", '{"type": "Placed", "id": 2, "sku": "pot", "quantity": 1}'),
        ("3", '{"type": "Placed", "id": 3, "sku": "pot", "quantity": 3}'),
        ("2", '{"type": "Cancelled", "id": 2}'),
        ("3", None),
    )
    with running("stock.py", here, broker):
        eventually(lambda: stored(here / "shop.db") == 5, what="the offset stored")
    shop = sqlite3.connect(here / "shop.db")
    assert shop.execute("select * from orders order by id").fetchall() == [(1, "cup", 500), (2, "pot", 0)]
    shop.close()


def stored(file: Path) -> int | None:
    connection = sqlite3.connect(file)
    try:
        row = connection.execute("select sum(next_offset) from kconsume_offsets").fetchone()
    except sqlite3.OperationalError:
        return None  # not there yet
    finally:
        connection.close()
    return None if row[0] is None else int(row[0])


def test_three_keeps_clicks_as_tables(broker: KafkaControls, here: Path) -> None:
    broker.create_topic("clicks", 2)
    send(broker, "clicks", *((str(n), f"click {n}") for n in range(500)))

    def kept() -> list[str]:
        files = sorted((here / "lake").glob("*.parquet"))
        return [(value or b"").decode() for file in files for value in read(file)["value"].to_pylist()]

    with running("lake.py", here, broker):
        eventually(lambda: len(kept()) == 500, what="all kept")
    assert sorted(kept()) == sorted(f"click {n}" for n in range(500))
    assert len(list((here / "lake").glob("*.parquet"))) < 10, "in batches"


def read(file: Path) -> pyarrow.Table:
    try:
        return pyarrow.parquet.read_table(file)
    except (OSError, pyarrow.ArrowInvalid):
        return pyarrow.table({"value": pyarrow.array([], pyarrow.binary())})  # being written


def test_four_charges_each_account_with_its_own_key(broker: KafkaControls, here: Path) -> None:
    broker.create_topic("charges", 2)
    send(broker, "charges", *((str(n), json.dumps({"account": f"a{n}", "cents": n})) for n in range(60)))
    with bank() as (address, charges), running("payments.py", here, broker, BANK=address):
        eventually(lambda: len(charges) == 60, what="all charged")
    assert sorted(account for account, _, _ in charges) == sorted(f"a{n}" for n in range(60))
    keys = {key for _, key, _ in charges}
    assert len(keys) == 60
    assert all(re.fullmatch(r"payments:[^:]+:[01]:\d+", key) for key in keys)


@contextmanager
def bank() -> Iterator[tuple[str, list[tuple[str, str, int]]]]:
    charges: list[tuple[str, str, int]] = []

    class Bank(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            charges.append((body["account"], self.headers["Idempotency-Key"], body["cents"]))
            self.send_response(201)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            """Not to standard error."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Bank)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", charges
    finally:
        server.shutdown()
        server.server_close()


def test_five_bills_and_ships_the_same_orders_in_two_groups(broker: KafkaControls, here: Path) -> None:
    broker.create_topic("orders", 1)
    broker.create_topic("parcels", 1)
    send(broker, "orders", *((None, json.dumps({"id": n, "paid": n % 2 == 0})) for n in range(6)))
    with running("shop.py", here, broker) as out:
        eventually(lambda: out.read_text().count("bill") == 6, what="all billed")
        eventually(lambda: values(broker, "parcels", 3), what="the paid ones shipped")
    assert out.read_text().splitlines() == [f"bill {n}" for n in range(6)]
    assert values(broker, "parcels", 3) == [b'{"parcel":0}', b'{"parcel":2}', b'{"parcel":4}']


def values(broker: KafkaControls, topic: str, count: int) -> list[bytes | None]:
    """All of partition 0, once there are so many."""
    consumer = Consumer({"bootstrap.servers": broker.bootstrap, "group.id": unique("look"), "log_level": 0})
    try:
        consumer.assign([TopicPartition(topic, 0, 0)])
        return [message.value() for message in consumer.consume(count, 2.0)]
    finally:
        consumer.close()


def test_six_is_a_unit_test_that_passes(here: Path) -> None:
    assert "3 passed" in run_pytest(here, "test_stock.py")


def test_the_samples_about_testing_pass_too(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "testing.md").read_text()
    for name, code in re.findall(SAMPLE, page, re.DOTALL):
        (tmp_path / name).write_text(code)
    assert "8 passed" in run_pytest(tmp_path, ".")


def run_pytest(folder: Path, what: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", what],
        cwd=folder, capture_output=True, text=True, check=False, timeout=110,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    return done.stdout

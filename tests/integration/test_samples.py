"""The code that people copy: the README's sample and the examples, run as they stand."""

from __future__ import annotations

import re
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from kconsume import App
from kconsume._embedded.named_broker import find
from kconsume.testing import EmbeddedKafka
from tests.fix_kafka import produce
from tests.waiting import eventually

ROOT = Path(__file__).parents[2]


def test_the_sample_of_the_readme_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (sample,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    monkeypatch.chdir(tmp_path)
    with sqlite3.connect("shop.db") as shop:
        shop.execute("create table stock (sku text, reserved integer)")
        shop.execute("insert into stock values ('cup', 1)")
    with EmbeddedKafka({"orders": 1}) as broker:
        produce(broker.bootstrap, "orders", ['{"id": 1, "sku": "cup", "quantity": 3}'])
        names: dict[str, object] = {"__name__": "readme"}
        exec(sample.replace("localhost:9092", broker.bootstrap), names)
        app = names["app"]
        assert isinstance(app, App)
        app.catch_up(idle=0.1)
    assert shop.execute("select reserved from stock").fetchone() == (4,)
    shop.close()


def test_the_inventory_example_works(tmp_path: Path) -> None:
    service = ROOT / "examples" / "inventory" / "service.py"
    running = subprocess.Popen([sys.executable, str(service)], cwd=tmp_path, stderr=subprocess.DEVNULL)
    try:
        for quantity in ("3", "4"):
            subprocess.run(
                [sys.executable, str(service), "--order", "cup", quantity], cwd=tmp_path, check=True, timeout=60
            )
        eventually(lambda: reserved(tmp_path / "inventory.db") == 7, within=30, what="both orders are reserved")
        running.send_signal(signal.SIGTERM)
        assert running.wait(30) == 0
    finally:
        running.kill()
        running.wait(10)
        broker = find("inventory")
        if broker is not None:
            broker.stop()


def reserved(database: Path) -> int | None:
    if not database.exists():
        return None
    connection = sqlite3.connect(database)
    try:
        row = connection.execute("select reserved from stock where sku = 'cup'").fetchone()
    except sqlite3.OperationalError:
        return None  # the table is not there yet
    finally:
        connection.close()
    return None if row is None else int(row[0])

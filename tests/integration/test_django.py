"""`docs/django.md`: the code of the page, as it stands there, on a real PostgreSQL and the embedded broker."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from kconsume._embedded.controls import KafkaControls
from tests.fix_arena import Arena

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "django.md"
COUNT = 2000

SETTINGS = """
import os
from psycopg.conninfo import conninfo_to_dict

at = conninfo_to_dict(os.environ["DATABASE_URL"])
DATABASES = {"default": {"ENGINE": "django.db.backends.postgresql", "NAME": at["dbname"], "USER": at.get("user"),
    "PASSWORD": at.get("password", ""), "HOST": at.get("host", ""), "PORT": at.get("port", "")}}
INSTALLED_APPS = ["shop"]
USE_TZ = True
TIME_ZONE = "Europe/Berlin"
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
"""

MODELS = """
from django.db import models

class Order(models.Model):
    number = models.IntegerField(unique=True)
    detail = models.JSONField()
    at = models.DateTimeField(auto_now_add=True)

class Stock(models.Model):
    sku = models.TextField(primary_key=True)
    reserved = models.IntegerField(default=0)
"""

TABLES = """
from django.db import connection
from shop.models import Order, Stock

with connection.schema_editor() as editor:
    editor.create_model(Order)
    editor.create_model(Stock)
Stock.objects.create(sku="tea")
"""


class Project:
    """A Django project with the files of the page in it."""

    def __init__(self, folder: Path, url: str, broker: Arena) -> None:
        self.folder, self.broker = folder, broker
        (folder / "shop").mkdir()
        for name, source in {"__init__.py": "", "settings.py": SETTINGS, "models.py": MODELS, **_page()}.items():
            (folder / "shop" / name).write_text(source)
        self._environment = {**os.environ, "DATABASE_URL": url, "KAFKA": broker.bootstrap, "PYTHONPATH": str(ROOT)}
        self.run(TABLES, setup=True)

    def run(self, script: str, *, setup: bool = False) -> list[str]:
        begin = "import os, django\nos.environ['DJANGO_SETTINGS_MODULE'] = 'shop.settings'\ndjango.setup()\n"
        command = [sys.executable, "-c", begin + script if setup else script]
        done = subprocess.run(
            command, cwd=self.folder, env=self._environment, capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout.splitlines()


def _page() -> dict[str, str]:
    blocks = re.findall(r"^```python\n# shop/(\S+)\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert [name for name, _ in blocks] == ["on_tx.py", "consumer.py"]
    return dict(blocks)


@pytest.fixture
def project(tmp_path: Path, postgres_url: str, embedded: KafkaControls) -> Iterator[Project]:
    arena = Arena("embedded", embedded.bootstrap, embedded)
    yield Project(tmp_path, postgres_url, arena)
    arena.clean_up()


def test_the_page_has_one_effect_a_record_and_skips_what_fails_alone(
    project: Project, database: psycopg.Connection
) -> None:
    topic = "orders"
    project.broker.topic(2, topic)
    numbers = [*range(COUNT), 7, 7]  # a number comes again: the unique key refuses it, with all that its handler wrote
    project.broker.produce(topic, [json.dumps({"number": n, "sku": "tea"}) for n in numbers], 0)
    project.run("from shop.consumer import app; app.catch_up(idle=0.5)")

    orders = [number for (number,) in database.execute("select number from shop_order order by 1").fetchall()]
    assert orders == list(range(COUNT))
    assert database.execute("select reserved from shop_stock").fetchone() == (COUNT,)
    assert database.execute("select sum(next_offset) from kconsume_offsets").fetchone() == (len(numbers),)
    assert database.execute(
        "select count(*) from shop_order where abs(extract(epoch from now() - at)) < 600"
    ).fetchone() == (COUNT,)


# Each is the body of a block, on a transaction of the store; what it prints is what it raised, and what was written.
ON_A_TRANSACTION = """
from shop.consumer import *
from django.db import connection, transaction
from django.utils import timezone
from kconsume.backends import PostgresStore, Position
from kconsume.records import Partition

store = PostgresStore(os.environ["DATABASE_URL"])
P = Partition("orders", 0)
epoch = store.claim("shop", [P], "me", lambda ps: dict.fromkeys(ps, Position(0)))[P].epoch
try:
    with store.transaction("shop", P, epoch) as tx:
        with django_on(tx.connection):
{body}
        tx.advance(0, 1)
except Exception as error:
    print(type(error).__name__)
else:
    print("passed")
print(*Order.objects.values_list("number", flat=True).order_by("number"))
print(store.load("shop", [P])[P].next_offset)
store.close()
"""


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("Order.objects.create(number=1, detail={})", ["passed", "1", "1"]),
        ("raise LookupError", ["LookupError", "", "0"]),
        ("Order.objects.create(number=1, detail={}); transaction.commit()", ["TransactionManagementError", "", "0"]),
        ("Order.objects.create(number=1, detail={}); connection.close()", ["TransactionMisused", "", "0"]),
        ("transaction.on_commit(print)", ["TransactionManagementError", "", "0"]),
        (
            "Order.objects.create(number=1, detail={})\n"
            "try:\n"
            "    with transaction.atomic(): Order.objects.create(number=1, detail={})\n"
            "except django.db.IntegrityError: Order.objects.create(number=2, detail={})",
            ["passed", "1 2", "1"],
        ),
        (
            "Order.objects.create(number=1, detail={})\n"
            "try: Order.objects.create(number=1, detail={})\n"
            "except django.db.IntegrityError: pass",
            ["TransactionManagementError", "", "0"],
        ),
        (
            "made = Order.objects.create(number=1, detail={'a': [1]})\n"
            "again = Order.objects.get(number=1)\n"
            "assert again.detail == {'a': [1]} and again.at == made.at, (again.at, made.at)\n"
            "assert [o.number for o in Order.objects.iterator()] == [1]",
            ["passed", "1", "1"],
        ),
    ],
    ids=["write", "raise", "commit", "close", "on_commit", "savepoint", "swallowed", "values"],
)
def test_the_block_is_in_the_transaction(project: Project, body: str, said: list[str]) -> None:
    indented = "\n".join(f"            {line}" for line in body.splitlines())
    assert project.run(ON_A_TRANSACTION.replace("{body}", indented)) == said

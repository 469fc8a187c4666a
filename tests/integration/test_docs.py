"""Every Python sample of the README, of docs/ and of the examples' pages is run by a test: here, those no other runs.

A sample that begins with `# name.py` is a program: it is run as it stands. Any other is a piece of one: it is run after
a few lines that the reader is to think before it, which are here.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import re
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from confluent_kafka import Consumer, TopicPartition

import kconsume
from kconsume import App, BatchError, Partition, backends, rebalance, testing
from kconsume._config.client_settings import check_overrides
from kconsume._config.environment import read
from kconsume.backends import SqliteStore
from kconsume.testing import EmbeddedKafka, feed
from tests.fix_kafka import produce
from tests.integration.test_programs import SAMPLE, run_pytest

ROOT = Path(__file__).parents[2]
PAGES = {
    page.relative_to(ROOT).as_posix(): page.read_text()
    for page in (ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md")), *sorted(ROOT.glob("examples/**/*.md")))
}
NUMBERS = itertools.count()
TESTED = ["fastapi", "from-a-loop", "from-faststream", "from-faust", "from-quix", "from-spring-kafka", "sqlite"]
"""Pages with programs and their tests."""

PROGRAMS_ARE_RUN_BY = {
    "docs/django.md": "integration/test_django.py",
    "docs/exactly-once.md": "integration/test_postgres_docs.py",
    "docs/failures.md": "integration/test_failures_docs.py",
    "docs/index.md": "integration/test_docs.py",
    "docs/outbox.md": "integration/test_outbox_docs.py",
    "docs/postgres.md": "integration/test_postgres_docs.py",
    "docs/programs.md": "integration/test_programs.py",
    "docs/stores.md": "contract/test_conformance.py",
    "docs/testing.md": "integration/test_programs.py",
    "docs/tutorial.md": "cli/test_tutorial.py",
    **dict.fromkeys((f"docs/{name}.md" for name in TESTED), "integration/test_docs.py"),
}
PIECES_ARE_RUN_BY = {
    "README.md": "integration/test_samples.py",
    "docs/logging.md": "integration/test_docs.py",
    "docs/redis.md": "contract/test_redis_servers.py",
    "docs/spark.md": "spark/test_docs.py",
    "docs/stores.md": "contract/test_conformance.py",
    **dict.fromkeys(
        (
            f"docs/{name}.md"
            for name in ("embedded", "failures", "handlers", "listeners", "sqlalchemy", "standstill", "stores")
        ),
        "integration/test_docs.py",
    ),
    "docs/running.md": "contract/test_start.py",
}


def programs(page: str) -> dict[str, str]:
    return dict(re.findall(SAMPLE, PAGES[page], re.DOTALL))


def pieces(page: str) -> list[str]:
    """Those that are no programs."""
    return re.findall(r"```python\n(?!# \S+\.py\n)(.*?)```", PAGES[page], re.DOTALL)


def test_every_sample_has_a_test_that_runs_it() -> None:
    assert {page for page in PAGES if programs(page)} == set(PROGRAMS_ARE_RUN_BY)
    assert {page for page in PAGES if pieces(page)} == set(PIECES_ARE_RUN_BY)
    for page, test in {**PROGRAMS_ARE_RUN_BY, **PIECES_ARE_RUN_BY}.items():
        assert Path(page).stem in (ROOT / "tests" / test).read_text(), f"{test} does not know {page}"
    told = re.compile(r"^ *```+(\w*)", re.MULTILINE)
    assert {word for page in PAGES.values() for word in told.findall(page)} <= {
        "", "console", "dockerfile", "python", "sh", "sql", "text", "toml", "yaml",
    }, "py, python3 and the like would go past this test"  # fmt: skip


def test_programs_pass_the_tests_that_stand_beside_them(tmp_path: Path) -> None:
    tests = 0
    for name in TESTED:
        for file, code in programs(f"docs/{name}.md").items():
            assert not (tmp_path / file).exists(), "no two pages have programs of one name: they are run together"
            (tmp_path / file).write_text(code)
            tests += code.count("\ndef test_")
    assert f"{tests} passed" in run_pytest(tmp_path, ".")


def test_the_sample_of_the_first_page_reserves() -> None:
    app = run(programs("docs/index.md")["shop.py"])["app"]
    shop = sqlite3.connect(":memory:")
    shop.executescript("create table stock (sku, reserved); insert into stock values ('cup', 1)")
    assert feed(app, "orders", {"cup": 3}, tx=shop).outcome == "handled"
    assert shop.execute("select reserved from stock").fetchall() == [(4,)]
    shop.close()


def test_what_a_loop_has_committed_is_where_the_app_begins(tmp_path: Path) -> None:
    """docs/from-a-loop.md: its take_over.py."""
    take_over = run(programs("docs/from-a-loop.md")["take_over.py"])["take_over"]
    store = f"sqlite:///{tmp_path}/shop.db"
    with EmbeddedKafka({"orders": 2}) as broker:
        produce(broker.bootstrap, "orders", ["a", "b", "c"], partition=0)
        loop = Consumer({"bootstrap.servers": broker.bootstrap, "group.id": "shop", "enable.auto.commit": False})
        loop.commit(offsets=[TopicPartition("orders", 0, 2)], asynchronous=False)
        loop.close()
        assert take_over(broker.bootstrap, "shop", "orders", 2, store) == {Partition("orders", 0): 2}
        handled: list[str] = []
        app = App(broker.bootstrap, group="shop", offsets=store, kafka={"session.timeout.ms": 2000})

        @app.consume("orders")
        def handle(order: str) -> None:
            handled.append(order)

        app.catch_up(idle=0.1)
    assert handled == ["c"]


BEFORE = {
    "docs/embedded.md": "from kconsume import App",
    "docs/failures.md": "from kconsume import Retry",
    "docs/handlers.md": """
import logging, time
from collections.abc import Iterator
import msgspec
from confluent_kafka.schema_registry import SchemaRegistryClient
from confluent_kafka.schema_registry.avro import AvroDeserializer
from kconsume import App, Batch, BatchError, Batching, Record, Router

app = App("localhost:9092", group="shop")
error, other = ValueError("one"), ValueError("two")
seen = []

class Placed(msgspec.Struct):
    id: int

class Order(msgspec.Struct):
    id: int
    @classmethod
    def of(cls, fields, context):
        return cls(**fields)

class Parcel(msgspec.Struct):
    id: int

class Click(msgspec.Struct):
    page: str

class StockClient:
    def __init__(self, url): ...
    def __enter__(self):
        seen.append("opened")
        return self
    def __exit__(self, *_):
        seen.append("closed")

class histogram:
    observe = seen.append
""",
    "docs/listeners.md": """
from collections.abc import Sequence
from unittest.mock import AsyncMock, Mock
from kconsume import App, Partition, Record
from kconsume.rebalance import PartitionState, Rebalance, RebalanceListener

app = App("localhost:9092", group="shop", offsets="memory://", kafka={"session.timeout.ms": 2000})
cache, audit, saved = Mock(), AsyncMock(), {}
read_count = lambda partition: saved.get(partition, 0)
write_count = saved.__setitem__
""",
    "docs/sqlalchemy.md": """
import msgspec
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column
from kconsume import App
from kconsume.backends import PostgresStore

class Base(DeclarativeBase): ...

class Reservation(Base):
    __tablename__ = "reservations"
    order: Mapped[int] = mapped_column(primary_key=True)
    sku: Mapped[str]

class Placed(msgspec.Struct):
    id: int
    sku: str

app = App("localhost:9092", group="shop")
""",
}
"""What is to be thought before the pieces of a page."""


def run(code: str, before: str = "") -> dict[str, Any]:
    """The names of a module with this code. It stays known, because SQLAlchemy looks annotations up by module."""
    module = ModuleType(f"sample_{next(NUMBERS)}")
    sys.modules[module.__name__] = module
    exec(compile(before, module.__name__, "exec", dont_inherit=True), vars(module))
    exec(compile(code, module.__name__, "exec", dont_inherit=True), vars(module))
    return vars(module)


def a_piece(page: str, words: str) -> dict[str, Any]:
    """The one piece with these words, run."""
    (found,) = [piece for piece in pieces(page) if words in piece]
    return run(found, BEFORE[page])


def test_pieces_about_handlers_do_what_the_page_says(caplog: pytest.LogCaptureFixture) -> None:
    page = "docs/handlers.md"
    looked_at: dict[str, Callable[[], object]] = {
        "def reserve(order: Placed) ->": lambda: fed(a_piece(page, "def reserve(order: Placed) ->"), {"id": 1}),
        "AvroDeserializer": lambda: a_piece(page, "AvroDeserializer"),
        "StockClient": lambda: resource_is_opened_and_closed(page),
        "@app.wrap": lambda: a_wrap_goes_around(page),
        "list[Click]": lambda: fed(a_piece(page, "list[Click]"), [{"page": "/"}], topic="clicks"),
        "raise BatchError": lambda: raises(page),
        'to="parcels"': lambda: a_piece(page, 'to="parcels"'),
        "Router(": lambda: a_router_is_included(page),
        "logging.Formatter": lambda: a_piece(page, "logging.Formatter"),
    }
    assert len(looked_at) == len(pieces(page)), "one look for each"
    for look in looked_at.values():
        look()


def fed(names: dict[str, Any], value: object, topic: str = "orders") -> None:
    assert feed(names["app"], topic, value).outcome == "handled"


def resource_is_opened_and_closed(page: str) -> None:
    names = a_piece(page, "StockClient")
    fed(names, {"id": 1})
    assert names["seen"] == ["opened", "closed"]


def a_wrap_goes_around(page: str) -> None:
    names = a_piece(page, "@app.wrap")
    exec("@app.consume('orders')\ndef handle(order: bytes) -> None: ...", names)
    fed(names, b"")
    assert len(names["seen"]) == 1


def raises(page: str) -> None:
    with pytest.raises(BatchError):
        a_piece(page, "raise BatchError")


def a_router_is_included(page: str) -> None:
    names = a_piece(page, "Router(")
    names["app"].include(names["router"])
    fed(names, {"id": 1})


def test_pieces_about_listeners_do_what_the_page_says() -> None:
    page = "docs/listeners.md"
    assert len(pieces(page)) == 3
    functions, listener, state = (run(piece, BEFORE[page]) for piece in pieces(page))
    with EmbeddedKafka({"orders": 1}) as broker:
        produce(broker.bootstrap, "orders", ["a", "b"])
        for names in (functions, listener, state):
            app = names["app"]
            app.brokers = broker.bootstrap
            if names is not state:
                exec("@app.consume('orders')\ndef handle(order: bytes) -> None: ...", names)
            assert app.catch_up(idle=0.1).handled == 2
    here = [Partition("orders", 0)]
    assert [list(call.args[0]) for call in functions["cache"].warm.call_args_list] == [here]
    functions["audit"].note.assert_awaited_once_with("1 partitions went: left")
    assert state["saved"] == {here[0]: 2}


def test_the_piece_about_the_embedded_broker_runs() -> None:
    (piece,) = pieces("docs/embedded.md")
    assert isinstance(run(piece, BEFORE["docs/embedded.md"])["app"], App)


def test_the_piece_about_health_tells_why_an_app_is_not_healthy() -> None:
    (piece,) = pieces("docs/standstill.md")
    before = "from kconsume import App\napp, paged = App('127.0.0.1:1', group='shop'), []\npage = paged.extend\n"
    assert run(piece, before)["paged"] == ["the app is not running"]


def test_the_piece_about_capabilities_declares_what_the_store_offers() -> None:
    (piece,) = pieces("docs/stores.md")
    store = run(piece)["EtcdStore"]()
    assert store.capabilities.named is store


def test_the_piece_about_tenacity_gives_up_after_a_minute() -> None:
    (piece,) = pieces("docs/failures.md")
    retry = run(piece, BEFORE["docs/failures.md"])["retry"]
    assert retry.pause(1, ValueError("busy"), 0.0) is not None
    assert retry.pause(1, ValueError("full"), 0.0) is None
    assert retry.pause(9, ValueError("busy"), 61.0) is None


def test_the_pieces_about_sqlalchemy_write_in_a_session(postgres_url: str) -> None:
    page = "docs/sqlalchemy.md"
    url = postgres_url.replace("postgresql://", "postgresql+psycopg://", 1)
    plain, asynchronous = (
        run(piece.replace("postgresql+psycopg://localhost/shop", url), BEFORE[page]) for piece in pieces(page)
    )
    with EmbeddedKafka({"orders": 1}) as broker:
        plain["Base"].metadata.create_all(plain["engine"])
        for names, order in ((plain, 1), (asynchronous, 2)):
            app = names["app"]
            app.brokers, app.kafka = broker.bootstrap, {"session.timeout.ms": 2000}
            produce(broker.bootstrap, "orders", [f'{{"id": {order}, "sku": "cup"}}'])
            app.catch_up(idle=0.1)
            app.offsets.close() if names is plain else None
    with plain["engine"].connect() as connection:
        found = connection.exec_driver_sql('select "order", sku from reservations order by 1').fetchall()
    assert [tuple(row) for row in found] == [(1, "cup"), (2, "cup")]
    plain["engine"].dispose()
    asyncio.run(asynchronous["engine"].dispose())


def test_the_variables_for_kubernetes_are_known_and_the_grace_is_above_the_shutdown() -> None:
    page = PAGES["docs/kubernetes.md"]
    names = re.findall(r"name: (KCONSUME_\w+)(?:, value: \"?([^\"}]*)\"?)?", page)
    assert len(names) > 6
    said = read({name: value.strip() or "a-secret" for name, value in names if name != "KCONSUME_OFFSETS"})
    assert said.unread([]) == []
    check_overrides(said.kafka)
    assert said.shutdown is not None
    (grace,) = re.findall(r"terminationGracePeriodSeconds: (\d+)", page)
    assert int(grace) > said.shutdown > App("localhost:9092", group="shop").shutdown


def test_the_reference_has_every_public_name() -> None:
    page = PAGES["docs/reference.md"]
    for package in (kconsume, backends, rebalance, testing):
        names = {f"{package.__name__}.{name}" for name in package.__all__ if not name.startswith("_")}
        assert names == set(re.findall(rf"^::: ({package.__name__}\.[A-Za-z_]+)$", page, re.MULTILINE))


def test_logging_is_as_the_page_shows_it() -> None:
    (piece,) = [piece for piece in pieces("docs/handlers.md") if "logging.Formatter" in piece]
    formatter = eval(piece, {"logging": logging})
    line = logging.LogRecord("shop", logging.INFO, __file__, 1, "low stock", None, None)
    assert formatter.format(line) == "INFO low stock -/-@-"


def test_the_store_of_the_sqlite_page_is_the_one_that_is_there() -> None:
    app = run(programs("docs/sqlite.md")["reserve.py"])["app"]
    assert isinstance(app.declared.store(app.offsets), SqliteStore)


@pytest.mark.parametrize("number", [0, 1])
def test_logging_that_is_set_up_as_on_the_page_shows_events(number: int) -> None:
    shown = subprocess.run(
        [sys.executable, "-c", f"{pieces('docs/logging.md')[number]}\n{AN_EVENT}"],
        capture_output=True, text=True, check=True, timeout=60,
    ).stderr  # fmt: skip
    if number:
        assert json.loads(shown) == {"level": "INFO", "message": "partitions assigned", "partitions": ["orders/3"]}
    else:
        assert shown.rstrip().endswith("INFO kconsume.rebalance partitions assigned partitions=orders/3")


AN_EVENT = """
from kconsume._event_log import EventLog
from kconsume import Partition
EventLog("rebalance").info("partitions assigned", partitions=[Partition("orders", 3)])
"""

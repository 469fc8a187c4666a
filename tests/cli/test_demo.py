"""`kconsume demo`, the first thing a person runs: it must work, tell the truth, and leave nothing behind."""

from __future__ import annotations

import io
import json
import shutil
import signal
import sqlite3
from contextlib import closing
from functools import partial
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
from rich.console import Console

from kconsume._runtime.deadlines import Deadline
from kconsume.cli.demo import app
from kconsume.cli.demo.command import ORDERS, DemoRun, complaints_of
from kconsume.cli.demo.screen import Result, show_result
from kconsume.cli.demo.stage import DemoDatabase, prepare
from kconsume.errors import ConfigurationError
from tests.cli.conftest import Shop
from tests.waiting import eventually

GOOD = Result(
    produced=100,
    handled=100,
    rows=100,
    distinct=100,
    lost=0,
    duplicated=0,
    seconds=2.0,
    take_over=1.5,
    by_consumer={"consumer 1": 70, "consumer 2": 30},
    file="kept.db",
    complaints=[],
)


def query(file: Path, statement: str) -> list[tuple[object, ...]]:
    with closing(sqlite3.connect(file)) as database:
        return database.execute(statement).fetchall()


def test_the_demo_kills_a_consumer_and_ends_with_one_row_for_each_order(shop: Shop) -> None:
    played = shop.run("demo", "--keep", "kept.db", "--json")
    result = json.loads(played.stdout)
    file = shop.folder / "kept.db"

    assert played.returncode == 0, played.stdout + played.stderr
    assert (result["lost"], result["duplicated"], result["complaints"]) == (0, 0, [])
    assert {result[count] for count in ("produced", "handled", "rows", "distinct")} == {ORDERS}
    assert result["take_over"] > 0
    assert query(file, "select count(*), count(distinct id), min(id), max(id) from orders") == [
        (ORDERS, ORDERS, 0, ORDERS - 1)
    ]
    assert query(file, "select sum(next_offset) from kconsume_offsets") == [(ORDERS,)]
    assert {consumer for (consumer,) in query(file, "select distinct consumer from orders")} == {
        "consumer 1",
        "consumer 2",
    }
    assert [path.name for path in shop.folder.iterdir()] == ["kept.db"]
    assert shop.processes() == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_demo_leaves_no_process(shop: Shop, number: signal.Signals) -> None:
    playing = shop.start("demo")
    eventually(lambda: "orders arrive" in playing.out, within=90, what="a stream of orders")
    assert len(shop.processes()) >= 6  # the demo, the broker, two consumers and who watches over them
    playing.send(number)

    assert playing.end() == 128 + number
    assert "all processes have ended" in playing.err
    eventually(lambda: shop.processes() == [], what="the end of all processes")


def test_a_killed_demo_leaves_no_process(shop: Shop) -> None:
    playing = shop.start("demo")
    eventually(lambda: "orders arrive" in playing.out, within=90, what="a stream of orders")
    playing.send(signal.SIGKILL)
    playing.end()

    eventually(lambda: shop.processes() == [], what="the end of all processes")


def test_the_demo_replaces_its_own_file_and_no_other(tmp_path: Path) -> None:
    ours, theirs, text = tmp_path / "ours.db", tmp_path / "theirs.db", tmp_path / "notes.txt"
    prepare(ours)
    with closing(sqlite3.connect(ours)) as made:
        made.execute("insert into orders (id) values (1)")
        made.commit()
    with closing(sqlite3.connect(theirs)) as precious:
        precious.execute("create table precious (id integer)")
    text.write_text("precious")
    prepare(ours)

    assert query(ours, "select count(*) from orders") == [(0,)]
    for file in (theirs, text):
        with pytest.raises(ConfigurationError, match="is not replaced"):
            prepare(file)
    assert query(theirs, "select count(*) from precious") == [(0,)]
    assert text.read_text() == "precious"


def test_a_file_that_cannot_be_written_is_an_error_that_names_the_fix(shop: Shop) -> None:
    refused = shop.run("demo", "--keep", "not/there.db")

    assert refused.returncode == 2
    assert "name another with --keep" in refused.stderr


class SlowBooks:
    """Of consumers that handle another order every ten seconds, up to some number; then nothing goes on."""

    def __init__(self, upto: int) -> None:
        self.now = 0.0
        self._upto = upto

    def passed(self) -> int:
        self.now += 10.0
        return min(self._upto, int(self.now / 10.0))

    def rows(self) -> dict[str, int]:
        return {}

    def owners(self) -> dict[int, int]:
        return {}


@pytest.mark.parametrize(("upto", "seconds"), [(100, 1000.0), (50, 520.0)], ids=["all of them", "half of them"])
def test_orders_are_waited_for_as_long_as_they_are_handled_however_slowly(
    upto: int, seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Given up too soon, those that nobody has come to yet would be called lost."""
    module, books = import_module("kconsume.cli.demo.command"), SlowBooks(upto)
    monkeypatch.setattr(module, "Deadline", partial(Deadline, clock=lambda: books.now))
    monkeypatch.setattr(module, "_TICK", 0.0)
    first = SimpleNamespace(pid=1, name="consumer 1", running=True, killed=False, stopped=False)
    props: Any = SimpleNamespace(produced=lambda: 100, consumers=[first], sent=100)
    shown: Any = SimpleNamespace(show=lambda view: None)
    DemoRun(props, cast(DemoDatabase, books), shown, "kept.db")._catch_up()
    assert books.now == seconds


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"rows": 99, "distinct": 99, "lost": 1}, "1 orders were produced and have no row"),
        ({"rows": 102, "duplicated": 2}, "2 rows are duplicates"),
        ({"rows": 101}, "101 rows for 100 orders"),
        ({"handled": 98}, "offsets say 98 of 100 orders were handled"),
        ({"take_over": None}, "no consumer took over the partitions of consumer 2"),
    ],
)
def test_a_count_that_does_not_agree_is_a_complaint(change: dict[str, int | None], told: str) -> None:
    assert list(complaints_of(GOOD, "consumer 2")) == []
    assert told in list(complaints_of(msgspec.structs.replace(GOOD, **change), "consumer 2"))


def test_the_books_see_rows_that_are_there_twice(tmp_path: Path) -> None:
    """The negative control: the demo's table lets a row in twice, and its counts show that."""
    file = tmp_path / "kept.db"
    prepare(file)
    with closing(sqlite3.connect(file)) as made:
        rows = [(number, "plum", 1, 0, "consumer 1", float(number)) for number in (1, 2, 2, 4)]
        made.executemany("insert into orders values (?, ?, ?, ?, ?, ?)", rows)
        made.commit()
    with closing(DemoDatabase(file)) as books:
        assert books.rows() == {"consumer 1": 4}
        assert books.distinct() == 3
        assert books.span() == 3.0
        assert books.first_row_after(1.5, "consumer 1", {0}) == 2.0
        assert books.first_row_after(1.5, "consumer 1", {1}) is None
        assert (books.passed(), books.owners()) == (0, {})


@pytest.mark.parametrize("program", ["/usr/bin/sqlite3", None])
def test_the_end_says_how_to_look_for_oneself(monkeypatch: pytest.MonkeyPatch, program: str | None) -> None:
    monkeypatch.setattr(shutil, "which", lambda _: program)
    shown = io.StringIO()
    show_result(Console(file=shown, width=120), GOOD)
    told = shown.getvalue()

    assert ("sqlite3 kept.db" in told) == (program is not None)
    assert ("-c \"import sqlite3; print(*sqlite3.connect('kept.db')" in told) == (program is None)
    assert "70 by consumer 1, 30 by consumer 2" in told
    assert str(app.__file__) in told


def test_the_end_says_what_does_not_agree() -> None:
    shown = io.StringIO()
    show_result(Console(file=shown, width=120), msgspec.structs.replace(GOOD, complaints=["2 rows are duplicates"]))

    assert "✗ 2 rows are duplicates" in shown.getvalue()
    assert "nothing was lost" not in shown.getvalue()

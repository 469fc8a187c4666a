"""examples/lakehouse: both ways keep each click once while they are killed, and books that do not balance are found."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from examples.lakehouse import books, traffic
from examples.lakehouse.clicks import Click
from kconsume.testing.services import KafkaService, PostgresService
from tests.fix_spark import QUICK
from tests.integration.test_example_orders import run

CLICKS = 2_000


@pytest.fixture(autouse=True)
def quick_java(monkeypatch: pytest.MonkeyPatch) -> None:
    """As for the sessions of other tests: what these gain by compiling well they do not live to see."""
    monkeypatch.setenv("JDK_JAVA_OPTIONS", QUICK)


PNG = b"\x89PNG\r\n\x1a\n"

Clicks = list[Click]


@pytest.mark.timeout(400)
def test_both_ways_keep_each_click_once_while_they_are_killed(
    kafka: KafkaService, postgres: PostgresService, tmp_path: Path
) -> None:
    plot = tmp_path / "clicks.png"
    code, said = run(
        "lakehouse", "--brokers", kafka.bootstrap, "--database", postgres.url, "--plot", str(plot),
        "--clicks", str(CLICKS), "--kills", "1", "--within", "300",
    )  # fmt: skip
    assert code == 0, said
    assert said.count("kill -9 lake ") == said.count("kill -9 warehouse ") == 1
    for book in ("lake: SparkSink", "warehouse: rows"):
        (line,) = (line for line in said.splitlines() if book in line)
        assert [cell.strip() for cell in line.split("│")[2:-1]] == ["2,000", "2,000", "2,000", "0", "0", "balances"]
    assert said.count("│ balances") == 3
    assert plot.read_bytes().startswith(PNG)


@pytest.mark.timeout(200)
def test_what_has_not_come_through_in_time_does_not_balance(
    kafka: KafkaService, postgres: PostgresService, tmp_path: Path
) -> None:
    """The control: the exit code is that of the books."""
    where = ("--brokers", kafka.bootstrap, "--database", postgres.url, "--plot", str(tmp_path / "clicks.png"))
    code, said = run("lakehouse", *where, "--clicks", "100", "--kills", "0", "--within", "0")
    assert code == 1, said
    assert "not every click was stored in time" in said
    assert said.count("│ does not balance") == 3


SENT = list(traffic.day(CLICKS, seed=7))
WRONG: dict[str, tuple[Callable[[Clicks], Clicks], int, int]] = {
    "one is lost": (lambda clicks: clicks[:-1], 1, 0),
    "one is there twice": (lambda clicks: [*clicks, clicks[3]], 0, 1),
    "one is lost and another there twice": (lambda clicks: [*clicks[:-1], clicks[3]], 1, 1),
    "one is another": (lambda clicks: [*clicks[:-1], msgspec.structs.replace(clicks[-1], page="/elsewhere")], 1, 1),
}  # fmt: skip


@pytest.mark.parametrize("what", WRONG)
def test_clicks_that_were_tampered_with_do_not_balance(what: str) -> None:
    tamper, missing, too_much = WRONG[what]
    kept = tamper(SENT)
    right, wrong = books.of_clicks("right", SENT, SENT), books.of_clicks("wrong", SENT, kept)
    assert (right.rows, right.distinct, right.balances) == (CLICKS, CLICKS, True)
    assert (wrong.missing, wrong.too_much, wrong.rows) == (missing, too_much, len(kept))
    assert not wrong.balances
    assert shown(right)
    assert not shown(right, wrong), "one is enough"


def test_totals_that_are_off_by_one_do_not_balance() -> None:
    pages = Counter(click.page for click in SENT)
    assert shown(books.of_pages("right", SENT, pages))
    assert not shown(books.of_pages("counted twice", SENT, pages + Counter({"/help": 1})))
    assert not shown(books.of_pages("lost", SENT, pages - Counter({"/help": 1})))


def shown(*opened: books.Book) -> bool:
    return books.show(opened, Console(file=io.StringIO()))


def test_a_day_follows_from_its_seed() -> None:
    assert list(traffic.day(CLICKS, seed=7)) == SENT
    assert list(traffic.day(CLICKS, seed=8)) != SENT
    assert [click.id for click in SENT] == list(range(CLICKS))
    assert [click.at for click in SENT] == sorted(click.at for click in SENT)

"""`kconsume new`, as a person begins: the project is there, its test passes, and it consumes."""

from __future__ import annotations

import json
import os
import shlex
import signal
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from kconsume._embedded.named_broker import attach
from tests.cli.conftest import ROOT, Shop
from tests.waiting import eventually

FILES = [
    ".gitignore",
    "README.md",
    "my_shop/__init__.py",
    "my_shop/app.py",
    "pyproject.toml",
    "tests/test_app.py",
]


def test_a_project_has_a_handler_a_test_and_what_else_it_needs(shop: Shop) -> None:
    made = shop.run("new", "my-shop")
    project = shop.folder / "my-shop"

    assert (made.returncode, made.stderr) == (0, "")
    assert sorted(str(file.relative_to(project)) for file in project.rglob("*") if file.is_file()) == FILES
    assert all("$" not in file.read_text() for file in project.rglob("*") if file.is_file())
    assert 'dependencies = ["kconsume>=' in (project / "pyproject.toml").read_text()
    assert '"embedded://my-shop"' in (project / "my_shop" / "app.py").read_text()


def test_its_tests_pass(shop: Shop) -> None:
    shop.run("new", "my-shop")
    tested = run_in(shop.folder / "my-shop", [sys.executable, "-m", "pytest", "-q", "-W", "error"])

    assert tested.returncode == 0, tested.stdout + tested.stderr
    assert "2 passed" in tested.stdout


def test_its_tests_fail_when_its_handler_is_wrong(shop: Shop) -> None:
    shop.run("new", "my-shop")
    app = shop.folder / "my-shop" / "my_shop" / "app.py"
    app.write_text(app.read_text().replace("reserved + excluded.reserved", "excluded.reserved"))
    tested = run_in(shop.folder / "my-shop", [sys.executable, "-m", "pytest", "-q"])

    assert tested.returncode == 1
    assert "1 failed, 1 passed" in tested.stdout


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What mypy has found out about kconsume itself: half a minute, and the same for each project."""
    return tmp_path_factory.mktemp("mypy")


@pytest.mark.parametrize("name", ["s", "a-shop-with-a-name-as-long-as-it-may-be"])
def test_it_is_clean_for_strict_checkers(shop: Shop, known: Path, name: str) -> None:
    shop.run("new", name)
    for check in (
        ["mypy", "--strict", f"--cache-dir={known}", "."],
        ["ruff", "check", "--select", "E,F,W,I,B,UP"],
        ["ruff", "format", "--check"],
    ):
        checked = run_in(shop.folder / name, [sys.executable, "-m", *check])
        assert checked.returncode == 0, checked.stdout


def test_the_next_three_commands_work_as_they_are_printed(shop: Shop) -> None:
    made = shop.run("new", "my-shop", "--json")
    project = shop.folder / "my-shop"
    _, run, send = json.loads(made.stdout)["next"]
    shop.folder = project
    running = shop.start(*shlex.split(run)[1:])
    sent = shop.run(*shlex.split(send)[1:])
    assert sent.returncode == 0, sent.stderr
    place = sent.stdout.strip()
    database = project / "my_shop.db"
    eventually(lambda: rows(database) == [("tea", 2)], what=f"the order is handled; {running.err}")
    running.send(signal.SIGINT)

    assert running.end() == 0
    assert shop.run("try", "my_shop.app:app", place).returncode == 0
    assert rows(database) == [("tea", 2)]
    assert shop.run("check", "my_shop.app:app").returncode == 0
    assert "orders" in attach("my-shop").topics()


def test_what_to_do_next_is_printed(shop: Shop) -> None:
    shown = shop.run("new", "shop").stdout

    assert "cd shop && python -m pytest\n" in shown
    assert "kconsume run shop.app:app --reload\n" in shown
    assert """kconsume send orders '{"sku": "tea", "quantity": 2}' --app shop.app:app\n""" in shown


def test_an_empty_folder_is_filled(shop: Shop) -> None:
    (shop.folder / "shop").mkdir()
    assert shop.run("new", "shop").returncode == 0


@pytest.mark.parametrize("kind", ["folder", "file"])
def test_what_is_there_is_never_changed(shop: Shop, kind: str) -> None:
    there = shop.folder / "shop" / "README.md" if kind == "folder" else shop.folder / "shop"
    there.parent.mkdir(exist_ok=True)
    there.write_text("mine")
    refused = shop.run("new", "shop")

    assert refused.returncode == 2
    assert refused.stderr == "error: 'shop' exists and is not empty: choose another name, or move it away first\n"
    assert there.read_text() == "mine"
    assert list(there.parent.iterdir()) == [there]


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("My Shop!", "as in kconsume new my-shop"),
        ("3shop", "as in kconsume new shop"),
        ("shop-", "as in kconsume new shop"),
        ("services/shop", "as in kconsume new shop"),
        ("..", "as in kconsume new shop"),
        ("é", "as in kconsume new shop"),
        ("a" * 41, "use up to 40 letters"),
        ("queue", "'queue' is Python's own"),
        ("class", "'class' is Python's own"),
        ("tests", "'tests' is where the tests are"),
        ("msgspec", "'msgspec' is installed here"),
        ("confluent-kafka", "as in kconsume new confluent-kafka-service"),
    ],
)
def test_a_name_that_cannot_be_used_is_refused_with_one_that_can(shop: Shop, name: str, told: str) -> None:
    refused = shop.run("new", name)

    assert refused.returncode == 2
    assert told in refused.stderr
    assert list(shop.folder.iterdir()) == []
    suggested = refused.stderr.rpartition("kconsume new ")[2].strip()
    assert shop.run("new", suggested).returncode == 0


def test_a_folder_that_is_not_ones_own_is_an_error_and_no_traceback(shop: Shop) -> None:
    shop.folder = Path("/proc")
    refused = shop.run("new", "shop")

    assert refused.returncode == 2
    assert "cannot be written" in refused.stderr
    assert "Traceback" not in refused.stderr


def run_in(folder: Path, command: list[str]) -> subprocess.CompletedProcess[str]:
    """A command in a folder of which nothing knows that it is inside a test."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "KCONSUME_"))}
    return subprocess.run(
        command,
        cwd=folder,
        env={**inherited, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )


def rows(database: Path) -> list[tuple[str, int]]:
    with closing(sqlite3.connect(database)) as connection:
        try:
            return connection.execute("select sku, reserved from stock").fetchall()
        except sqlite3.OperationalError:  # no order has come yet
            return []

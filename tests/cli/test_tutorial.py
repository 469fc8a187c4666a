"""docs/tutorial.md, followed from its first line to its last in two terminals, as it stands."""

from __future__ import annotations

import ast
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.cli.conftest import DEADLINE, ROOT, Running, Shop
from tests.waiting import eventually

PAGE = (ROOT / "docs" / "tutorial.md").read_text()
APP = "kconsume run shop.app:app"


class Block(NamedTuple):
    language: str
    title: str
    text: str


def blocks() -> list[Block]:
    return [Block(*found) for found in re.findall(r'```(\w+)(?: title="([^"]+)")?\n(.*?)```', PAGE, re.DOTALL)]


@pytest.mark.timeout(300)
def test_the_tutorial_can_be_followed(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    installing, making, *rest = blocks()
    assert installing.text == "make demo\n. .venv/bin/activate\n"
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    typed(shop.folder, making.text)
    project = shop.folder / "shop"
    first = (project / "shop" / "app.py").read_text()

    service: Running | None = None
    said = ""
    for place, block in enumerate(rest):
        if block.language == "python":
            name, _, code = block.text.removeprefix("# ").partition("\n")
            if place == 0:
                assert ast.dump(ast.parse(code)) == ast.dump(ast.parse(first)), "what `kconsume new` makes"
            (project / name).write_text(code)
        elif block.title == "terminal 1":
            assert block.text.strip() == APP
            stop(service)
            shop.folder = project
            service = shop.start(*shlex.split(APP)[1:])
            service.await_err("assigned")
        elif block.language == "text":
            shows(project, rest[place - 1].text, said, block.text)
        else:
            if "--stop" in block.text:
                stop(service)
            said = typed(project, block.text.removeprefix("cd shop\n"))
            look_at(block.text, said, service)
    assert not (project / "shop.db").exists(), "removed in the end"


def shows(folder: Path, command: str, said: str, expected: str) -> None:
    if command.startswith("python -c"):  # it takes a moment until it has been handled
        eventually(lambda: typed(folder, command) == expected, within=DEADLINE, what=expected)
    else:
        assert said == expected


def look_at(command: str, said: str, service: Running | None) -> None:
    """What the page tells of, where it shows no output."""
    if "pytest" in command:
        assert "2 passed" in said
    if '\'{"sku": "tea"}\'' in command:
        assert service is not None
        assert service.end() == 1
        (shown,) = re.findall(r"^    error: reserve failed.*?\n\n", PAGE, re.MULTILINE | re.DOTALL)
        assert [line.strip() for line in shown.strip().splitlines()] == [
            line.strip() for line in service.err.strip().splitlines()[-3:]
        ]
    if "dlq list" in command:
        assert service is not None
        service.await_err("dead letter to=failed_orders record=orders/2@2")
    if "dlq redrive" in command:
        assert "sent back 1" in said if "--yes" in command else re.search(r"would pass +1", said)


def typed(folder: Path, commands: str) -> str:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("KCONSUME_")}
    done = subprocess.run(
        ["bash", "-ec", commands], cwd=folder, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def stop(service: Running | None) -> None:
    """Ctrl-C, if it has not ended by itself."""
    if service is not None and service.process.poll() is None:
        service.send(signal.SIGINT)
        assert service.end() == 0, service.err

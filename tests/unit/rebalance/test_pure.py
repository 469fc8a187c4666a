"""What `assignors` and `events` say of themselves: no clock, no I/O, no threads, no logging."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import kconsume.rebalance

FOLDER = Path(kconsume.rebalance.__file__).parent
NEEDED = {
    "__future__", "collections", "collections.abc", "dataclasses", "datetime", "itertools", "math", "typing",
    "kconsume.errors", "kconsume.records",
}  # fmt: skip
CLOCKS = {"now", "today", "utcnow"}


@pytest.mark.parametrize("module", ["assignors", "events"])
def test_nothing_is_imported_that_has_a_clock_or_does_io(module: str) -> None:
    tree = ast.parse((FOLDER / f"{module}.py").read_text())
    imported = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    imported |= {name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names}
    assert imported - NEEDED == set()
    assert [node.lineno for node in ast.walk(tree) if isinstance(node, ast.Attribute) and node.attr in CLOCKS] == []

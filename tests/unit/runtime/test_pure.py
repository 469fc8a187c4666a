"""What modules of the runtime and the failure policies say of themselves: no clock, no I/O, no logging."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import kconsume

FOLDER = Path(kconsume.__file__).parent
PURE = [
    "_runtime/observation/causes",
    "_runtime/assignment/watermark",
    "_runtime/lanes/backpressure",
    "_runtime/lanes/pacing",
    "_runtime/output/letter_batch",
    "_runtime/processing/failure_decisions",
    "_runtime/processing/rules",
    "_runtime/processing/steps",
    "failures/policy",
    "failures/retry",
]
IMPURE = {
    "asyncio", "io", "logging", "os", "pathlib", "queue", "random", "select", "socket", "subprocess", "sys", "tempfile",
    "threading", "time", "kconsume._event_log",
}  # fmt: skip
CLOCKS = {"now", "today", "utcnow"}


def impurities(text: str) -> set[str]:
    """What a module imports or calls that has a clock, does I/O or logs."""
    tree = ast.parse(text)
    imported = {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    imported |= {name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names}
    clocks = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and node.attr in CLOCKS}
    return (imported & IMPURE) | clocks


@pytest.mark.parametrize("module", PURE)
def test_a_pure_module_has_no_clock_does_no_io_and_does_not_log(module: str) -> None:
    assert impurities((FOLDER / f"{module}.py").read_text()) == set()


def test_control_a_module_with_a_clock_or_a_log_is_noticed() -> None:
    assert impurities((FOLDER / "failures/skip_log.py").read_text()) == {"kconsume._event_log", "threading", "time"}

"""What keeps the house easy to enter: folders that fit on a screen, one name a class, no private names across rooms,
and log events that are listed. Each guard has a control that it fails."""

from __future__ import annotations

import ast
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

import kconsume

PACKAGE = Path(kconsume.__path__[0])
EVENTS_PAGE = PACKAGE.parent / "docs" / "log-events.md"
MOST_MODULES = 20
OF_NAMED_TUPLES = {"_asdict", "_fields", "_make", "_replace"}
LEVELS = {"debug", "info", "warning", "error", "at"}

Sources = Mapping[str, str]


def sources() -> Sources:
    return {file.relative_to(PACKAGE).as_posix(): file.read_text() for file in sorted(PACKAGE.rglob("*.py"))}


def crowded_folders(files: Sources) -> list[str]:
    counted = Counter(name.rpartition("/")[0] for name in files if not name.endswith("__init__.py"))
    return [folder for folder, modules in counted.items() if modules > MOST_MODULES]


def shared_class_names(files: Sources) -> dict[str, list[str]]:
    places: dict[str, list[str]] = defaultdict(list)
    for name, text in files.items():
        for node in ast.parse(text).body:
            if isinstance(node, ast.ClassDef):
                places[node.name].append(name)
    return {name: where for name, where in places.items() if len(where) > 1}


def borrowed_private_names(files: Sources) -> Iterator[str]:
    """Underscored names that a module takes from another module of the package."""
    defined = {name: set(_names_of(ast.parse(text))) for name, text in files.items()}
    everywhere = set[str]().union(*defined.values())
    modules = {part.removesuffix(".py") for name in files for part in name.split("/")}
    for name, text in files.items():
        tree = ast.parse(text)
        imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("kconsume"):
                for alias in node.names:
                    if _is_private(alias.name) and alias.name not in modules:
                        yield f"{name}:{node.lineno} imports {alias.name}"
            elif isinstance(node, ast.Attribute) and _is_private(node.attr) and node.attr in everywhere - defined[name]:
                if isinstance(node.value, ast.Name) and node.value.id in {*imported, "KafkaError"}:
                    continue  # another package's name, such as `os._exit`
                yield f"{name}:{node.lineno} uses {ast.unparse(node)}"


def log_events(files: Sources) -> Iterator[tuple[str, str | None]]:
    """Where an event is logged, and its name if it is a constant."""
    for name, text in files.items():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in LEVELS:
                logger = node.func.value
                if isinstance(logger, ast.Name) and logger.id.endswith("_log"):
                    event = node.args[node.func.attr == "at"] if node.args else None
                    known = isinstance(event, ast.Constant) and isinstance(event.value, str)
                    yield f"{name}:{node.lineno}", str(event.value) if known else None  # type: ignore[union-attr]


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name not in OF_NAMED_TUPLES


def _names_of(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):  # __slots__
            yield node.value


def test_no_folder_has_more_modules_than_fit_on_a_screen() -> None:
    assert crowded_folders(sources()) == []
    assert crowded_folders({f"runtime/part{number}.py": "" for number in range(MOST_MODULES + 1)}) == ["runtime"]


def test_no_two_classes_share_a_name() -> None:
    assert shared_class_names(sources()) == {}
    assert shared_class_names({"a.py": "class Line: ...", "b.py": "class Line: ..."}) == {"Line": ["a.py", "b.py"]}


def test_no_module_uses_private_names_of_another() -> None:
    assert list(borrowed_private_names(sources())) == []


@pytest.mark.parametrize(
    "taken",
    ["from kconsume.store import _connect", "def f(store): return store._sql"],
)
def test_control_a_private_name_of_another_module_is_noticed(taken: str) -> None:
    files = {"store.py": "def _connect(): ...\nclass S:\n    def __init__(self): self._sql = 1", "tool.py": taken}
    assert len(list(borrowed_private_names(files))) == 1


def test_every_log_line_is_an_event_with_a_constant_name() -> None:
    assert [place for place, event in log_events(sources()) if event is None] == []
    assert [event for _, event in log_events({"a.py": "_log.info(f'lost {p}')"})] == [None]


def test_every_event_is_a_few_plain_words() -> None:
    events = {event for _, event in log_events(sources()) if event}
    assert [event for event in sorted(events) if not re.fullmatch(r"[a-zA-Z0-9_-]+( [a-zA-Z0-9_-]+){1,6}", event)] == []


def test_the_page_of_log_events_lists_those_of_the_code() -> None:
    listed = set(re.findall(r"^\| `([^`]+)` \|", EVENTS_PAGE.read_text(), re.MULTILINE))
    assert listed == {event for _, event in log_events(sources()) if event}

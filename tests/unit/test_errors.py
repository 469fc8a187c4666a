"""One tree of errors, as it is drawn at the top of `errors.py`."""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
from collections.abc import Iterator
from pathlib import Path

import pytest

import kconsume
from kconsume import errors
from kconsume.errors import (
    BrokerUnavailable,
    ConfigurationError,
    HandlerFailed,
    InvalidHandler,
    KconsumeError,
    ShutdownTimeout,
)

RAISED_BESIDES = {
    "_runtime/assignment/watermark.py": {"ValueError"},  # a mistake of ours, not the person's
    "app.py": {"SystemExit"},
    "_runtime/interrupt.py": {"Interrupted"},
    "rebalance/partition_state.py": {"ExceptionGroup"},  # what several loads raised, each as it is
    "_lazy.py": {"AttributeError"},  # what Python wants to hear
    "_handlers/batches.py": {"ValueError"},  # a slice that Python's own sequences would take
    "_config/environment.py": {"ValueError"},  # never leaves the file: it becomes a sentence with the variable's name
    "_kafka/delivery.py": {"KafkaException"},  # as above
    "_kafka/transactional_producer.py": {"TransactionFailed"},  # `kconsume dlq redrive` makes a sentence of it
    "backends/postgres/psycopg_internals.py": {"NotImplementedError"},  # for the class that mixes it in
    "_kafka/outgoing.py": {"NotImplementedError"},  # what msgspec wants to hear
}


def drawn() -> dict[str, str | None]:
    """Each class of the drawing with the one above it."""
    parents: dict[str, str | None] = {}
    path: list[str] = []
    for line in (errors.__doc__ or "").splitlines():
        if not line.startswith(("KconsumeError", "├", "│", "└")):
            continue
        branch = line.rstrip("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ …()0123456789.,=\"'@;:_-")
        name = line[len(branch) :].split()[0]
        depth = (line.index(name) + 3) // 4
        path[depth:] = [name]
        parents[name] = path[depth - 1] if depth else None
    return parents


def written() -> dict[str, str | None]:
    classes = [c for c in vars(errors).values() if inspect.isclass(c) and issubclass(c, KconsumeError)]
    return {c.__name__: None if c is KconsumeError else c.__bases__[0].__name__ for c in classes}


def modules() -> Iterator[str]:
    for module in pkgutil.walk_packages(kconsume.__path__, "kconsume."):
        if not module.name.endswith("__main__"):
            yield module.name


def test_the_tree_that_is_drawn_is_the_tree_that_is_written() -> None:
    assert drawn() == written()
    assert len(drawn()) >= 20


def test_every_error_says_what_it_is() -> None:
    assert all(getattr(errors, name).__doc__ for name in drawn())


def test_every_error_class_of_the_package_is_in_the_tree() -> None:
    strays = {
        member.__name__
        for name in modules()
        for member in vars(importlib.import_module(name)).values()
        if inspect.isclass(member)
        and issubclass(member, BaseException)
        and member.__module__.startswith("kconsume")
        and not issubclass(member, KconsumeError)
    }
    # A private one never leaves its module, the interrupts never the block that they end, `TransactionFailed` never
    # `kconsume dlq redrive`.
    assert {name for name in strays if not name.startswith("_")} == {
        "Interrupted",
        "QueryInterrupted",
        "TransactionFailed",
    }


def test_what_the_engine_and_the_stores_raise_is_in_the_tree() -> None:
    package = Path(kconsume.__path__[0])
    strays = [
        f"{file.relative_to(package)}:{line} raises {name}"
        for file in sorted(package.rglob("*.py"))
        if file.relative_to(package).parts[0] not in ("testing", "cli", "ui", "_embedded")
        for line, name in raised_in(file)
        if not hasattr(errors, name) and name not in RAISED_BESIDES.get(str(file.relative_to(package)), ())
    ]
    assert strays == []


def raised_in(file: Path) -> Iterator[tuple[int, str]]:
    """The classes that are named in `raise` statements."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Raise) and node.exc is not None:
            called = node.exc.func if isinstance(node.exc, ast.Call) else node.exc
            if isinstance(called, ast.Name) and called.id[:1].isupper():
                yield node.lineno, called.id


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (KconsumeError("x"), 1),
        (BrokerUnavailable("x"), 1),
        (HandlerFailed("h", "orders/3@1", LookupError()), 1),
        (ConfigurationError("x"), 2),
        (InvalidHandler("x"), 2),
        (ShutdownTimeout("x"), 3),
    ],
)
def test_the_exit_codes_are_the_pinned_ones(error: KconsumeError, code: int) -> None:
    assert error.exit_code == code


def test_every_configuration_error_ends_with_2_and_no_other_does() -> None:
    for name in drawn():
        error = getattr(errors, name)
        assert (error.exit_code == 2) == issubclass(error, ConfigurationError)


def test_a_failed_handler_is_told_with_its_name_the_record_and_the_cause() -> None:
    cause = LookupError("no such sku")
    error = HandlerFailed("reserve", "orders/3@1042", cause)
    assert str(error) == "reserve failed on orders/3@1042: LookupError: no such sku"
    assert error.place == "orders/3@1042"
    assert error.__cause__ is cause

"""The private methods of psycopg that kconsume overrides or calls, as this version of psycopg has them.

If one of these tests fails after an upgrade of psycopg, its message names the method that changed: adapt
`kconsume/backends/postgres/psycopg_internals.py`, then raise the upper bound in `pyproject.toml`.
"""

from __future__ import annotations

import ast
import asyncio
import inspect
import re
import tomllib
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import psycopg
import pytest

from kconsume.backends.postgres import psycopg_internals
from kconsume.backends.postgres.connection import AsyncHandlerConnection, HandlerConnection

ROOT = Path(__file__).parents[2]
HOME = ROOT / "kconsume" / "backends" / "postgres" / "psycopg_internals.py"

METHODS: dict[tuple[type, str], tuple[str, ...]] = {
    (psycopg.Cursor, "_raise_for_result"): ("self", "result"),
    (psycopg.AsyncCursor, "_raise_for_result"): ("self", "result"),
    (psycopg.Cursor, "_fetch_pipeline"): ("self",),
    (psycopg.Pipeline, "_communicate_gen"): ("self",),
    (psycopg.Pipeline, "_fetch_gen"): ("self", "*flush"),
}
"""A star marks a parameter that is passed by its name only."""


def changes(methods: dict[tuple[type, str], tuple[str, ...]] = METHODS) -> list[str]:
    return [
        f"psycopg {psycopg.__version__}: {owner.__name__}.{name} {difference}"
        for (owner, name), expected in methods.items()
        if (difference := _difference(owner, name, expected)) is not None
    ]


def _difference(owner: type, name: str, expected: tuple[str, ...]) -> str | None:
    method = inspect.getattr_static(owner, name, None)
    if not inspect.isfunction(method):
        return "is no longer a method"
    found = tuple(
        f"*{each.name}" if each.kind is each.KEYWORD_ONLY else each.name
        for each in inspect.signature(method).parameters.values()
    )
    return None if found == expected else f"takes ({', '.join(found)}) and not ({', '.join(expected)})"


@pytest.fixture
def connection(postgres_url: str) -> Iterator[HandlerConnection]:
    with closing(psycopg.connect(postgres_url, autocommit=True)) as pooled:
        connection = HandlerConnection(pooled.pgconn)
        connection.execute_own("begin")
        yield connection
        connection.execute_own("rollback")
        connection.detach()


def counted(monkeypatch: pytest.MonkeyPatch, owner: type, name: str) -> list[str]:
    """Its calls, by psycopg or by kconsume."""
    calls: list[str] = []
    method = getattr(owner, name)

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(name)
        return method(self, *args, **kwargs)

    monkeypatch.setattr(owner, name, call)
    return calls


def test_the_private_methods_have_the_signatures_that_kconsume_relies_on() -> None:
    assert changes() == []


def test_control_a_method_that_is_gone_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    owner = next(kind for kind in psycopg.Pipeline.__mro__ if "_communicate_gen" in vars(kind))
    monkeypatch.delattr(owner, "_communicate_gen")
    assert changes() == [f"psycopg {psycopg.__version__}: Pipeline._communicate_gen is no longer a method"]


def test_control_a_method_with_another_signature_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psycopg.Pipeline, "_fetch_gen", lambda self, flush, limit: None, raising=True)
    (changed,) = changes()
    assert "Pipeline._fetch_gen takes (self, flush, limit) and not (self, *flush)" in changed


def test_psycopg_calls_raise_for_result_with_an_error_of_the_server(
    connection: HandlerConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = counted(monkeypatch, psycopg_internals.ErrorReportingCursor, "_raise_for_result")
    with pytest.raises(psycopg.errors.DivisionByZero) as raised:
        connection.execute("select 1 / 0")
    assert calls == ["_raise_for_result"], "psycopg raises errors without Cursor._raise_for_result"
    assert connection.has_raised(raised.value)


def test_psycopg_calls_raise_for_result_in_async_cursors(postgres_url: str) -> None:
    async def fail() -> bool:
        async with await psycopg.AsyncConnection.connect(postgres_url, autocommit=True) as pooled:
            connection = AsyncHandlerConnection(pooled.pgconn)
            await connection.execute_own("begin")
            with pytest.raises(psycopg.errors.DivisionByZero) as raised:
                await connection.execute("select 1 / 0")
            return connection.has_raised(raised.value)

    assert asyncio.run(fail()), "psycopg raises errors without AsyncCursor._raise_for_result"


def test_a_pipeline_is_kconsumes_own_and_sends_and_fetches_by_the_overridden_methods(
    connection: HandlerConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = counted(monkeypatch, psycopg_internals.PortionedPipeline, "_communicate_gen")
    fetched = counted(monkeypatch, psycopg_internals.PortionedPipeline, "_fetch_gen")
    with connection.portioned_pipeline() as pipeline:
        assert type(pipeline) is psycopg_internals.PortionedPipeline, "Connection.pipeline ignores Connection._pipeline"
        cursor = connection.execute("select 1")
        assert sent, "psycopg sends a pipeline without Pipeline._communicate_gen"
        assert len(pipeline.command_queue) == 1, "the statement was sent at once"
        assert cursor.rowcount == 1, "Cursor._fetch_pipeline does not fetch"
        assert fetched, "psycopg fetches a pipeline without Pipeline._fetch_gen"


def test_a_connection_object_is_autocommit_inside_a_transaction(connection: HandlerConnection) -> None:
    assert connection.autocommit is True, "Connection.autocommit is no longer Connection._autocommit"
    connection.execute("select 1")
    assert connection.info.transaction_status == psycopg.pq.TransactionStatus.INTRANS


def test_psycopg_has_an_upper_bound_and_this_version_is_below_it() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    groups = settings["dependency-groups"]
    extras = settings["project"]["optional-dependencies"]["postgres"] + groups["orders"] + groups["lakehouse"]
    bounds = [re.search(r"<(\d+)\.(\d+)$", each) for each in extras if each.startswith("psycopg")]
    assert len(bounds) == 3
    for bound in bounds:
        assert bound is not None, "no upper bound"
        assert tuple(map(int, psycopg.__version__.split(".")[:2])) < tuple(map(int, bound.groups()))


def test_no_other_module_names_what_is_private_to_psycopg() -> None:
    names = {name for _, name in METHODS} | {"_pipeline", "_autocommit"}
    assert {name for _, name in _attributes(HOME)} >= names - {"_pipeline"}
    elsewhere = [
        f"{path.relative_to(ROOT)}:{line} {name}"
        for path in sorted((ROOT / "kconsume").rglob("*.py"))
        if path != HOME and "psycopg" in path.read_text()
        for line, name in _attributes(path)
        if name in names
    ]
    assert elsewhere == []


def _attributes(path: Path) -> list[tuple[int, str]]:
    nodes = ast.walk(ast.parse(path.read_text()))
    return [(node.lineno, node.attr) for node in nodes if isinstance(node, ast.Attribute)]

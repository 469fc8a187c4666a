"""What a store offers is one declared value, and nothing else is asked."""

from __future__ import annotations

import ast
from dataclasses import replace
from pathlib import Path

import pytest

import kconsume
from kconsume.backends import KafkaStore, MemoryStore, OffsetStore, SqliteStore
from kconsume.backends import base as levels
from kconsume.backends import capabilities as declarations
from kconsume.backends.capabilities import Capabilities, capabilities_of
from tests.unit.fakes import ListStore

PACKAGE = Path(kconsume.__file__).parent
MAY_ASK = ("backends/capabilities.py", "testing/conformance/")
"""Where a store or a transaction may be tested for a protocol: where the level is derived, and in the suite that checks
declarations."""


class TestAStoreThatDeclaresNothing:
    """A third party's, which implements one of the three levels."""

    class Offsets:
        def __init__(self) -> None:
            self.address, self.guarantee = "etcd://host", "at least once"
            self.load = self.save = self.reset = self.delete = self.groups = self.close = lambda *_: None

    class Fenced(Offsets):
        def __init__(self) -> None:
            super().__init__()
            self.claim = self.reclaim = lambda *_: None

    class Transactional(Fenced):
        def __init__(self) -> None:
            super().__init__()
            self.connection_types, self.parallel, self.by_record = (dict,), None, False
            self.transaction = lambda *_: None

    @pytest.mark.parametrize(
        ("kind", "fenced", "types"), [(Offsets, False, ()), (Fenced, True, ()), (Transactional, True, (dict,))]
    )
    def test_it_offers_its_level_and_nothing_else(
        self, kind: type[OffsetStore], fenced: bool, types: tuple[type, ...]
    ) -> None:
        store = kind()
        offers = capabilities_of(store)
        assert offers == Capabilities(store)
        assert offers.fenced is (store if fenced else None)
        assert offers.transactional is (store if types else None)
        assert (offers.connection_types, offers.async_connection_types) == (types, None)


def test_the_level_is_derived_also_where_the_rest_is_declared() -> None:
    """A store that forgot to declare its level would lose its fence without a word."""
    store = ListStore()
    assert capabilities_of(store).transactional is store
    assert capabilities_of(MemoryStore()).transactional is None
    assert replace(capabilities_of(store), severs=True).fenced is store


def test_what_the_stores_of_the_package_declare(tmp_path: Path) -> None:
    kafka, sqlite = KafkaStore("nowhere:9092"), SqliteStore(tmp_path / "shop.db")
    assert capabilities_of(kafka) == Capabilities(kafka)
    offers = capabilities_of(sqlite)
    assert (offers.outbox, offers.noting, offers.named, offers.dry_run) == (sqlite, sqlite, sqlite, sqlite)
    assert (offers.pipelining, offers.async_transactional) == (None, None)
    assert offers.location is not None
    assert offers.location.endswith(str(tmp_path / "shop.db"))
    assert not capabilities_of(MemoryStore()).durable


def test_no_store_or_transaction_is_tested_for_a_protocol_elsewhere() -> None:
    protocols = {
        name
        for module in (levels, declarations)
        for name, value in vars(module).items()
        if getattr(value, "_is_protocol", False) and name != "OffsetStore"  # by it `offsets=` is checked
    }
    assert {"FencedStore", "OutboxStore", "OutboxTx"} <= protocols
    asked = [
        f"{path.relative_to(PACKAGE)}:{node.lineno}"
        for path in PACKAGE.rglob("*.py")
        if not path.relative_to(PACKAGE).as_posix().startswith(MAY_ASK)
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id in ("isinstance", "issubclass")
        and protocols & {each.id for each in ast.walk(node.args[1]) if isinstance(each, ast.Name)}
    ]
    assert asked == []

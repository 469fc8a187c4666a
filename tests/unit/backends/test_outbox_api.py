"""Which transactions `Outbox` takes. No database is used."""

from __future__ import annotations

import asyncio

import psycopg
import pytest

from kconsume.backends import SqliteStore
from kconsume.backends.outbox.api import Outbox
from kconsume.errors import InvalidHandler

STATEMENT = ("insert into kconsume_outbox", {"topic": "orders"})


class Recorded(psycopg.Connection[object]):
    """A connection that records its statements. It is not connected."""

    def __init__(self) -> None:
        self.executed: list[object] = []

    def execute(self, *statement: object) -> None:  # type: ignore[override]
        self.executed.append(statement)


class AwaitedConnection(psycopg.AsyncConnection[object]):
    def __init__(self) -> None:
        """Not connected."""


def outbox_at(address: str, monkeypatch: pytest.MonkeyPatch) -> Outbox:
    """An outbox whose store builds the statement without its database."""
    outbox = Outbox(address)
    monkeypatch.setattr(outbox._store, "insert_statement", lambda _: STATEMENT)
    return outbox


@pytest.mark.parametrize("scheme", ["postgresql", "postgres"])
def test_a_connection_of_psycopg_fits_both_schemes_of_a_postgresql_address(
    scheme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    outbox, connection = outbox_at(f"{scheme}://nowhere/shop", monkeypatch), Recorded()
    outbox.send(connection, "orders", "x")
    assert connection.executed == [STATEMENT]
    outbox.close()


@pytest.mark.usefixtures("sqlite_stores_are_closed")
def test_control_a_connection_of_another_database_is_refused(tmp_path: object) -> None:
    outbox = Outbox(SqliteStore(f"{tmp_path}/shop.db"))
    with pytest.raises(InvalidHandler, match="tx is of type Recorded, which is not a transaction of sqlite:///"):
        outbox.send(Recorded(), "orders", "x")
    outbox.close()


def test_the_errors_for_a_wrong_method_name_the_type_without_an_article(monkeypatch: pytest.MonkeyPatch) -> None:
    outbox = outbox_at("postgresql://nowhere/shop", monkeypatch)
    with pytest.raises(InvalidHandler, match=r"^tx is of type AwaitedConnection, whose methods are awaited: write"):
        outbox.send(AwaitedConnection(), "orders", "x")
    with pytest.raises(InvalidHandler, match=r"^tx is of type Recorded, whose methods are not awaited: call send"):
        asyncio.run(outbox.asend(Recorded(), "orders", "x"))
    outbox.close()

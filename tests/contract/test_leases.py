"""Who sends the rows that are nobody's, when a clock was put back: a lease from the future counts as lapsed."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import psycopg
import pytest

from kconsume._kafka.outgoing import Outgoing
from kconsume.backends import PostgresStore, SqliteStore

LEASES = [("2 hours", 1), ("5 seconds", 0)]
"""How far ahead each is, and how many rows another gets: one that is seconds ahead is of now, by a clock that differs a
little."""


@pytest.mark.parametrize(("later", "sent"), LEASES)
def test_in_postgresql(postgres_url: str, database: psycopg.Connection, later: str, sent: int) -> None:
    with closing(PostgresStore(postgres_url)) as store:
        database.execute(*store.insert_statement(Outgoing(b"v", topic="bills", headers=())))
        assert len(store.unowned_rows("one", 10)) == 1
        assert store.unowned_rows("two", 10) == []
        database.execute("update kconsume_schema set relay_at = now() + %s::interval", (later,))
        assert len(store.unowned_rows("two", 10)) == sent


@pytest.mark.parametrize(("later", "sent"), LEASES)
def test_in_sqlite(tmp_path: Path, later: str, sent: int) -> None:
    path = tmp_path / "shop.db"
    with closing(SqliteStore(path)) as store, closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute(*store.insert_statement(Outgoing(b"v", topic="bills", headers=())))
        assert len(store.unowned_rows("one", 10)) == 1
        assert store.unowned_rows("two", 10) == []
        written = "strftime('%Y-%m-%dT%H:%M:%f000+00:00', 'now', ?)"
        connection.execute(f"update kconsume_schema set relay_at = {written}", (f"+{later}",))
        assert len(store.unowned_rows("two", 10)) == sent

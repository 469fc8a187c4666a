"""Origins that are known for longer than they are kept are forgotten, however many there are, and none that is younger.

One statement for all that are due, over a table without an index on the time, stops to succeed above some rate: it is
cut off before it ends, undone, and finds more the next time.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import psycopg
import pytest

from kconsume.backends import PostgresStore, SqliteStore
from kconsume.backends.outbox.tables import FORGOTTEN_AT_ONCE, SQLITE_FORGET

OLD, YOUNG = 2 * FORGOTTEN_AT_ONCE + 5, 1000


@pytest.fixture
def postgres_store(postgres_url: str) -> Iterator[PostgresStore]:
    with closing(PostgresStore(postgres_url)) as store:
        store.groups()
        yield store


def fill_postgres(database: psycopg.Connection) -> None:
    database.execute(
        """insert into kconsume_seen select 'shop', 'old ' || n, now() - interval '8 days' from generate_series(1, %s) n
            union all select 'shop', 'young ' || n, now() from generate_series(1, %s) n""",
        (OLD, YOUNG),
    )
    database.execute("analyze kconsume_seen")


def plan_of(store: PostgresStore, database: psycopg.Connection) -> str:
    return "\n".join(line for (line,) in database.execute(f"explain {store.database.statements.forget_origins}"))


def test_postgresql_forgets_in_portions_by_an_index(
    postgres_store: PostgresStore, database: psycopg.Connection
) -> None:
    fill_postgres(database)
    plan = plan_of(postgres_store, database)
    assert "kconsume_seen_time" in plan
    assert "Seq Scan" not in plan
    assert [postgres_store.forget_origins() for _ in range(4)] == [True, True, False, False]
    assert database.execute("select count(*), min(origin) from kconsume_seen").fetchone() == (YOUNG, "young 1")


def test_postgresql_waits_for_no_origin_that_another_transaction_has(
    postgres_store: PostgresStore, postgres_url: str, database: psycopg.Connection
) -> None:
    fill_postgres(database)
    with psycopg.connect(postgres_url) as other:
        other.execute("select from kconsume_seen where origin = 'old 1' for update")
        while postgres_store.forget_origins():
            pass
        assert database.execute("select count(*) from kconsume_seen").fetchone() == (YOUNG + 1,)


def test_tables_of_before_get_the_index(postgres_url: str, database: psycopg.Connection) -> None:
    with closing(PostgresStore(postgres_url)) as store:
        store.groups()
    database.execute("drop index kconsume_seen_time; update kconsume_schema set additions = 1")
    fill_postgres(database)
    with closing(PostgresStore(postgres_url)) as store:
        store.groups()
        assert "kconsume_seen_time" in plan_of(store, database)


@pytest.mark.parametrize("before", [False, True])
def test_sqlite_forgets_in_portions_by_an_index(tmp_path: Path, before: bool) -> None:
    path = tmp_path / "shop.db"
    with closing(SqliteStore(path)) as store:
        store.groups()
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        if before:
            connection.executescript("drop index kconsume_seen_time; update kconsume_schema set additions = 1")
        rows = [("old", n, "2020-01-01T00:00:00+00:00") for n in range(OLD)]
        rows += [("young", n, "2999-01-01T00:00:00+00:00") for n in range(YOUNG)]
        connection.execute("begin")
        connection.executemany("insert into kconsume_seen values ('shop', ? || ?, ?)", rows)
        connection.execute("commit")
    with closing(SqliteStore(path)) as store:
        assert [store.forget_origins() for _ in range(4)] == [True, True, False, False]
    with closing(sqlite3.connect(path)) as connection:
        plan = " ".join(str(row) for row in connection.execute(f"explain query plan {SQLITE_FORGET}", ("2020",)))
        assert "SEARCH kconsume_seen USING COVERING INDEX kconsume_seen_time" in plan
        assert connection.execute("select count(*), min(origin) from kconsume_seen").fetchone() == (YOUNG, "young0")

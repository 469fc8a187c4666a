"""The tables of `postgresql://` and `kconsume schema`: made, brought up to date, or refused with what to do."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from unittest.mock import ANY

import msgspec
import psycopg
import pytest

from kconsume.backends import FencedStore, open_store
from kconsume.backends.base import Position
from kconsume.backends.claim import granted
from kconsume.backends.outbox.tables import POSTGRES_STEP
from kconsume.backends.postgres import schema as postgres_schema
from kconsume.backends.postgres import statements, tables
from kconsume.cli.schema import Tables, migrated, shown
from kconsume.errors import ConfigurationError, StoreError
from kconsume.records import Partition
from tests.integration.postgres_roles import a_role, added
from tests.waiting import eventually

ORDERS = Partition("orders", 0)
VERSION_1 = """
create table kconsume_schema (version integer not null, last_epoch bigint not null default 0);
create table kconsume_offsets (
    group_id text not null, topic text not null, partition integer not null,
    next_offset bigint not null, epoch bigint not null, topic_id text, owner text,
    leader_epoch integer, metadata text not null default '', updated_at timestamptz not null default now(),
    primary key (group_id, topic, partition)
) with (fillfactor = 50, autovacuum_vacuum_scale_factor = 0.01);
insert into kconsume_schema (version, last_epoch) values (1, 41);
insert into kconsume_offsets values
    ('shop', 'orders', 0, 7, 3, 'an id', 'somebody', 2, 'a note', '2026-01-02 03:04:05+00'),
    ('shop', 'orders', 1, 9000000000, 1, null, null, null, '', '2026-01-02 03:04:06+00'),
    ('bills', 'orders', 0, 0, 12, null, 'else', 0, '', '2026-01-02 03:04:07+00')"""
"""As the first kconsume made them, with rows in them."""
COLUMNS_2 = {
    "kconsume_deleted": ["group_id", "topic", "partition", "epoch", "deleted_at"],
    "kconsume_offsets": [
        "group_id", "topic", "partition", "next_offset", "epoch", "topic_id", "owner", "leader_epoch", "metadata",
        "updated_at", "generation", "reset_epoch",
    ],
    "kconsume_outbox": [
        "id", "group_id", "topic", "partition", "target", "key", "value", "headers", "record_timestamp", "posted_at",
    ],
    "kconsume_schema": ["version", "last_epoch", "relay", "relay_at", "additions", "store_id"],
    "kconsume_seen": ["group_id", "origin", "seen_at"],
}  # fmt: skip


@pytest.fixture
def version_1(database: psycopg.Connection) -> None:
    database.execute(VERSION_1)


def use(url: str) -> dict[Partition, Position]:
    """As a service does first: this makes the tables, or brings them up to date."""
    store = open_store(url)
    assert isinstance(store, FencedStore)
    try:
        return granted(store.claim("shop", [ORDERS], "me", _at_7))
    finally:
        store.close()


def _at_7(partitions: Sequence[Partition]) -> dict[Partition, Position]:
    return {partition: Position(7) for partition in partitions}


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "kconsume", "schema", *arguments],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip


def version(database: psycopg.Connection) -> int:
    row = database.execute("select version from kconsume_schema").fetchone()
    assert row is not None
    return int(row[0])


def columns(database: psycopg.Connection, schema: str = "public") -> dict[str, list[str]]:
    """Of all tables of ours in a schema."""
    found = database.execute(
        """select table_name, array_agg(column_name::text order by ordinal_position) from information_schema.columns
           where table_schema = %s and table_name like 'kconsume%%' group by 1 order by 1""",
        (schema,),
    )
    return dict(found.fetchall())


def rows(database: psycopg.Connection) -> list[tuple[object, ...]]:
    """What the first version knows of them."""
    return database.execute(
        """select group_id, topic, partition, next_offset, epoch, topic_id, owner, leader_epoch, metadata, updated_at
           from kconsume_offsets order by 1, 2, 3"""
    ).fetchall()


@pytest.mark.usefixtures("version_1")
def test_a_migration_leaves_every_row_as_it_was(postgres_url: str, database: psycopg.Connection) -> None:
    before = rows(database)
    assert len(before) == 3
    done = migrated(open_store(postgres_url))
    assert (done.version, done.changed) == (2, True)
    assert done.said.startswith("migrated from version 1 to 2; ")
    assert rows(database) == before
    assert database.execute("select * from kconsume_schema").fetchall() == [(2, 41, None, None, 2, ANY)]
    assert columns(database) == COLUMNS_2


@pytest.mark.usefixtures("version_1")
def test_a_service_of_this_version_migrates_and_goes_on_where_the_older_one_was(
    postgres_url: str, database: psycopg.Connection
) -> None:
    position = use(postgres_url)[ORDERS]
    assert (position.next_offset, position.epoch, position.topic_id) == (7, 4, "an id")
    assert version(database) == 2
    store = open_store(postgres_url)
    store.delete("shop")
    store.close()
    assert use(postgres_url)[ORDERS].epoch == 42, "an epoch that the older version has retired was given out again"


def test_a_new_database_gets_all_versions_at_once(postgres_url: str, database: psycopg.Connection) -> None:
    use(postgres_url)
    assert version(database) == 2
    assert columns(database) == COLUMNS_2


def tables_of_the_version_before(database: psycopg.Connection) -> None:
    """Version 2 as the kconsume before made it: without what was added to it since."""
    step = POSTGRES_STEP.format(schema="")
    database.execute(f"{VERSION_1}; {step}; update kconsume_schema set version = 2")


def test_tables_of_the_version_before_are_added_to_and_it_goes_on_with_them(
    postgres_url: str, database: psycopg.Connection
) -> None:
    tables_of_the_version_before(database)
    before = rows(database)
    assert shown(open_store(postgres_url)).sql is not None
    done = migrated(open_store(postgres_url))
    assert (done.version, done.changed) == (2, True)
    assert "that an earlier kconsume ignores" in done.said
    assert (rows(database), columns(database)) == (before, COLUMNS_2)
    assert database.execute("select version, additions from kconsume_schema").fetchall() == [(2, 2)]
    assert not migrated(open_store(postgres_url)).changed
    assert shown(open_store(postgres_url)).sql is None
    # What the version before sends, also when it starts after us.
    assert database.execute("select version from kconsume_schema").fetchall() == [(2,)], "which it does not refuse"
    database.execute(
        "insert into kconsume_offsets (group_id, topic, partition, next_offset, epoch) values ('g', 't', 0, 1, 1)"
    )
    with closing(open_store(postgres_url)) as store:
        row = store.load("g", [Partition("t", 0)])[Partition("t", 0)]
        assert (row.generation, row.reset_epoch) == (None, 0)


@pytest.mark.usefixtures("version_1")
def test_a_migration_that_fails_changes_nothing(postgres_url: str, database: psycopg.Connection) -> None:
    before = rows(database)
    database.execute("create table kconsume_seen (somebody_s text)")
    with pytest.raises(StoreError, match=r"kconsume_seen.*already exists"):
        use(postgres_url)
    assert rows(database) == before
    assert database.execute("select * from kconsume_schema").fetchall() == [(1, 41)]
    assert "kconsume_outbox" not in columns(database)
    database.execute("drop table kconsume_seen")
    assert use(postgres_url)[ORDERS].next_offset == 7


@pytest.mark.usefixtures("version_1")
def test_what_is_new_is_made_where_the_older_tables_are(postgres_url: str, database: psycopg.Connection) -> None:
    """And not where `search_path` begins."""
    database.execute("create schema first")
    address = added(postgres_url, "options=-c%20search_path%3Dfirst,public")
    assert 'create table "public".kconsume_outbox' in (shown(open_store(address)).sql or "")
    assert use(address)[ORDERS].next_offset == 7
    assert (columns(database), columns(database, "first")) == (COLUMNS_2, {})


@pytest.mark.usefixtures("version_1")
def test_many_who_migrate_at_once_do_it_once(postgres_url: str, database: psycopg.Connection) -> None:
    many_migrate_at_once(postgres_url, database)


@pytest.mark.usefixtures("version_1")
def test_control_without_the_lock_they_are_in_each_others_way(
    postgres_url: str, database: psycopg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(postgres_schema, "_LOCK_SCHEMA", "select 1")
    with pytest.raises(AssertionError, match=r"^\[(Conflict|StoreError)\("):
        many_migrate_at_once(postgres_url, database)


def many_migrate_at_once(url: str, database: psycopg.Connection, many: int = 6) -> None:
    """All of them have found version 1 before the first can go on: somebody else is about to make the same table."""
    before, stores = rows(database), [open_store(url) for _ in range(many)]
    with ThreadPoolExecutor(many) as pool:
        with psycopg.connect(url) as in_the_way:
            in_the_way.execute("create table kconsume_outbox ()")
            waiting = [pool.submit(migrated, store) for store in stores]
            eventually(lambda: those_who_wait(database) == many, what="all of them wait")
            in_the_way.rollback()
        errors = [error for each in waiting if (error := each.exception(60)) is not None]
    assert not errors, errors
    assert database.execute("select * from kconsume_schema").fetchall() == [(2, 41, None, None, 2, ANY)]
    assert (columns(database), rows(database)) == (COLUMNS_2, before)


def those_who_wait(database: psycopg.Connection) -> int:
    (number,) = database.execute(
        "select count(*) from pg_stat_activity where datname = current_database() and wait_event_type = 'Lock'"
    ).fetchone() or (0,)
    return int(number)


@pytest.mark.parametrize("since", [0, 1])
def test_two_processes_that_make_the_tables_at_once_make_them_once(
    postgres_url: str, database: psycopg.Connection, since: int
) -> None:
    if since:
        database.execute(VERSION_1)
    arguments = [sys.executable, "-m", "kconsume", "schema", "migrate", "--offsets", postgres_url]
    both = [subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    said = [process.communicate(timeout=60) for process in both]
    assert [process.returncode for process in both] == [0, 0], said
    assert database.execute("select version from kconsume_schema").fetchall() == [(2,)]
    assert columns(database) == COLUMNS_2
    assert len(rows(database)) == 3 * since


@pytest.mark.parametrize("since", [0, 1])
def test_what_show_prints_does_the_same_as_a_migration(
    postgres_url: str, database: psycopg.Connection, since: int
) -> None:
    if since:
        database.execute(VERSION_1)
    before = rows(database) if since else []
    tables = shown(open_store(postgres_url))
    assert (tables.version, tables.wanted) == (since, 2)
    assert tables.sql is not None
    database.execute(tables.sql)
    assert version(database) == 2
    assert (columns(database), rows(database)) == (COLUMNS_2, before)
    assert shown(open_store(postgres_url)).sql is None
    assert not migrated(open_store(postgres_url)).changed


def test_a_role_without_the_right_is_told_the_command(postgres_url: str, database: psycopg.Connection) -> None:
    with a_role(postgres_url) as role:
        with pytest.raises(ConfigurationError, match=r"version 2 of the tables .*kconsume schema migrate --offsets"):
            use(role.url)
        use(postgres_url)
        for table, rights in tables.RIGHTS:
            database.execute(f"grant {rights} on {table} to {role.name}")
        use(role.url)  # the rights that are listed are enough


@pytest.mark.usefixtures("version_1")
def test_a_role_that_may_use_the_older_tables_and_not_change_them_is_told_the_command(
    postgres_url: str, database: psycopg.Connection
) -> None:
    before = rows(database)
    with a_role(postgres_url) as role:
        database.execute(f"grant select, insert, update, delete on kconsume_offsets to {role.name}")
        database.execute(f"grant select, update on kconsume_schema to {role.name}")
        with pytest.raises(ConfigurationError, match=r"version 2 of the tables .*permission denied.*schema migrate"):
            use(role.url)
        database.execute(f"grant create on schema public to {role.name}")
        with pytest.raises(ConfigurationError, match=r"version 2 of the tables .*must be owner.*schema migrate"):
            use(role.url)
        assert (version(database), rows(database)) == (1, before)
        assert "kconsume_outbox" not in columns(database)
        migrated(open_store(postgres_url))
        assert use(role.url)[ORDERS].next_offset == 7


def test_a_role_that_may_not_even_read_the_version_is_told_what_it_needs(postgres_url: str) -> None:
    use(postgres_url)
    with a_role(postgres_url) as role, pytest.raises(ConfigurationError, match="select, update on kconsume_schema"):
        use(role.url)


def test_tables_of_a_newer_kconsume_are_refused(postgres_url: str, database: psycopg.Connection) -> None:
    use(postgres_url)
    database.execute("update kconsume_schema set version = 9")
    with pytest.raises(StoreError, match="version 9, and this kconsume writes version 2: upgrade kconsume here"):
        use(postgres_url)
    with pytest.raises(StoreError, match="version 9"):
        migrated(open_store(postgres_url))
    assert "newer than 2: upgrade kconsume" in shown(open_store(postgres_url)).said
    assert version(database) == 9


def test_each_schema_has_tables_of_its_own(postgres_url: str, database: psycopg.Connection) -> None:
    for name in ("billing", 'od"d name'):
        use(added(postgres_url, f"schema={name.replace(' ', '%20')}"))
    found = database.execute("select schemaname from pg_tables where tablename = 'kconsume_offsets' order by 1")
    assert found.fetchall() == [("billing",), ('od"d name',)]


def test_the_command_line_shows_makes_and_has_nothing_left_to_do(
    postgres_url: str, database: psycopg.Connection
) -> None:
    address = added(postgres_url, "schema=shop")
    script = command("show", "--offsets", address)
    assert script.returncode == 0
    assert all(line.startswith("--") for line in script.stdout.splitlines()[:1])
    for table, rights in tables.RIGHTS:
        assert re.search(rf'create table (if not exists )?"shop".{table} ', script.stdout)
        assert f'grant {rights} on "shop".{table} to ROLE;' in script.stdout
    made = command("migrate", "--offsets", address, "--json")
    assert json.loads(made.stdout)[0]["changed"] is True
    assert database.execute("select version from shop.kconsume_schema").fetchone() == (2,)
    assert columns(database, "shop") == COLUMNS_2
    again = command("migrate", "--offsets", address)
    assert "version 2, the version of this kconsume: nothing to do" in again.stdout
    assert "nothing to do" in command("show", "--offsets", address).stdout


def test_the_stores_of_an_app_are_found(postgres_url: str, tmp_path: Path) -> None:
    (tmp_path / "shop.py").write_text(
        "import psycopg\nfrom kconsume import App\n"
        f"app = App('embedded://', group='shop', offsets={postgres_url!r})\n"
        "@app.consume('orders')\ndef reserve(order: bytes, tx: psycopg.Connection) -> None: ...\n"
        "@app.consume('clicks', group='clicks', offsets='kafka://')\ndef count(click: bytes) -> None: ...\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "kconsume", "schema", "show", "shop:app", "--json"],
        cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    tables = msgspec.json.decode(done.stdout, type=list[Tables])
    assert [each.version for each in tables] == [0, None]


def test_show_needs_no_database_when_the_version_is_given() -> None:
    done = command("show", "--offsets", "postgresql://nowhere.invalid/shop", "--since", "0")
    assert done.returncode == 0
    assert "create table kconsume_offsets" in done.stdout
    assert "create table kconsume_outbox" in done.stdout
    newer = command("show", "--offsets", "postgresql://nowhere.invalid/shop", "--since", "1")
    assert "create table kconsume_offsets" not in newer.stdout
    assert "create table kconsume_outbox" in newer.stdout
    above = command("show", "--offsets", "postgresql://nowhere.invalid/shop", "--since", "3")
    assert (above.returncode, "above version 2" in above.stderr) == (2, True)


def test_stores_without_tables_say_so_and_sqlite_says_its_version(tmp_path: Path) -> None:
    for address in ("kafka://", "memory://", "redis://localhost:1/0"):
        tables = shown(open_store(address))
        assert (tables.version, tables.sql) == (None, None)
        assert "has no tables" in tables.said
        assert "nothing to do" in tables.said
    address = f"sqlite:///{tmp_path}/shop.db"
    assert shown(open_store(address)).version == 0
    use(address)
    assert shown(open_store(address)).version == migrated(open_store(address)).wanted == 2
    assert not migrated(open_store(address)).changed


def test_a_missing_database_and_a_missing_app_are_sentences() -> None:
    gone = command("migrate", "--offsets", "postgresql://shop:hunter2@localhost:1/shop")
    assert gone.returncode == 1
    assert "Traceback" not in gone.stderr
    assert "hunter2" not in gone.stderr
    assert "cannot be reached" in gone.stderr
    nothing = command("migrate")
    assert nothing.returncode == 2
    assert "--offsets ADDRESS" in nothing.stderr


def test_a_server_that_is_too_old_is_refused_before_anything_is_made(
    postgres_url: str, database: psycopg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By what it says of itself: of those before 14, `pg_terminate_backend` has one parameter, which is what fails."""
    with monkeypatch.context() as patch:
        patch.setattr(psycopg.ConnectionInfo, "server_version", property(lambda _: 130014))
        patch.setattr(statements, "MAY_END_OTHERS", statements.MAY_END_OTHERS.replace("bigint", "no_such_type"))
        with closing(open_store(postgres_url)) as store:
            with pytest.raises(ConfigurationError, match=r"is PostgreSQL 13, .*: use PostgreSQL 14 or newer"):
                store.groups()
            with pytest.raises(ConfigurationError, match="use PostgreSQL 14 or newer"):
                migrated(store)
    assert columns(database) == {}

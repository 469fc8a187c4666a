"""`kconsume check` on a real PostgreSQL: what it asks and tries, and that it changes nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from unittest.mock import ANY

import msgspec
import psycopg
import pytest

from kconsume.backends import open_store
from kconsume.backends.postgres import schema as postgres_schema
from kconsume.backends.postgres.tables import RIGHTS
from kconsume.cli.check import postgres as findings_postgres
from kconsume.cli.check.findings import Finding
from kconsume.cli.check.postgres import of_stores
from kconsume.cli.schema import migrated
from kconsume.testing.services import LocalPostgres
from tests.integration.postgres_roles import a_role, a_server_with_passwords, added, as_user
from tests.integration.test_postgres_schema import VERSION_1, columns, use

APP = """
import psycopg
from kconsume import App

app = App("embedded://", group="shop", offsets={address!r})

@app.consume("orders")
def reserve(order: bytes, tx: psycopg.Connection) -> None: ...

@app.consume("clicks")
def count(click: bytes) -> None: ...
"""


def found(url: str) -> dict[str, Finding]:
    store = open_store(url)
    try:
        return {finding.code: finding for finding in of_stores([store, store])}
    finally:
        store.close()


def everything(database: psycopg.Connection) -> dict[str, list[tuple[object, ...]]]:
    """All tables of ours, with all their rows."""
    return {table: database.execute(f"select * from {table} order by 1, 2").fetchall() for table in columns(database)}


def grant_all(database: psycopg.Connection, role: str) -> None:
    for table, rights in RIGHTS:
        database.execute(f"grant {rights} on {table} to {role}")


def check(address: str, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    (folder / "shop.py").write_text(APP.format(address=address))
    return subprocess.run(
        [sys.executable, "-m", "kconsume", "check", "shop:app", *arguments],
        cwd=folder, capture_output=True, text=True, timeout=60, check=False,
        env={**os.environ, "COLUMNS": "400"},
    )  # fmt: skip


def test_an_empty_database_is_tried_and_left_empty(postgres_url: str, database: psycopg.Connection) -> None:
    findings = found(postgres_url)
    assert set(findings) == {"postgres-schema", "postgres-frozen"}
    assert findings["postgres-schema"].level == "note"
    assert database.execute("select count(*) from pg_tables where tablename like 'kconsume%'").fetchone() == (0,)


def test_tables_further_down_the_search_path_are_found(postgres_url: str, database: psycopg.Connection) -> None:
    use(postgres_url)
    database.execute("create schema first")
    address = added(postgres_url, "options=-c%20search_path%3Dfirst,public")
    assert set(found(address)) == {"postgres-frozen"}


def test_a_new_schema_is_tried_and_not_made(postgres_url: str, database: psycopg.Connection) -> None:
    assert found(added(postgres_url, "schema=shop"))["postgres-schema"].level == "note"
    assert database.execute("select count(*) from pg_namespace where nspname = 'shop'").fetchone() == (0,)


def test_tables_that_are_there_are_tried_and_left_as_they_were(postgres_url: str, database: psycopg.Connection) -> None:
    use(postgres_url)
    database.execute("""
        insert into kconsume_outbox (group_id, topic, partition, target, headers)
            values ('shop', 'orders', 0, 'bills', '[]'), ('', '', 0, 'bills', '[]');
        insert into kconsume_seen (group_id, origin, seen_at) values ('shop', 'long ago', now() - interval '1 year')""")
    before = everything(database)
    assert {table: len(rows) for table, rows in before.items()} == {
        "kconsume_deleted": 0, "kconsume_offsets": 1, "kconsume_outbox": 2, "kconsume_schema": 1, "kconsume_seen": 1,
    }  # fmt: skip
    assert set(found(postgres_url)) == {"postgres-frozen"}
    assert everything(database) == before
    assert before["kconsume_schema"] == [(2, 0, None, None, 2, ANY)]


def test_tables_of_an_older_version_are_tried_in_the_new_one_and_left_as_they_were(
    postgres_url: str, database: psycopg.Connection
) -> None:
    database.execute(VERSION_1)
    database.execute("create schema first")
    before = everything(database)
    for address in (postgres_url, added(postgres_url, "options=-c%20search_path%3Dfirst,public")):
        findings = found(address)
        assert set(findings) == {"postgres-schema", "postgres-frozen"}
        assert findings["postgres-schema"].level == "note"
        assert "has tables of version 1; the first run brings them to version 2" in findings["postgres-schema"].problem
        assert everything(database) == before
        assert columns(database, "first") == {}


def test_tables_of_a_newer_version_are_an_error_and_not_touched(
    postgres_url: str, database: psycopg.Connection
) -> None:
    use(postgres_url)
    database.execute("update kconsume_schema set version = 9")
    before = everything(database)
    finding = found(postgres_url)["postgres-schema-newer"]
    assert (finding.level, finding.fix) == ("error", "upgrade kconsume here")
    assert "version 9, and this kconsume writes version 2" in finding.problem
    assert everything(database) == before


def test_a_role_that_may_not_change_an_older_version_is_told_the_command_and_then_the_grants(
    postgres_url: str, database: psycopg.Connection
) -> None:
    database.execute(VERSION_1)
    with a_role(postgres_url) as role:
        assert "on kconsume_offsets to" in found(role.url)["postgres-rights"].fix  # and no word of what is not there
        database.execute(found(role.url)["postgres-rights"].fix)
        for may_create in (False, True):
            if may_create:  # and still owns nothing
                database.execute(f"grant create on schema public to {role.name}")
            finding = found(role.url)["postgres-schema"]
            assert finding.level == "error"
            assert f"this kconsume writes version 2, and {role.name} may not change them" in finding.problem
            assert "kconsume schema migrate" in finding.fix
        migrated(open_store(postgres_url))
        assert found(role.url)["postgres-rights"].fix == (
            f"grant select, insert, update on kconsume_deleted to {role.name}; "
            f"grant select, insert, delete on kconsume_outbox to {role.name}; "
            f"grant select, insert, delete on kconsume_seen to {role.name};"
        )
        database.execute(found(role.url)["postgres-rights"].fix)
        assert set(found(role.url)) == {"postgres-frozen"}


def test_somebody_who_migrates_meanwhile_is_no_trouble(
    postgres_url: str, database: psycopg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    database.execute(VERSION_1)
    tried = findings_postgres._tried

    def tried_late(*arguments: object) -> object:
        migrated(open_store(postgres_url))
        return tried(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(findings_postgres, "_tried", tried_late)
    assert set(found(postgres_url)) == {"postgres-frozen"}
    database.execute("drop table kconsume_outbox, kconsume_seen, kconsume_offsets, kconsume_schema")
    database.execute(VERSION_1)
    for look in ("locked_schema_state", "schema_state"):  # the control
        monkeypatch.setattr(postgres_schema, look, lambda *_: postgres_schema.SchemaState(1, 0))
    assert "already exists" in found(postgres_url)["postgres-trial"].problem


def test_each_right_that_is_missing_is_named_with_the_grant_and_that_is_enough(
    postgres_url: str, database: psycopg.Connection
) -> None:
    use(postgres_url)
    with a_role(postgres_url) as role:
        database.execute(f"grant select, insert on kconsume_offsets to {role.name}")
        finding = found(role.url)["postgres-rights"]
        assert finding.problem.endswith(
            ": select, insert, update on kconsume_deleted; update, delete on kconsume_offsets; "
            "select, insert, delete on kconsume_outbox; select, update on kconsume_schema; "
            "select, insert, delete on kconsume_seen"
        )
        database.execute(finding.fix)
        assert set(found(role.url)) == {"postgres-frozen"}
        use(role.url)


def test_every_single_right_is_missed(postgres_url: str, database: psycopg.Connection) -> None:
    use(postgres_url)
    with a_role(postgres_url) as role:
        grant_all(database, role.name)
        for table, rights in RIGHTS:
            for right in rights.split(", "):
                database.execute(f"revoke {right} on {table} from {role.name}")
                finding = found(role.url)["postgres-rights"]
                assert finding.fix == f"grant {right} on {table} to {role.name};"
                database.execute(finding.fix)
        assert set(found(role.url)) == {"postgres-frozen"}


def test_no_right_is_listed_that_a_run_does_not_need(
    postgres_url: str, database: psycopg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is used by what is tried: where it is not asked for first, the trial fails for the want of it."""
    use(postgres_url)
    monkeypatch.setattr(findings_postgres, "_missing", lambda *_: ())
    with a_role(postgres_url) as role:
        grant_all(database, role.name)
        assert set(found(role.url)) == {"postgres-frozen"}
        for table, rights in RIGHTS:
            for right in rights.split(", "):
                if (table, right) == ("kconsume_schema", "select"):
                    continue  # the version could not even be read
                database.execute(f"revoke {right} on {table} from {role.name}")
                assert f"permission denied for table {table}" in found(role.url)["postgres-trial"].problem
                database.execute(f"grant {right} on {table} to {role.name}")


def test_a_schema_that_the_role_may_not_use_is_named(postgres_url: str, database: psycopg.Connection) -> None:
    address = added(postgres_url, "schema=shop")
    use(address)
    with a_role(postgres_url) as role:
        theirs = added(role.url, "schema=shop")
        for _ in range(2):  # first the schema, then what is in it
            database.execute(found(theirs)["postgres-rights"].fix)
        assert set(found(theirs)) == {"postgres-frozen"}


def test_a_role_that_may_not_create_tables_is_an_error_with_the_command(postgres_url: str) -> None:
    with a_role(postgres_url) as role:
        finding = found(role.url)["postgres-schema"]
    assert finding.level == "error"
    assert "kconsume schema migrate" in finding.fix


@pytest.mark.parametrize(
    ("event", "table"),
    [
        ("insert", "kconsume_offsets"), ("update", "kconsume_offsets"), ("delete", "kconsume_offsets"),
        ("insert", "kconsume_outbox"), ("delete", "kconsume_outbox"), ("update", "kconsume_schema"),
        ("insert", "kconsume_seen"), ("delete", "kconsume_seen"),
    ],
)  # fmt: skip
def test_a_trigger_that_refuses_is_found_by_trying(
    postgres_url: str, database: psycopg.Connection, event: str, table: str
) -> None:
    use(postgres_url)
    before = everything(database)
    database.execute(f"""
        create function no() returns trigger language plpgsql as $$ begin raise exception 'not on my watch'; end $$;
        create trigger no before {event} on {table} for each row execute function no()""")
    assert "not on my watch" in found(postgres_url)["postgres-trial"].problem
    assert everything(database) == before


@pytest.mark.parametrize("table", ["kconsume_offsets", "kconsume_outbox", "kconsume_seen"])
def test_a_trigger_that_swallows_what_is_written_is_found_by_trying(
    postgres_url: str, database: psycopg.Connection, table: str
) -> None:
    use(postgres_url)
    database.execute(f"""
        create function gone() returns trigger language plpgsql as $$ begin return null; end $$;
        create trigger gone before insert on {table} for each row execute function gone()""")
    assert f"written to {table} could not be read" in found(postgres_url)["postgres-trial"].problem


def test_a_policy_that_hides_what_was_written_is_found_by_trying(
    postgres_url: str, database: psycopg.Connection
) -> None:
    use(postgres_url)
    with a_role(postgres_url) as role:
        grant_all(database, role.name)
        database.execute("alter table kconsume_outbox enable row level security")
        database.execute("create policy write on kconsume_outbox for insert with check (true)")
        assert "written to kconsume_outbox could not be read" in found(role.url)["postgres-trial"].problem
        database.execute("create policy all_of_it on kconsume_outbox using (true)")
        assert set(found(role.url)) == {"postgres-frozen"}


def test_who_may_not_end_backends_is_warned(postgres_url: str, database: psycopg.Connection) -> None:
    use(postgres_url)
    with a_role(postgres_url) as role:
        grant_all(database, role.name)
        assert found(role.url)["postgres-frozen"].level == "note"
        # In this database only: the function's rights are kept in each database's own catalogue.
        database.execute("revoke execute on function pg_terminate_backend(integer, bigint) from public")
        finding = found(role.url)["postgres-frozen"]
        assert finding.level == "warning"
        database.execute(finding.fix)
        assert found(role.url)["postgres-frozen"].level == "note"
        database.execute(f"revoke execute on function pg_terminate_backend(integer, bigint) from {role.name}")


def test_settings_of_the_role_are_seen(postgres_url: str) -> None:
    with a_role(postgres_url) as role, psycopg.connect(postgres_url, autocommit=True) as owner:
        use(postgres_url)
        grant_all(owner, role.name)
        owner.execute(f"alter role {role.name} set synchronous_commit = off")
        owner.execute(f"alter role {role.name} set idle_in_transaction_session_timeout = '5s'")
        owner.execute(f"alter role {role.name} set default_transaction_read_only = on")
        owner.execute(f"alter role {role.name} connection limit 9")
        findings = found(role.url)
    assert set(findings) == {
        "postgres-asynchronous", "postgres-idle-limit", "postgres-read-only", "postgres-connections", "postgres-frozen",
    }  # fmt: skip
    assert findings["postgres-connections"].level == "error"


def test_a_database_or_role_that_is_not_there_is_a_finding(postgres_url: str) -> None:
    for url in (as_user(postgres_url, "nobody_at_all"), postgres_url + "_gone"):
        finding = found(url)["store-unusable"]
        assert finding.level == "error"
        assert "does not exist" in finding.problem
        assert finding.fix == "check user, password and database in offsets="


def test_the_command_says_for_each_handler_what_is_exactly_once_and_what_is_not(
    postgres_url: str, tmp_path: Path
) -> None:
    done = check(postgres_url, tmp_path)
    assert done.returncode == 0, done.stderr
    assert "exactly once: what the handler writes and the offset commit together; what it does elsewhere" in done.stdout
    assert "at least once: the handler does not take the store's transaction" in done.stdout
    assert "the next owner of the partition ends its connection at once" in " ".join(done.stdout.split())


def test_offline_asks_nobody(tmp_path: Path) -> None:
    done = check("postgresql://shop:hunter2@localhost:1/shop", tmp_path, "--offline")
    assert done.returncode == 0, done.stdout


def test_a_host_that_does_not_answer_is_a_finding_without_the_password(tmp_path: Path) -> None:
    done = check("postgresql://shop:hunter2@localhost:1/shop", tmp_path, "--json")
    assert done.returncode == 2
    assert "hunter2" not in done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    findings = msgspec.json.decode(done.stdout)["findings"]
    assert [f["code"] for f in findings if f["level"] == "error"] == ["store-unreachable"]


def test_a_wrong_password_is_a_finding_that_does_not_show_it(tmp_path: Path) -> None:
    with a_server_with_passwords() as address:
        done = check(address("hunter2"), tmp_path, "--json")
        right = check(address("right"), tmp_path, "--json")
    assert done.returncode == 2
    assert "hunter2" not in done.stdout + done.stderr
    (error,) = [f for f in msgspec.json.decode(done.stdout)["findings"] if f["level"] == "error"]
    assert "password authentication failed" in error["problem"]
    assert "store-unusable" not in right.stdout


def test_a_standby_is_an_error_that_names_the_primary_as_the_fix() -> None:
    with LocalPostgres() as server:
        use(server.url)
        server.stop()
        beside, signal = server.data / "PG_VERSION", server.data / "standby.signal"
        signal.touch()
        os.chown(signal, beside.stat().st_uid, beside.stat().st_gid)
        server.start()
        finding = found(server.url)["postgres-standby"]
    assert finding.level == "error"
    assert "target_session_attrs=read-write" in finding.fix

"""What happens to an SQLite store when its file, its disk or its system fails, and which places it refuses.

Whatever fails on the way into a transaction or out of it is the store's, and tried again: no record is skipped for it.
"""

from __future__ import annotations

import errno
import fcntl
import os
import sqlite3
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from kconsume.backends import Position, SqliteStore, open_store
from kconsume.backends.sqlite import connection as sqlite_connection
from kconsume.backends.sqlite import location
from kconsume.errors import ConfigurationError, Fenced, StoreError, StoreUnavailable
from tests.contract.sqlite_child import GROUP, ORDERS
from tests.contract.test_sqlite_store import Table, claim_orders, open_in, opened, table_in
from tests.waiting import eventually


@pytest.fixture
def table(tmp_path: Path) -> Iterator[Table]:
    with opened(tmp_path / "shop.db") as store:
        yield table_in(store)


def handle(table: Table, number: int = 1) -> None:
    with table.transaction() as tx:
        tx.connection.execute("insert into effects values (?)", (number,))
        tx.advance(0, 1)


CODES = {
    name: getattr(sqlite3, name)
    for name in (
        "SQLITE_PROTOCOL", "SQLITE_NOMEM", "SQLITE_PERM", "SQLITE_INTERRUPT", "SQLITE_IOERR", "SQLITE_IOERR_WRITE",
        "SQLITE_IOERR_FSYNC", "SQLITE_IOERR_SHORT_READ", "SQLITE_FULL", "SQLITE_BUSY", "SQLITE_BUSY_RECOVERY",
        "SQLITE_READONLY_DBMOVED", "SQLITE_CANTOPEN",
    )
}  # fmt: skip


class TestOnTheWayInAndOut:
    @pytest.mark.parametrize("statement", ["begin immediate", "update kconsume_offsets set updated_at", "commit"])
    @pytest.mark.parametrize("code", CODES.values(), ids=CODES.keys())
    def test_what_the_file_cannot_do_is_tried_again(
        self, table: Table, monkeypatch: pytest.MonkeyPatch, statement: str, code: int
    ) -> None:
        error = sqlite3.OperationalError("the file's fault")
        error.sqlite_errorcode = code
        failing(monkeypatch, statement, error)
        with pytest.raises(StoreUnavailable, match=r"shop\.db cannot be written: the file's fault") as refused:
            handle(table)
        assert refused.value.__cause__ is error
        monkeypatch.undo()
        assert (table.effects(), table.offset()) == ([], 0)
        handle(table)
        assert (table.effects(), table.offset()) == ([1], 1)

    @pytest.mark.parametrize("statement", ["begin immediate", "update kconsume_offsets set next_offset", "commit"])
    def test_no_memory_is_tried_again(self, table: Table, monkeypatch: pytest.MonkeyPatch, statement: str) -> None:
        """Python raises a MemoryError for it."""
        failing(monkeypatch, statement, MemoryError())
        with pytest.raises(StoreUnavailable, match="MemoryError"):
            handle(table)
        monkeypatch.undo()
        assert (table.effects(), table.offset()) == ([], 0)

    def test_a_table_that_somebody_changed_is_the_store_s_and_not_the_record_s(self, table: Table) -> None:
        with closing(sqlite3.connect(table.store.path)) as other:
            other.execute("alter table kconsume_offsets rename column epoch to era")
            other.commit()
        with pytest.raises(StoreError, match=r"no such column: epoch.*changed by hand") as refused:
            handle(table)
        assert not isinstance(refused.value, StoreUnavailable)

    def test_a_constraint_that_is_checked_at_commit_is_the_handler_s(
        self, table: Table, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with closing(sqlite3.connect(table.store.path)) as other:
            other.execute("create table items (part integer references effects (id) deferrable initially deferred)")

        def handler(tx: Any) -> None:
            tx.connection.execute("pragma defer_foreign_keys = on")
            tx.connection.execute("insert into items values (7)")
            tx.advance(0, 1)

        enforce_foreign_keys(monkeypatch)
        table.store.close()
        table.refuses(sqlite3.IntegrityError, handler, match="FOREIGN KEY")

    def test_another_database_that_is_busy_is_the_handler_s(self, table: Table, tmp_path: Path) -> None:
        """Its error goes through our transaction, and is not ours."""
        with (
            closing(sqlite3.connect(tmp_path / "other.db", isolation_level=None)) as other,
            closing(sqlite3.connect(tmp_path / "other.db", isolation_level=None, timeout=0)) as waiting,
        ):
            other.execute("begin immediate")
            table.refuses(sqlite3.OperationalError, lambda _: waiting.execute("begin immediate"), match="locked")


def failing(monkeypatch: pytest.MonkeyPatch, statement: str, error: BaseException) -> None:
    """SQLite's own faults of this kind need a broken disk: here the statement that begins so raises one."""

    class Faulty(sqlite_connection.LentSqliteConnection):
        def execute(self, sql: str, *values: Any) -> sqlite3.Cursor:
            if sql.startswith(statement):
                raise error
            return super().execute(sql, *values)

    def activate(self: Any) -> None:
        self._is_idle = False
        self.__class__ = Faulty

    monkeypatch.setattr(sqlite_connection.LentSqliteConnection, "activate", activate)


def enforce_foreign_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    set_up = sqlite_connection.SqliteConnection._set_up

    def enforcing(self: sqlite_connection.SqliteConnection) -> None:
        self.connection.execute("pragma foreign_keys = on")
        set_up(self)

    monkeypatch.setattr(sqlite_connection.SqliteConnection, "_set_up", enforcing)


# In a process of its own: the limit is the process's, and stands for a disk of which the last block is taken.
_FULL = """
import resource, signal, sqlite3, sys
from kconsume.backends import Position, SqliteStore
from kconsume.errors import StoreUnavailable
from kconsume.records import Partition

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
orders, store = Partition("orders", 0), SqliteStore(sys.argv[1])
epoch = store.claim("shop", [orders], "me", lambda missing: dict.fromkeys(missing, Position(0)))[orders].epoch
outside = sqlite3.connect(sys.argv[1], isolation_level=None)
outside.execute("create table pages (page blob)")

def handle(epoch):
    with store.transaction("shop", orders, epoch) as tx:
        tx.connection.execute("insert into pages values (zeroblob(400000))")
        tx.advance(0, 1)
        print("before the commit")

resource.setrlimit(resource.RLIMIT_FSIZE, (150_000, resource.RLIM_INFINITY))
try:
    handle(epoch)
except StoreUnavailable as error:
    print("unavailable")
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
row = store.reclaim("shop", {orders: epoch}, "me")[orders]
print(row.next_offset, *outside.execute("select count(*) from pages").fetchone())
handle(row.epoch)
print(store.load("shop", [orders])[orders].next_offset, *outside.execute("select count(*) from pages").fetchone())
"""


def test_a_disk_that_is_full_at_commit_leaves_neither_and_is_tried_again(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _FULL, str(tmp_path / "shop.db")],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    said = ["before the commit", "unavailable", "0 0", "before the commit", "1 1"]
    assert done.stdout.splitlines() == said, done.stderr


class TestTheTurnstile:
    def test_a_system_without_locks_is_tried_again(self, table: Table, monkeypatch: pytest.MonkeyPatch) -> None:
        flock = fcntl.flock

        def lockless(file: int, how: int) -> None:
            if how & fcntl.LOCK_EX:
                raise OSError(errno.ENOLCK, "No locks available")
            flock(file, how)

        monkeypatch.setattr(fcntl, "flock", lockless)
        with pytest.raises(StoreUnavailable, match=r"shop\.db-turnstile.*No locks available") as refused:
            handle(table)
        assert isinstance(refused.value.__cause__, OSError)

    @pytest.mark.parametrize("lacks", ["a descriptor", "a thread", "a lock while it waits"])
    def test_a_system_that_cannot_let_it_wait_is_tried_again(
        self, table: Table, monkeypatch: pytest.MonkeyPatch, lacks: str
    ) -> None:
        def refuse(*_: object) -> None:
            raise OSError(errno.EMFILE, "Too many open files")

        def exhausted(*_: object) -> None:
            raise RuntimeError("can't start new thread")

        turnstile = os.open(f"{table.store.path}-turnstile", os.O_RDWR)
        fcntl.flock(turnstile, fcntl.LOCK_EX)
        folder = Path(table.store.path).parent
        before = open_in(folder)
        table.store.close()
        if lacks == "a descriptor":
            monkeypatch.setattr(os, "dup", refuse)
        elif lacks == "a thread":
            monkeypatch.setattr(threading.Thread, "start", exhausted)
        else:
            monkeypatch.setattr(sqlite_connection, "_take_turn", lockless_turn)
        with pytest.raises(StoreUnavailable, match=r"cannot be locked.*ulimit") as refused:
            handle(table)
        assert refused.value.__cause__ is not None
        monkeypatch.undo()
        os.close(turnstile)
        eventually(lambda: open_in(folder) <= before, what="nothing is left open")
        handle(table)

    def test_a_store_that_came_with_a_fork_is_refused_and_leaves_the_parent_s_alone(self, table: Table) -> None:
        """Locks and connections are the parent's; SQLite says that a fork must not even close them."""
        handle(table)
        child = os.fork()
        if child == 0:
            code = 1
            try:
                table.store.close()
                table.store.groups()
            except StoreError as error:
                code = 0 if "this process is a fork of that one" in str(error) and "by spawn" in str(error) else 2
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert table.offset() == 1


def lockless_turn(queue: int, turn: Future[None]) -> None:
    os.close(queue)
    turn.set_exception(OSError(errno.ENOLCK, "No locks available"))


class TestPlaces:
    @pytest.mark.parametrize("kind", ["nfs4", "cifs", "smb3", "fuse.sshfs", "ceph", "9p", "ext4"])
    def test_a_file_that_several_hosts_may_reach_is_refused(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
    ) -> None:
        """Its locks do not hold there, and each host would have offsets of its own."""
        share = tmp_path / "on share"
        share.mkdir()
        mounted(monkeypatch, tmp_path, {"/": "ext4", str(share): kind})
        store = SqliteStore(share / "shop.db")
        if kind in ("9p", "ext4"):
            assert store.groups() == []
            assert store.trouble() is None
            return
        with pytest.raises(ConfigurationError, match=rf"network file system \({kind}\).*a disk of this host"):
            store.groups()
        assert list(share.iterdir()) == [], "it made a file all the same"
        assert f"({kind})" in (store.trouble() or "")

    def test_a_link_to_a_share_is_followed_and_a_disk_below_a_share_is_none(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        share, disk = tmp_path / "share", tmp_path / "share" / "disk"
        disk.mkdir(parents=True)
        (tmp_path / "here.db").symlink_to(share / "shop.db")
        mounted(monkeypatch, tmp_path, {"/": "ext4", str(share): "nfs", str(disk): "xfs"})
        with pytest.raises(ConfigurationError, match="nfs"):
            SqliteStore(tmp_path / "here.db").groups()
        assert SqliteStore(disk / "shop.db").groups() == []

    def test_where_there_is_no_table_of_mounts_nothing_is_refused(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(location, "MOUNTS", tmp_path / "missing")
        assert SqliteStore(tmp_path / "shop.db").groups() == []

    @pytest.mark.parametrize("url", ["sqlite:///shop.db?timeout=5", "sqlite:////tmp/shop.db#here"])
    def test_settings_in_the_address_are_refused_and_not_taken_for_the_name(self, url: str) -> None:
        with pytest.raises(ConfigurationError, match=r"a SQLite address has no settings: write sqlite:///file\.db"):
            open_store(url)

    @pytest.mark.parametrize("path", [5, None, b"shop.db", "shop\0.db"])
    def test_a_path_that_is_none_is_refused_with_the_fix(self, path: Any) -> None:
        with pytest.raises(ConfigurationError):
            SqliteStore(path)


class TestTrouble:
    """What `kconsume check` finds of a file, without making one."""

    def test_a_file_that_is_well_or_not_there_yet_is_no_trouble(self, table: Table, tmp_path: Path) -> None:
        assert table.store.trouble() is None
        assert SqliteStore(tmp_path / "later.db").trouble() is None
        assert not (tmp_path / "later.db").exists()

    def test_a_folder_that_is_not_there(self, tmp_path: Path) -> None:
        assert "there is no folder" in (SqliteStore(tmp_path / "missing" / "shop.db").trouble() or "")

    def test_a_file_of_another_version(self, table: Table) -> None:
        with closing(sqlite3.connect(table.store.path)) as writer:
            writer.execute("update kconsume_schema set version = 99")
            writer.commit()
        assert "schema version 99, and this kconsume writes version 2" in (table.store.trouble() or "")

    def test_a_file_that_is_no_database_and_a_folder_in_its_place(self, tmp_path: Path) -> None:
        (tmp_path / "text.db").write_bytes(b"no database " * 400)
        (tmp_path / "folder.db").mkdir()
        assert "not a database" in (SqliteStore(tmp_path / "text.db").trouble() or "")
        assert "is not a file" in (SqliteStore(tmp_path / "folder.db").trouble() or "")

    @pytest.mark.parametrize("closed", ["folder", "file"])
    def test_what_may_not_be_written(self, closed: str) -> None:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "shop.db"
            with opened(path) as store:
                claim_orders(store)
            os.chmod(folder, 0o755 if closed == "folder" else 0o777)
            path.chmod(0o666 if closed == "folder" else 0o444)
            assert "may not be written" in trouble_of_nobody(path)


def trouble_of_nobody(path: Path) -> str:
    """Without root's right to write everywhere; see `test_sqlite_store.py` for why in a process of its own."""
    code = """
import os, sys
from kconsume.backends import SqliteStore
if os.geteuid() == 0:
    os.setgroups([]), os.setegid(65534), os.setuid(65534)
print(SqliteStore(sys.argv[1]).trouble())
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=True, timeout=60
    )
    return done.stdout


def mounted(monkeypatch: pytest.MonkeyPatch, folder: Path, mounts: dict[str, str]) -> None:
    """A table of mounts as Linux writes it: the place, and the kind of its file system."""
    lines = [
        f"{number} 1 0:{number} / {point.replace(' ', chr(92) + '040')} rw,relatime shared:1 - {kind} source rw"
        for number, (point, kind) in enumerate(mounts.items(), 20)
    ]
    (folder / "mountinfo").write_text("\n".join(lines))
    monkeypatch.setattr(location, "MOUNTS", folder / "mountinfo")


@pytest.mark.parametrize("jump", [timedelta(days=40_000), timedelta(days=-15_000)])
def test_a_clock_that_jumps_changes_nothing(table: Table, jump: timedelta) -> None:
    """`updated_at` is for people; who owns a partition and where it stands never depends on it."""
    moment = (datetime.now(UTC) + jump).isoformat()
    with closing(sqlite3.connect(table.store.path)) as writer:
        writer.execute("update kconsume_offsets set updated_at = ?", (moment,))
        writer.commit()
    assert table.store.load(GROUP, [ORDERS])[ORDERS].updated_at == datetime.fromisoformat(moment)
    table.store.save(GROUP, {ORDERS: Position(0, table.epoch)})
    handle(table)
    rival = claim_orders(table.store, "rival")
    assert rival == table.epoch + 1
    with pytest.raises(Fenced):
        handle(table)
    assert (table.effects(), table.offset()) == ([1], 1)

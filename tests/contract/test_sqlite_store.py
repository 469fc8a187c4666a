"""What only an SQLite file on this host can be asked: the handler's connection, other processes, the file itself.

That it is a store, `test_conformance.py` says. Beside each guard stands its negative control: the same test, on a store
whose guard is off, must fail.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import os
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import pytest

from kconsume.backends import OffsetStore, Position, SqliteStore
from kconsume.backends.claim import granted
from kconsume.backends.sqlite import connection as sqlite_connection
from kconsume.backends.sqlite import schema as sqlite_schema
from kconsume.backends.sqlite import transaction
from kconsume.cli.schema import migrated, shown
from kconsume.errors import Fenced, StoreError, StoreUnavailable, TransactionMisused
from kconsume.records import Partition
from kconsume.testing.conformance import TransactionalSuite
from tests.contract.places import SqlitePlace, switch_off
from tests.contract.places import fails as fails_on
from tests.contract.sqlite_child import GROUP, ORDERS, switch_turnstile_off
from tests.waiting import eventually

_ROOT = Path(__file__).parent.parent.parent


def fails(promise: Callable[..., None], *arguments: object) -> None:
    """The negative control: with the guard off, the test that watches it must not pass."""
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        promise(*arguments)


@contextmanager
def opened(path: Path) -> Iterator[SqliteStore]:
    store = SqliteStore(path)
    try:
        yield store
    finally:
        store.close()


@pytest.fixture
def sqlite(tmp_path: Path) -> Iterator[SqliteStore]:
    with opened(tmp_path / "shop.db") as store:
        yield store


@dataclass(frozen=True)
class Table:
    """A transactional store with a table for effects, and a partition that is claimed at offset 0."""

    store: SqliteStore
    epoch: int

    @contextmanager
    def transaction(self, epoch: int | None = None) -> Iterator[Any]:
        with self.store.transaction(GROUP, ORDERS, self.epoch if epoch is None else epoch) as tx:
            yield tx

    def refuses(self, kind: type[BaseException], handler: Callable[[Any], object], match: str | None = None) -> None:
        """A handler that must fail in its transaction, and leave neither an effect nor an offset."""
        with pytest.raises(kind, match=match), self.transaction() as tx:
            handler(tx)
        assert (self.effects(), self.offset()) == ([], 0)

    def effects(self) -> list[int]:
        return self._read("select id from effects order by id")

    def turns_of_the_other(self) -> int:
        return max(self._read("select next_offset from kconsume_offsets where partition = 1"), default=0)

    def _read(self, query: str) -> list[int]:
        reader = sqlite3.connect(self.store.path)
        try:
            return [row[0] for row in reader.execute(query)]
        finally:
            reader.close()

    def offset(self) -> int:
        return self.store.load(GROUP, [ORDERS])[ORDERS].next_offset


def table_in(store: SqliteStore) -> Table:
    epoch = claim_orders(store)
    maker = sqlite3.connect(store.path, isolation_level=None)
    maker.execute("create table if not exists effects (id integer primary key)")
    maker.close()
    return Table(store, epoch)


def claim_orders(store: SqliteStore, owner: str = "me") -> int:
    return granted(store.claim(GROUP, [ORDERS], owner, lambda ps: dict.fromkeys(ps, Position(0))))[ORDERS].epoch


@pytest.fixture
def table(sqlite: SqliteStore) -> Table:
    return table_in(sqlite)


Misuse = Callable[[sqlite3.Connection], object]


def within_itself(connection: sqlite3.Connection) -> None:
    with connection:
        connection.execute("select 1")


MISUSES: dict[str, Misuse] = {
    "COMMIT": lambda c: c.execute("COMMIT"),
    "commit;": lambda c: c.execute("commit;"),
    "END": lambda c: c.execute("end transaction"),
    "ROLLBACK": lambda c: c.execute("ROLLBACK"),
    "BEGIN": lambda c: c.execute("BEGIN"),
    "BEGIN IMMEDIATE": lambda c: c.execute("begin immediate"),
    "commit()": lambda c: c.commit(),
    "rollback()": lambda c: c.rollback(),
    "with connection": within_itself,
    "executescript": lambda c: c.executescript("insert into effects values (2); insert into effects values (3);"),
    "cursor": lambda c: c.cursor().execute("COMMIT"),
}
misused = pytest.mark.parametrize("misuse", MISUSES.values(), ids=MISUSES.keys())


class TestTheHandlersTransaction:
    """What a handler may do with the connection that it is lent, and what not."""

    def test_a_wrong_statement_is_the_handler_s_own_error(self, table: Table) -> None:
        with pytest.raises(sqlite3.OperationalError, match="no such table"), table.transaction() as tx:
            tx.connection.execute("insert into nowhere values (1)")

    def test_the_advance_of_a_zombie_undoes_all(self, table: Table) -> None:
        """SQLite has one writer, so nobody can claim meanwhile; the advance checks the epoch all the same."""

        def handler(tx: Any) -> None:
            tx.connection.execute("insert into effects values (1)")
            tx.connection.execute("update kconsume_offsets set epoch = epoch + 1")
            tx.advance(0, 5)

        table.refuses(Fenced, handler)

    def test_a_claim_waits_for_the_transaction_that_runs_and_sees_its_offset(self, table: Table) -> None:
        began, go_on = threading.Event(), threading.Event()

        def owner() -> None:
            with table.transaction() as tx:
                began.set()
                assert go_on.wait(20)
                tx.advance(0, 5)

        thread = threading.Thread(target=owner)
        thread.start()
        assert began.wait(20)
        with ThreadPoolExecutor(1) as pool:
            rival = pool.submit(lambda: table.store.claim(GROUP, [ORDERS], "rival", lambda _: {}))
            go_on.set()
            assert granted(rival.result(20))[ORDERS].next_offset == 5
        thread.join(20)

    def test_a_handler_reads_its_own_writes(self, table: Table) -> None:
        with table.transaction() as tx:
            tx.connection.execute("insert into effects values (1)")
            assert tx.connection.execute("select count(*) from effects").fetchone() == (1,)
            tx.advance(0, 1)

    @misused
    def test_a_handler_cannot_end_the_transaction(self, table: Table, misuse: Misuse) -> None:
        def handler(tx: Any) -> None:
            tx.connection.execute("insert into effects values (1)")
            misuse(tx.connection)
            tx.advance(0, 5)

        table.refuses(TransactionMisused, handler, match="must not begin, commit or roll back")

    @misused
    def test_a_handler_cannot_hide_that_it_tried(self, table: Table, misuse: Misuse) -> None:
        def handler(tx: Any) -> None:
            tx.connection.execute("insert into effects values (1)")
            with contextlib.suppress(sqlite3.Error):
                misuse(tx.connection)
            tx.advance(0, 5)

        table.refuses(TransactionMisused, handler)

    @misused
    def test_the_next_handler_is_not_blamed_for_it(self, table: Table, misuse: Misuse) -> None:
        with contextlib.suppress(TransactionMisused, sqlite3.Error), table.transaction() as tx:
            misuse(tx.connection)
        with pytest.raises(sqlite3.OperationalError, match="no such table"), table.transaction() as tx:
            tx.connection.execute("insert into nowhere values (1)")

    def test_a_statement_that_rolls_back_by_itself_is_noticed(self, table: Table) -> None:
        def handler(tx: Any) -> None:
            tx.connection.execute("insert into effects values (1)")
            with contextlib.suppress(sqlite3.IntegrityError):
                tx.connection.execute("insert or rollback into effects values (1)")
            tx.advance(0, 5)

        table.refuses(TransactionMisused, handler, match="INSERT OR ROLLBACK")

    @pytest.mark.parametrize(
        "again",
        ["insert into effects values (?) -- a new statement", "insert into effects values (?)"],
        ids=["a new statement", "one that was prepared before"],
    )
    def test_what_is_written_after_such_a_statement_is_undone_too(self, table: Table, again: str) -> None:
        """Outside a transaction each statement commits itself: the record's effect would be there twice."""

        def handler(tx: Any) -> None:
            tx.connection.execute("insert into effects values (?)", (1,))
            with contextlib.suppress(sqlite3.IntegrityError):
                tx.connection.execute("insert or rollback into effects values (1)")
            tx.connection.execute(again, (2,))
            tx.advance(0, 5)

        table.refuses(TransactionMisused, handler)

    def test_a_handler_that_closes_the_connection_passes_nothing(self, table: Table) -> None:
        def handler(tx: Any) -> None:
            tx.connection.execute("insert into effects values (1)")
            tx.connection.close()
            tx.advance(0, 5)

        table.refuses(TransactionMisused, handler)

    def test_a_savepoint_is_the_handler_s_to_use(self, table: Table) -> None:
        with table.transaction() as tx:
            tx.connection.execute("insert into effects values (1)")
            tx.connection.execute("savepoint mine")
            tx.connection.execute("insert into effects values (2)")
            tx.connection.execute("rollback to mine")
            tx.connection.execute("release mine")
            tx.advance(0, 5)
        assert (table.effects(), table.offset()) == ([1], 5)

    def test_a_savepoint_left_open_does_not_keep_the_offset_from_being_passed(self, table: Table) -> None:
        with table.transaction() as tx:
            tx.connection.execute("savepoint mine")
            tx.connection.execute("insert into effects values (1)")
            tx.advance(0, 5)
        assert (table.effects(), table.offset()) == ([1], 5)


class TestTheHandlersTransactionControls:
    def test_control_an_advance_without_the_epoch(self, table: Table, monkeypatch: pytest.MonkeyPatch) -> None:
        switch_off(monkeypatch, "ADVANCE", "and epoch = ?", "and ? is not null")
        fails(TestTheHandlersTransaction().test_the_advance_of_a_zombie_undoes_all, table)

    @pytest.mark.parametrize("name", ["COMMIT", "commit()", "ROLLBACK", "with connection", "executescript"])
    def test_control_without_the_authorizer_a_handler_ends_the_transaction(
        self, table: Table, monkeypatch: pytest.MonkeyPatch, name: str
    ) -> None:
        monkeypatch.setattr(sqlite_connection.LentSqliteConnection, "_authorize", lambda *_: sqlite3.SQLITE_OK)
        table.store.close()
        fails(
            expecting_ours, TestTheHandlersTransaction().test_a_handler_cannot_end_the_transaction, table, MISUSES[name]
        )

    def test_control_an_advance_that_does_not_ask_whether_there_is_a_transaction(
        self, table: Table, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def unasking(tx: Any, old: int, new: int, leader_epoch: int | None = None) -> None:
            tx.connection.execute("update kconsume_offsets set next_offset = ?", (new,))

        monkeypatch.setattr(transaction.SqliteTx, "advance", unasking)
        fails(expecting_ours, TestTheHandlersTransaction().test_a_statement_that_rolls_back_by_itself_is_noticed, table)

    def test_control_effects_outside_the_transaction_stay(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        place = SqlitePlace(tmp_path)
        outside = sqlite3.connect(place.path, isolation_level=None)

        @contextmanager
        def elsewhere(store: SqliteStore, group: str, partition: Partition, epoch: int) -> Iterator[object]:
            yield OutsideTx(outside)

        monkeypatch.setattr(SqliteStore, "transaction", elsewhere)
        fails_on(
            TransactionalSuite.test_a_handler_error_rolls_back_writes_and_offset_and_is_raised_unchanged, place.subject
        )
        outside.close()


@dataclass(frozen=True)
class OutsideTx:
    connection: sqlite3.Connection

    def advance(self, old: int, new: int, leader_epoch: int | None = None) -> None: ...

    def fault(self, error: BaseException) -> None: ...


def expecting_ours(promise: Callable[..., None], *arguments: object) -> None:
    """The promise, where an error of another class is a failure too."""
    try:
        promise(*arguments)
    except sqlite3.Error as error:
        pytest.fail(f"not an error of ours: {error!r}")


class TestWhoseFaultItIs:
    """`Tx.fault`: what is the file's is tried again, what is the handler's goes to its policies."""

    def test_a_full_disk_is_the_file_s(self, table: Table) -> None:
        with pytest.raises(StoreUnavailable, match=r"shop\.db cannot be written: database or disk is full"):
            self.fill_up(table, lambda error: error)
        assert (table.effects(), table.offset()) == ([], 0)

    def test_also_where_the_handler_made_another_error_of_it(self, table: Table) -> None:
        def wrapped(error: BaseException) -> BaseException:
            outer = ValueError("not stored")
            outer.__cause__ = error
            return outer

        def hidden(error: BaseException) -> BaseException:
            try:
                try:
                    raise error
                except sqlite3.Error:
                    raise ValueError("not stored") from None
            except ValueError as outer:
                return outer

        for made in (wrapped, hidden):
            with pytest.raises(StoreUnavailable, match="disk is full"):
                self.fill_up(table, made)

    def test_a_wrong_statement_and_an_error_that_causes_itself_are_the_handler_s(self, table: Table) -> None:
        around = ValueError()
        around.__context__ = KeyError()
        around.__context__.__context__ = around
        with table.transaction() as tx:
            assert tx.fault(around) is None
            with pytest.raises(sqlite3.Error) as wrong:
                tx.connection.execute("insert into nowhere values (1)")
            assert tx.fault(wrong.value) is None
            tx.advance(0, 1)

    def fill_up(self, table: Table, made: Callable[[BaseException], BaseException]) -> None:
        """What a handler makes of a full disk, in a transaction that is then told whose fault it was."""
        with table.transaction() as tx:
            (pages,) = tx.connection.execute("pragma page_count").fetchone()
            tx.connection.execute(f"pragma max_page_count = {pages}").fetchone()
            tx.connection.execute("insert into effects values (1)")
            try:
                tx.connection.execute("create table large as select zeroblob(1000000) as page")
            except sqlite3.Error as error:
                fault = tx.fault(made(error))
                assert fault is not None
                raise fault from error


class TestAfterItsEnd:
    """A connection that a handler kept is in the pool, or lent to another."""

    def test_a_cursor_that_was_kept_does_not_write(self, table: Table) -> None:
        """It runs a statement that was prepared while this was allowed, so nothing is asked about it again."""
        with table.transaction() as tx:
            kept = tx.connection.cursor()
            kept.execute("insert into effects values (?)", (1,))
            tx.advance(0, 1)
        with pytest.raises(sqlite3.DatabaseError, match="not authorized"):
            kept.execute("insert into effects values (?)", (2,))
        with table.transaction() as tx:
            tx.advance(1, 2)
        assert (table.effects(), table.offset()) == ([1], 2)

    @pytest.mark.parametrize("use", ["execute", "executemany", "executescript", "cursor", "commit", "rollback"])
    def test_the_error_says_what_to_do_instead(self, table: Table, use: str) -> None:
        with table.transaction() as tx:
            kept = tx.connection
            tx.advance(0, 1)
        arguments: dict[str, tuple[object, ...]] = {
            "execute": ("select 1",),
            "executemany": ("select ?", []),
            "executescript": ("select 1",),
        }
        with pytest.raises(TransactionMisused, match=r"used after its handler had returned.*connection of your own"):
            getattr(kept, use)(*arguments.get(use, ()))

    def test_another_writer_is_not_held_up_by_what_was_refused(self, table: Table) -> None:
        with table.transaction() as tx:
            kept = tx.connection.cursor()
            kept.execute("insert into effects values (?)", (1,))
            tx.advance(0, 1)
        with contextlib.suppress(sqlite3.DatabaseError):
            kept.execute("insert into effects values (?)", (2,))
        stranger = sqlite3.connect(table.store.path, isolation_level=None, timeout=0.1)
        stranger.execute("begin immediate")
        stranger.execute("rollback")
        stranger.close()

    def test_a_statement_that_was_not_broken_off_in_time_ends_all_the_same(self, table: Table) -> None:
        """It began a moment after `sever` had interrupted what there was: here nothing interrupts it at all."""
        opened_connection, begun = sqlite_connection.SqliteConnection(table.store.path), threading.Event()
        opened_connection.connection.set_trace_callback(lambda _: begun.set())
        for_ever = "with recursive n(i) as (select 1 union all select i + 1 from n) select count(*) from n"
        with ThreadPoolExecutor(1) as handler:
            running = handler.submit(opened_connection.connection.execute, for_ever)
            try:
                assert begun.wait(20)
                opened_connection.connection.deactivate()
                assert isinstance(running.exception(20), sqlite3.OperationalError)
            finally:
                opened_connection.connection.interrupt()
        opened_connection.connection.activate()
        opened_connection.close()

    def test_control_a_connection_that_is_not_put_to_rest_writes(
        self, table: Table, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(sqlite_connection.LentSqliteConnection, "deactivate", lambda _: None)
        fails(self.test_a_cursor_that_was_kept_does_not_write, table)


class TestPins:
    def test_claims_that_all_find_the_row_missing_pin_one(
        self, sqlite: SqliteStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The same as the control without its change, so that it is the change that fails."""
        monkeypatch.setattr(sqlite, "load", lambda *_: {})
        claims_that_find_no_row_pin_one(sqlite)

    def test_control_a_pin_that_the_next_one_overwrites(
        self, sqlite: SqliteStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        switch_off(
            monkeypatch,
            "PIN",
            "on conflict do nothing",
            "on conflict do update set next_offset = excluded.next_offset",
        )
        monkeypatch.setattr(sqlite, "load", lambda *_: {})  # all find the row missing
        fails(claims_that_find_no_row_pin_one, sqlite)


def claims_that_find_no_row_pin_one(store: SqliteStore) -> None:
    def claimed(at: int) -> int:
        return granted(store.claim(GROUP, [ORDERS], "me", lambda ps: dict.fromkeys(ps, Position(at))))[
            ORDERS
        ].next_offset

    assert list(map(claimed, (7, 8, 9))) == [7, 7, 7]


def open_in(folder: Path) -> int:
    """The descriptors of this process for files in there; clients of other tests open and close theirs meanwhile."""
    seen = 0
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # closed meanwhile
            seen += Path(os.readlink(descriptor)).is_relative_to(folder.resolve())
    return seen


class Child:
    """Another process at the same file; `tests/contract/sqlite_child.py` says what it does."""

    def __init__(self, *arguments: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.contract.sqlite_child", *arguments],
            cwd=_ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def hears(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def go(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("go\n")
        self.process.stdin.flush()

    def waits_at_the_turnstile_of(self, path: Path) -> bool:
        """Who waits has a second descriptor of the same file."""
        seen = 0
        for descriptor in Path(f"/proc/{self.process.pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                seen += os.readlink(descriptor) == f"{path}-turnstile"
        return seen == 2

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


class TestSqlite:
    def test_claims_of_four_processes_at_once_each_win_an_epoch_and_pin_the_start_once(self, tmp_path: Path) -> None:
        times, path = 25, str(tmp_path / "shop.db")
        with contextlib.ExitStack() as stack:
            children = [stack.enter_context(Child("claim", path, str(number), str(times))) for number in range(4)]
            assert [child.hears() for child in children] == ["ready"] * 4
            for child in children:
                child.go()
            said = [child.hears().split() for child in children for _ in range(times)]
        epochs, offsets = zip(*((int(epoch), int(offset)) for epoch, offset in said), strict=True)
        assert sorted(epochs) == list(range(1, 4 * times + 1))
        assert len(set(offsets)) == 1

    def test_kill_9_in_a_transaction_leaves_neither_the_row_nor_the_offset(self, table: Table) -> None:
        killed_while_it_holds(table, "inside")

    def test_control_kill_9_outside_the_transaction_leaves_the_row(self, table: Table) -> None:
        fails(killed_while_it_holds, table, "outside")

    def test_a_process_that_writes_without_a_pause_does_not_starve_another(self, table: Table) -> None:
        gets_in(table, turnstile="on", within=20.0)

    def test_control_without_the_turnstile_it_starves(self, table: Table, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(
            sqlite_connection.SqliteConnection, "turnstile", sqlite_connection.SqliteConnection.turnstile
        )  # put back afterwards
        switch_turnstile_off()
        fails(gets_in, table, "off", 3.0)

    def test_another_instance_on_the_same_file_is_fenced_too(self, table: Table) -> None:
        with opened(table.store.path) as rival:
            claim_orders(rival, "rival")
        with pytest.raises(Fenced), table.transaction():
            pytest.fail("it began")

    def test_a_claim_by_another_process_fences_this_one(self, table: Table) -> None:
        with Child("claim", str(table.store.path), "7", "1") as child:
            assert child.hears() == "ready"
            child.go()
            assert child.hears() == f"{table.epoch + 1} 0"
        with pytest.raises(Fenced), table.transaction():
            pytest.fail("it began")

    def test_the_table_has_the_pinned_columns(self, table: Table) -> None:
        reader = sqlite3.connect(table.store.path)
        columns = [row[1] for row in reader.execute("pragma table_info(kconsume_offsets)")]
        reader.close()
        assert columns == [
            "group_id", "topic", "partition", "next_offset", "epoch", "topic_id", "owner", "leader_epoch",
            "metadata", "updated_at", "generation", "reset_epoch",
        ]  # fmt: skip

    def test_the_person_s_own_tables_are_left_alone(self, tmp_path: Path) -> None:
        own = sqlite3.connect(tmp_path / "shop.db")
        own.execute("create table stock (sku text)")
        own.execute("insert into stock values ('one')")
        own.commit()
        with opened(tmp_path / "shop.db") as store:
            claim_orders(store)
        names = {row[0] for row in own.execute("select name from sqlite_master where type = 'table'")}
        stock = own.execute("select * from stock").fetchall()
        own.close()
        assert names == {"stock", *COLUMNS_2, "sqlite_sequence"}  # the last is SQLite's own, for autoincrement
        assert stock == [("one",)]

    def test_a_file_of_another_version_is_refused_with_both(self, table: Table) -> None:
        writer = sqlite3.connect(table.store.path)
        writer.execute("update kconsume_schema set version = 99")
        writer.commit()
        writer.close()
        with pytest.raises(
            StoreError, match="schema version 99, and this kconsume writes version 2: upgrade kconsume here"
        ):
            SqliteStore(table.store.path).groups()
        with pytest.raises(StoreError, match="schema version 99"):
            migrated(SqliteStore(table.store.path))
        assert "version 2: upgrade kconsume here" in shown(SqliteStore(table.store.path)).said
        assert contents(table.store.path)["kconsume_schema"] == [(99, 0, None, None, 2, ANY)]

    def test_a_writer_that_does_not_queue_is_waited_for_and_then_named(
        self, table: Table, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The sqlite3 shell, say: it does not know the turnstile."""
        table.store.close()
        stranger = sqlite3.connect(table.store.path, isolation_level=None)
        stranger.execute("begin immediate")
        impatient = sqlite3.connect
        monkeypatch.setattr(sqlite3, "connect", lambda *args, **kwargs: impatient(*args, **{**kwargs, "timeout": 0.1}))
        with pytest.raises(StoreUnavailable, match=r"shop\.db"):
            table.store.reset(GROUP, {ORDERS: 1})
        stranger.execute("rollback")
        stranger.close()
        table.store.reset(GROUP, {ORDERS: 1})


VERSION_1 = """
create table kconsume_schema (version integer not null, last_epoch bigint not null default 0);
create table kconsume_offsets (
    group_id text not null, topic text not null, partition integer not null,
    next_offset bigint not null, epoch bigint not null, topic_id text, owner text,
    leader_epoch integer, metadata text not null default '', updated_at text not null,
    primary key (group_id, topic, partition)
) without rowid;
insert into kconsume_schema (version, last_epoch) values (1, 41);
insert into kconsume_offsets values
    ('shop', 'orders', 0, 7, 3, 'an id', 'somebody', 2, 'a note', '2026-01-02T03:04:05+00:00'),
    ('shop', 'orders', 1, 9000000000, 1, null, null, null, '', '2026-01-02T03:04:06+00:00'),
    ('bills', 'orders', 0, 0, 12, null, 'else', 0, '', '2026-01-02T03:04:07+00:00');
create table stock (sku text);
insert into stock values ('one');
"""
"""As the first kconsume made them, with rows in them, and with a table of the person's own."""
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
UP_TO_DATE = [(2, 41, None, None, 2, ANY)]


def columns(path: Path) -> dict[str, list[str]]:
    """Of all tables of ours."""
    with contextlib.closing(sqlite3.connect(path)) as reader:
        return {table: [row[1] for row in reader.execute(f"pragma table_info({table})")] for table in tables(reader)}


def contents(path: Path) -> dict[str, list[tuple[object, ...]]]:
    """All rows of all tables of ours, and the person's."""
    with contextlib.closing(sqlite3.connect(path)) as reader:
        names = tables(reader) + tables(reader, "stock")
        return {table: reader.execute(f"select * from {table}").fetchall() for table in names}


def tables(reader: sqlite3.Connection, pattern: str = "kconsume%") -> list[str]:
    query = "select name from sqlite_master where type = 'table' and name like ? order by 1"
    return [row[0] for row in reader.execute(query, (pattern,))]


class TestAnOlderVersion:
    """A file of version 1 is brought up to date by whoever opens it first."""

    @pytest.fixture
    def path(self, tmp_path: Path) -> Path:
        with contextlib.closing(sqlite3.connect(tmp_path / "shop.db", isolation_level=None)) as maker:
            maker.execute("pragma journal_mode = wal")  # as the first kconsume did
            maker.executescript(VERSION_1)
        return tmp_path / "shop.db"

    def test_a_migration_leaves_every_row_as_it_was(self, path: Path) -> None:
        before = contents(path)
        assert [len(rows) for rows in before.values()] == [3, 1, 1]
        with opened(path) as store:
            assert store.groups() == ["bills", "shop"]
        assert contents(path) == {
            **before,
            "kconsume_offsets": [(*row, None, None) for row in before["kconsume_offsets"]],
            "kconsume_schema": UP_TO_DATE,
            "kconsume_outbox": [],
            "kconsume_seen": [],
            "kconsume_deleted": [],
        }  # fmt: skip
        assert columns(path) == COLUMNS_2

    def test_it_has_the_same_tables_as_a_new_file(self, path: Path, tmp_path: Path) -> None:
        with opened(path) as migrant, opened(tmp_path / "new.db") as new:
            migrant.groups()
            new.groups()
        query = "select type, name, sql from sqlite_master where name like '%kconsume%' order by 1, 2"
        with contextlib.closing(sqlite3.connect(path)) as old, contextlib.closing(sqlite3.connect(new.path)) as made:
            assert old.execute(query).fetchall() == made.execute(query).fetchall()

    def test_a_service_goes_on_where_the_older_one_was(self, path: Path) -> None:
        with opened(path) as store:
            position = granted(store.claim(GROUP, [ORDERS], "me", lambda _: {}))[ORDERS]
            assert (position.next_offset, position.epoch, position.topic_id) == (7, 4, "an id")
            with store.transaction(GROUP, ORDERS, 4) as tx:
                assert tx.record_origins(["an origin"]) == {"an origin"}
                tx.advance(7, 8)
            store.delete(GROUP)
            assert claim_orders(store) == 42, "an epoch that the older version has retired was given out again"

    def test_looking_at_it_changes_nothing(self, path: Path) -> None:
        before = contents(path)
        store = SqliteStore(path)
        assert store.trouble() is None
        tables = shown(store)
        assert (tables.version, tables.wanted, tables.changed) == (1, 2, False)
        assert "the first process that opens it migrates to version 2" in tables.said
        assert contents(path) == before

    def test_the_command_migrates_it_and_has_nothing_left_to_do(self, path: Path) -> None:
        first, second = migrated(SqliteStore(path)), migrated(SqliteStore(path))
        assert (first.version, first.changed, first.said) == (2, True, "migrated from version 1 to 2")
        assert (second.version, second.changed) == (2, False)
        assert contents(path)["kconsume_schema"] == UP_TO_DATE

    def test_a_migration_that_fails_changes_nothing(self, path: Path) -> None:
        """In its second step: somebody has a table of that name."""
        with contextlib.closing(sqlite3.connect(path)) as somebody:
            somebody.execute("create table kconsume_seen (theirs text)")
        before = contents(path)
        with pytest.raises(StoreUnavailable, match="kconsume_seen already exists"), opened(path) as store:
            store.groups()
        assert contents(path) == before
        assert before["kconsume_schema"] == [(1, 41)]

    def test_two_processes_that_open_it_at_once_migrate_it_once(self, path: Path) -> None:
        """Both have found version 1 when the first of them is let in."""
        before = contents(path)
        with contextlib.ExitStack() as stack:
            queue = stack.enter_context(open(f"{path}-turnstile", "w"))
            fcntl.flock(queue, fcntl.LOCK_EX)
            children = [stack.enter_context(Child("claim", str(path), str(number), "1")) for number in range(2)]
            for child in children:
                child.go()
            assert [child.hears() for child in children] == ["ready"] * 2
            for child in children:
                eventually(lambda child=child: child.waits_at_the_turnstile_of(path), what="it waits")  # type: ignore[misc]
            assert contents(path) == before
            fcntl.flock(queue, fcntl.LOCK_UN)
            assert sorted(child.hears() for child in children) == ["4 7", "5 7"]
        after = contents(path)
        assert (columns(path), after["kconsume_schema"]) == (COLUMNS_2, UP_TO_DATE)
        assert [row[:4] for row in after["kconsume_offsets"]] == [row[:4] for row in before["kconsume_offsets"]]

    def test_who_comes_second_finds_nothing_to_do(self, path: Path) -> None:
        second_comes_late(path)

    def test_control_who_does_not_look_again_is_in_the_way(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(sqlite_schema, "version_of", lambda _: 1)
        with pytest.raises(sqlite3.OperationalError, match="already exists"):
            second_comes_late(path)


def second_comes_late(path: Path) -> None:
    """Two have found version 1, and then each brings it up to date."""
    with contextlib.ExitStack() as stack:
        both = [stack.enter_context(contextlib.closing(sqlite3.connect(path, isolation_level=None))) for _ in range(2)]
        assert [sqlite_schema.version_of(connection) for connection in both] == [1, 1]
        for connection in both:
            sqlite_schema.bring_up_to_date(connection)
    assert (columns(path), contents(path)["kconsume_schema"]) == (COLUMNS_2, UP_TO_DATE)


def killed_while_it_holds(table: Table, where: str) -> None:
    with Child("hold", str(table.store.path), where) as child:
        assert child.hears() == "holding"
        child.kill()
    assert (table.effects(), table.offset()) == ([], 0)
    epoch = claim_orders(table.store, "next")
    with table.transaction(epoch) as tx:
        tx.connection.execute("insert into effects values (1)")
        tx.advance(0, 1)
    assert (table.effects(), table.offset()) == ([1], 1)


def gets_in(table: Table, turnstile: str, within: float, times: int = 20) -> None:
    """Between two busy turns of the other process, each time anew; one long gap would prove nothing."""
    deadline = time.monotonic() + within
    got_in = 0
    with Child("busy", str(table.store.path), turnstile) as child:
        assert child.hears() == "busy"
        while got_in < times and time.monotonic() < deadline:
            turns = table.turns_of_the_other()
            with contextlib.suppress(StoreUnavailable), table.transaction() as tx:
                tx.advance(got_in, got_in + 1)
                got_in += 1
            eventually(lambda turns=turns: table.turns_of_the_other() > turns, what="a turn of the other")  # type: ignore[misc]
    assert got_in == times, f"got in {got_in} of {times} times within {within:g} s"


# In a process of its own: to change the user, the C library interrupts every thread of the process, and librdkafka's
# mock cluster does not survive that ("failed to poll: Interrupted system call", then its memory is freed).
_AS_NOBODY = """
import os, sys
from kconsume.backends import SqliteStore
from kconsume.errors import StoreUnavailable
from kconsume.records import Partition

if os.geteuid() == 0:
    os.seteuid(65534)
store = SqliteStore(sys.argv[2])
try:
    store.groups() if sys.argv[1] == "groups" else store.reset("shop", {Partition("orders", 0): 1})
except StoreUnavailable as error:
    print(error)
"""


def as_nobody(method: str, path: Path) -> str:
    """What a store says to somebody who may not write there: without root's right to write everywhere."""
    done = subprocess.run(
        [sys.executable, "-c", _AS_NOBODY, method, str(path)], capture_output=True, text=True, check=True, timeout=60
    )
    return done.stdout


class TestAway:
    """A store that cannot be reached says so, in every method, as `StoreUnavailable`: the caller tries again."""

    METHODS: Mapping[str, Callable[[OffsetStore], object]] = {
        "load": lambda store: store.load(GROUP, [ORDERS]),
        "save": lambda store: store.save(GROUP, {ORDERS: Position(1)}),
        "reset": lambda store: store.reset(GROUP, {ORDERS: 1}),
        "delete": lambda store: store.delete(GROUP),
        "groups": lambda store: store.groups(),
    }
    every_method = pytest.mark.parametrize("method", METHODS.values(), ids=METHODS.keys())

    @every_method
    def test_a_folder_that_is_not_there(self, method: Callable[[OffsetStore], object], tmp_path: Path) -> None:
        with pytest.raises(StoreUnavailable, match=r"missing/shop\.db"):
            method(SqliteStore(tmp_path / "missing" / "shop.db"))

    def test_a_folder_that_may_not_be_written(self, tmp_path: Path) -> None:
        closed = tmp_path / "closed"
        closed.mkdir(mode=0o500)
        assert "closed/shop.db" in as_nobody("groups", closed / "shop.db")

    def test_a_file_that_may_only_be_read(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            os.chmod(folder, 0o777)
            path = Path(folder) / "shop.db"
            with opened(path) as store:
                claim_orders(store)
            for file in Path(folder).iterdir():
                file.chmod(0o444)
            assert "shop.db" in as_nobody("reset", path)

    def test_a_file_that_is_no_database(self, tmp_path: Path) -> None:
        path = tmp_path / "shop.db"
        path.write_bytes(b"this is a text, and longer than the header of a database would be " * 20)
        before = path.read_bytes()
        with pytest.raises(StoreUnavailable, match=r"shop\.db.*not a database"):
            SqliteStore(path).groups()
        assert path.read_bytes() == before

    def test_a_folder_where_the_file_should_be(self, tmp_path: Path) -> None:
        (tmp_path / "shop.db").mkdir()
        with pytest.raises(StoreUnavailable, match=r"shop\.db"):
            SqliteStore(tmp_path / "shop.db").groups()

    def test_what_was_opened_in_vain_is_closed(self, tmp_path: Path) -> None:
        """It is tried again for as long as the file is not a database."""
        (tmp_path / "shop.db").write_bytes(b"no database " * 400)
        store = SqliteStore(tmp_path / "shop.db")
        gc.disable()  # what only the collector would close is not closed
        try:
            before = open_in(tmp_path)
            for _ in range(10):
                with pytest.raises(StoreUnavailable):
                    store.groups()
            assert open_in(tmp_path) <= before + 1
        finally:
            gc.enable()

    def test_it_is_found_again_once_it_is_there(self, tmp_path: Path) -> None:
        store = SqliteStore(tmp_path / "later" / "shop.db")
        with pytest.raises(StoreUnavailable):
            store.groups()
        (tmp_path / "later").mkdir()
        assert store.groups() == []
        store.close()

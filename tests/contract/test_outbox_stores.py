"""Every store of ours that has an outbox passes its suite, in each form of its transaction; and every test can fail."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import psycopg
import pytest
from sqlalchemy import NullPool, create_engine
from sqlalchemy.ext.asyncio import create_async_engine

from kconsume.backends import MemoryStore, PostgresStore, SqliteStore, TransactionalStore
from kconsume.backends.capabilities import capabilities_of
from kconsume.backends.outbox import tables
from kconsume.backends.sqlite import schema
from kconsume.testing.conformance import Bench, OutboxSuite, Subject, TransactionalSuite, awaited, pipelined
from tests.chaos.proxy import CuttingProxy
from tests.contract.broken_outboxes import OUTBOX_CONTROLS, OutboxControl
from tests.contract.broken_stores import Promise
from tests.contract.forms import S, for_async_handlers
from tests.contract.places import SqlitePlace, fails
from tests.contract.queue_outbox import QueueOutbox, outbox_subject
from tests.contract.queue_store import QueueStore, subject_of
from tests.contract.test_postgres_store import subject_of as postgres_subject

Execute = Callable[[str, Any], object]
PROMISES = sorted(
    name for name in dir(OutboxSuite) if name.startswith("test_") and not hasattr(TransactionalSuite, name)
)


def only_the_outbox(suite: S) -> S:
    """What its transactions are is tested elsewhere."""
    for name in dir(TransactionalSuite):
        if name.startswith("test_"):
            setattr(suite, name, None)
    return suite


def in_sqlite(tmp_path: Path, form: Callable[[SqliteStore], TransactionalStore] = lambda store: store) -> Subject:
    place = SqlitePlace(tmp_path)

    @contextmanager
    def own() -> Iterator[Execute]:
        with place._outside() as connection:
            connection.execute("begin immediate")
            with connection:
                yield connection.execute

    return replace(place.subject(), open=lambda: form(place.open()), own=own)


def in_postgres(
    proxy: CuttingProxy,
    database: psycopg.Connection,
    url: str,
    form: Callable[[PostgresStore], TransactionalStore] = lambda store: store,
) -> Subject:
    @contextmanager
    def own() -> Iterator[Execute]:
        with psycopg.connect(url) as connection:
            yield connection.execute

    return replace(postgres_subject(proxy, database, form), own=own)


@only_the_outbox
class TestSqlite(OutboxSuite):
    @pytest.fixture
    def subject(self, tmp_path: Path) -> Subject:
        return in_sqlite(tmp_path)


@only_the_outbox
class TestSqliteForAsyncHandlers(OutboxSuite):
    @pytest.fixture
    def subject(self, tmp_path: Path) -> Subject:
        return in_sqlite(tmp_path, for_async_handlers)


@only_the_outbox
class TestPostgres(OutboxSuite):
    @pytest.fixture
    def subject(self, cutting_proxy: CuttingProxy, database: psycopg.Connection, postgres_url: str) -> Subject:
        return in_postgres(cutting_proxy, database, postgres_url)


@only_the_outbox
class TestPostgresPipelined(OutboxSuite):
    fence_shows_at_the_end = True

    @pytest.fixture
    def subject(self, cutting_proxy: CuttingProxy, database: psycopg.Connection, postgres_url: str) -> Subject:
        return in_postgres(cutting_proxy, database, postgres_url, pipelined)


@only_the_outbox
class TestPostgresAwaited(OutboxSuite):
    @pytest.fixture
    def subject(self, cutting_proxy: CuttingProxy, database: psycopg.Connection, postgres_url: str) -> Subject:
        return in_postgres(cutting_proxy, database, postgres_url, awaited)


@only_the_outbox
class TestQueue(OutboxSuite):
    @pytest.fixture
    def subject(self) -> Subject:
        return outbox_subject(QueueOutbox())


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize(
    "promise",
    [
        OutboxSuite.test_outbox_rows_are_rolled_back_with_their_transaction,
        OutboxSuite.test_an_outbox_row_keeps_every_field_of_its_record,
        OutboxSuite.test_an_origin_is_recorded_once_by_each_group,
    ],
)
def test_sessions_of_sqlalchemy_keep_the_same_promises(
    cutting_proxy: CuttingProxy, database: psycopg.Connection, postgres_url: str, is_async: bool, promise: Promise
) -> None:
    url = postgres_url.replace("postgresql://", "postgresql+psycopg://", 1)
    plain, on_loop = create_engine(url, poolclass=NullPool), create_async_engine(url, poolclass=NullPool)

    def open_store() -> TransactionalStore:
        return awaited(PostgresStore(engine=on_loop)) if is_async else PostgresStore(engine=plain)

    subject = replace(in_postgres(cutting_proxy, database, postgres_url), open=open_store)
    with Bench(subject) as bench:
        promise(OutboxSuite(), bench)


# Negative controls


@pytest.mark.parametrize("control", OUTBOX_CONTROLS, ids=str)
def test_a_broken_outbox_is_found_out(control: OutboxControl) -> None:
    fails(control.promise, control.subject)


def test_every_test_of_the_outbox_has_a_store_that_it_fails() -> None:
    assert len(PROMISES) > 15
    assert set(PROMISES) - {control.promise.__name__ for control in OUTBOX_CONTROLS} == set()


def test_a_sound_outbox_is_no_control() -> None:
    with pytest.raises(AssertionError, match="noticed nothing"):
        fails(OutboxSuite.test_the_number_of_an_outbox_row_is_never_used_again, lambda: outbox_subject(QueueOutbox()))


B = OutboxSuite
GUARDS: list[tuple[str, str, str, Promise]] = [
    (
        "SQLITE_IS_OURS",
        "and epoch = ?",
        "and ? is not null",
        B.test_a_stale_epoch_reads_no_outbox_rows_and_the_next_owner_reads_them,
    ),
    (
        "SQLITE_READ",
        "order by b.id",
        "order by -b.id",
        B.test_outbox_rows_are_read_in_the_order_of_writing_up_to_the_limit,
    ),
    ("SQLITE_DELETE", "where id = ?", "where id <= ?", B.test_only_delivered_outbox_rows_are_deleted),
    ("SQLITE_STEP", "autoincrement", "", B.test_the_number_of_an_outbox_row_is_never_used_again),
    (
        "SQLITE_LEASE",
        "relay_at not between ?3 and ?4",
        "?3 < ?4",
        B.test_outbox_rows_without_a_partition_have_one_sender_at_a_time,
    ),
    ("SQLITE_FORGET", "seen_at < ?", "seen_at > ?", B.test_an_origin_is_recorded_once_by_each_group),
]


@pytest.mark.parametrize(("statement", "guard", "instead", "promise"), GUARDS, ids=[guard[0] for guard in GUARDS])
def test_a_guard_that_is_taken_out_of_a_statement_of_the_outbox_is_missed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, statement: str, guard: str, instead: str, promise: Promise
) -> None:
    text: str = getattr(tables, statement)
    assert guard in text
    monkeypatch.setattr(tables, statement, text.replace(guard, instead))
    if statement == "SQLITE_STEP":
        steps = tuple(step.replace(guard, instead) for step in schema._STEPS)
        monkeypatch.setattr(schema, "_STEPS", steps)
    fails(promise, lambda: in_sqlite(tmp_path))


def test_our_stores_have_the_outbox_that_they_are_examined_for(tmp_path: Path, postgres_url: str) -> None:
    with closing(PostgresStore(postgres_url)) as postgres:
        assert capabilities_of(postgres).outbox is postgres
    for store in (SqliteStore(tmp_path / "shop.db"), QueueOutbox()):
        assert capabilities_of(store).outbox is store
    assert capabilities_of(MemoryStore()).outbox is None


def test_a_store_without_an_outbox_is_told_what_it_lacks() -> None:
    store = QueueStore()
    with (
        Bench(subject_of(store)) as bench,
        pytest.raises(AssertionError, match="is no OutboxTx: it needs post, record_origins"),
    ):
        OutboxSuite().test_an_outbox_row_keeps_every_field_of_its_record(bench)

"""Every store of ours passes the suite of its level, and every test of the suites can fail.

    OffsetsSuite          kafka (on the real broker)
    FencedSuite           memory
    TransactionalSuite    sqlite, in one process and in several; and a store in memory that applies all at the end

What only one store can be asked is in a file of its own: `test_sqlite_store.py`, `test_kafka_store.py`.
"""

from __future__ import annotations

import contextlib
import itertools
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kconsume.backends import FencedStore, KafkaStore, MemoryStore, SqliteStore, TransactionalStore
from kconsume.backends.capabilities import Capabilities, NamedStore, capabilities_of
from kconsume.backends.sqlite import transaction
from kconsume.backends.sqlite.connection import LentSqliteConnection
from kconsume.records import Partition
from kconsume.testing.conformance import Bench, FencedSuite, OffsetsSuite, Subject, TransactionalSuite, pipelined
from tests.contract.broken_stores import Control, Counted, Promise
from tests.contract.broken_transactions import CONTROLS, Unfenced
from tests.contract.forms import for_async_handlers, only_transactions
from tests.contract.other_process import OtherProcess, RemoteStore
from tests.contract.places import SqlitePlace, cases_of, fails, kafka_place, switch_off
from tests.contract.queue_store import (
    AwaitedQueueStore,
    PipelinedQueueStore,
    QueueStore,
    awaited_subject_of,
    subject_of,
)

ROOT = Path(__file__).parents[2]


class TestMemory(FencedSuite):
    @pytest.fixture
    def subject(self) -> Subject:
        store = MemoryStore()
        return Subject(open=lambda: store)


class TestSqlite(TransactionalSuite):
    @pytest.fixture
    def subject(self, tmp_path: Path) -> Subject:
        return SqlitePlace(tmp_path).subject()


@only_transactions
class TestSqliteForAsyncHandlers(TransactionalSuite):
    @pytest.fixture
    def subject(self, tmp_path: Path) -> Subject:
        place = SqlitePlace(tmp_path)
        return replace(place.subject(), open=lambda: for_async_handlers(place.open()))


class TestSqliteInSeveralProcesses(TransactionalSuite):
    """Every store object in another process than the one before it."""

    @pytest.fixture
    def subject(self, tmp_path: Path, processes: list[OtherProcess]) -> Subject:
        place, turns = SqlitePlace(tmp_path), itertools.cycle(processes)
        opened: list[RemoteStore] = []

        def open_store() -> RemoteStore:
            opened.append(next(turns).open(place.path))
            return opened[-1]

        @contextmanager
        def away() -> Iterator[None]:
            for store in opened:
                store.close()
            with place.away():
                yield

        return Subject(open_store, write=lambda tx, number: tx.write(number), effects=place.effects, away=away)


@pytest.fixture(scope="module")
def processes() -> Iterator[list[OtherProcess]]:
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as started:  # a short path, for sockets
        yield [started.enter_context(OtherProcess(Path(folder) / str(number))) for number in range(3)]


class TestQueue(TransactionalSuite):
    @pytest.fixture
    def subject(self) -> Subject:
        return subject_of(QueueStore())


class TestAwaitedQueue(TransactionalSuite):
    @pytest.fixture
    def subject(self) -> Subject:
        return awaited_subject_of(AwaitedQueueStore())


class TestPipelinedQueue(TransactionalSuite):
    fence_shows_at_the_end = True

    @pytest.fixture
    def subject(self) -> Subject:
        store = PipelinedQueueStore()
        return replace(subject_of(store), open=lambda: pipelined(store))


class TestKafka(OffsetsSuite):
    @pytest.fixture
    def subject(self, request: pytest.FixtureRequest) -> Subject:
        return kafka_place(request)


# Negative controls


@pytest.mark.parametrize("control", CONTROLS, ids=str)
def test_a_broken_store_is_found_out(control: Control) -> None:
    fails(control.promise, control.subject, control.case)


def test_every_test_of_the_suites_has_a_store_that_it_fails() -> None:
    promises = {name for name in dir(TransactionalSuite) if name.startswith("test_")}
    assert len(promises) > 80
    assert promises - {control.promise.__name__ for control in CONTROLS} == set()


def test_every_case_of_a_test_has_a_store_that_it_fails() -> None:
    """A case without one may be as blind as the next: they look alike, and watch different guards."""
    controlled = {(control.promise.__name__, control.case) for control in CONTROLS}
    promises = [getattr(TransactionalSuite, name) for name in dir(TransactionalSuite) if name.startswith("test_")]
    cases = [(promise.__name__, case) for promise in promises for case in cases_of(promise) if case]
    assert len(cases) > 40
    assert [each for each in cases if each not in controlled] == []


def test_a_place_that_counts_is_asked_no_more_for_1000_partitions_than_for_one() -> None:
    """The control of the controls: a sound store that is counted passes."""
    with pytest.raises(AssertionError, match="noticed nothing"):
        fails(FencedSuite.test_1000_partitions_are_claimed_together, Control(Counted, print).subject)


def test_a_control_whose_guard_is_on_controls_nothing() -> None:
    """The control of the controls: `fails` itself notices a sound store."""
    with pytest.raises(AssertionError, match="noticed nothing"):
        fails(OffsetsSuite.test_an_offset_never_goes_backwards, lambda: subject_of(QueueStore()))


def test_a_test_whose_subject_lacks_what_it_needs_says_what() -> None:
    store = QueueStore()
    with pytest.raises(pytest.fail.Exception, match="needs write="):
        fails_plainly(TransactionalSuite.test_many_records_share_a_transaction, Subject(open=lambda: store))


def test_a_store_without_the_level_s_methods_is_told_which() -> None:
    with pytest.raises(AssertionError, match="KafkaStore is no FencedStore: it needs claim, reclaim"):
        fails_plainly(
            FencedSuite.test_a_reclaim_of_no_partitions_returns_nothing,
            Subject(open=lambda: KafkaStore("nowhere:9092")),
        )


def fails_plainly(promise: Promise, subject: Subject) -> None:
    with Bench(subject) as bench:
        promise(TransactionalSuite(), bench)


def test_our_stores_have_the_level_that_they_are_examined_for(tmp_path: Path) -> None:
    assert isinstance(MemoryStore(), FencedStore)
    assert isinstance(SqliteStore(tmp_path / "shop.db"), TransactionalStore)
    assert isinstance(QueueStore(), TransactionalStore)
    assert not isinstance(KafkaStore("nowhere:9092"), FencedStore)


def test_pytest_is_needed_for_the_suites_and_for_nothing_else_of_testing() -> None:
    code = "import sys, kconsume.testing; from kconsume.testing import *; assert 'pytest' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_the_sample_of_the_docs_runs_and_can_fail(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "stores.md").read_text()
    (sample,) = re.findall(r"```python\n(# test_my_store\.py\n.*?)```", page, re.DOTALL)
    (tmp_path / "test_my_store.py").write_text(sample)
    (tmp_path / "test_broken.py").write_text(sample.replace("my_package", "broken"))
    (tmp_path / "my_package.py").write_text("from kconsume.backends import SqliteStore as MyStore\n")
    (tmp_path / "broken.py").write_text("import my_package\nclass MyStore(my_package.MyStore):\n    guarantee = ''\n")
    run = [sys.executable, "-m", "pytest", "-q", "-W", "error", "-k", "promises or commit_together or one_step"]
    done = subprocess.run(run, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert "1 failed, 5 passed" in done.stdout, done.stdout
    assert "FAILED test_broken.py::TestMyStore::test_a_store_has_a_guarantee_and_an_address" in done.stdout


def test_what_the_piece_of_the_docs_declares_is_what_the_runtime_finds() -> None:
    page = (ROOT / "docs" / "stores.md").read_text()
    (piece,) = re.findall(r"```python\n(?!# \S+\.py\n)(.*?)```", page, re.DOTALL)
    names: dict[str, Any] = {"__name__": "etcd"}
    exec(piece, names)
    whole: Any = type("WholeStore", (names["EtcdStore"], MemoryStore), {})  # the dots of the page stand for the methods
    store = whole()
    assert capabilities_of(store) == Capabilities(store, named=store)
    assert capabilities_of(store).fenced is not None
    with Bench(Subject(open=lambda: store)) as bench:
        OffsetsSuite().test_a_declared_capability_is_implemented(bench, "named", NamedStore)


def test_a_store_that_declares_an_id_and_has_none_is_found_out() -> None:
    """The control of the test before: the same declaration on a store without `identity()`."""

    class Nameless(QueueStore):
        identity = None  # type: ignore[assignment]

        @property
        def capabilities(self) -> Capabilities:
            return Capabilities(self, named=self)  # type: ignore[arg-type]

    with (
        pytest.raises(AssertionError, match="Nameless declares named and is no NamedStore"),
        Bench(subject_of(Nameless())) as bench,
    ):
        OffsetsSuite().test_a_declared_capability_is_implemented(bench, "named", NamedStore)


@pytest.mark.parametrize(
    "promise",
    [
        TransactionalSuite.test_a_claim_during_a_transaction_takes_effect_before_or_after_it,
        TransactionalSuite.test_an_advance_from_a_wrong_offset_changes_nothing,
        TransactionalSuite.test_a_transaction_does_not_begin_after_another_owner_has_claimed,
        TransactionalSuite.test_claims_during_commits_leave_each_effect_once,
        TransactionalSuite.test_after_16_concurrent_claims_exactly_one_owner_can_commit,
    ],
)
def test_a_broken_store_is_found_out_by_what_is_awaited_too(promise: Promise) -> None:
    class AwaitedUnfenced(Unfenced, AwaitedQueueStore): ...

    fails(promise, lambda: awaited_subject_of(AwaitedUnfenced()))


# The same, with a guard taken out of a statement of the SQLite store

L, F, T = OffsetsSuite, FencedSuite, TransactionalSuite
GUARDS: list[tuple[str, str, str, list[Promise]]] = [
    ("SAVE", "and next_offset <= ?", "and ? is not null", [L.test_an_offset_never_goes_backwards]),
    (
        "SAVE",
        "and next_offset in (coalesce(?, next_offset), ?)",
        "and ? is not ?",
        [F.test_a_save_is_refused_if_the_row_is_not_at_the_previous_offset],
    ),
    ("SAVE", "coalesce(?, topic_id)", "?", [L.test_an_unknown_topic_id_never_overwrites_a_known_one]),
    (
        "SAVE",
        "and epoch = ?",
        "and ? is not null",
        [
            F.test_a_stale_epoch_is_refused_and_changes_nothing,
            F.test_an_epoch_that_was_never_given_out_is_refused,
            F.test_a_save_is_all_or_none,
            F.test_a_reset_raises_the_epoch_and_fences_a_running_owner,
            F.test_after_a_reclaim_only_the_new_epoch_can_save,
            F.test_after_16_concurrent_claims_exactly_one_owner_can_save,
        ],
    ),
    (
        "CLAIM",
        "epoch = epoch + 1",
        "epoch = 1",
        [
            F.test_every_claim_raises_the_epoch_even_by_the_same_owner,
            F.test_16_concurrent_claims_get_16_epochs_and_one_start_offset,
        ],
    ),
    (
        "CLAIM",
        "coalesce(?, generation)",
        "?",
        [F.test_a_claim_without_terms_is_granted_and_keeps_the_generation_of_the_row],
    ),
    (
        "CLAIM",
        "coalesce(?, generation)",
        "coalesce(generation, ?)",
        [
            F.test_a_claim_of_a_later_generation_is_granted_and_its_generation_is_kept,
            F.test_a_claim_with_epochs_compares_only_the_epochs,
        ],
    ),
    (
        "RECLAIM",
        "and epoch = ?",
        "and ? is not null",
        [
            F.test_a_reclaim_after_the_claim_of_another_owner_is_refused_and_raises_no_epoch,
            F.test_a_reset_raises_the_epoch_and_fences_a_running_owner,
        ],
    ),
    (
        "RECLAIM",
        "epoch = epoch + 1",
        "epoch = epoch",
        [
            F.test_a_reclaim_raises_the_epoch_and_reads_the_position,
            F.test_after_a_reclaim_only_the_new_epoch_can_save,
            T.test_after_a_reclaim_the_transaction_under_the_old_epoch_has_ended_or_cannot_commit,
        ],
    ),
    (
        "RESET",
        "epoch = epoch + 1",
        "epoch = epoch",
        [
            F.test_a_reset_raises_the_epoch_and_fences_a_running_owner,
            T.test_a_reset_during_a_transaction_takes_effect_before_or_after_it,
        ],
    ),
    (
        "KEEP_LAST_EPOCH",
        "max(last_epoch,",
        "min(last_epoch,",
        [F.test_a_zombie_from_before_a_delete_is_fenced_after_the_row_is_created_again],
    ),
    ("ADVANCE", "and next_offset = ?", "and ? is not null", [T.test_an_advance_from_a_wrong_offset_changes_nothing]),
    (
        "MARK",
        "and epoch = ?",
        "and ? is not null",
        [
            T.test_a_transaction_does_not_begin_after_another_owner_has_claimed,
            T.test_a_transaction_under_an_epoch_that_was_never_given_out_does_not_begin,
        ],
    ),
]


@pytest.mark.parametrize(
    ("statement", "guard", "instead", "promise"),
    [(statement, guard, instead, promise) for statement, guard, instead, promises in GUARDS for promise in promises],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_a_guard_that_is_taken_out_of_a_statement_is_missed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, statement: str, guard: str, instead: str, promise: Promise
) -> None:
    switch_off(monkeypatch, statement, guard, instead)
    fails(promise, places_in(tmp_path))


@pytest.mark.parametrize(
    "promise",
    [
        T.test_the_transaction_of_a_zombie_changes_nothing_even_if_it_began,
        T.test_claims_during_commits_leave_each_effect_once,
        T.test_two_owners_that_fence_each_other_end_with_one_owner_and_each_effect_once,
        T.test_after_16_concurrent_claims_exactly_one_owner_can_commit,
    ],
)
def test_with_the_whole_fence_off_sqlite_has_effects_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, promise: Promise
) -> None:
    for statement, guard in (("MARK", "and epoch = ?"), ("ADVANCE", "and epoch = ?")):
        switch_off(monkeypatch, statement, guard, "and ? is not null")
    switch_off(monkeypatch, "ADVANCE", "and next_offset = ?", "and ? is not null")
    fails(promise, places_in(tmp_path))


@pytest.mark.parametrize(
    "promise",
    [
        T.test_a_commit_after_a_refused_advance_commits_nothing,
        T.test_a_refused_advance_raises_even_if_the_handler_ignores_it,
    ],
)
def test_an_end_that_does_not_ask_what_became_of_the_advance_is_missed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, promise: Promise
) -> None:
    monkeypatch.setattr(transaction.SqliteTx, "end", lambda _: None)
    fails(promise, places_in(tmp_path))


def test_a_pooled_connection_that_is_not_deactivated_is_missed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LentSqliteConnection, "deactivate", lambda _: None)
    fails(T.test_a_transaction_that_has_ended_refuses_further_use, places_in(tmp_path))


def test_a_transaction_that_begins_without_looking_is_missed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def unlooking(store: SqliteStore, group: str, partition: Partition, epoch: int) -> Iterator[transaction.SqliteTx]:
        with store.database.writing() as connection:
            yield transaction.SqliteTx(connection, store.address, group, partition, epoch)

    monkeypatch.setattr(SqliteStore, "transaction", unlooking)
    fails(T.test_a_transaction_does_not_begin_after_another_owner_has_claimed, places_in(tmp_path))


def places_in(folder: Path) -> Callable[[], Subject]:
    """A file of its own for each case of a test."""
    numbers = iter(range(100))

    def place() -> Subject:
        own = folder / str(next(numbers))
        own.mkdir()
        return SqlitePlace(own).subject()

    return place

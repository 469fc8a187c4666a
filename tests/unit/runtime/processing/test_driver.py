"""A handler over a chunk: what is finished, what is undone, what is reported, whatever fails where."""

from __future__ import annotations

import itertools
import logging
import sqlite3
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kconsume import DecodeError, Record
from kconsume._handlers.binding import Binding, bind
from kconsume._runtime.assignment.watermark import Watermark
from kconsume._runtime.lanes.inline import InlineLanes
from kconsume._runtime.lanes.lane import Chunk, Lane, Work
from kconsume._runtime.lanes.pacing import Pace
from kconsume._runtime.lanes.reports import Failure, LaneReport, Progress, StoreRefused
from kconsume._runtime.processing.driver import ThreadDriver
from kconsume._runtime.processing.plain import PlainAttempt
from kconsume._runtime.processing.rules import ChunkRules
from kconsume._runtime.processing.transactional import TransactionalAttempt
from kconsume.backends import Position, SqliteStore, TransactionalStore
from kconsume.backends.claim import granted
from kconsume.errors import Fenced, StoreError, StoreUnavailable
from kconsume.failures.policy import OnError, Policy
from kconsume.failures.retry_topics import Moment
from kconsume.records import Partition
from tests.unit.fakes import ORDERS, ListStore, Writes, messages_at

pytestmark = pytest.mark.usefixtures("no_time_passes")

GROUP = "shop"
GAPPED = [3, 4, 7, 8, 9, 20, 21, 30]


def plain_work(binding: Binding, policy: Policy) -> Work:
    return ThreadDriver(ChunkRules(binding, policy, clock=Moment.now), PlainAttempt(binding.runner(), binding.batched))


def transactional_work(binding: Binding, policy: Policy, store: TransactionalStore) -> Work:
    course = ChunkRules(binding, policy, stores=True, clock=Moment.now)
    return ThreadDriver(course, TransactionalAttempt(binding.runner(), binding.batched, store, GROUP))


class Bench:
    """A lane over a `ListStore`, with a handler that writes each offset and fails on those in `bad`."""

    def __init__(
        self, bad: Iterable[int] = (), *, on_error: OnError = "stop", start: int = 0, chunk: int = 1000
    ) -> None:
        self.store = ListStore()
        self.called: list[int] = []
        self.plain_effects: list[int] = []
        self.outcomes: list[LaneReport] = []
        self.during: dict[int, Callable[[], None]] = {}
        """What happens while the record at an offset is handled."""
        self._bad = set(bad)
        self._policy = Policy(on_error)
        position = self.claim(start)
        self.lane = Lane(
            ORDERS, InlineLanes(SimpleQueue()), self.transactional, epoch=position.epoch, start=start, scope="shop:A",
            pace=Pace(chunk),
        )  # fmt: skip
        self.start = start

    def claim(self, start: int = 0) -> Position:
        return granted(self.store.claim(GROUP, [ORDERS], "me", lambda ps: dict.fromkeys(ps, Position(start))))[ORDERS]

    @property
    def transactional(self) -> Work:
        def handle(value: bytes, record: Record, tx: Writes) -> None:
            tx.append(record.offset)
            self._handle(record)

        return transactional_work(bind(handle, [Writes]), self._policy, self.store)

    @property
    def plain(self) -> Work:
        def handle(value: bytes, record: Record) -> None:
            self._handle(record)
            self.plain_effects.append(record.offset)

        return plain_work(bind(handle), self._policy)

    def _handle(self, record: Record) -> None:
        self.called.append(record.offset)
        self.during.get(record.offset, lambda: None)()
        if record.offset in self._bad:
            raise LookupError(f"bad {record.offset}")

    def work(self, kind: str, offsets: Sequence[int]) -> None:
        chunk = Chunk([*messages_at(offsets)], offsets[0], offsets[-1])
        (self.plain if kind == "plain" else self.transactional)(self.lane, chunk, self.outcomes.append)

    def effects(self, kind: str) -> list[int]:
        return self.plain_effects if kind == "plain" else self.store.effects

    def progress(self) -> list[Progress]:
        return [outcome for outcome in self.outcomes if isinstance(outcome, Progress)]

    def stored(self) -> int:
        return self.store.row(GROUP, ORDERS).next_offset


both = pytest.mark.parametrize("kind", ["plain", "transactional"])


class TestAllGood:
    @both
    def test_each_record_has_its_effect_once_and_in_order(self, kind: str) -> None:
        bench = Bench()
        bench.work(kind, range(100))
        assert bench.effects(kind) == list(range(100))
        assert bench.called == list(range(100))
        assert sum(p.handled for p in bench.progress()) == 100
        assert bench.progress()[-1].upto == 100

    @both
    def test_gaps_are_passed_with_the_records_around_them(self, kind: str) -> None:
        bench = Bench()
        bench.work(kind, GAPPED)
        assert bench.effects(kind) == GAPPED
        assert bench.progress()[-1].upto == 31
        assert {p.first for p in bench.progress()} == {3}

    @both
    def test_the_first_slice_is_one_record_and_the_next_at_most_twice_as_many(self, kind: str) -> None:
        bench = Bench()
        bench.work(kind, range(200))
        sizes = [p.handled for p in bench.progress()]
        assert sizes[0] == 1
        assert all(after <= 2 * before for before, after in itertools.pairwise(sizes))

    @both
    def test_a_slice_is_never_longer_than_the_lane_allows(self, kind: str) -> None:
        bench = Bench(chunk=3)
        bench.work(kind, range(50))
        assert max(p.handled for p in bench.progress()) <= 3
        assert bench.effects(kind) == list(range(50))

    def test_a_chunk_of_one_is_one_transaction_a_record(self) -> None:
        bench = Bench(chunk=1)
        bench.work("transactional", GAPPED)
        assert [new for _, new in bench.store.moves] == [offset + 1 for offset in GAPPED]

    def test_the_store_moves_from_mark_to_mark_without_a_hole(self) -> None:
        bench = Bench(start=2)
        bench.work("transactional", GAPPED)
        bench.work("transactional", [40, 50])
        olds, news = zip(*bench.store.moves, strict=True)
        assert olds == (2, *news[:-1])
        assert news[-1] == bench.lane.stored == bench.stored() == 51

    def test_what_is_committed_with_the_work_is_reported_as_stored_and_the_other_is_not(self) -> None:
        transactional, plain = Bench(), Bench()
        transactional.work("transactional", [1, 2])
        plain.work("plain", [1, 2])
        assert {p.stored for p in transactional.progress()} == {True}
        assert {p.stored for p in plain.progress()} == {False}

    @both
    def test_the_leader_epoch_of_the_last_record_comes_with_the_progress(self, kind: str) -> None:
        bench = Bench()
        messages = messages_at([1, 2, 3])
        messages[-1]._leader_epoch = 7
        work = bench.plain if kind == "plain" else bench.transactional
        work(bench.lane, Chunk([*messages], 1, 3), bench.outcomes.append)
        assert bench.progress()[-1].leader_epoch == 7


class TestOneFails:
    @both
    def test_by_default_the_lane_stops_before_it_and_names_it(self, kind: str) -> None:
        bench = Bench(bad=[20])
        bench.work(kind, GAPPED)
        assert bench.effects(kind) == [3, 4, 7, 8, 9]
        failure = bench.outcomes[-1]
        assert isinstance(failure, Failure)
        assert failure.message.offset() == 20
        assert failure.handler == "handle"
        assert isinstance(failure.error, LookupError)
        assert bench.lane.stop_reasons
        assert bench.progress()[-1].upto == 10

    @both
    def test_a_skipped_record_has_no_effect_and_its_neighbours_have_theirs_once(self, kind: str) -> None:
        bench = Bench(bad=[7, 20, 30], on_error="skip")
        bench.work(kind, GAPPED)
        assert bench.effects(kind) == [3, 4, 8, 9, 21]
        assert sum(p.skipped for p in bench.progress()) == 3
        assert sum(p.handled for p in bench.progress()) == 5
        assert bench.progress()[-1].upto == 31
        assert not bench.lane.stop_reasons

    @both
    def test_a_skip_is_logged_with_the_place_and_the_cause(self, kind: str, caplog: pytest.LogCaptureFixture) -> None:
        bench = Bench(bad=[7], on_error="skip")
        with caplog.at_level(logging.WARNING, "kconsume"):
            bench.work(kind, GAPPED)
        (line,) = caplog.messages
        assert 'record skipped record=orders/0@7 cause="LookupError: bad 7"' in line

    def test_without_a_transaction_no_record_is_run_twice(self) -> None:
        bench = Bench(bad=[8, 21], on_error="skip")
        bench.work("plain", GAPPED)
        assert bench.called == GAPPED

    def test_in_a_transaction_only_the_slice_of_the_failing_record_is_run_again(self) -> None:
        bench = Bench(bad=[12], on_error="skip")
        bench.work("transactional", range(31))
        again = {offset for offset in bench.called if bench.called.count(offset) > 1}
        assert again <= set(range(7, 15))  # slices of 1, 2, 4, 8 … at most: 12 is in 7 … 14
        assert bench.store.effects == [o for o in range(31) if o != 12]

    @both
    def test_a_payload_that_cannot_be_decoded_is_named_as_that(self, kind: str) -> None:
        bench = Bench()

        def plain(value: str) -> None: ...
        def transactional(value: str, tx: Writes) -> None: ...

        work = plain_work(bind(plain), Policy())
        if kind == "transactional":
            work = transactional_work(bind(transactional, [Writes]), Policy(), bench.store)
        messages = messages_at([1, 2])
        messages[1]._value = b"\xff"
        work(bench.lane, Chunk([*messages], 1, 2), bench.outcomes.append)
        failure = bench.outcomes[-1]
        assert isinstance(failure, Failure)
        assert isinstance(failure.error, DecodeError)
        assert failure.message is messages[1]

    def test_a_constraint_that_fails_at_commit_is_the_record_s_failure(self) -> None:
        bench = Bench(chunk=1)

        def refuse_four() -> None:
            if bench.called[-1] == 4:
                raise sqlite3.IntegrityError("FOREIGN KEY constraint failed")

        bench.store.before_commit = refuse_four
        bench.work("transactional", GAPPED)
        failure = bench.outcomes[-1]
        assert isinstance(failure, Failure)
        assert failure.message.offset() == 4
        assert bench.store.effects == [3]


class TestStop:
    @both
    def test_a_stop_in_the_middle_of_a_slice_keeps_what_was_done(self, kind: str) -> None:
        bench = Bench()
        bench.during[12] = lambda: bench.lane.stop_reasons.append("revoked")
        bench.work(kind, range(40))
        assert bench.effects(kind) == list(range(13))
        assert bench.progress()[-1].upto == 13
        assert not [o for o in bench.outcomes if not isinstance(o, Progress)]

    @both
    def test_a_lane_that_is_stopped_already_starts_nothing(self, kind: str) -> None:
        bench = Bench()
        bench.lane.request_stop("revoked")
        bench.work(kind, [1, 2, 3])
        assert bench.called == []
        assert bench.outcomes == []

    def test_a_stop_before_the_first_record_of_a_slice_commits_nothing(self) -> None:
        bench = Bench()
        bench.store.before_begin = lambda: bench.lane.stop_reasons.append("revoked")
        bench.work("transactional", [1, 2, 3])
        assert bench.outcomes == []
        assert (bench.store.effects, bench.stored()) == ([], 0)

    def test_what_is_run_again_without_its_bad_record_is_done_as_a_whole_or_not_at_all(self) -> None:
        """Else a record would be passed over, and what is written about it would not be there."""
        bench = Bench(bad=[20], on_error="skip")
        bench.during[25] = lambda: bench.lane.stop_reasons.append("revoked")
        bench.work("transactional", range(40))
        begins = bench.progress()[-1].upto
        again = [offset for offset in range(begins, 26) if offset != 20]
        assert bench.called == [*range(21), *again], "its slice is run again without it, up to the stop"
        assert begins < 20
        assert (bench.store.effects, bench.stored()) == ([*range(begins)], begins)


class TestTheStoreRefuses:
    def test_fenced_before_it_begins(self) -> None:
        bench = Bench()
        bench.claim()
        bench.work("transactional", GAPPED)
        (outcome,) = bench.outcomes
        assert isinstance(outcome, StoreRefused)
        assert isinstance(outcome.error, Fenced)
        assert bench.called == []
        assert bench.lane.stop_reasons

    def test_fenced_while_a_handler_runs_undoes_the_slice(self) -> None:
        bench = Bench()
        bench.during[8] = lambda: void(bench.claim())
        bench.work("transactional", GAPPED)
        assert isinstance(bench.outcomes[-1], StoreRefused)
        assert bench.store.effects == [3, 4, 7] or bench.store.effects == [3]
        assert [o for o in GAPPED if o < bench.stored()] == bench.store.effects

    def test_away_is_not_the_record_s_fault(self) -> None:
        bench = Bench(on_error="skip")
        bench.store.before_begin = raising(StoreUnavailable("disk full"))
        bench.work("transactional", GAPPED)
        (outcome,) = bench.outcomes
        assert isinstance(outcome, StoreRefused)
        assert isinstance(outcome.error, StoreUnavailable)

    def test_away_at_commit_leaves_the_outcome_open_and_is_not_tried_again_here(self) -> None:
        bench = Bench()
        bench.store.before_commit = raising(StoreUnavailable("connection lost in COMMIT"))
        bench.work("transactional", GAPPED)
        assert isinstance(bench.outcomes[-1], StoreRefused)
        assert bench.called == [3]

    @pytest.mark.parametrize("error", [Fenced("a rival"), StoreUnavailable("disk full")])
    def test_also_while_a_record_is_skipped(self, error: Exception) -> None:
        bench = Bench(bad=[3], on_error="skip")
        bench.store.before_begin = at_the_second_call(error)
        bench.work("transactional", GAPPED)
        (outcome,) = bench.outcomes
        assert isinstance(outcome, StoreRefused)
        assert outcome.error is error
        assert bench.stored() == 0

    @pytest.mark.parametrize("error", [StoreError("statement timeout"), OSError("too many open files")])
    @pytest.mark.parametrize("when", ["before_begin", "before_commit"])
    def test_a_record_that_is_alone_is_not_skipped_for_what_the_store_could_not_do(
        self, when: str, error: Exception
    ) -> None:
        if when == "before_commit" and isinstance(error, OSError):
            error = StoreError("too many open files")  # at the exit, what a store raises it names as its own
        bench = Bench(on_error="skip", chunk=1)
        setattr(bench.store, when, raising(error))
        bench.work("transactional", GAPPED)
        (outcome,) = bench.outcomes
        assert isinstance(outcome, StoreRefused)
        assert outcome.error is error
        assert bench.stored() == 0

    def test_an_error_of_the_store_that_nobody_foresaw_is_reported_too(self) -> None:
        """A worker that dies of it without a word would leave the partition stopped, and nobody told."""
        bench = Bench(bad=[3], on_error="skip")
        bench.store.before_begin = at_the_second_call(sqlite3.IntegrityError("a trigger on kconsume_offsets"))
        bench.work("transactional", GAPPED)
        assert isinstance(bench.outcomes[-1], Failure | StoreRefused)

    @pytest.mark.parametrize("error", [Fenced("in another store"), StoreUnavailable("another store")])
    def test_an_error_that_the_handler_raised_is_the_handler_s_whatever_its_class(self, error: Exception) -> None:
        """A handler may use a store of its own; taken for ours, its poison record would be tried for ever."""
        bench = Bench()
        bench.during[4] = raising(error)
        bench.work("transactional", GAPPED)
        failure = bench.outcomes[-1]
        assert isinstance(failure, Failure)
        assert failure.message.offset() == 4


class TestOnSqlite:
    """The same on a store that is not made for the test."""

    def test_a_handler_whose_own_other_file_is_away_fails_itself(self, tmp_path: Path) -> None:
        def handle(value: bytes, tx: sqlite3.Connection) -> None:
            sqlite3.connect(tmp_path / "no such folder" / "other.db")

        outcomes = on_sqlite(tmp_path, handle, [0, 1])
        assert isinstance(outcomes[-1], Failure)
        assert isinstance(outcomes[-1].error, sqlite3.OperationalError)

    def test_a_wrong_statement_is_the_handler_s_failure(self, tmp_path: Path) -> None:
        def handle(value: bytes, tx: sqlite3.Connection) -> None:
            tx.execute("insert into nowhere values (1)")

        outcomes = on_sqlite(tmp_path, handle, [0, 1])
        assert isinstance(outcomes[-1], Failure)
        assert "no such table: nowhere" in str(outcomes[-1].error)

    def test_a_handler_may_set_a_row_factory(self, tmp_path: Path) -> None:
        def handle(value: bytes, tx: sqlite3.Connection) -> None:
            tx.row_factory = as_dict
            assert tx.execute("select 1 as one").fetchone() == {"one": 1}

        outcomes = on_sqlite(tmp_path, handle, range(20))
        assert [type(outcome) for outcome in outcomes] == [Progress] * len(outcomes), outcomes[-1]

    def test_a_handler_may_set_a_text_factory(self, tmp_path: Path) -> None:
        def handle(value: bytes, tx: sqlite3.Connection) -> None:
            tx.text_factory = bytes

        outcomes = on_sqlite(tmp_path, handle, range(20))
        assert [type(outcome) for outcome in outcomes] == [Progress] * len(outcomes), outcomes[-1]
        store = SqliteStore(tmp_path / "shop.db")
        assert store.load(GROUP, [ORDERS])[ORDERS].next_offset == 20
        store.close()


def on_sqlite(folder: Path, handle: Callable[..., None], offsets: Sequence[int]) -> list[LaneReport]:
    store = SqliteStore(folder / "shop.db")
    position = granted(store.claim(GROUP, [ORDERS], "me", lambda ps: dict.fromkeys(ps, Position(0))))[ORDERS]
    work = transactional_work(bind(handle, store.connection_types), Policy(), store)
    lane = Lane(
        ORDERS, InlineLanes(SimpleQueue()), work, epoch=position.epoch, start=0, scope="shop:A", pace=Pace(1000)
    )  # fmt: skip
    outcomes: list[LaneReport] = []
    work(lane, Chunk([*messages_at(offsets)], offsets[0], offsets[-1]), outcomes.append)
    try:
        store.load(GROUP, [ORDERS])  # what the handler left behind on the connection must not break the store
    finally:
        store.close()
    return outcomes


def as_dict(cursor: sqlite3.Cursor, row: tuple[Any, ...]) -> dict[str, Any]:
    return {column[0]: value for column, value in zip(cursor.description, row, strict=True)}


def raising(error: Exception) -> Callable[[], None]:
    def act() -> None:
        raise error

    return act


def at_the_second_call(error: Exception) -> Callable[[], None]:
    calls = itertools.count(1)

    def act() -> None:
        if next(calls) == 2:
            raise error

    return act


def void(_: object) -> None: ...


steps = st.lists(st.integers(1, 4), min_size=1, max_size=40)


@settings(max_examples=1500, deadline=None)
@given(
    kind=st.sampled_from(["plain", "transactional"]),
    gaps=steps,
    bad=st.sets(st.integers(0, 39), max_size=6),
    on_error=st.sampled_from(["stop", "skip"]),
    chunk=st.integers(1, 50),
    cuts=st.sets(st.integers(1, 39), max_size=4),
    stop_at=st.none() | st.integers(0, 39),
    fence_at=st.none() | st.integers(0, 39),
)
def test_the_effects_are_exactly_the_good_records_below_the_stop_point(
    kind: str,
    gaps: list[int],
    bad: set[int],
    on_error: OnError,
    chunk: int,
    cuts: set[int],
    stop_at: int | None,
    fence_at: int | None,
) -> None:
    """`bad`, `stop_at` and `fence_at` count records; `cuts` divides them into chunks."""
    offsets = list(itertools.accumulate(gaps))
    numbered = dict(enumerate(offsets))
    poison = {numbered[n] for n in bad if n in numbered}
    bench = Bench(bad=poison, on_error=on_error, chunk=chunk)
    if stop_at in numbered:
        bench.during[numbered[stop_at]] = lambda: bench.lane.stop_reasons.append("revoked")
    if fence_at in numbered and kind == "transactional" and fence_at != stop_at:
        bench.during[numbered[fence_at]] = lambda: void(bench.claim())
    tracker = Watermark(0)
    edges = [0, *sorted(cut for cut in cuts if cut < len(offsets)), len(offsets)]
    for begin, end in itertools.pairwise(edges):
        if bench.lane.stop_reasons:
            break
        tracker.delivered(offsets[begin], offsets[end - 1])
        bench.work(kind, offsets[begin:end])
    for progress in bench.progress():
        tracker.finished(progress.first, progress.upto)

    reached = max((p.upto for p in bench.progress()), default=0)
    below = [offset for offset in offsets if offset < reached]
    assert bench.effects(kind) == [offset for offset in below if offset not in poison]
    assert sum(p.handled for p in bench.progress()) == len(bench.effects(kind))
    assert sum(p.skipped for p in bench.progress()) == len(poison.intersection(below))
    assert tracker.watermark <= min((o for o in offsets if o >= reached), default=reached)
    if kind == "transactional":
        assert bench.stored() == bench.lane.stored == reached
        assert [old for old, _ in bench.store.moves] == [0, *(new for _, new in bench.store.moves)][:-1]
    else:
        assert len(bench.called) == len(set(bench.called))
    last = bench.outcomes[-1] if bench.outcomes else None
    if isinstance(last, Failure):
        assert on_error == "stop"
        assert last.message.offset() == min(o for o in offsets if o >= reached) in poison
    elif not bench.lane.stop_reasons:
        assert below == offsets


def test_control_a_store_that_does_not_undo_is_found_out() -> None:
    """The same bench, with a transaction whose writes are there whether it commits or not."""
    bench = Bench(bad=[8], on_error="skip")

    class Leaky(Writes):
        def append(self, offset: int) -> None:
            super().append(offset)
            bench.store.effects.append(offset)

    def handle(value: bytes, record: Record, tx: Writes) -> None:
        Leaky().append(record.offset)
        bench._handle(record)

    work = transactional_work(bind(handle, [Writes]), Policy("skip"), bench.store)
    work(bench.lane, Chunk([*messages_at(GAPPED)], 3, 30), bench.outcomes.append)
    assert bench.store.effects != [o for o in GAPPED if o != 8]


def test_records_of_another_partition_have_their_own_row() -> None:
    store = ListStore()
    other = Partition("orders", 1)
    store.claim(GROUP, [ORDERS, other], "me", lambda ps: dict.fromkeys(ps, Position(5)))
    with store.transaction(GROUP, other, 1) as tx:
        tx.advance(5, 9)
    assert store.row(GROUP, ORDERS).next_offset == 5
    assert store.row(GROUP, other).next_offset == 9

"""Retries in place and dead letters on the course of a chunk: order, attempts, what is applied once, what is held."""

from __future__ import annotations

import asyncio
import gc
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any, cast

import pytest
import tenacity
from hypothesis import given
from hypothesis import strategies as st

from kconsume import BatchError, DeadLetter, Record, Retry
from kconsume._handlers.binding import bind
from kconsume._kafka.outgoing import Outgoing
from kconsume._runtime.lanes.inline import InlineLanes
from kconsume._runtime.lanes.lane import Chunk, Lane
from kconsume._runtime.lanes.pacing import Pace
from kconsume._runtime.lanes.reports import Failure, LaneReport, Progress, Suspended
from kconsume._runtime.output.publisher import Publisher
from kconsume._runtime.processing.blocking_tx import off_the_loop
from kconsume._runtime.processing.driver import LoopDriver, ThreadDriver
from kconsume._runtime.processing.plain import AsyncPlainAttempt, PlainAttempt
from kconsume._runtime.processing.rules import ChunkRules
from kconsume._runtime.processing.transactional import AsyncTransactionalAttempt, TransactionalAttempt
from kconsume.backends import Position
from kconsume.backends.claim import granted
from kconsume.errors import SendFailed, TooManyFailures
from kconsume.failures.dead_letter import DeadLetterLimit
from kconsume.failures.policy import OnError, Policy
from kconsume.failures.retry_topics import Moment, RetryTopics
from tests.unit.fakes import ORDERS, FakeMessage, ListStore, Writes, messages_at

pytestmark = pytest.mark.usefixtures("no_time_passes")

GROUP = "shop"
FORMS = ["plain", "batch", "transaction", "batch transaction", "async", "async transaction"]


class Post:
    """Confirms what it is given, unless it is told to fail some times first."""

    def __init__(self) -> None:
        self.letters: list[Outgoing] = []
        self.failing = 0
        self.deliveries = 0

    def deliver(self, outgoing: Sequence[Outgoing]) -> Future[None]:
        self.deliveries += 1
        done: Future[None] = Future()
        if self.failing:
            self.failing -= 1
            done.set_exception(SendFailed("the topic does not exist: create it"))
        else:
            self.letters.extend(outgoing)
            done.set_result(None)
        return done

    @property
    def offsets(self) -> list[int]:
        return [int(dict(letter.headers)["kconsume-offset"]) for letter in self.letters]


@dataclass
class Bench:
    """A lane with a handler that fails on some records, each so many times."""

    form: str
    fails: Mapping[int, int]
    on_error: OnError = "stop"
    retry: Retry | None = None
    names: bool = False
    """Whether a batch handler says which of its records failed."""
    gauge: DeadLetterLimit | None = None
    post: Post = field(default_factory=Post)
    store: ListStore = field(default_factory=ListStore)
    effects_outside: list[int] = field(default_factory=list)
    attempts: list[tuple[int, int]] = field(default_factory=list)
    """The record that failed and its number, at each call."""
    rests: list[float] = field(default_factory=list)
    reports: list[LaneReport] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.failures: Counter[int] = Counter()
        position = granted(self.store.claim(GROUP, [ORDERS], "me", lambda ps: dict.fromkeys(ps, Position(0))))[ORDERS]
        self.lane = Lane(
            ORDERS, InlineLanes(SimpleQueue()), self.work, epoch=position.epoch, start=0, scope="shop:T",
            pace=Pace(1000),
        )  # fmt: skip
        self.lane.pace.size = 100
        self.during_rest: Callable[[], None] = lambda: None

    def run(self, offsets: Sequence[int]) -> None:
        chunk = Chunk([*messages_at(offsets)], offsets[0], offsets[-1])
        if "async" in self.form:
            asyncio.run(self._run_async(chunk))
            return
        parked = cast("Suspended | None", self.work(self.lane, chunk, self.reports.append))
        while parked is not None:
            self._rested(parked)
            parked = cast("Suspended | None", parked.resume())

    async def _run_async(self, chunk: Chunk) -> None:
        parked = await cast("Awaitable[Suspended | None]", self.work(self.lane, chunk, self.reports.append))
        while parked is not None:
            self._rested(parked)
            parked = await cast("Awaitable[Suspended | None]", parked.resume())

    def _rested(self, parked: Suspended) -> None:
        self.rests.append(parked.seconds)
        self.during_rest()

    @property
    def work(self) -> Any:
        policy = Policy(self.on_error, self.retry)
        mail = None if policy.dead_letter is None else Publisher(self.post, policy.dead_letter, self.post, 10**6)
        stores = "transaction" in self.form
        binding = bind(self._handler(), [Writes] if stores else [])
        course = ChunkRules(binding, policy, stores=stores, group=GROUP, dead_letter_limit=self.gauge, clock=Moment.now)
        batched = binding.batched
        if binding.is_async:
            if stores:
                attempt = AsyncTransactionalAttempt(
                    binding.async_runner(), batched, off_the_loop(self.store), GROUP, mail
                )
                return LoopDriver(course, attempt)
            return LoopDriver(course, AsyncPlainAttempt(binding.async_runner(), batched, mail))
        if stores:
            return ThreadDriver(course, TransactionalAttempt(binding.runner(), batched, self.store, GROUP, mail))
        return ThreadDriver(course, PlainAttempt(binding.runner(), batched, mail))

    def _handler(self) -> Callable[..., Any]:
        def plain(record: Record) -> None:
            self._look([record])
            self.effects_outside.append(record.offset)

        def batch(records: list[Record]) -> None:
            good = self._look(records)
            self.effects_outside.extend(good)
            if len(good) < len(records):
                raise BatchError(
                    {i: LookupError(str(r.offset)) for i, r in enumerate(records) if r.offset not in set(good)}
                )

        def transaction(record: Record, tx: Writes) -> None:
            self._look([record])
            tx.append(record.offset)

        def batch_transaction(records: list[Record], tx: Writes) -> None:
            for offset in self._look(records):
                tx.append(offset)

        async def awaited(record: Record) -> None:
            plain(record)

        async def awaited_transaction(record: Record, tx: Writes) -> None:
            transaction(record, tx)

        forms: dict[str, Callable[..., Any]] = {
            "plain": plain, "batch": batch, "transaction": transaction, "batch transaction": batch_transaction,
            "async": awaited, "async transaction": awaited_transaction,
        }  # fmt: skip
        return forms[self.form]

    def _look(self, records: Sequence[Record]) -> list[int]:
        """Those that pass now; raises for the first that does not, unless failures are named."""
        good = []
        for record in records:
            if self.failures[record.offset] < self.fails.get(record.offset, 0):
                self.failures[record.offset] += 1
                self.attempts.append((record.offset, record.attempt))
                if not self.names:
                    raise LookupError(f"bad {record.offset}")
            else:
                good.append(record.offset)
        return good

    @property
    def effects(self) -> list[int]:
        return self.store.effects if "transaction" in self.form else self.effects_outside

    @property
    def reached(self) -> int:
        return max((r.upto for r in self.reports if isinstance(r, Progress)), default=0)

    @property
    def failure(self) -> Failure | None:
        return next((r for r in self.reports if isinstance(r, Failure)), None)


FOR_EVER = 10_000


@pytest.mark.parametrize("form", FORMS)
def test_a_record_that_passes_in_the_end_has_its_effect_once_and_in_its_place(form: str) -> None:
    bench = Bench(form, {3: 2, 7: 1}, retry=Retry(5, wait=0.2))
    bench.run(range(10))
    assert bench.effects == list(range(10))
    assert bench.reached == 10
    assert bench.failure is None
    assert bench.rests, "it waited"


@pytest.mark.parametrize(
    ("form", "fails"), [*((form, {}) for form in FORMS), ("plain", {3: 10_000}), ("async", {3: 10_000})]
)
def test_records_are_freed_when_their_chunk_is_done_and_not_when_the_collector_comes_by(
    form: str, fails: Mapping[int, int]
) -> None:
    bench, others = Bench(form, fails, DeadLetter("dead")), messages_there()
    gc.disable()
    try:
        bench.run(range(10))
        assert len(bench.effects) == 10 - len(fails)
        bench.reports.clear()
        assert messages_there().keys() <= others.keys()
    finally:
        gc.enable()


def messages_there() -> dict[int, FakeMessage]:
    """All that are alive, those of other tests included, by their ids."""
    return {id(each): each for each in gc.get_objects() if isinstance(each, FakeMessage)}


@pytest.mark.parametrize("form", FORMS)
def test_attempts_are_counted_and_then_it_ends(form: str) -> None:
    bench = Bench(form, {3: FOR_EVER}, retry=Retry(4, wait=0.0))
    bench.run([3])
    assert bench.attempts == [(3, 1), (3, 2), (3, 3), (3, 4)]
    assert bench.failure is not None
    assert bench.reached == 0
    assert bench.effects == []


@pytest.mark.parametrize("form", FORMS)
def test_a_dead_letter_is_written_once_and_the_others_are_done(form: str) -> None:
    bench = Bench(form, {2: FOR_EVER, 5: FOR_EVER}, DeadLetter("dead"), Retry(2, wait=0.0))
    bench.run(range(8))
    assert bench.effects == [0, 1, 3, 4, 6, 7]
    assert bench.post.offsets == [2, 5]
    assert bench.reached == 8
    assert {dict(letter.headers)["kconsume-attempts"] for letter in bench.post.letters} <= {b"1", b"2"}


@pytest.mark.parametrize("form", FORMS)
def test_a_dead_letter_that_cannot_be_written_holds_the_lane_until_it_can(form: str) -> None:
    bench = Bench(form, {2: FOR_EVER}, DeadLetter("dead"))
    bench.post.failing = 3
    bench.run(range(4))
    assert bench.effects == [0, 1, 3]
    assert bench.post.offsets == [2]
    assert bench.reached == 4
    assert sum(bench.rests) == pytest.approx(1 + 2 + 4)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("on_error", ["skip", DeadLetter("dead")])
def test_told_to_stop_while_it_waits_it_passes_nothing(form: str, on_error: OnError) -> None:
    bench = Bench(form, {2: FOR_EVER}, on_error, Retry(50, wait=5.0))
    bench.during_rest = lambda: bench.lane.stop_reasons.append("revoked")
    bench.run(range(4))
    assert len(bench.rests) == 1, "it looks up within a twentieth of a second"
    assert bench.rests[0] <= 0.05
    assert bench.effects == [0, 1] or bench.form.startswith("batch")
    assert 2 not in bench.effects
    assert bench.reached <= 2
    assert bench.post.letters == []
    assert bench.failure is None


@pytest.mark.parametrize("form", FORMS)
def test_told_to_stop_while_a_letter_cannot_be_written_it_passes_nothing(form: str) -> None:
    bench = Bench(form, {0: FOR_EVER}, DeadLetter("dead"))
    bench.post.failing = 100
    bench.during_rest = lambda: bench.lane.stop_reasons.append("shutdown")
    bench.run([0])
    assert bench.reached == 0
    assert bench.post.letters == []


@pytest.mark.parametrize("form", FORMS)
def test_too_many_dead_letters_stop_before_the_next_is_written(form: str) -> None:
    bench = Bench(form, dict.fromkeys(range(10), FOR_EVER), DeadLetter("dead", limit=3))
    bench.gauge = DeadLetterLimit(3, 60.0, lambda: 0.0)
    bench.lane.pace.size = 1
    for offset in range(10):
        if not bench.lane.stop_reasons:
            bench.run([offset])
    assert bench.post.offsets == [0, 1, 2]
    assert bench.failure is not None
    assert isinstance(bench.failure.error, TooManyFailures)
    assert bench.failure.message.offset() == 3
    assert bench.reached == 3


@pytest.mark.parametrize("form", FORMS)
def test_each_dead_letter_counts_once_however_often_its_record_was_run(form: str) -> None:
    bench = Bench(form, dict.fromkeys((3, 40, 41, 77), FOR_EVER), DeadLetter("dead", limit=4))
    bench.gauge = DeadLetterLimit(4, 60.0, lambda: 0.0)
    bench.run(range(100))
    assert bench.post.offsets == [3, 40, 41, 77]
    assert bench.failure is None
    assert bench.reached == 100


def test_a_record_on_its_way_to_a_retry_topic_is_no_dead_letter_when_a_later_one_stops_the_lane() -> None:
    def handle(records: list[Record]) -> None:
        raise BatchError({0: LookupError("later"), 1: SystemExit(3)})

    bench, binding, gauge = Bench("batch", {}), bind(handle), DeadLetterLimit(1, 60.0, lambda: 0.0)
    policy = Policy(DeadLetter("dead", limit=1), RetryTopics((5,)))
    chain = policy.retry_chain((ORDERS.topic,), GROUP)
    rules = ChunkRules(binding, policy, group=GROUP, dead_letter_limit=gauge, retry_chain=chain, clock=Moment.now)
    mail = Publisher(bench.post, policy.dead_letter, bench.post, 10**6)
    work = ThreadDriver(rules, PlainAttempt(binding.runner(), True, mail))
    work(bench.lane, Chunk([*messages_at(range(3))], 0, 2), bench.reports.append)
    assert [letter.topic for letter in bench.post.letters] == ["orders.shop.retry.1"]
    assert isinstance(bench.failure and bench.failure.error, SystemExit)
    assert bench.reached == 1
    assert not gauge.exceeds(1), "none of the dead letters that are allowed was written"


@pytest.mark.parametrize("form", ["batch", "batch transaction"])
def test_a_batch_is_tried_as_a_whole_and_then_the_bad_record_is_found(form: str) -> None:
    bench = Bench(form, {5: FOR_EVER}, DeadLetter("dead"), Retry(3, wait=0.0))
    bench.run(range(16))
    assert bench.effects == [n for n in range(16) if n != 5]
    assert bench.post.offsets == [5]
    assert [attempt for _, attempt in bench.attempts][:3] == [1, 2, 3]


@pytest.mark.parametrize("retry", [None, Retry(3, wait=0.0)])
def test_records_that_a_batch_handler_names_are_tried_again_and_the_good_ones_are_not(retry: Retry | None) -> None:
    bench = Bench("batch", {2: 1, 6: FOR_EVER}, DeadLetter("dead"), retry, names=True)
    bench.run(range(8))
    expected = [0, 1, 3, 4, 5, 7] if retry is None else [0, 1, 3, 4, 5, 7, 2]
    assert bench.effects == expected
    assert bench.post.offsets == ([2, 6] if retry is None else [6])
    assert bench.reached == 8


def test_the_letter_of_a_record_that_was_found_in_a_batch_says_how_often_the_batch_was_tried() -> None:
    bench = Bench("batch", {5: FOR_EVER}, DeadLetter("dead"), Retry(3, wait=0.0))
    bench.run(range(16))
    (letter,) = bench.post.letters
    assert dict(letter.headers)["kconsume-attempts"] == b"3"


def test_where_nobody_waits_a_stop_by_time_counts_what_would_have_been_waited() -> None:
    bench = Bench("plain", {0: FOR_EVER}, DeadLetter("dead"), Retry(tenacity.stop_after_delay(2), wait=0.5))
    bench.run([0])
    assert len(bench.attempts) == 5
    assert bench.post.offsets == [0]


def test_dead_letters_that_are_near_each_other_are_written_together() -> None:
    bench = Bench("plain", dict.fromkeys(range(0, 100, 10), FOR_EVER), DeadLetter("dead"))
    bench.run(range(100))
    assert bench.post.deliveries == 1
    assert bench.post.offsets == list(range(0, 100, 10))
    assert bench.effects == [n for n in range(100) if n % 10]
    assert bench.reached == 100


@pytest.mark.parametrize("form", ["plain", "async"])
def test_a_slice_is_not_left_for_records_that_are_skipped(form: str) -> None:
    bench = Bench(form, dict.fromkeys(range(0, 100, 10), FOR_EVER), "skip")
    bench.run(range(100))
    assert [(p.upto, p.handled, p.skipped) for p in bench.reports if isinstance(p, Progress)] == [(100, 90, 10)]
    assert bench.effects == [n for n in range(100) if n % 10]


def test_nothing_behind_a_letter_is_reported_before_it_is_written() -> None:
    bench = Bench("plain", {2: FOR_EVER}, DeadLetter("dead"))
    bench.post.failing = 1
    bench.during_rest = lambda: reached.append(bench.reached)
    reached: list[int] = []
    bench.run(range(6))
    assert set(reached) == {2}, "as long as it could not be written"
    assert bench.reached == 6


def test_a_slice_that_was_undone_for_one_record_is_run_again_without_it_and_not_piece_by_piece() -> None:
    bench = Bench("transaction", {50: FOR_EVER}, DeadLetter("dead"))
    bench.run(range(100))
    assert bench.store.moves == [(0, 100)]
    assert bench.effects == [n for n in range(100) if n != 50]


def test_an_error_that_is_no_error_of_the_record_is_not_tried_again() -> None:
    bench = Bench("plain", {}, DeadLetter("dead"), Retry(5, wait=0.0))

    def stop(record: Record) -> None:
        raise SystemExit(3)

    bench._handler = lambda: stop  # type: ignore[method-assign]
    bench.run([0])
    assert isinstance(bench.failure and bench.failure.error, SystemExit)
    assert bench.post.letters == []


cases = st.dictionaries(st.integers(0, 19), st.integers(1, 6), max_size=6)


@given(st.sampled_from(FORMS), cases, st.integers(1, 4), st.booleans())
def test_whatever_fails_good_and_dead_are_disjoint_their_union_is_all_and_order_is_kept(
    form: str, fails: dict[int, int], attempts: int, buries: bool
) -> None:
    bench = Bench(form, fails, DeadLetter("dead") if buries else "skip", Retry(attempts, wait=0.0))
    bench.run(range(20))
    dead = bench.post.offsets if buries else sorted(set(range(20)) - set(bench.effects))
    assert sorted([*bench.effects, *dead]) == list(range(20)), "each exactly once, here or there"
    assert bench.effects == sorted(bench.effects), "in order, also through retries"
    assert dead == sorted(dead)
    assert set(dead) <= set(fails)
    assert bench.reached == 20
    never = {offset for offset, times in fails.items() if times >= FOR_EVER}
    assert never <= set(dead)


def test_control_a_course_that_passes_a_record_before_its_letter_is_written_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kconsume._runtime.processing.failure_decisions.FailureDecisions.drafts", lambda *_: [])
    with pytest.raises(AssertionError):
        test_a_dead_letter_is_written_once_and_the_others_are_done("plain")

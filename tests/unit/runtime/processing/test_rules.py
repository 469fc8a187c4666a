"""The course of records and batches: whatever fails where, good ones have their effect and nothing undone is passed."""

from __future__ import annotations

import asyncio
import itertools
import math
import sqlite3
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any, cast

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kconsume import BatchError, DecodeError, Sender
from kconsume._handlers.binding import bind
from kconsume._handlers.rate import Limiter, Rate
from kconsume._kafka.outgoing import Outgoing
from kconsume._kafka.producer import Producer
from kconsume._runtime.assignment.watermark import Watermark
from kconsume._runtime.lanes.inline import InlineLanes
from kconsume._runtime.lanes.lane import Chunk, Lane, Work
from kconsume._runtime.lanes.pacing import Pace
from kconsume._runtime.lanes.reports import Failure, Progress, StoreRefused
from kconsume._runtime.lanes.reports import LaneReport as Report
from kconsume._runtime.output.publisher import Publisher
from kconsume._runtime.processing.blocking_tx import off_the_loop
from kconsume._runtime.processing.driver import LoopDriver, ThreadDriver
from kconsume._runtime.processing.plain import AsyncPlainAttempt, PlainAttempt
from kconsume._runtime.processing.rules import ChunkRules
from kconsume._runtime.processing.steps import CallHandler, SkipRecords, StepResult, Wait
from kconsume._runtime.processing.transactional import AsyncTransactionalAttempt, TransactionalAttempt
from kconsume.backends import Position
from kconsume.backends.claim import granted
from kconsume.errors import ConfigurationError, InvalidHandler, SendFailed
from kconsume.failures.policy import OnError, Policy
from kconsume.failures.retry_topics import Moment
from tests.unit.fakes import ORDERS, FakeMessage, ListStore, Writes

pytestmark = pytest.mark.usefixtures("no_time_passes")

GROUP = "shop"
ROTTEN = b"\xff\xfe"


@pytest.fixture(scope="module", autouse=True)
def loop() -> Iterator[None]:
    """One loop for all examples: making one for each would cost more than the rest."""
    with asyncio.Runner() as runner:
        Bench.runner = runner
        yield


class Post:
    """An outlet that confirms at once, and remembers."""

    def __init__(self, fails: Exception | None = None) -> None:
        self.confirmed: list[int] = []
        self.fails = fails

    def deliver(self, outgoing: Sequence[Outgoing]) -> Future[None]:
        answer: Future[None] = Future()
        if self.fails is not None:
            answer.set_exception(self.fails)
        else:
            self.confirmed.extend(int(cast(bytes, each.value)) for each in outgoing)
            answer.set_result(None)
        return answer


@dataclass
class Case:
    """What is fetched, and what happens to it. Numbers count records; `offsets` are theirs."""

    offsets: list[int]
    transactional: bool = True
    is_async: bool = False
    sends: bool = False
    names: bool = True
    """Whether the handler names the records that fail, or only raises."""
    bad: set[int] = field(default_factory=set)
    rotten: set[int] = field(default_factory=set)
    """Those that cannot be decoded."""
    refused: set[int] = field(default_factory=set)
    """Those with which no COMMIT succeeds."""
    on_error: OnError = "stop"
    cuts: set[int] = field(default_factory=set)
    """Where one batch ends and the next begins."""
    stop_at: int | None = None
    fence_at: int | None = None
    batched: bool = True

    def at(self, numbers: set[int]) -> set[int]:
        return {self.offsets[n] for n in numbers if n < len(self.offsets)}

    @property
    def batches(self) -> list[list[int]]:
        edges = [0, *sorted(cut for cut in self.cuts if cut < len(self.offsets)), len(self.offsets)]
        return [self.offsets[begin:end] for begin, end in itertools.pairwise(edges)]


class Bench:
    """A lane with a handler that writes each offset, does what the case says, and is watched."""

    runner: asyncio.Runner

    def __init__(self, case: Case, *, stores: bool | None = None) -> None:
        self.case = case
        self.store = ListStore()
        self.post = Post()
        self.calls: list[list[int]] = []
        self.effects_outside: list[int] = []
        self.reports: list[Report] = []
        self.poison = case.at(case.bad)
        self.rotten = case.at(case.rotten)
        self.refused = case.at(case.refused) if case.transactional else set()
        self.during: dict[int, Callable[[], object]] = {}
        self._in_hand: list[int] = []
        position = self.claim()
        self.lane = Lane(
            ORDERS, InlineLanes(SimpleQueue()), lambda *_: None, epoch=position.epoch, start=0, scope="shop:A",
            pace=Pace(1000),
        )  # fmt: skip
        self._plan_interruptions()
        self.store.before_begin = self._in_hand.clear
        self.store.before_commit = self._refuse
        self.binding = bind(self._form(), [Writes])
        stores = case.transactional if stores is None else stores
        self.course = ChunkRules(self.binding, Policy(case.on_error), stores=stores, clock=Moment.now)

    def claim(self) -> Position:
        return granted(self.store.claim(GROUP, [ORDERS], "me", lambda ps: dict.fromkeys(ps, Position(0))))[ORDERS]

    def _plan_interruptions(self) -> None:
        case, count = self.case, len(self.case.offsets)
        if case.stop_at is not None and case.stop_at < count:
            self.during[case.offsets[case.stop_at]] = lambda: self.lane.stop_reasons.append("revoked")
        if case.fence_at is not None and case.fence_at < count and case.transactional and case.fence_at != case.stop_at:
            self.during[case.offsets[case.fence_at]] = self.claim

    def _refuse(self) -> None:
        if self.refused.intersection(self._in_hand):
            raise sqlite3.IntegrityError("FOREIGN KEY constraint failed")

    # The handler, in each of its forms

    def _handle(self, values: list[str], write: Callable[[int], None], sender: Sender | None) -> None:
        offsets = [int(value) for value in values]
        self.calls.append(offsets)
        self._in_hand.extend(offsets)
        for offset in offsets:
            self.during.get(offset, lambda: None)()
        errors = {index: LookupError(f"bad {o}") for index, o in enumerate(offsets) if o in self.poison}
        if errors and not self.case.names:
            raise next(iter(errors.values()))
        for offset in offsets:
            if offset not in self.poison:
                write(offset)
                if sender is not None:
                    sender.send("out", str(offset))
        if errors:
            raise BatchError(errors)

    def _form(self) -> Callable[..., object]:
        """The handler in the form that the case asks for."""
        forms = self._sync_forms() if not self.case.is_async else self._async_forms()
        form = forms[self.case.transactional, self.case.sends]
        form.__annotations__["given"] = list[str] if self.case.batched else str
        return form

    def _sync_forms(self) -> dict[tuple[bool, bool], Callable[..., object]]:
        outside = self.effects_outside.append

        def plain(given: Any) -> None:
            self._handle(many(given), outside, None)

        def sends(given: Any, sender: Sender) -> None:
            self._handle(many(given), outside, sender)

        def stores(given: Any, tx: Writes) -> None:
            self._handle(many(given), tx.append, None)

        def stores_sends(given: Any, tx: Writes, sender: Sender) -> None:
            self._handle(many(given), tx.append, sender)

        return {(False, False): plain, (False, True): sends, (True, False): stores, (True, True): stores_sends}

    def _async_forms(self) -> dict[tuple[bool, bool], Callable[..., object]]:
        outside = self.effects_outside.append

        async def plain(given: Any) -> None:
            await asyncio.sleep(0)
            self._handle(many(given), outside, None)

        async def sends(given: Any, sender: Sender) -> None:
            await asyncio.sleep(0)
            self._handle(many(given), outside, sender)

        async def stores(given: Any, tx: Writes) -> None:
            await asyncio.sleep(0)
            self._handle(many(given), tx.append, None)

        async def stores_sends(given: Any, tx: Writes, sender: Sender) -> None:
            await asyncio.sleep(0)
            self._handle(many(given), tx.append, sender)

        return {(False, False): plain, (False, True): sends, (True, False): stores, (True, True): stores_sends}

    # Running it

    def run(self) -> Bench:
        for offsets in self.case.batches:
            if self.lane.stop_reasons:
                break
            self.work(offsets)
        return self

    def work(self, offsets: Sequence[int]) -> None:
        messages = [FakeMessage(ROTTEN if o in self.rotten else b"%d" % o, offset=o) for o in offsets]
        chunk = Chunk([*messages], offsets[0], offsets[-1])
        outlet = cast(Producer, self.post) if self.case.sends else None
        ran = work_of(self.course, self.store, outlet)(self.lane, chunk, self.reports.append)
        if ran is not None:
            self.runner.run(cast(Any, ran))

    # What came of it

    @property
    def effects(self) -> list[int]:
        return self.store.effects if self.case.transactional else self.effects_outside

    @property
    def progress(self) -> list[Progress]:
        return [report for report in self.reports if isinstance(report, Progress)]

    @property
    def reached(self) -> int:
        return max((p.upto for p in self.progress), default=0)

    @property
    def last(self) -> Report | None:
        return self.reports[-1] if self.reports else None


def many(given: str | list[str]) -> list[str]:
    return given if isinstance(given, list) else [given]


def work_of(course: ChunkRules, store: ListStore, outlet: Producer | None) -> Work:
    binding = course.binding
    batched, transactional = binding.batched, binding.transaction is not None
    mail = None if outlet is None else Publisher(outlet, None, outlet, 10**6)
    if binding.is_async:
        runner = binding.async_runner()
        if transactional:
            return LoopDriver(course, AsyncTransactionalAttempt(runner, batched, off_the_loop(store), GROUP, mail))
        return LoopDriver(course, AsyncPlainAttempt(runner, batched, mail))
    if transactional:
        return ThreadDriver(course, TransactionalAttempt(binding.runner(), batched, store, GROUP, mail))
    return ThreadDriver(course, PlainAttempt(binding.runner(), batched, mail))


def judge(bench: Bench) -> None:
    """The promises, for any case."""
    case, offsets, reached = bench.case, bench.case.offsets, bench.reached
    failing = bench.poison | bench.rotten | bench.refused
    below = [offset for offset in offsets if offset < reached]
    good = [offset for offset in below if offset not in failing]

    if case.transactional:
        assert bench.effects == good, "each good record below the stop point once, in order, and nothing else"
        assert bench.store.row(GROUP, ORDERS).next_offset == bench.lane.stored == reached
        assert [old for old, _ in bench.store.moves] == [0, *(new for _, new in bench.store.moves)][:-1], "no hole"
    else:
        assert set(good) <= set(bench.effects), "nothing was passed that was not done"
        assert not failing.intersection(bench.effects)
        if not case.sends or not case.batched:
            done_below = [offset for offset in bench.effects if offset < reached]
            assert done_below == good, "nothing that raised before it wrote was done twice"
        if not case.names:
            assert set(bench.effects) <= set(good), "nothing was done that was not passed"
    if case.sends:
        assert set(good) <= set(bench.post.confirmed), "nothing was passed that was not confirmed"
        assert not (bench.poison | bench.rotten).intersection(bench.post.confirmed), "what failed has not sent"

    assert sum(p.handled for p in bench.progress) == len(good)
    assert sum(p.skipped for p in bench.progress) == len(below) - len(good)
    judge_the_end(bench, failing)
    judge_the_tracker(bench)


def judge_the_end(bench: Bench, failing: set[int]) -> None:
    last, offsets, reached = bench.last, bench.case.offsets, bench.reached
    if isinstance(last, Failure):
        assert bench.case.on_error == "stop"
        assert last.message.offset() == min(o for o in offsets if o >= reached) in failing, "the very record"
    elif isinstance(last, StoreRefused):
        assert bench.case.fence_at is not None
    elif not bench.lane.stop_reasons:
        assert reached == offsets[-1] + 1, "everything was passed"
    assert all(isinstance(report, Progress) for report in bench.reports[:-1])


def judge_the_tracker(bench: Bench) -> None:
    """As the loop hears of it: forwards only, and never past what is unfinished."""
    tracker = Watermark(0)
    firsts = {p.first for p in bench.progress}
    for batch in bench.case.batches:
        if batch[0] in firsts:
            tracker.delivered(batch[0], batch[-1])
    for progress in bench.progress:
        tracker.finished(progress.first, progress.upto)
    assert tracker.watermark <= min((o for o in bench.case.offsets if o >= bench.reached), default=bench.reached)


numbers = st.integers(0, 29)
cases = st.builds(
    Case,
    offsets=st.lists(st.integers(1, 3), min_size=1, max_size=30).map(lambda gaps: list(itertools.accumulate(gaps))),
    transactional=st.booleans(),
    is_async=st.booleans(),
    sends=st.booleans(),
    names=st.booleans(),
    bad=st.sets(numbers, max_size=5),
    rotten=st.sets(numbers, max_size=3),
    refused=st.just(set()) | st.sets(numbers, max_size=2),
    on_error=st.sampled_from(["stop", "skip"]),
    cuts=st.sets(st.integers(1, 29), max_size=4),
    stop_at=st.none() | numbers,
    fence_at=st.none() | numbers,
    batched=st.sampled_from([True, True, False]),
)


@settings(max_examples=1200, deadline=None)
@given(cases)
def test_the_effects_are_exactly_those_of_the_good_records_below_the_stop_point(case: Case) -> None:
    judge(Bench(case).run())


# Controls: the same judge, with a guard off


def test_control_a_course_that_believes_the_others_done_although_they_were_undone_is_found_out() -> None:
    case = Case(offsets=[1, 2, 3], bad={1}, on_error="skip")
    judge(Bench(case).run())
    with pytest.raises(AssertionError):
        judge(Bench(case, stores=False).run())


def test_control_a_skip_without_a_second_call_loses_what_the_others_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(offsets=[1, 2, 3], bad={1}, on_error="skip", transactional=False, sends=True)
    judge(Bench(case).run())
    monkeypatch.setattr(ChunkRules, "undoes", property(lambda course: course.stores))
    with pytest.raises(AssertionError, match="nothing was passed that was not confirmed"):
        judge(Bench(case).run())


def test_control_a_batch_that_is_passed_as_a_whole_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kconsume._runtime.processing.rules.ChunkRun._failed", pass_all)
    with pytest.raises(AssertionError):
        judge(Bench(Case(offsets=[1, 2, 3], bad={1}, on_error="skip", transactional=False, names=False)).run())


def pass_all(run: Any, part: Sequence[FakeMessage], outcome: object) -> Generator[object, object, bool]:
    run._passed(part)
    yield from ()
    return True


# What a handler names

FORMS = [(False, False), (True, False), (False, True), (True, True)]
every_form = pytest.mark.parametrize(("transactional", "is_async"), FORMS)
both_stores = pytest.mark.parametrize("transactional", [False, True])


class TestBatchError:
    @every_form
    def test_those_named_are_skipped_and_the_others_are_done_once(self, transactional: bool, is_async: bool) -> None:
        case = Case([*range(500)], transactional, is_async, bad={0, 7, 499}, on_error="skip")
        bench = Bench(case).run()
        judge(bench)
        assert len(bench.calls) == (2 if transactional else 1), "again without them, and only where they were undone"
        assert len(bench.progress) == 1

    @every_form
    def test_all_of_them(self, transactional: bool, is_async: bool) -> None:
        case = Case([1, 2, 3], transactional, is_async, bad={0, 1, 2}, on_error="skip")
        bench = Bench(case).run()
        judge(bench)
        assert bench.calls == [[1, 2, 3]]
        assert bench.reached == 4

    @every_form
    def test_by_default_the_first_of_them_stops_and_what_is_before_it_is_passed(
        self, transactional: bool, is_async: bool
    ) -> None:
        bench = Bench(Case([1, 2, 3, 4, 5], transactional, is_async, bad={2, 4})).run()
        judge(bench)
        assert bench.reached == 3
        assert isinstance(bench.last, Failure)
        assert str(bench.last.error) == "bad 3"

    @both_stores
    @pytest.mark.parametrize("on_error", ["stop", "skip"])
    @pytest.mark.parametrize(
        ("errors", "sentence"),
        [
            ({}, r"raised BatchError\(\{\}\): name the records that failed, or return"),
            ({3: ValueError()}, r"raised BatchError with 3, and its batch has the indexes 0 to 2"),
            ({-1: ValueError()}, r"with -1, and its batch has the indexes 0 to 2"),
            ({1: ValueError(), 99: ValueError()}, r"with 99, and its batch has the indexes 0 to 2"),
            ({"1": ValueError()}, r"with '1', and its batch has the indexes 0 to 2"),
            ({1.0: ValueError()}, r"with 1\.0, and its batch has the indexes 0 to 2"),
            ({1: "no such order"}, r"with a str for index 1: give the exception that says why"),
            ({1: ValueError}, r"with a type for index 1: give the exception that says why"),
        ],
    )
    def test_a_name_that_is_none_stops_the_lane_whatever_the_policy_and_passes_nothing(
        self, transactional: bool, on_error: OnError, errors: dict[Any, Any], sentence: str
    ) -> None:
        bench = Bench(Case([4, 5, 6], transactional, on_error=on_error))
        bench.during[4] = raising(BatchError(errors))
        bench.run()
        (failure,) = bench.reports
        assert isinstance(failure, Failure)
        assert isinstance(failure.error, InvalidHandler)
        with pytest.raises(InvalidHandler, match=sentence):
            raise failure.error

    def test_an_index_of_another_library_is_an_index(self) -> None:
        class Int64:
            """As numpy's: not an int, and as good as one."""

            def __init__(self, value: int) -> None:
                self.value = value

            def __index__(self) -> int:
                return self.value

            def __eq__(self, other: object) -> bool:
                return self.value == other

            def __hash__(self) -> int:
                return hash(self.value)

        bench = Bench(Case([4, 5, 6], transactional=False, on_error="skip"))
        bench.during[4] = raising(BatchError({Int64(1): LookupError()}))  # type: ignore[dict-item]
        bench.run()
        assert [(p.upto, p.handled, p.skipped) for p in bench.progress] == [(7, 2, 1)]

    def test_a_second_call_that_names_others_is_isolated_and_ends(self) -> None:
        """The handler names what fails only one at a time, so each second call fails again."""
        bench = Bench(Case([*range(64)], on_error="skip"))
        bad = {3, 5, 40}

        def name_the_first() -> None:
            found = [n for n, offset in enumerate(bench.calls[-1]) if offset in bad]
            if found:
                raise BatchError({found[0]: LookupError()})

        for offset in range(64):
            bench.during[offset] = lambda: name_the_first() if bench.calls[-1][-1] >= 0 else None
        bench.run()
        assert bench.effects == [n for n in range(64) if n not in bad]
        assert bench.reached == 64
        assert len(bench.calls) < 64

    def test_of_a_handler_of_one_record_it_is_an_error_like_any_other(self) -> None:
        def one(value: bytes) -> None:
            raise BatchError({0: LookupError()})

        reports = carry_out(one, [b"a", b"b"], "skip")
        assert [(p.handled, p.skipped) for p in reports if isinstance(p, Progress)] == [(0, 1), (0, 1)]


class TestBisection:
    @every_form
    @pytest.mark.parametrize("culprit", [0, 1, 249, 250, 498, 499])
    def test_one_bad_record_of_five_hundred_is_found_in_few_calls(
        self, transactional: bool, is_async: bool, culprit: int
    ) -> None:
        case = Case([*range(500)], transactional, is_async, names=False, bad={culprit}, on_error="skip")
        bench = Bench(case).run()
        judge(bench)
        assert sum(p.skipped for p in bench.progress) == 1
        assert len(bench.calls) <= 3 * math.ceil(math.log2(500)), "logarithmic"

    @every_form
    def test_a_failure_that_passes_at_the_second_call_costs_nobody(self, transactional: bool, is_async: bool) -> None:
        bench = Bench(Case([*range(10)], transactional, is_async))
        bench.during[5] = raising_once(ConnectionError("reset by peer"))
        bench.run()
        judge(bench)
        assert bench.calls[0] == list(range(10))
        assert bench.reached == 10
        assert bench.effects == list(range(10))

    @pytest.mark.parametrize("is_async", [False, True])
    @pytest.mark.parametrize("culprit", [0, 3, 9])
    def test_a_constraint_at_commit_is_found_to_be_one_record_s(self, is_async: bool, culprit: int) -> None:
        bench = Bench(Case([*range(10)], is_async=is_async, refused={culprit})).run()
        judge(bench)
        assert isinstance(bench.last, Failure)
        assert bench.last.message.offset() == culprit
        assert isinstance(bench.last.error, sqlite3.IntegrityError)

    @every_form
    def test_sys_exit_is_not_answered_with_another_call(self, transactional: bool, is_async: bool) -> None:
        bench = Bench(Case([*range(100)], transactional, is_async, on_error="skip"))
        bench.during[50] = raising(SystemExit(3)) if not is_async else raising(KeyboardInterrupt())
        bench.run()
        assert len(bench.calls) == 1
        assert bench.reached == 0
        assert isinstance(bench.last, Failure)


class TestUndecodable:
    @every_form
    def test_a_batch_is_cut_at_it(self, transactional: bool, is_async: bool) -> None:
        bench = Bench(Case([*range(10)], transactional, is_async, rotten={4}, on_error="skip")).run()
        judge(bench)
        assert bench.calls == [[0, 1, 2, 3], [5, 6, 7, 8, 9]]

    @every_form
    def test_it_stops_the_lane_with_a_decode_error_that_names_it(self, transactional: bool, is_async: bool) -> None:
        bench = Bench(Case([*range(10)], transactional, is_async, rotten={4})).run()
        judge(bench)
        assert isinstance(bench.last, Failure)
        assert isinstance(bench.last.error, DecodeError)

    def test_a_decoder_that_stops_the_iteration_loses_no_record(self) -> None:
        """`next()` over nothing in a model's own check: `map` would end there as if the batch were over."""
        seen: list[int] = []

        def many(values: list[Checked]) -> None:
            seen.extend(value.id for value in values)

        reports = carry_out(many, [b'{"id": %d}' % n for n in range(6)], "skip")
        assert seen == [0, 1, 2, 4, 5]
        assert [(p.handled, p.skipped) for p in reports if isinstance(p, Progress)] == [(3, 0), (0, 1), (2, 0)]

    @pytest.mark.parametrize("on_error", ["stop", "skip"])
    @pytest.mark.parametrize(
        "annotation", ["list[bytes]", "list[str]", "list[dict]", "list[Checked]"], ids=lambda text: str(text)
    )
    def test_a_tombstone_is_undecodable_unless_it_is_asked_for(self, annotation: str, on_error: OnError) -> None:
        sizes: list[int] = []
        values = [b'{"id": 1}', b'{"id": 2}', None, b'{"id": 4}']
        reports = carry_out(many_of(annotation, sizes), values, on_error)
        assert sizes == ([2] if on_error == "stop" else [2, 1])
        if on_error == "stop":
            assert isinstance(reports[-1], Failure)
            with pytest.raises(DecodeError, match=r"null \(a tombstone\).* annotate it as list\[.* \| None\] to get"):
                raise reports[-1].error

    @pytest.mark.parametrize(
        "annotation", ["list[bytes | None]", "list[str | None]", "list[dict | None]", "list[Checked | None]"]
    )
    def test_a_tombstone_that_is_asked_for_is_none(self, annotation: str) -> None:
        got: list[object] = []

        def many(values: Any) -> None:
            got.extend(value is None for value in values)

        many.__annotations__ = {"values": annotation, "return": None}
        carry_out(many, [b'{"id": 1}', None, None, b'{"id": 4}'])
        assert got == [False, True, True, False]


class TestReturning:
    @every_form
    def test_a_value_that_nobody_takes_stops_whatever_the_policy(self, transactional: bool, is_async: bool) -> None:
        def plain(value: bytes):  # type: ignore[no-untyped-def]
            return value

        def stores(value: bytes, tx: Writes):  # type: ignore[no-untyped-def]
            return value

        async def plain_async(value: bytes):  # type: ignore[no-untyped-def]
            return value

        async def stores_async(value: bytes, tx: Writes):  # type: ignore[no-untyped-def]
            return value

        forms: dict[tuple[bool, bool], Callable[..., object]] = {
            (False, False): plain,
            (True, False): stores,
            (False, True): plain_async,
            (True, True): stores_async,
        }
        (failure,) = carry_out(forms[transactional, is_async], [b"a", b"b"], "skip")
        assert isinstance(failure, Failure)
        assert isinstance(failure.error, InvalidHandler)
        assert "returned a value (bytes), and nothing takes it" in str(failure.error)

    def test_none_is_nothing(self) -> None:
        def sometimes(value: bytes):  # type: ignore[no-untyped-def]
            return None if value == b"a" else b"x"

        reports = carry_out(sometimes, [b"a", b"a"], "skip")
        assert [type(report) for report in reports] == [Progress, Progress]


# Sending


class TestSending:
    @every_form
    def test_a_broker_that_does_not_confirm_stops_and_nothing_is_skipped(
        self, transactional: bool, is_async: bool
    ) -> None:
        bench = Bench(Case([1, 2, 3], transactional, is_async, sends=True, on_error="skip"))
        bench.post.fails = SendFailed("not confirmed within 60 s")
        bench.run()
        (failure,) = bench.reports
        assert isinstance(failure, Failure)
        assert isinstance(failure.error, SendFailed)
        assert (bench.reached, bench.store.effects) == (0, [])

    @every_form
    def test_nor_in_the_second_call_without_those_that_failed(self, transactional: bool, is_async: bool) -> None:
        bench = Bench(Case([1, 2, 3], transactional, is_async, sends=True, bad={1}, on_error="skip"))
        bench.post.fails = SendFailed("not confirmed within 60 s")
        bench.run()
        (failure,) = bench.reports
        assert isinstance(failure, Failure)
        assert (bench.reached, bench.store.effects) == (0, [])

    @every_form
    def test_a_producer_that_cannot_be_made_is_said_and_no_record_is_blamed(
        self, transactional: bool, is_async: bool
    ) -> None:
        """On kafka:// there is no claim that would find out: taken for the store's, it would stand still in silence."""
        bench = Bench(Case([1, 2], transactional, is_async, sends=True, on_error="skip"))
        bench.post.fails = ConfigurationError("max.in.flight must be set <= 5")
        if transactional:
            bench.run()
            assert isinstance(bench.last, Failure)
            assert isinstance(bench.last.error, ConfigurationError)
        else:
            with pytest.raises(ConfigurationError):
                bench.run()
            assert bench.reports == []
        assert bench.reached == 0

    @pytest.mark.parametrize("is_async", [False, True])
    def test_a_transaction_whose_offset_cannot_be_advanced_has_sent_nothing(self, is_async: bool) -> None:
        bench = Bench(Case([1, 2], is_async=is_async, sends=True))
        moved = {ORDERS: Position(1, bench.lane.epoch)}
        bench.during[1] = lambda: bench.store.save(GROUP, moved)  # as if a rival had been there
        bench.run()
        assert isinstance(bench.last, StoreRefused)
        assert (bench.effects, bench.post.confirmed) == ([], [])


class TestSender:
    def test_one_that_was_kept_is_refused_while_the_next_record_is_handled(self) -> None:
        """Else what it sends would be taken for the next record's, and undone with it."""
        kept: list[Sender] = []

        def handle(value: bytes, sender: Sender) -> None:
            for other in kept:
                with pytest.raises(SendFailed, match="after the handler had returned"):
                    other.send("out", value)
            kept.append(sender)

        reports = carry_out(handle, [b"%d" % n for n in range(8)])
        assert sum(p.handled for p in reports if isinstance(p, Progress)) == 8

    @pytest.mark.parametrize("annotation", ["bytes", "list[bytes]"])
    def test_one_that_was_kept_is_refused_after_the_last(self, annotation: str) -> None:
        kept: list[Sender] = []

        def handle(value: Any, sender: Sender) -> None:
            kept.append(sender)

        handle.__annotations__["value"] = annotation
        carry_out(handle, [b"1", b"2"])
        for sender in kept:
            with pytest.raises(SendFailed, match="after the handler had returned"):
                sender.send("out", b"x")

    def test_what_a_failing_record_sent_does_not_leave_and_that_of_its_neighbours_does(self) -> None:
        post = Post()

        def handle(value: bytes, sender: Sender) -> None:
            sender.send("out", value)
            if value == b"2":
                raise LookupError

        carry_out(handle, [b"1", b"2", b"3"], "skip", post)
        assert post.confirmed == [1, 3]


# Rates


class TestRate:
    def test_the_second_call_of_a_batch_counts_too(self) -> None:
        now = [0.0]
        course = ChunkRules(
            bind(many_of("list[bytes]", []), []),
            Policy("skip"),
            Limiter(Rate(10), lambda: now[0]),
            True,
            clock=Moment.now,
        )
        bench = Bench(Case([1]))
        messages = [FakeMessage(b"%d" % n, offset=n) for n in range(10)]
        steps = course.steps(bench.lane, Chunk([*messages], 0, 9), bench.reports.append)
        assert isinstance(next(steps), CallHandler)
        step = steps.send(StepResult(0, messages[0], BatchError({3: LookupError()}), certain=False))
        assert isinstance(step, Wait), "ten were granted, and nine more would be too many"
        now[0] = 1.0
        step = steps.send(StepResult(0))
        assert isinstance(step, CallHandler)
        assert len(step.records) == 9

    def test_a_stop_ends_the_wait_and_nothing_runs(self) -> None:
        course = ChunkRules(
            bind(many_of("list[bytes]", []), []), Policy(), Limiter(Rate(1, 3600.0), lambda: 0.0), clock=Moment.now
        )
        bench = Bench(Case([1]))
        messages = [FakeMessage(b"%d" % n, offset=n) for n in range(2)]
        steps = course.steps(bench.lane, Chunk([*messages], 0, 1), bench.reports.append)
        assert isinstance(next(steps), CallHandler)
        list(course.steps(bench.lane, Chunk([], 0, 0), bench.reports.append))
        waiting = course.steps(bench.lane, Chunk([*messages], 0, 1), bench.reports.append)
        step = next(waiting)
        assert isinstance(step, Wait)
        assert step.seconds <= 0.05, "so that a stop is seen soon"
        bench.lane.request_stop("revoked")
        with pytest.raises(StopIteration):
            waiting.send(StepResult(0))
        assert bench.reports == []

    def test_skipping_takes_nothing_of_the_rate(self) -> None:
        course = ChunkRules(
            bind(many_of("list[bytes]", []), []), Policy("skip"), Limiter(Rate(2), lambda: 0.0), True, clock=Moment.now
        )
        bench = Bench(Case([1]))
        messages = [FakeMessage(b"%d" % n, offset=n) for n in range(2)]
        steps = course.steps(bench.lane, Chunk([*messages], 0, 1), bench.reports.append)
        assert isinstance(next(steps), CallHandler)
        both = BatchError({0: LookupError(), 1: LookupError()})
        assert isinstance(steps.send(StepResult(0, messages[0], both, certain=False)), SkipRecords)


# Small parts


class Checked(msgspec.Struct):
    id: int

    def __post_init__(self) -> None:
        if self.id == 3:
            next(iter(()))


def carry_out(
    handle: Callable[..., object], values: Sequence[bytes | None], on_error: OnError = "stop", post: Post | None = None
) -> list[Report]:
    """Run a handler over one chunk, in its own form, on a store of its own."""
    bench = Bench(Case([1]))
    binding = bind(handle, [Writes], names=globals())
    course = ChunkRules(binding, Policy(on_error), stores=binding.transaction is not None, clock=Moment.now)
    messages = [FakeMessage(value, offset=n) for n, value in enumerate(values)]
    outlet = cast(Producer, post or Post()) if binding.sends else None
    chunk = Chunk([*messages], 0, len(messages) - 1)
    ran = work_of(course, bench.store, outlet)(bench.lane, chunk, bench.reports.append)
    if ran is not None:
        Bench.runner.run(cast(Any, ran))
    return bench.reports


def many_of(annotation: str, sizes: list[int]) -> Callable[..., object]:
    def many(values: Any) -> None:
        sizes.append(len(values))

    many.__annotations__ = {"values": annotation, "return": None}
    return many


def raising(error: BaseException) -> Callable[[], None]:
    def act() -> None:
        raise error

    return act


def raising_once(error: Exception) -> Callable[[], None]:
    errors = [error]

    def act() -> None:
        if errors:
            raise errors.pop()

    return act

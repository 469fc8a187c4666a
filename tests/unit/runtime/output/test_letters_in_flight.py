"""Letters that are on their way while later records are run: nothing behind them is reported before they are confirmed,
one that fails holds the lane, and the log counts each."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import re
import weakref
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kconsume import DeadLetter
from kconsume._handlers.binding import bind
from kconsume._kafka.outgoing import Outgoing
from kconsume._runtime.lanes.event_loop import CANCELLED
from kconsume._runtime.lanes.inline import InlineLanes
from kconsume._runtime.lanes.lane import Chunk, Lane
from kconsume._runtime.lanes.pacing import Pace
from kconsume._runtime.lanes.reports import Failure, LaneReport, LettersFailed, Progress, Suspended, Unblocked
from kconsume._runtime.output.letters_in_flight import LettersInFlight
from kconsume._runtime.output.publisher import Publisher
from kconsume._runtime.processing.driver import LoopDriver, ThreadDriver
from kconsume._runtime.processing.plain import AsyncPlainAttempt, PlainAttempt
from kconsume._runtime.processing.rules import ChunkRules
from kconsume.errors import SendFailed, TooManyFailures
from kconsume.failures.dead_letter import DeadLetterLimit
from kconsume.failures.policy import OnError, Policy
from kconsume.failures.retry_topics import Moment
from tests.unit.fakes import ORDERS, FakeMessage

A_REFUSAL = "the topic does not exist: create it"


@pytest.fixture(autouse=True)
def gathers_to_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine a chunk may take longer than letters wait for each other."""
    monkeypatch.setattr("kconsume._runtime.output.letter_batch._LONGEST_DELAY", 3600.0)


class Steady(Pace):
    """Slices of one size, however long they take."""

    def measured(self, records: int, seconds: float) -> None: ...


class Post:
    """Takes letters, and confirms them when it is told to."""

    def __init__(self) -> None:
        self.parcels: list[tuple[list[int], Future[None]]] = []

    def deliver(self, outgoing: Sequence[Outgoing]) -> Future[None]:
        offsets = [int(dict(each.headers)["kconsume-offset"]) for each in outgoing]
        self.parcels.append((offsets, Future()))
        return self.parcels[-1][1]

    @property
    def sent(self) -> list[list[int]]:
        return [offsets for offsets, _ in self.parcels]

    def confirm(self, number: int) -> None:
        self.parcels[number][1].set_result(None)

    def fail(self, number: int) -> None:
        self.parcels[number][1].set_exception(SendFailed(A_REFUSAL))


class Bench:
    """A lane with a handler that fails on some records."""

    def __init__(
        self,
        fails: Sequence[int],
        on_error: OnError | None = None,
        *,
        gauge: DeadLetterLimit | None = None,
        is_async: bool = False,
    ) -> None:
        self.fails = set(fails)
        self.post = Post()
        self.handled: list[int] = []
        self.reports: list[LaneReport] = []
        self.rests = 0
        self.during_rest: Callable[[], None] = lambda: None
        self.lane = Lane(
            ORDERS, InlineLanes(SimpleQueue()), lambda *_: None, epoch=0, start=0, scope="shop:T", pace=Steady(1000)
        )
        self.lane.pace.size = 1000
        policy = Policy(on_error or DeadLetter("dead"))
        mail = Publisher(self.post, policy.dead_letter, self.post, 10**6)
        self.work: Any
        if is_async:
            binding = bind(self._handle_async)
            course = ChunkRules(binding, policy, group="shop", dead_letter_limit=gauge, clock=Moment.now)
            self.work = LoopDriver(course, AsyncPlainAttempt(binding.async_runner(), False, mail))
        else:
            binding = bind(self._handle)
            course = ChunkRules(binding, policy, group="shop", dead_letter_limit=gauge, clock=Moment.now)
            self.work = ThreadDriver(course, PlainAttempt(binding.runner(), False, mail))

    def _handle(self, value: bytes) -> None:
        if (offset := int(value)) in self.fails:
            raise LookupError(f"no such order: {offset}")
        self.handled.append(offset)

    async def _handle_async(self, value: bytes) -> None:
        self._handle(value)

    def run(self, offsets: Sequence[int]) -> None:
        messages = [FakeMessage(str(offset).encode(), offset=offset) for offset in offsets]
        self._work_off(Chunk([*messages], offsets[0], offsets[-1]))

    def knock(self) -> None:
        """What the loop does with `LettersFailed`."""
        self._work_off(Chunk([], 0, -1))

    def _work_off(self, chunk: Chunk) -> None:
        parked = cast("Suspended | None", self.work(self.lane, chunk, self.reports.append))
        while parked is not None:
            self.rests += 1
            self.during_rest()
            parked = cast("Suspended | None", parked.resume())

    @property
    def progress(self) -> list[int]:
        return [report.upto for report in self.reports if isinstance(report, Progress)]

    @property
    def worked_off(self) -> int:
        """How many records the loop takes for done, whether they are passed or not."""
        passed = [report for report in self.reports if isinstance(report, Progress) and not report.waited_for_letters]
        held = [report.records for report in self.reports if isinstance(report, Unblocked)]
        return sum(held) + sum(report.handled + report.skipped for report in passed)

    @property
    def counted(self) -> tuple[int, int]:
        done = [report for report in self.reports if isinstance(report, Progress)]
        return sum(report.handled for report in done), sum(report.skipped for report in done)


def test_records_behind_a_letter_are_run_at_once_and_reported_when_it_is_confirmed() -> None:
    bench = Bench([2])
    bench.run(range(5))
    bench.run(range(5, 8))
    assert bench.handled == [0, 1, 3, 4, 5, 6, 7], "nobody waited"
    assert bench.rests == 0
    assert bench.progress == [2], "those before the letter, and no more"
    bench.post.confirm(0)
    assert bench.progress == [2, 5, 8]
    assert bench.counted == (7, 1)
    assert not bench.lane.unfinished


def test_control_reports_that_wait_for_nothing_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LettersInFlight, "_report_or_queue", lambda self, progress: self._report(progress))
    with pytest.raises(AssertionError, match="those before the letter"):
        test_records_behind_a_letter_are_run_at_once_and_reported_when_it_is_confirmed()


def test_letters_that_are_confirmed_out_of_order_are_reported_in_order() -> None:
    bench = Bench([0, 3, 6])
    for first in (0, 3, 6):
        bench.run(range(first, first + 3))
    bench.post.confirm(1)
    bench.post.confirm(2)
    assert bench.progress == []
    bench.post.confirm(0)
    assert bench.progress == [3, 6, 9]


def test_of_letters_that_are_confirmed_and_wait_for_an_earlier_one_nothing_is_kept() -> None:
    bench = Bench([0, 1])
    messages = [FakeMessage(str(offset).encode(), offset=offset) for offset in range(2)]
    watched = weakref.ref(messages[1])
    for message in messages:
        bench._work_off(Chunk([message], message.offset(), message.offset()))
    del message, messages
    assert watched() is not None, "it may have to be written again"
    bench.post.confirm(1)
    gc.collect()
    assert watched() is None
    assert bench.progress == []


def test_a_letter_that_fails_after_later_ones_were_confirmed_holds_the_lane_until_it_is_written() -> None:
    bench = Bench([0, 3, 6])
    for first in (0, 3, 6):
        bench.run(range(first, first + 3))
    bench.post.confirm(1)
    bench.post.fail(0)
    assert [each for each in bench.reports if not isinstance(each, Unblocked)] == [LettersFailed(bench.lane)]
    bench.post.confirm(2)
    assert bench.progress == [], "what is behind the one that failed is not passed"

    def confirm_what_is_sent_again() -> None:
        assert 9 not in bench.handled, "the lane is held"
        if len(bench.post.parcels) == 4 and not bench.post.parcels[3][1].done():
            bench.post.confirm(3)

    bench.during_rest = confirm_what_is_sent_again
    bench.run(range(9, 12))
    assert bench.post.sent == [[0], [3], [6], [0]], "only that one"
    assert bench.progress == [3, 6, 9, 12]
    assert bench.counted == (9, 3)


def test_a_lane_without_further_records_writes_a_letter_again_when_it_is_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    bench = Bench([0])
    bench.run([0])
    bench.post.fail(0)
    fails = [1, 2]

    def fail_twice_more() -> None:
        if fails and len(bench.post.parcels) > fails[0]:
            bench.post.fail(fails.pop(0))
        elif not fails and len(bench.post.parcels) == 4 and not bench.post.parcels[3][1].done():
            bench.post.confirm(3)

    bench.during_rest = fail_twice_more
    bench.knock()
    assert bench.post.sent == [[0]] * 4
    assert bench.progress == [1]
    held = [r.getMessage() for r in caplog.records if r.levelno == logging.ERROR]
    hint = "the partition is held until the letter is written"
    assert held == [f'dead letter unwritten record=orders/0@0 cause={json.dumps(str(A_REFUSAL))} hint="{hint}"'] * 3
    bench.knock()
    assert len(bench.post.parcels) == 4, "there is nothing left to do"


def test_told_to_stop_it_still_reports_what_is_confirmed_then() -> None:
    bench = Bench([1])
    bench.run(range(3))
    bench.lane.request_stop("revoked")
    assert bench.lane.unfinished
    bench.post.confirm(0)
    assert bench.progress == [1, 3]
    assert not bench.lane.unfinished


def test_told_to_stop_a_letter_that_fails_is_not_waited_for_and_nothing_behind_it_is_passed() -> None:
    bench = Bench([1])
    bench.run(range(3))
    bench.lane.request_stop("revoked")
    bench.post.fail(0)
    assert not bench.lane.unfinished
    bench.knock()
    assert bench.post.sent == [[1]]
    assert bench.progress == [1]


def test_told_to_stop_while_it_is_held_it_passes_nothing() -> None:
    bench = Bench([0])
    bench.run(range(2))
    bench.post.fail(0)
    bench.during_rest = lambda: bench.lane.stop_reasons.append("shutdown")
    bench.run(range(2, 4))
    assert bench.rests == 1
    assert bench.handled == [1]
    assert bench.progress == []


@pytest.mark.parametrize(("name", "most"), [("MOST_LETTERS", 3), ("MOST_BYTES", 3_000), ("MOST_RECORDS", 30)], ids=str)
def test_what_waits_for_confirmation_is_bounded(name: str, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LettersInFlight, name, most)
    bench = Bench(range(0, 1000, 10))
    handled_while_held: list[int] = []

    def confirm_one() -> None:
        handled_while_held.append(len(bench.handled))
        next(future for _, future in bench.post.parcels if not future.done()).set_result(None)

    bench.during_rest = confirm_one
    for first in range(0, 100, 10):
        bench.run(range(first, first + 10))
    assert handled_while_held, "it waited"
    assert handled_while_held[0] <= 36, "some chunks of ten were run without waiting, and not all"
    for _, future in bench.post.parcels:
        if not future.done():
            future.set_result(None)
    assert bench.progress[-1] == 100
    assert bench.counted == (90, 10)


def test_no_more_letters_than_the_limit_are_written_though_none_is_confirmed() -> None:
    bench = Bench(range(10), DeadLetter("dead", limit=3), gauge=DeadLetterLimit(3, 60.0, lambda: 0.0))
    bench.run(range(10))
    assert bench.post.sent == [[0, 1, 2]]
    (failure,) = [report for report in bench.reports if isinstance(report, Failure)]
    assert isinstance(failure.error, TooManyFailures)
    assert failure.message.offset() == 3
    assert bench.progress == []
    bench.post.confirm(0)
    assert bench.progress == [3]


def test_a_slice_is_not_left_for_a_record_that_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    slices: list[int] = []
    attempt = PlainAttempt.__call__

    def counted(self: PlainAttempt, lane: Any, step: Any) -> Any:
        slices.append(len(step.part))
        return attempt(self, lane, step)

    monkeypatch.setattr(PlainAttempt, "__call__", counted)
    bench = Bench(range(0, 100, 10))
    bench.run(range(100))
    assert slices == [100, 10], "the records at once, then their letters"
    assert bench.post.sent == [list(range(0, 100, 10))]


def test_an_error_that_asks_to_stop_behind_letters_of_its_slice_passes_those_and_not_itself() -> None:
    bench = Bench([1])
    bench.fails = {1}
    handle = bench._handle

    def stops(value: bytes) -> None:
        if value == b"4":
            raise SystemExit(3)
        handle(value)

    bench.work._attempt._run = bind(stops).runner()
    bench.run(range(6))
    assert isinstance(bench.reports[-1], Failure)
    assert bench.handled == [0, 2, 3]
    bench.post.confirm(0)
    assert bench.progress == [1, 4]


def test_what_a_handler_raises_when_its_task_is_cancelled_is_no_failure_of_its_record() -> None:
    bench = Bench([], is_async=True)
    started = asyncio.Event()

    async def stubborn(value: bytes) -> None:
        started.set()
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            raise LookupError("the connection is gone") from None

    bench.work._attempt._run = bind(stubborn).async_runner()

    async def cancel() -> None:
        chunk = Chunk([FakeMessage(b"0", offset=0)], 0, 0)
        task = asyncio.ensure_future(cast("Awaitable[None]", bench.work(bench.lane, chunk, bench.reports.append)))
        await started.wait()
        bench.lane.request_stop(CANCELLED)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancel())
    assert (bench.reports, bench.post.sent) == ([], [])


# The log


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]


def records_said(caplog: pytest.LogCaptureFixture) -> int:
    more = [re.search(r" more=(\d+) ", line) for line in said(caplog)]
    return sum(1 + (int(found[1]) if found else 0) for found in more)


def test_one_that_fails_alone_has_a_line_of_its_own(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench([1])
    bench.run(range(3))
    assert said(caplog) == ['dead letter to=dead record=orders/0@1 cause="LookupError: no such order: 1"']


@pytest.mark.parametrize("on_error", ["skip", DeadLetter("dead")])
def test_those_that_fail_alike_share_a_line_that_counts_them(
    on_error: OnError, caplog: pytest.LogCaptureFixture
) -> None:
    bench = Bench([1, 4, 7], on_error)
    bench.run(range(9))
    what = "record skipped" if on_error == "skip" else "dead letter to=dead"
    line = f'{what} record=orders/0@1 more=2 last=orders/0@7 cause="LookupError: no such order: 1"'
    assert said(caplog) == [line]


@pytest.mark.parametrize("on_error", ["skip", DeadLetter("dead")])
def test_what_follows_closely_is_said_once_a_second_and_all_of_it_in_the_end(
    on_error: OnError, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr("kconsume.failures.skip_log._clock", lambda: now)
    bench = Bench(range(0, 110, 10), on_error)
    for first in range(0, 50, 10):
        bench.run(range(first, first + 10))
    for parcel in range(len(bench.post.parcels)):
        bench.post.confirm(parcel)
    assert records_said(caplog) == 1, "the first at once; that they are confirmed is no reason for another line"
    bench.lane.skip_log.flush()
    assert records_said(caplog) == 1, "the owner comes by more often"
    now += 1.5
    bench.run(range(50, 60))
    assert records_said(caplog) == 6
    assert said(caplog)[1].endswith(
        ' record=orders/0@10 more=4 last=orders/0@50 cause="LookupError: no such order: 10"'
    )
    for first in range(60, 80, 10):
        bench.run(range(first, first + 10))
    now += 1.5
    bench.lane.skip_log.flush()
    assert records_said(caplog) == 8, "the owner has it said, when nothing fails any more"
    for first in range(80, 100, 10):
        bench.run(range(first, first + 10))
    bench.lane.request_stop("stop")
    assert records_said(caplog) == 10, "nothing is silent"
    bench.lane.stop_reasons.clear()
    bench.run(range(100, 110))
    assert records_said(caplog) == 11, "also what ends after its lane was told to stop"
    assert len(said(caplog)) == 5


def test_one_that_is_told_to_stop_before_its_letter_could_be_sent_is_not_said_to_have_one(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(post: Post, outgoing: Sequence[Outgoing]) -> Future[None]:
        raise SendFailed(A_REFUSAL)

    monkeypatch.setattr(Post, "deliver", refuse)
    bench = Bench([1])
    bench.during_rest = lambda: bench.lane.stop_reasons.append("shutdown")
    bench.run(range(3))
    assert bench.progress == [1], "it comes again, with those behind it"
    assert [r.levelname for r in caplog.records] == ["ERROR"], "that it is held, and nothing else"
    assert said(caplog) == []


outcomes = st.lists(st.tuples(st.integers(0, 4), st.booleans()), max_size=12)


@given(st.sets(st.integers(0, 39)), outcomes)
def test_whatever_is_confirmed_or_fails_when_progress_never_passes_a_letter_that_is_not_written(
    fails: set[int], ends: list[tuple[int, bool]]
) -> None:
    bench = Bench(sorted(fails))
    written: set[int] = set()

    def end(which: int, confirmed: bool) -> None:
        open_ones = [(offsets, future) for offsets, future in bench.post.parcels if not future.done()]
        if not open_ones:
            return
        offsets, future = open_ones[which % len(open_ones)]
        if confirmed:
            written.update(offsets)
            future.set_result(None)
        else:
            future.set_exception(SendFailed(A_REFUSAL))

    def check() -> None:
        passed = max(bench.progress, default=0)
        assert {n for n in fails if n < passed} <= written
        assert bench.progress == sorted(bench.progress)

    def go_on() -> None:
        end(0, confirmed=True)
        check()

    bench.during_rest = go_on
    for first in range(0, 40, 5):
        bench.run(range(first, first + 5))
        assert bench.worked_off == first + 5, "they make room for others, though letters are under way"
        if ends:
            end(*ends.pop())
        check()
    bench.knock()
    while any(not future.done() for _, future in bench.post.parcels):
        end(0, confirmed=True)
        check()
    bench.knock()
    while any(not future.done() for _, future in bench.post.parcels):
        end(0, confirmed=True)
    assert max(bench.progress) == 40
    assert bench.worked_off == 40, "once"
    assert bench.counted == (40 - len(fails), len(fails))
    assert bench.handled == [n for n in range(40) if n not in fails]
    assert sorted(written) == sorted(fails)

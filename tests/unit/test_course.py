"""The course of a batch: whatever fails where, the good records have their effect and nothing undone is passed."""

from __future__ import annotations

import asyncio
import itertools
import math
import sqlite3
import sys
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any, cast

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kconsume import BatchError, DecodeError, Sender
from kconsume.backends import Position
from kconsume.errors import ConfigurationError, InvalidHandler, SendFailed
from kconsume.failures.policy import OnError, Policy
from kconsume.handler import Binding, bind
from kconsume.outlet import Outlet
from kconsume.output import Outgoing
from kconsume.rate import Limiter, Rate
from kconsume.runtime.budget import Pace
from kconsume.runtime.course import Course, Outcome, PassOver, Rest, Try
from kconsume.runtime.lanes import Chunk, Ejected, Failure, InlineLanes, Lane, Progress
from kconsume.runtime.lanes import Outcome as Report
from kconsume.runtime.tracker import Tracker
from kconsume.runtime.work import InTransactions, InTransactionsAsync, LoopWork, Plainly, PlainlyAsync, ThreadWork
from tests.unit.fakes import ORDERS, FakeMessage, ListStore, Writes

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

    def at(self, numbers: set[int]) -> set[int]:
        return {self.offsets[n] for n in numbers if n < len(self.offsets)}

    @property
    def batches(self) -> list[list[int]]:
        edges = [0, *sorted(cut for cut in self.cuts if cut < len(self.offsets)), len(self.offsets)]
        return [self.offsets[begin:end] for begin, end in itertools.pairwise(edges)]


class Bench:
    """A lane with a batch handler that writes each offset, does what the case says, and is watched."""

    runner: asyncio.Runner

    def __init__(self, case: Case, *, stores: bool | None = None, undone: Callable[[], None] = lambda: None) -> None:
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
        self._undone = undone
        position = self.claim()
        self.lane = Lane(
            ORDERS, InlineLanes(SimpleQueue()), lambda *_: None, epoch=position.epoch, start=0, scope="shop:A",
            pace=Pace(1000),
        )  # fmt: skip
        self._plan_interruptions()
        self.store.before_commit = self._refuse
        self.binding = bind(self._form(), [Writes])
        stores = case.transactional if stores is None else stores
        self.course = Course(self.binding, Policy(case.on_error), stores=stores)

    def claim(self) -> Position:
        return self.store.claim(GROUP, [ORDERS], "me", lambda ps: dict.fromkeys(ps, Position(0)))[ORDERS]

    def _plan_interruptions(self) -> None:
        case, count = self.case, len(self.case.offsets)
        if case.stop_at is not None and case.stop_at < count:
            self.during[case.offsets[case.stop_at]] = lambda: self.lane.stop.append("revoked")
        if case.fence_at is not None and case.fence_at < count and case.transactional and case.fence_at != case.stop_at:
            self.during[case.offsets[case.fence_at]] = self.claim

    def _refuse(self) -> None:
        if self.calls and self.refused.intersection(self.calls[-1]):
            raise sqlite3.IntegrityError("FOREIGN KEY constraint failed")

    # The handler, in each of its forms

    def _handle(self, values: list[str], write: Callable[[int], None], sender: Sender | None) -> None:
        offsets = [int(value) for value in values]
        self.calls.append(offsets)
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
        outside = self.effects_outside.append

        def plain(values: list[str]) -> None:
            self._handle(values, outside, None)

        def plain_sends(values: list[str], sender: Sender) -> None:
            self._handle(values, outside, sender)

        def stores(values: list[str], tx: Writes) -> None:
            self._handle(values, tx.append, None)

        def stores_sends(values: list[str], tx: Writes, sender: Sender) -> None:
            self._handle(values, tx.append, sender)

        async def plain_async(values: list[str]) -> None:
            await asyncio.sleep(0)
            self._handle(values, outside, None)

        async def plain_async_sends(values: list[str], sender: Sender) -> None:
            await asyncio.sleep(0)
            self._handle(values, outside, sender)

        async def stores_async(values: list[str], tx: Writes) -> None:
            await asyncio.sleep(0)
            self._handle(values, tx.append, None)

        async def stores_async_sends(values: list[str], tx: Writes, sender: Sender) -> None:
            await asyncio.sleep(0)
            self._handle(values, tx.append, sender)

        forms: dict[tuple[bool, bool, bool], Callable[..., object]] = {
            (False, False, False): plain,
            (False, False, True): plain_sends,
            (False, True, False): plain_async,
            (False, True, True): plain_async_sends,
            (True, False, False): stores,
            (True, False, True): stores_sends,
            (True, True, False): stores_async,
            (True, True, True): stores_async_sends,
        }
        return forms[self.case.transactional, self.case.is_async, self.case.sends]

    # Running it

    def run(self) -> Bench:
        for offsets in self.case.batches:
            if self.lane.stop:
                break
            self.work(offsets)
        return self

    def work(self, offsets: Sequence[int]) -> None:
        messages = [FakeMessage(ROTTEN if o in self.rotten else b"%d" % o, offset=o) for o in offsets]
        chunk = Chunk([*messages], offsets[0], offsets[-1])
        outlet = cast(Outlet, self.post) if self.case.sends else None
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


def work_of(course: Course, store: ListStore, outlet: Outlet | None) -> Callable[..., Awaitable[None] | None]:
    binding = course.binding
    batched, transactional = binding.batched, binding.transaction is not None
    if binding.is_async:
        runner = binding.async_runner()
        if transactional:
            return LoopWork(course, InTransactionsAsync(runner, batched, store, GROUP, outlet))
        return LoopWork(course, PlainlyAsync(runner, batched, outlet))
    if transactional:
        return ThreadWork(course, InTransactions(binding.runner(), batched, store, GROUP, outlet))
    return ThreadWork(course, Plainly(binding.runner(), batched, outlet))


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
        if not case.sends:
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
    elif isinstance(last, Ejected):
        assert bench.case.fence_at is not None
    elif not bench.lane.stop:
        assert reached == offsets[-1] + 1, "everything was passed"
    assert all(isinstance(report, Progress) for report in bench.reports[:-1])


def judge_the_tracker(bench: Bench) -> None:
    """As the loop hears of it: forwards only, and never past what is unfinished."""
    tracker = Tracker(0)
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
)


@settings(max_examples=1200, deadline=None)
@given(cases)
def test_the_effects_of_batches_are_exactly_the_good_records_below_the_stop_point(case: Case) -> None:
    judge(Bench(case).run())


# Controls: the same judge, with a guard off


def test_control_a_course_that_believes_the_others_done_although_they_were_undone_is_found_out() -> None:
    case = Case(offsets=[1, 2, 3], bad={1}, on_error="skip")
    judge(Bench(case).run())
    with pytest.raises(AssertionError):
        judge(Bench(case, stores=False).run())


def test_control_a_skip_without_a_second_call_would_lose_what_was_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(offsets=[1, 2, 3], bad={1}, on_error="skip", transactional=False, sends=True)
    judge(Bench(case).run())
    monkeypatch.setattr(Binding, "sends", property(lambda _: False))
    monkeypatch.setattr(Bench, "course", None, raising=False)
    bench = Bench(case)
    assert bench.post.confirmed == []
    with pytest.raises(Exception):  # noqa: B017, PT011  (the judge, or the runner that has no sender)
        judge(bench.run())

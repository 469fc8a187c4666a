"""Lanes on an event loop: whose turn it is, how many run at once, and what becomes of a lane that is given up."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from queue import SimpleQueue

import pytest

from kconsume._handlers.batches import Batching
from kconsume._runtime.handler_loop import EventLoopThread
from kconsume._runtime.lanes import event_loop as async_lanes
from kconsume._runtime.lanes.batching import BatchBuffer
from kconsume._runtime.lanes.event_loop import AsyncLanes
from kconsume._runtime.lanes.lane import Chunk, Lane
from kconsume._runtime.lanes.pacing import Pace
from kconsume._runtime.lanes.reports import Crashed, LaneReport, Progress, SendReport
from kconsume.records import Partition
from tests.unit.fakes import messages_at
from tests.waiting import eventually

LONG = 60.0


class Bench:
    """Lanes whose work is to write down the offsets, until it is told otherwise."""

    def __init__(self, most: int = 8) -> None:
        self.outcomes: SimpleQueue[LaneReport] = SimpleQueue()
        self.handler_loop = EventLoopThread("kconsume-loop-test")
        self.lanes = AsyncLanes(self.outcomes, "kconsume-test", most, self.handler_loop)
        self.done: list[tuple[int, int]] = []
        self.began: list[int] = []
        self.hold: dict[int, threading.Event] = {}
        """Partitions whose work waits for this."""
        self.stubborn = False
        self.now = 0.0
        self.takes = 0.0
        """What a record adds to it, in seconds."""
        self.act: Callable[[], None] = lambda: None

    def lane(self, number: int, *, seconds_each: float | None = None, batches: bool = False) -> Lane:
        lane = Lane(
            Partition("orders", number), self.lanes, self.work, epoch=1, start=0, scope="shop:A", pace=Pace(1000),
            batch_buffer=BatchBuffer(Batching(100, 1.0)) if batches else None,
        )  # fmt: skip
        lane.pace.seconds_each = seconds_each
        return lane

    async def work(self, lane: Lane, chunk: Chunk, report: SendReport, /) -> None:
        number = lane.partition.number
        self.began.append(number)
        self.act()
        while number in self.hold and not self.hold[number].is_set():
            try:
                await asyncio.sleep(0.005)
            except asyncio.CancelledError:
                if not self.stubborn:
                    raise
        await asyncio.sleep(0)
        self.now += self.takes * len(chunk.messages)
        self.done.extend((number, message.offset()) for message in chunk.messages)
        report(Progress(lane, chunk.first, chunk.messages[-1].offset() + 1, len(chunk.messages)))

    def submit(self, lane: Lane, offsets: Sequence[int]) -> None:
        self.lanes.submit(lane, Chunk([*messages_at(offsets)], offsets[0], offsets[-1]))

    def said(self) -> list[LaneReport]:
        return [self.outcomes.get() for _ in range(self.outcomes.qsize())]

    def close(self) -> None:
        for event in self.hold.values():
            event.set()
        self.lanes.close()
        self.handler_loop.rest(5)
        self.handler_loop.close(5)


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench()
    yield bench
    bench.close()
    assert "kconsume-loop-test" not in [thread.name for thread in threading.enumerate()]


def test_a_lane_runs_its_chunks_in_order_one_at_a_time(bench: Bench) -> None:
    lane = bench.lane(0)
    for first in range(0, 100, 10):
        bench.submit(lane, range(first, first + 10))
    eventually(lambda: not lane.busy, what="the lane rests")
    assert bench.done == [(0, n) for n in range(100)]
    assert sum(p.handled for p in bench.said() if isinstance(p, Progress)) == 100


def test_without_records_no_loop_is_started() -> None:
    lanes = AsyncLanes(SimpleQueue(), "kconsume-test", 1, handler_loop := EventLoopThread("kconsume-loop-test"))
    lanes.lane_opened()
    lanes.lane_closed()
    lanes.close()
    assert "kconsume-loop-test" not in [thread.name for thread in threading.enumerate()]
    handler_loop.close(1)


class TestTurns:
    def test_a_lane_that_is_slow_does_not_keep_the_others_waiting_for_its_whole_chunk(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A fetch may have a thousand records: at a second each, the others would wait for a quarter of an hour."""
        bench = Bench(most=1)
        bench.takes = async_lanes.TURN / 10
        monkeypatch.setattr(async_lanes, "_clock", lambda: bench.now)
        bench.hold[0] = threading.Event()
        lanes = [bench.lane(number, seconds_each=async_lanes.TURN / 10) for number in range(3)]
        for lane in lanes:
            bench.submit(lane, range(100))
        bench.hold[0].set()
        eventually(lambda: not any(lane.busy for lane in lanes), what="all done")
        assert bench.began == [0, 1, 2] * 10
        for lane in lanes:
            number = lane.partition.number
            assert [o for n, o in bench.done if n == number] == list(range(100)), "in order, each once"
        reported = [p for p in bench.said() if isinstance(p, Progress)]
        assert {p.first for p in reported} == {0}, "the parts of a chunk are still the chunk that was delivered"
        bench.close()

    def test_a_lane_that_only_seems_slow_is_not_left_behind(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Its first record took long: then it is given one at a time, and as many as the others in a turn."""
        bench = Bench(most=1)
        bench.takes = async_lanes.TURN / 8  # so that eight of them are a turn to the last bit
        monkeypatch.setattr(async_lanes, "_clock", lambda: bench.now)
        bench.hold[0] = threading.Event()
        lanes = [bench.lane(0, seconds_each=1.0), bench.lane(1, seconds_each=bench.takes)]
        for lane in lanes:
            bench.submit(lane, range(32))
        bench.hold[0].set()
        eventually(lambda: not any(lane.busy for lane in lanes), what="all done")
        assert [number for number, _ in bench.done] == ([0] * 8 + [1] * 8) * 4
        bench.close()

    def test_one_that_is_not_known_yet_begins_with_one_record(self) -> None:
        bench = Bench(most=1)
        bench.submit(lane := bench.lane(0), range(10))
        eventually(lambda: not lane.busy, what="all done")
        assert len(bench.began) == 10, "its work never says how long it took"
        assert bench.done == [(0, n) for n in range(10)]
        bench.close()

    def test_a_fast_one_and_a_batch_are_not_divided(self, bench: Bench) -> None:
        fast, batches = bench.lane(0, seconds_each=1e-6), bench.lane(1, seconds_each=10.0, batches=True)
        for lane in (fast, batches):
            bench.submit(lane, range(100))
            eventually(lambda lane=lane: not lane.busy, what="done")  # type: ignore[misc]
        assert bench.began == [0, 1]

    def test_what_was_not_begun_is_dropped_with_the_lane(self) -> None:
        bench = Bench(most=1)
        bench.hold[0] = threading.Event()
        bench.submit(lane := bench.lane(0, seconds_each=async_lanes.TURN / 10), range(100))
        eventually(lambda: bench.began == [0], what="the first part runs")
        assert lane.request_stop("revoked") == 90
        bench.hold[0].set()
        eventually(lambda: not lane.busy, what="the lane rests")
        assert bench.done == [(0, n) for n in range(10)]
        bench.close()


class TestGivenUp:
    def test_its_task_is_cancelled_and_nothing_is_reported_of_it(self, bench: Bench) -> None:
        bench.hold[0] = threading.Event()
        bench.submit(lane := bench.lane(0), [0])
        eventually(lambda: bench.began == [0], what="it runs")
        lane.request_stop("revoked")
        bench.lanes.abandon(lane)
        eventually(lambda: not lane.busy, what="the lane rests")
        assert bench.said() == []
        assert bench.done == []

    def test_its_place_is_for_others_also_if_it_refuses_to_go(self) -> None:
        bench = Bench(most=1)
        bench.hold[0], bench.stubborn = threading.Event(), True
        bench.submit(stuck := bench.lane(0), [0])
        eventually(lambda: bench.began == [0], what="it runs")
        bench.submit(bench.lane(1), [7])
        stuck.request_stop("revoked")
        bench.lanes.abandon(stuck)
        eventually(lambda: bench.done == [(1, 7)], what="the other partition is handled")
        assert stuck.busy, "two lanes of one partition must not run at once: it is not at rest"
        bench.hold[0].set()
        eventually(lambda: not stuck.busy, what="it comes to rest after all")
        bench.close()

    def test_one_that_has_not_begun_comes_to_rest_too(self, bench: Bench) -> None:
        """Cancelled before its first step, a task never runs a line; a lane that stays busy could never be claimed
        again."""
        entered, go = threading.Event(), threading.Event()

        def block() -> None:
            entered.set()
            go.wait(LONG)

        bench.handler_loop.loop.call_soon_threadsafe(block)
        assert entered.wait(10)
        bench.submit(lane := bench.lane(0), [0])  # its task is made, and cancelled, in one turn of the loop
        bench.lanes.abandon(lane)
        go.set()
        eventually(lambda: not lane.busy, what="the lane rests")
        assert bench.began == []

    def test_the_others_go_on(self, bench: Bench) -> None:
        bench.hold[0] = threading.Event()
        bench.submit(stuck := bench.lane(0), [0])
        eventually(lambda: bench.began == [0], what="it runs")
        bench.lanes.abandon(stuck)
        bench.submit(bench.lane(1), [1, 2])
        eventually(lambda: bench.done == [(1, 1), (1, 2)], what="the other lane")


class TestCancelledByOthers:
    def test_it_is_told_and_stops_the_lane(self, bench: Bench) -> None:
        """A person who cancels all tasks of a loop, or a handler that cancels its own: a partition that stops without
        a word is the worst of all ends."""
        bench.hold[0] = threading.Event()
        bench.submit(lane := bench.lane(0), [0])
        eventually(lambda: bench.began == [0], what="it runs")

        def cancel() -> None:
            for task in asyncio.all_tasks(bench.handler_loop.loop):
                task.cancel()

        bench.handler_loop.loop.call_soon_threadsafe(cancel)
        eventually(lambda: not lane.busy, what="the lane rests")
        (crashed,) = bench.said()
        assert isinstance(crashed, Crashed)
        assert "'kconsume-test orders/0' was cancelled, and not by kconsume" in str(crashed.error)
        assert lane.stop_reasons == ["crashed"]

    def test_a_handler_that_cancels_its_own_task_is_told(self, bench: Bench) -> None:
        def cancel_oneself() -> None:
            task = asyncio.current_task()
            assert task is not None
            task.cancel()

        bench.act = cancel_oneself
        bench.submit(bench.lane(0), [0])
        eventually(lambda: not bench.outcomes.empty(), what="something is said")
        assert isinstance(bench.said()[0], Crashed)

    @pytest.mark.parametrize("error", [ValueError("a fault of ours"), SystemExit(3)])
    def test_what_the_work_raises_is_told_and_the_loop_goes_on(self, bench: Bench, error: BaseException) -> None:
        def fail() -> None:
            raise error

        bench.act = fail
        bench.submit(bench.lane(0), [0])
        eventually(lambda: not bench.outcomes.empty(), what="something is said")
        (crashed,) = bench.said()
        assert isinstance(crashed, Crashed)
        assert crashed.error is error
        bench.act = lambda: None
        bench.submit(bench.lane(1), [1])
        eventually(lambda: bench.done == [(1, 1)], what="the next lane")


def test_closing_cancels_all_that_runs_and_drops_what_waits() -> None:
    bench = Bench(most=2)
    for number in range(4):
        bench.hold[number] = threading.Event()
        bench.submit(bench.lane(number), [0])
    eventually(lambda: bench.began == [0, 1], what="two run, two wait")
    bench.lanes.close()
    bench.handler_loop.rest(5)
    bench.handler_loop.close(5)
    assert bench.began == [0, 1]
    assert bench.done == []
    assert bench.said() == []

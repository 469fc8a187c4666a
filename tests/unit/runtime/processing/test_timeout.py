"""A limit to how long a call may take: what is given up, what is not, and what a thread still does then."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextvars import Context

import pytest

from kconsume import App, ConfigurationError, Sender, _log_context
from kconsume._handlers.binding import bind
from kconsume._handlers.compiled import Halt
from kconsume._kafka.outgoing import Outgoing
from kconsume._runtime.processing import timeout as timing
from kconsume._runtime.processing.timeout import TimedCalls, cancelled_after
from kconsume._runtime.thread_pool import ThreadPool
from kconsume.errors import HandlerTimeout, TooManyFailures
from tests.unit.fakes import messages_at
from tests.waiting import eventually

SHORT, LONG = 0.05, 3600.0


class FakeClock:
    """Goes on only while something hangs, so that nothing else is ever late, on however busy a machine."""

    def __init__(self) -> None:
        self.now = 0.0

    def hang(self, until: threading.Event) -> None:
        while not until.wait(0.01):
            self.now += LONG


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    made = FakeClock()
    monkeypatch.setattr(timing, "_clock", lambda: made.now)
    return made


@pytest.fixture
def thread_pool() -> Iterator[ThreadPool]:
    made = ThreadPool("timing")
    yield made
    made.close()


def timed(handler: Callable[..., object], thread_pool: ThreadPool, seconds: float = SHORT) -> TimedCalls:
    binding = bind(handler)
    return TimedCalls(binding.runner(), binding.name, seconds, binding.batched, thread_pool)


class Scene:
    """A handler that hangs on some offsets until it is released."""

    def __init__(self, clock: FakeClock, thread_pool: ThreadPool, hanging: set[int]) -> None:
        self.called: list[int] = []
        self.release = threading.Event()
        self.timed = timed(self.handle, thread_pool)
        self._clock = clock
        self._hanging = hanging

    def handle(self, value: str) -> None:
        self.called.append(int(value))
        if int(value) in self._hanging:
            self._clock.hang(self.release)

    def run(self, count: int, stop: list[object] | None = None) -> Halt | None:
        return self.timed(messages_at(range(count)), stop or [], None, "shop:A", [])


@pytest.fixture
def scene(clock: FakeClock, thread_pool: ThreadPool) -> Iterator[Scene]:
    made = Scene(clock, thread_pool, {2})
    yield made
    made.release.set()


def test_a_call_past_its_limit_is_given_up_and_named(scene: Scene) -> None:
    halt = scene.run(5)
    assert halt is not None
    assert (halt.message.offset(), halt.certain, halt.abandoned, halt.sends_lost) == (2, True, True, False)
    with pytest.raises(HandlerTimeout, match=r"handle took longer than timeout=0\.05 s and was given up"):
        raise halt.error or AssertionError
    assert isinstance(halt.error, TimeoutError)


def test_a_thread_that_was_given_up_begins_no_other_call(scene: Scene) -> None:
    scene.run(5)
    (given_up,) = scene.timed._abandoned
    scene.release.set()
    eventually(given_up.done, what="it has come back")
    assert scene.called == [0, 1, 2]


def test_a_slice_may_take_longer_than_the_limit_if_its_calls_do_not(
    clock: FakeClock, thread_pool: ThreadPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks, walked = 0, _log_context.walked

    def look(context: Context) -> int | None:
        nonlocal looks
        looks += 1
        return walked(context)

    def six_tenths(value: str) -> None:
        seen = looks
        eventually(lambda: looks >= seen + 2, what="the watch has seen that this call has begun")
        clock.now += 0.6

    monkeypatch.setattr(_log_context, "walked", look)
    assert timed(six_tenths, thread_pool, 1.0)(messages_at(range(5)), [], None, "shop:A", []) is None
    assert clock.now == pytest.approx(3.0)


def test_a_call_that_ends_just_as_it_is_given_up_counts_as_ended(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """The watch has found it overdue; it ends before the next look: what it did is done, and the rest is not begun."""
    walked, overdue = _log_context.walked, threading.Event()

    def look(context: Context) -> int | None:
        if overdue.is_set():
            scene.release.set()
            eventually(lambda: walked(context) != 2, what="it has gone on")
        return walked(context)

    class Noted(timing._Stop):
        def __setattr__(self, name: str, value: object) -> None:
            super().__setattr__(name, value)
            if (name, value) == ("abandoned", True):
                overdue.set()

    monkeypatch.setattr(timing, "_Stop", Noted)
    monkeypatch.setattr(_log_context, "walked", look)
    halt = scene.run(5)
    assert halt is not None
    assert (halt.message.offset(), halt.error, halt.abandoned) == (3, None, False)
    assert scene.called == [0, 1, 2]


def test_the_lane_can_stop_a_runner_as_ever(scene: Scene) -> None:
    halt = scene.run(5, ["revoked"])
    assert halt is not None
    assert (halt.message.offset(), halt.error) == (0, None)


def test_what_was_sent_before_a_call_was_given_up_is_lost_so_its_records_are_not_done(
    clock: FakeClock, thread_pool: ThreadPool
) -> None:
    release, sent = threading.Event(), list[Outgoing]()

    def send(value: str, sender: Sender) -> None:
        sender.send("parcels", value)
        if value == "2":
            clock.hang(release)
            sender.send("parcels", "too late")

    run = timed(send, thread_pool)
    halt = run(messages_at(range(5)), [], None, "shop:A", sent)
    assert halt is not None
    assert (halt.message.offset(), halt.sends_lost, sent) == (2, True, [])
    release.set()
    assert run(messages_at([7]), [], None, "shop:A", sent) is None
    assert [outgoing.value for outgoing in sent] == [b"7"], "what is not given up is sent"


def test_a_batch_is_one_call_and_which_record_it_was_is_not_known(clock: FakeClock, thread_pool: ThreadPool) -> None:
    release = threading.Event()

    def many(values: list[str]) -> None:
        clock.hang(release)

    halts = [timed(many, thread_pool)(messages_at(offsets), [], None, "shop:A", []) for offsets in ([3, 4], [3])]
    release.set()
    assert [halt is not None and halt.certain for halt in halts] == [False, True]


def test_when_too_many_hang_no_other_is_begun_until_some_come_back(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timing, "MAX_ABANDONED", 2)
    scene.run(3)
    scene.run(3)
    with pytest.raises(TooManyFailures, match=r"2 calls of handle took longer than timeout=0\.05 s and still hang"):
        scene.run(3)
    assert scene.called == [0, 1, 2, 0, 1, 2]
    scene.release.set()
    eventually(lambda: all(hung.done() for hung in scene.timed._abandoned), what="they have come back")
    assert scene.run(3) is None


# async def


def awaited(seconds: float, work: Callable[[], object]) -> object:
    async def call() -> object:
        return await asyncio.wait_for(cancelled_after(seconds, "charge", work)(), 20)  # type: ignore[arg-type]

    return asyncio.run(call())


def test_an_async_call_past_its_limit_is_cancelled() -> None:
    ended: list[str] = []

    async def hang() -> None:
        try:
            await asyncio.sleep(3600)
        finally:
            ended.append("cleaned up")

    with pytest.raises(HandlerTimeout, match=r"charge took longer than timeout=0\.05 s and was cancelled"):
        awaited(SHORT, hang)
    assert ended == ["cleaned up"]


def test_a_timeout_of_the_handlers_own_stays_its_own() -> None:
    async def fail() -> None:
        raise TimeoutError("the bank did not answer")

    with pytest.raises(TimeoutError, match="the bank") as caught:
        awaited(LONG, fail)
    assert not isinstance(caught.value, HandlerTimeout)


def test_an_async_call_that_finishes_although_it_was_cancelled_has_finished() -> None:
    async def stubborn() -> str:
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            return "done"
        return "never"

    assert awaited(SHORT, stubborn) == "done"


# What is refused


@pytest.mark.parametrize("timeout", [0, -1, float("inf"), float("nan"), True, "30"])
def test_a_timeout_that_is_no_time_is_refused(timeout: object) -> None:
    with pytest.raises(ConfigurationError, match="must be the seconds that a call may take, above zero"):
        App("localhost:9092", group="shop").consume("orders", timeout=timeout)  # type: ignore[arg-type]


def test_a_timeout_on_the_polling_thread_is_refused() -> None:
    app = App("localhost:9092", group="shop")
    with pytest.raises(ConfigurationError, match="has timeout=, so it waits, and executor='inline'"):

        @app.consume("orders", timeout=1.0, executor="inline")
        def handle(value: bytes) -> None: ...

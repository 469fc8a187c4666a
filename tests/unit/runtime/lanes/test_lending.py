"""The consumer lent to an event loop: by turns, never by two threads at once, and taken back from one that hangs."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator

import pytest

from kconsume._runtime.handler_loop import EventLoopThread
from kconsume._runtime.lanes import lending
from kconsume._runtime.lanes.lending import Lending


class Owner:
    """Fetches so many times, and says on which thread."""

    def __init__(self, handler_loop: EventLoopThread) -> None:
        self.handler_loop = handler_loop
        self.left = 3
        self.threads: list[str] = []
        self.rests = True
        self.error: Exception | None = None
        self.hold: threading.Event | None = None
        """Blocks the event loop behind a fetch, as a handler would."""
        self.touching = 0
        self.fetched = threading.Event()

    def fetch_now(self) -> bool:
        self.touching += 1
        assert self.touching == 1, "two threads have the consumer"
        self.threads.append(threading.current_thread().name)
        time.sleep(0)
        self.touching -= 1
        if self.error is not None:
            raise self.error
        self.left -= 1
        if self.hold is not None:
            asyncio.get_running_loop().call_soon(self.hold.wait, 20)
            self.rests = False
        self.fetched.set()
        return self.left >= 0

    def at_rest(self) -> bool:
        return self.rests


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine may leave any thread alone for longer than a burst lasts."""
    monkeypatch.setattr(lending, "BURST", 20.0)


@pytest.fixture
def handler_loop() -> Iterator[EventLoopThread]:
    handler_loop = EventLoopThread("kconsume-loop-test")
    yield handler_loop
    handler_loop.close(5)


def test_a_burst_fetches_on_the_loop_until_nothing_comes(handler_loop: EventLoopThread) -> None:
    owner = Owner(handler_loop)
    assert Lending(handler_loop, owner).burst()
    assert owner.threads == ["kconsume-loop-test"] * 4


def test_a_burst_ends_when_its_time_is_over_though_more_would_come(
    handler_loop: EventLoopThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lending, "BURST", 0.0)
    monkeypatch.setattr(lending, "HELD_UP", 20.0)
    owner = Owner(handler_loop)
    assert Lending(handler_loop, owner).burst()
    assert len(owner.threads) == 1


def test_nothing_is_lent_while_a_lane_is_busy(handler_loop: EventLoopThread) -> None:
    owner = Owner(handler_loop)
    owner.rests = False
    assert not Lending(handler_loop, owner).burst()
    assert owner.threads == []


def test_a_burst_that_brought_nothing_says_so(handler_loop: EventLoopThread) -> None:
    owner = Owner(handler_loop)
    owner.left = 0
    assert not Lending(handler_loop, owner).burst()


def test_an_error_in_a_burst_is_raised_where_the_consumer_lives(handler_loop: EventLoopThread) -> None:
    owner = Owner(handler_loop)
    owner.error = ValueError("the offset is not in the log")
    with pytest.raises(ValueError, match="not in the log"):
        Lending(handler_loop, owner).burst()


def test_a_loop_that_is_held_up_loses_the_consumer_and_is_left_alone_for_a_while(
    handler_loop: EventLoopThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner = Owner(handler_loop)
    owner.hold = threading.Event()
    monkeypatch.setattr(lending, "REST", 100.0)
    ended = lending._Lease.ended
    monkeypatch.setattr(lending._Lease, "ended", lambda lease, _: owner.fetched.wait(20) and ended(lease, 0.01))
    lends = Lending(handler_loop, owner)
    assert lends.burst(), "what it fetched before counts"
    owner.rests = True
    assert not lends.burst(), "not again so soon"
    owner.hold.set()
    asyncio.run_coroutine_threadsafe(asyncio.sleep(0), handler_loop.loop).result(60)
    assert len(owner.threads) == 1, "the burst that was taken back touched the consumer"
    monkeypatch.setattr(lends, "_not_before", 0.0)
    monkeypatch.setattr(lending._Lease, "ended", ended)
    owner.hold = None
    assert lends.burst(), "and then again"


def test_a_loop_that_was_closed_takes_nothing(handler_loop: EventLoopThread) -> None:
    owner, lends = Owner(handler_loop), Lending(handler_loop, Owner(handler_loop))
    _ = handler_loop.loop
    handler_loop.close(5)
    assert not lends.burst()
    assert owner.threads == []

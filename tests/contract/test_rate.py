"""A handler's rate on a running app: kept in every window over all its partitions, and no stop waits for it."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest

from kconsume import App, BatchError, Batching, Partition, Rate
from kconsume._handlers.rate import Limiter
from tests.fix_arena import IMPATIENT, POLL_INTERVAL, Arena
from tests.waiting import eventually

EXECUTORS = ["thread", "async", "batch", "async batch"]
every = pytest.mark.parametrize("executor", EXECUTORS)

RATE = Rate(20, per=0.6)
WINDOW = RATE.per - 1e-6
"""Seconds; moments are rounded."""


def consume(app: App, topic: str, executor: str, see: Callable[[int], None], **options: Any) -> None:
    """A handler in the form that this executor runs, which tells how many records it has been given."""

    def one(value: str) -> None:
        see(1)

    async def later(value: str) -> None:
        see(1)
        await asyncio.sleep(0)

    def many(values: list[str]) -> None:
        see(len(values))

    async def many_later(values: list[str]) -> None:
        see(len(values))
        await asyncio.sleep(0)

    forms: dict[str, Callable[..., Any]] = {"thread": one, "async": later, "batch": many, "async batch": many_later}
    if "batch" in executor:
        options["batch"] = Batching(7, wait=0.05)
    app.consume(topic, **options)(forms[executor])


Moments = list[tuple[float, int]]


class Watch:
    """When records started, and when they were granted. Windows are those of the grants: between its grant and its
    start, a busy machine may stop a thread for as long as it likes; so what is granted and has not started is counted,
    and must be no more than one call of each lane."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.started: Moments = []
        self.granted: Moments = []
        self.balance = 0
        self.lowest = self.highest = 0
        """Granted and not started, at the least and at the most."""
        self._lock = threading.Lock()
        remember = Limiter._remember

        def watched(limiter: Limiter, now: float, granted: int) -> None:
            remember(limiter, now, granted)
            with self._lock:
                self.granted.append((now, granted))
                self.balance += granted
                self.highest = max(self.highest, self.balance)

        monkeypatch.setattr(Limiter, "_remember", watched)

    def see(self, records: int) -> None:
        with self._lock:
            self.started.append((time.monotonic(), records))
            self.balance -= records
            self.lowest = min(self.lowest, self.balance)


def most_in(seconds: float, moments: Moments) -> int:
    """The most records in any stretch of so many seconds."""
    return max(sum(records for moment, records in moments if 0 <= moment - begin < seconds) for begin, _ in moments)


@every
def test_no_window_has_more_than_the_rate_over_all_partitions(
    arena: Arena, group: str, executor: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic, watch = arena.topic(4), Watch(monkeypatch)
    arena.fill(topic, 21)
    app = arena.app(group)
    consume(app, topic, executor, watch.see, rate=RATE, concurrency=4)

    report = app.catch_up(idle=0.3)

    assert report.handled == sum(records for _, records in watch.started) == 84
    assert most_in(WINDOW, watch.granted) <= RATE.records
    assert watch.lowest >= 0, "nothing started before it was granted"
    assert watch.highest <= 4 * (7 if "batch" in executor else 1), "granted when it starts, and not some time before"


@every
def test_control_without_a_rate_the_same_records_start_in_one_window(
    arena: Arena, group: str, executor: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic, watch = arena.topic(4), Watch(monkeypatch)
    arena.fill(topic, 21)
    app = arena.app(group)
    consume(app, topic, executor, watch.see, concurrency=4)
    app.catch_up(idle=0.3)
    assert watch.granted == []
    assert most_in(WINDOW, watch.started) > RATE.records


def test_also_in_transactions_and_when_a_batch_is_called_again(
    arena: Arena, group: str, sqlite_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic, watch = arena.topic(2), Watch(monkeypatch)
    arena.fill(topic, 20, partitions=2)
    app = arena.app(group, sqlite_url)

    @app.consume(topic, batch=Batching(10, wait=0.1), rate=RATE, on_error="skip")
    def handle(values: list[str], tx: sqlite3.Connection) -> None:
        watch.see(len(values))
        bad = {index: LookupError() for index, value in enumerate(values) if value.endswith(":3")}
        if bad:
            raise BatchError(bad)

    report = app.catch_up(idle=0.3)
    assert (report.handled, report.skipped) == (38, 2)
    assert sum(records for _, records in watch.started) == 40 + 18, "two batches were called again without one"
    assert most_in(WINDOW, watch.granted) <= RATE.records
    assert watch.lowest >= 0
    assert watch.highest <= 2 * 10


@pytest.mark.dense
@every
def test_a_stop_while_it_waits_ends_promptly_and_what_has_not_begun_is_left(
    arena: Arena, group: str, executor: str
) -> None:
    topic, seen = arena.topic(1), list[int]()
    arena.produce(topic, ["x"] * 30, 0)
    app = App(arena.bootstrap, group=group, kafka=arena.quick({}), shutdown=60.0)
    consume(app, topic, executor, seen.append, rate=Rate(7, per=3600.0))
    with app.running():
        eventually(lambda: sum(seen) == 7, what="as many as the rate allows")
        asked = time.monotonic()
    assert time.monotonic() - asked < 20.0, "far from the deadline, and further from the hour"
    again: list[int] = []
    other = arena.app(group)
    consume(other, topic, executor, again.append)
    assert other.catch_up(idle=0.3).committed == {Partition(topic, 0): 30}
    assert sum(again) == 23


def test_waiting_for_the_rate_costs_neither_the_membership_nor_a_hand_over(arena: Arena, group: str) -> None:
    topic, seen = arena.topic(2), list[int]()
    arena.fill(topic, 3, partitions=2)
    one, two = arena.app(group, kafka=IMPATIENT), arena.app(group, kafka=IMPATIENT)
    consume(one, topic, "thread", seen.append, rate=Rate(1, per=POLL_INTERVAL + 1.0))
    consume(two, topic, "thread", seen.append)
    with ExitStack() as stack:
        stack.enter_context(one.running())
        eventually(lambda: len(seen) == 2, what="longer than the poll interval, and still a member")
        stack.enter_context(two.running())
        eventually(lambda: len(seen) >= 5, what="the partition that moves does not wait for its old owner's rate")
        eventually(lambda: len(seen) >= 6, what="all")
    assert len(seen) == 6 or arena.kind == "embedded", "which may refuse a commit while it rebalances"


# In turn


class FakeClock:
    def __init__(self) -> None:
        self.now = 4096.0

    def __call__(self) -> float:
        return self.now


def granted_after(seconds: float, *, in_turn: bool, large: int) -> float | None:
    """When a batch of `large` is granted beside a partition that gets a record every 0.8 s; both ask every 50 ms."""
    clock = FakeClock()
    limiter, began = Limiter(Rate(50), clock), clock.now
    busy, trickle = ("busy", "trickle") if in_turn else (None, None)
    waiting = 0
    for step in range(int(seconds / 0.05)):
        clock.now = began + step * 0.05
        waiting += step % 16 == 0
        if waiting and limiter.take(1, 1, trickle)[0]:
            waiting -= 1
        if limiter.take(large, large, busy)[0]:
            return clock.now - began
    return None


@pytest.mark.parametrize("large", [50, 500])
def test_a_batch_that_needs_the_whole_rate_is_not_kept_out_by_a_partition_that_trickles(large: int) -> None:
    granted = granted_after(600, in_turn=True, large=large)
    assert granted is not None
    assert granted <= 3.0


@pytest.mark.parametrize("large", [50, 500])
def test_control_without_turns_it_is_kept_out_for_ever(large: int) -> None:
    assert granted_after(600, in_turn=False, large=large) is None


def test_who_stops_asking_holds_up_nobody_for_long() -> None:
    clock = FakeClock()
    limiter = Limiter(Rate(10), clock)
    assert limiter.take(10, 10, "first") == (10, 0.0)
    assert limiter.take(10, 10, "revoked")[0] == 0
    clock.now += 1.0
    assert limiter.take(1, 1, "next") == (1, 0.0)


def test_those_who_wait_are_granted_in_the_order_in_which_they_came() -> None:
    clock, order = FakeClock(), list[str]()
    limiter = Limiter(Rate(10), clock)
    limiter.take(10, 10, "before")
    left = ["c", "a", "b"]
    for _ in range(200):
        for who in list(left):
            if limiter.take(6, 6, who)[0]:
                order.append(who)
                left.remove(who)
        clock.now += 0.05
    assert order == ["c", "a", "b"]

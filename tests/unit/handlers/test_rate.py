"""A rate is kept in every window, whoever asks and however; and who is told to wait is granted after that time."""

from __future__ import annotations

import math
import pickle
import threading
from collections.abc import Callable
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kconsume._handlers.rate import Limiter, Rate
from kconsume.errors import ConfigurationError

TICK = 1 / 1024
"""Times in these tests are whole numbers of ticks, which floats add and compare exactly."""


class FakeClock:
    def __init__(self, now: float = 4096.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


class Ask(NamedTuple):
    """After so many ticks, by a caller who waits if it is told to, or goes away."""

    ticks: int
    least: int
    most: int
    patient: bool


class Granted(NamedTuple):
    moment: float
    records: int


rates = st.builds(lambda records, ticks: Rate(records, ticks * TICK), st.integers(1, 300), st.integers(1, 4096))
asks = st.builds(
    lambda ticks, least, more, patient: Ask(ticks, least, least + more, patient),
    st.integers(0, 2000),
    st.integers(1, 350),
    st.integers(0, 400),
    st.booleans(),
)


def play(limiter: Limiter, clock: FakeClock, schedule: list[Ask]) -> list[Granted]:
    grants = []
    for ask in schedule:
        clock.now += ask.ticks * TICK
        records, seconds = limiter.take(ask.least, ask.most)
        if not records and ask.patient:
            clock.now += seconds
            records, seconds = limiter.take(ask.least, ask.most)
            assert records, f"told to wait, and then {seconds} s more"
        if records:
            assert seconds == 0.0
            assert ask.least <= records <= ask.most
            grants.append(Granted(clock.now, records))
        else:
            assert seconds > 0.0
    return grants


def check_every_window(rate: Rate, grants: list[Granted]) -> None:
    for first in grants:
        within = [grant for grant in grants if 0 <= grant.moment - first.moment < rate.per]
        assert sum(grant.records for grant in within) <= rate.records or len(within) == 1


@settings(max_examples=200, deadline=None)
@given(rates, st.lists(asks, max_size=60))
def test_no_window_has_more_than_the_rate_but_for_one_batch_that_is_larger(rate: Rate, schedule: list[Ask]) -> None:
    clock = FakeClock()
    check_every_window(rate, play(Limiter(rate, clock), clock, schedule))


@settings(max_examples=200, deadline=None)
@given(rates, st.lists(asks, max_size=60))
def test_no_batch_makes_the_rate_higher_over_time(rate: Rate, schedule: list[Ask]) -> None:
    clock = FakeClock()
    grants = play(Limiter(rate, clock), clock, schedule)
    passed = sum(grant.records for grant in grants[:-1])
    if grants:
        seconds = grants[-1].moment - grants[0].moment
        assert passed <= rate.records * (seconds / rate.per + 1) + 1e-6


def test_control_without_the_window_check_the_same_schedule_breaks_the_rate() -> None:
    class Forgetful(Limiter):
        def _room(self, least: int) -> int:
            return max(least, self._records)

    rate, twice_at_once = Rate(10), [Ask(0, 1, 10, False)] * 2

    def run(limited: Callable[[Rate, FakeClock], Limiter]) -> None:
        clock = FakeClock()
        check_every_window(rate, play(limited(rate, clock), clock, twice_at_once))

    run(Limiter)
    with pytest.raises(AssertionError):
        run(Forgetful)


def test_control_a_wait_that_is_told_a_tick_too_short_is_noticed() -> None:
    class Hasty(Limiter):
        def _free_at(self, least: int) -> float:
            return super()._free_at(least) - TICK

    clock = FakeClock()
    with pytest.raises(AssertionError, match="s more"):
        play(Hasty(Rate(1), clock), clock, [Ask(0, 1, 1, True)] * 2)


@settings(max_examples=300, deadline=None)
@given(
    start=st.floats(0, 1e9),
    per=st.floats(1e-6, 1e6),
    gaps=st.lists(st.floats(0, 1e3), min_size=1, max_size=20),
)
def test_the_time_told_is_enough_whatever_the_clock_rounds(start: float, per: float, gaps: list[float]) -> None:
    clock = FakeClock(start)
    limiter = Limiter(Rate(3, per), clock)
    for gap in gaps:
        clock.now += gap
        if not limiter.take(2, 3)[0]:
            clock.now += limiter.take(2, 3)[1]
            assert limiter.take(2, 3)[0]


def test_what_was_granted_counts_until_the_window_has_passed_and_not_longer() -> None:
    clock = FakeClock()
    limiter = Limiter(Rate(2), clock)
    assert limiter.take(1, 1) == (1, 0.0)
    clock.now += 0.25
    assert limiter.take(1, 5) == (1, 0.0)
    assert limiter.take(1, 5) == (0, 0.75)
    assert limiter.take(2, 5) == (0, 1.0)
    clock.now += 0.75
    assert limiter.take(1, 5) == (1, 0.0)
    assert limiter.take(1, 5) == (0, 0.25)


def test_a_refusal_costs_nothing() -> None:
    clock = FakeClock()
    limiter = Limiter(Rate(1), clock)
    limiter.take(1, 1)
    for _ in range(5):
        assert limiter.take(1, 1) == (0, 1.0)


def test_a_batch_larger_than_the_rate_waits_for_an_empty_window_and_counts_for_several() -> None:
    clock = FakeClock()
    limiter = Limiter(Rate(50), clock)
    assert limiter.take(1, 1) == (1, 0.0)
    clock.now += 0.5
    assert limiter.take(500, 500) == (0, 0.5)
    clock.now += 0.5
    assert limiter.take(500, 900) == (500, 0.0)
    assert limiter.take(1, 1) == (0, 10.0)
    clock.now += 10.0
    assert limiter.take(500, 500) == (500, 0.0)


def test_the_memory_of_a_high_rate_is_small_and_nearly_all_of_the_rate_is_granted() -> None:
    clock = FakeClock()
    limiter = Limiter(Rate(20_000), clock)
    granted, most_remembered, began = 0, 0, clock.now
    while clock.now < began + 5.0:
        records, seconds = limiter.take(1, 1)
        granted += records
        clock.now += seconds or 49e-6  # a little faster than the rate, so that the memory slides
        most_remembered = max(most_remembered, len(limiter._grants))
    assert most_remembered <= 130
    assert 0.97 * 5 * 20_000 < granted <= 5 * 20_000


def test_threads_that_share_it_get_no_more_than_the_rate_together() -> None:
    limiter = Limiter(Rate(5000), FakeClock())
    shares: list[int] = []

    def greedy() -> None:
        mine = 0
        while records := limiter.take(1, 3)[0]:
            mine += records
        shares.append(mine)

    threads = [threading.Thread(target=greedy) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(shares), sum(shares)) == (4, 5000)


@pytest.mark.parametrize("records", [0, -1, 0.5, 50.0, math.nan, True, "50", None])
def test_a_number_of_records_that_cannot_be_kept_is_refused_with_the_fix(records: int) -> None:
    with pytest.raises(ConfigurationError, match=r"whole number above zero.* Rate\(1, per=10.0\)"):
        Rate(records)


@pytest.mark.parametrize("per", [0, 0.0, -1.0, math.nan, math.inf, True, "1", None])
def test_a_time_that_is_none_is_refused_with_the_fix(per: float) -> None:
    with pytest.raises(ConfigurationError, match=r"seconds above zero, for example Rate\(50, per=1.0\)"):
        Rate(50, per=per)


def test_a_rate_is_a_value() -> None:
    assert Rate(50) == Rate(50, per=1.0) == pickle.loads(pickle.dumps(Rate(50)))
    assert len({Rate(50), Rate(50, 1)}) == 1

"""How much work is started at once, and how deadlines are shared."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kconsume._runtime.deadlines import Deadline
from kconsume._runtime.lanes.pacing import Pace

A_HAIR = 1.0001

speeds = st.floats(min_value=0.0, max_value=60.0)


def run(pace: Pace, seconds_each: float) -> None:
    pace.measured(pace.size, pace.size * seconds_each)


def too_long(pace: Pace) -> bool:
    """Whether the next slice overruns the target by more than one record, at the pace known so far."""
    known = pace.seconds_each or 0.0
    return pace.size * known > (Pace.TARGET + known) * A_HAIR


@settings(max_examples=1000, deadline=None)
@given(st.integers(1, 5000), st.lists(speeds, min_size=1, max_size=40))
def test_a_slice_never_overruns_the_target_by_more_than_a_record(limit: int, history: list[float]) -> None:
    pace = Pace(limit)
    for each in history:
        before = pace.size
        run(pace, each)
        assert not too_long(pace)
        assert 1 <= pace.size <= min(limit, before * 2)


@settings(max_examples=1000, deadline=None)
@given(st.lists(speeds, max_size=20), st.floats(min_value=0.0, max_value=1.0))
def test_one_slow_record_is_enough_to_shorten_the_next_slice(history: list[float], slow: float) -> None:
    pace = Pace(5000)
    for each in history:
        run(pace, each)
    run(pace, slow)
    assert pace.size == 1 or pace.size * slow <= Pace.TARGET * A_HAIR


def test_the_first_slice_is_one_record_because_nothing_is_known() -> None:
    assert Pace(1000).size == 1


def test_a_slow_handler_gets_one_record_at_a_time() -> None:
    pace = Pace(1000)
    for _ in range(10):
        run(pace, 10.0)
    assert pace.size == 1


def test_a_fast_handler_gets_all_it_may_have() -> None:
    pace = Pace(1000)
    for _ in range(11):
        run(pace, 0.000_001)
    assert pace.size == 1000


def test_a_handler_that_was_slow_once_gets_long_slices_again() -> None:
    pace = Pace(1000)
    run(pace, 30.0)
    for _ in range(100):
        run(pace, 0.000_001)
    assert pace.size == 1000


def test_a_clock_that_saw_no_time_pass_breaks_nothing() -> None:
    pace = Pace(1000)
    run(pace, 0.0)
    assert pace.size == 2


class TestThatWaits:
    """A handler in transactions of a server: each slice waits for its transaction, however few records it has."""

    def test_the_rest_of_a_chunk_does_not_shorten_the_next_slice(self) -> None:
        pace = Pace(1000, waits=True)
        for _ in range(11):
            run(pace, 0.000_02)
        pace.measured(1, 0.01)
        assert pace.size > 900

    def test_small_rests_that_are_slow_again_and_again_do(self) -> None:
        pace = Pace(1000, waits=True)
        for _ in range(11):
            run(pace, 0.000_02)
        for _ in range(40):
            pace.measured(1, 0.045)
        assert pace.size < 10

    def test_a_rest_that_takes_longer_than_a_slice_may_is_enough(self) -> None:
        pace = Pace(1000, waits=True)
        for _ in range(11):
            run(pace, 0.000_02)
        pace.measured(1, 0.06)
        assert pace.size == 1

    def test_what_a_transaction_costs_once_does_not_keep_slices_small(self) -> None:
        pace = Pace(1000, waits=True)
        for _ in range(10):
            pace.measured(pace.size, 0.01 + pace.size * 0.000_02)
        assert pace.size == 1000

    @settings(max_examples=1000, deadline=None)
    @given(st.lists(st.tuples(speeds, st.floats(min_value=0.01, max_value=1.0)), min_size=1, max_size=40))
    def test_no_slice_is_longer_than_what_is_known_allows(self, history: list[tuple[float, float]]) -> None:
        pace = Pace(1000, waits=True)
        for each, share in history:
            before, records = pace.size, max(1, int(pace.size * share))
            pace.measured(records, records * each)
            assert not too_long(pace)
            assert 1 <= pace.size <= min(1000, before * 2)


def test_control_a_pace_that_only_doubles_overruns() -> None:
    class Doubling(Pace):
        def measured(self, records: int, seconds: float) -> None:
            super().measured(records, seconds)
            self.size = min(self.limit, records * 2)

    pace = Doubling(1000)
    run(pace, 0.04)
    run(pace, 0.04)
    assert too_long(pace)


class FakeClock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class TestDeadline:
    def test_steps_share_what_is_left(self) -> None:
        clock = FakeClock()
        deadline = Deadline(10.0, clock)
        clock.now += 4.0
        assert deadline.left == pytest.approx(6.0)
        assert not deadline.passed

    def test_what_is_left_is_never_negative(self) -> None:
        clock = FakeClock()
        deadline = Deadline(10.0, clock)
        clock.now += 11.0
        assert deadline.left == 0.0
        assert deadline.passed

    def test_it_has_passed_at_the_moment_itself(self) -> None:
        clock = FakeClock()
        deadline = Deadline(10.0, clock)
        clock.now += 10.0
        assert deadline.passed

    def test_a_part_ends_before_the_whole_and_on_the_same_clock(self) -> None:
        clock = FakeClock()
        deadline = Deadline(10.0, clock)
        clock.now += 4.0
        part = deadline.part(0.5)
        assert part.left == pytest.approx(3.0)
        clock.now += 3.0
        assert (part.passed, deadline.passed) == (True, False)

    def test_a_part_of_a_deadline_that_has_passed_has_passed(self) -> None:
        clock = FakeClock()
        deadline = Deadline(1.0, clock)
        clock.now += 2.0
        assert deadline.part(0.7).passed

"""How much may be in flight: bounded, without flapping, and paused only for what lasts."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kconsume._runtime.lanes.backpressure import RECORD_OVERHEAD, Advice, Backpressure

MB = 1024 * 1024

counts = st.integers(0, 50_000)
sizes = st.integers(0, 64 * MB)


class Lane:
    """A lane under a window, worked as the loop works it: records come only while the advice is to let them."""

    def __init__(self, window: Backpressure, seconds_each: float | None) -> None:
        self.window = window
        self.seconds_each = seconds_each
        self.records = 0
        self.bytes = 0
        self.most = 0
        self.crowded_since: float | None = None
        self.advice = Advice.FLOW
        self.flips: list[float] = []
        """How full the lane was at each change between flowing and not."""

    def step(self, now: float, arriving: int, each: int, finished: int) -> None:
        if self.advice is Advice.FLOW:
            self.records += arriving
            self.bytes += arriving * each
        done = min(finished, self.records)
        self.bytes -= self.bytes * done // self.records if self.records else 0
        self.records -= done
        share = self.window.fullness(self.records, self.bytes, self.seconds_each)
        if share >= 1.0 and self.crowded_since is None:
            self.crowded_since = now
        full_for = None if self.crowded_since is None else now - self.crowded_since
        advice = self.window.advise(self.records, self.bytes, full_for=full_for, seconds_each=self.seconds_each)
        if (advice is Advice.FLOW) != (self.advice is Advice.FLOW):
            self.flips.append(share)
        if advice is Advice.FLOW:
            self.crowded_since = None
        self.advice = advice
        self.most = max(self.most, self.bytes + self.records * RECORD_OVERHEAD)


speeds = st.sampled_from([None, 0.000_001, 0.001, 1.0])
steps = st.lists(st.tuples(st.integers(0, 1000), st.integers(0, 20_000), st.integers(0, 1500)), max_size=60)


@settings(max_examples=1000, deadline=None)
@given(steps, speeds)
def test_it_does_not_flap_half_a_window_lies_between_stopping_and_going_on(
    history: list[tuple[int, int, int]], seconds_each: float | None
) -> None:
    lane = Lane(Backpressure(4 * MB, 1), seconds_each)
    for number, (arriving, each, finished) in enumerate(history):
        lane.step(number * 0.05, arriving, each, finished)
    stopped, went_on = lane.flips[0::2], lane.flips[1::2]
    assert all(share >= 1.0 for share in stopped)
    assert all(share < 0.5 for share in went_on)


@settings(max_examples=1000, deadline=None)
@given(steps, speeds)
def test_memory_is_bounded_by_the_window_and_one_fetch(
    history: list[tuple[int, int, int]], seconds_each: float | None
) -> None:
    window = Backpressure(4 * MB, 1)
    lane = Lane(window, seconds_each)
    for number, (arriving, each, finished) in enumerate(history):
        lane.step(number * 0.05, arriving, each, finished)
    largest_fetch = max((arriving * (each + RECORD_OVERHEAD) for arriving, each, _ in history), default=0)
    assert lane.most <= window.bytes + largest_fetch


def test_control_without_hysteresis_it_flaps() -> None:
    class Hasty(Backpressure):
        def advise(
            self,
            records: int,
            size: int,
            *,
            full_for: float | None,
            seconds_each: float | None,
            waits: bool = False,
            batch: int = 0,
        ) -> Advice:
            return super().advise(records, size, full_for=None, seconds_each=seconds_each, waits=waits, batch=batch)

    lane = Lane(Hasty(4 * MB, 1), 0.001)
    for number in range(40):
        lane.step(number * 0.05, 500, 20_000, 30)
    assert [share for share in lane.flips[1::2] if share >= 0.5]


@given(counts, sizes, st.integers(0, MB), st.integers(1, 64), speeds)
def test_a_lane_is_fuller_with_more_bytes_and_with_more_records(
    records: int, size: int, more: int, lanes: int, seconds_each: float | None
) -> None:
    window = Backpressure(64 * MB, lanes)
    share = window.fullness(records, size, seconds_each)
    assert window.fullness(records, size + more, seconds_each) >= share
    assert window.fullness(records + 1, size, seconds_each) > share


def test_a_fast_handler_has_few_records_in_flight_because_more_would_only_cost_it() -> None:
    window = Backpressure(1024 * MB, 1)
    assert window.fullness(2000, 0, 0.000_030) == 1.0
    assert window.fullness(2000, 0, 0.001) < 0.1
    assert window.fullness(2000, 0, None) == 1.0, "enough to find out how fast it is"


def test_one_that_waits_has_many_so_that_a_crowded_lane_leaves_the_others_something_to_do() -> None:
    window = Backpressure(1024 * MB, 1)
    assert window.fullness(2000, 0, 0.000_030, waits=True) < 0.1
    assert window.advise(2000, 0, full_for=None, seconds_each=0.000_030, waits=True) is Advice.FLOW
    assert window.advise(2000, 0, full_for=None, seconds_each=0.000_030) is Advice.WAIT


class TestLargeBatches:
    """A batch larger than the window is there as a whole or not at all; meanwhile the next ones are fetched."""

    BATCH = 60_000
    window = Backpressure(1024 * MB, 1)

    @pytest.mark.parametrize(("each", "waits"), [(None, False), (None, True), (0.000_005, True), (0.000_030, False)])
    def test_with_one_batch_and_with_the_next_nobody_is_held_up(self, each: float | None, waits: bool) -> None:
        for records in (self.BATCH, 2 * self.BATCH):
            flows = self.window.advise(records, 0, full_for=None, seconds_each=each, waits=waits, batch=self.BATCH)
            assert flows is Advice.FLOW, records

    def test_control_by_the_usual_window_one_batch_holds_up_all_partitions(self) -> None:
        one = self.window.advise(self.BATCH, 0, full_for=None, seconds_each=0.000_005, waits=True)
        assert one is Advice.WAIT

    def test_a_third_is_one_too_many_until_one_is_left(self) -> None:
        def advice(records: int, full_for: float | None) -> Advice:
            return self.window.advise(
                records, 0, full_for=full_for, seconds_each=0.000_005, waits=True, batch=self.BATCH
            )

        assert advice(3 * self.BATCH, None) is Advice.WAIT
        assert advice(2 * self.BATCH, 0.1) is Advice.WAIT
        assert advice(self.BATCH, 0.1) is Advice.FLOW

    def test_memory_bounds_them_all_the_same(self) -> None:
        small = Backpressure(self.BATCH * RECORD_OVERHEAD, 1)
        assert small.fullness(self.BATCH, 0, 0.000_005, waits=True, batch=self.BATCH) == 1.0

    def test_small_batches_have_the_window_of_records(self) -> None:
        assert self.window.fullness(2000, 0, 0.000_030, batch=500) == 1.0


@given(st.integers(1, 1000), st.integers(1, 1024 * MB))
def test_all_lanes_together_stay_within_the_total(lanes: int, total: int) -> None:
    window = Backpressure(total, lanes)
    assert window.bytes * lanes <= max(total, lanes)


@given(counts, sizes, st.floats(0.0, 1000.0), st.none() | st.floats(0.0, 100.0))
def test_an_empty_lane_always_flows_even_after_a_record_larger_than_the_window(
    records: int, size: int, full_for: float, each: float | None
) -> None:
    assert Backpressure(1, 100).advise(0, 0, full_for=full_for, seconds_each=each) is Advice.FLOW


@given(
    st.integers(1, 50_000), sizes, st.none() | st.floats(0.0, 100.0), st.none() | st.floats(0.0, 10.0)
)  # fmt: skip
def test_it_pauses_only_for_what_lasts(records: int, size: int, full_for: float | None, each: float | None) -> None:
    """Pausing costs the prefetched records, so a lane that has room again within a second is not paused."""
    window = Backpressure(8 * MB, 1)
    advice = window.advise(records, size, full_for=full_for, seconds_each=each)
    lasts_already = full_for is not None and full_for > Backpressure.SOON
    will_last = records * (each or 0.0) > Backpressure.SOON
    assert advice is not Advice.PAUSE or lasts_already or will_last


@pytest.mark.parametrize(
    ("records", "full_for", "each", "advice"),
    [
        (23_999, None, 0.001, Advice.FLOW),
        (24_000, 0.0, 0.000_030, Advice.WAIT),
        (1_999, None, 0.000_030, Advice.FLOW),
        (2_000, 0.0, 0.000_030, Advice.WAIT),
        (1_000, 0.5, 0.000_030, Advice.WAIT),
        (999, 0.5, 0.000_030, Advice.FLOW),
        (1, 0.0, 0.000_001, Advice.FLOW),
        (2_000, 0.0, 0.000_001, Advice.WAIT),
        (0, 0.0, 0.000_001, Advice.FLOW),
        (24_000, 0.0, 0.001, Advice.PAUSE),
        (24_000, 0.0, None, Advice.WAIT),
        (24_000, 1.5, None, Advice.PAUSE),
        (12_000, 1.5, 0.001, Advice.PAUSE),
        (11_999, 1.5, 0.001, Advice.FLOW),
        (12_001, None, 0.001, Advice.FLOW),
    ],
)
def test_the_advice_in_the_cases_that_meet(
    records: int, full_for: float | None, each: float | None, advice: Advice
) -> None:
    assert Backpressure(1024 * MB, 1).advise(records, 0, full_for=full_for, seconds_each=each) is advice


def test_a_lane_is_resumed_while_it_still_has_work() -> None:
    """Resuming takes up to a second, and the handler should not be idle meanwhile."""
    window = Backpressure(1024 * MB, 1)
    just_below_half = Backpressure.MOST_RECORDS // 2 - 1
    assert window.advise(just_below_half, 0, full_for=5.0, seconds_each=0.001) is Advice.FLOW
    assert just_below_half > 10_000

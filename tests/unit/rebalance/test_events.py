"""A rebalance as a value, and how often and how long the last ones were: the sums are right, also in a storm."""

from __future__ import annotations

import dataclasses
import threading
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kconsume.errors import ConfigurationError
from kconsume.rebalance import History, Rebalance, Statistics
from kconsume.rebalance.events import JOINED, LEFT, LOST, MEMBERS, PARTITIONS, SUBSCRIPTION
from kconsume.records import Partition

START = datetime(2026, 3, 1, 12, 0, 30, tzinfo=UTC)
HOUR = 3600.0


def orders(*numbers: int) -> tuple[Partition, ...]:
    return tuple(Partition("orders", number) for number in numbers)


def at(seconds: float) -> datetime:
    return START + timedelta(seconds=seconds)


def rebalance(began: float = 0.0, duration: float = 0.0, *, success: bool = True) -> Rebalance:
    return Rebalance(MEMBERS, "cooperative", (), (), (), at(began), duration, 0, 0, (), success)


def history_of(*rebalances: Rebalance, ring: int = 128) -> History:
    history = History(START, ring)
    for each in rebalances:
        history.add(each)
    return history


class TestValue:
    def test_it_is_written_as_one_line_of_fields(self) -> None:
        value = Rebalance(MEMBERS, "cooperative", orders(3), (), orders(0, 1, 2), START, 0.0123, 1, 40, (), True)
        assert str(value) == (
            "reason=members protocol=cooperative gained=orders/3 gone=- kept=3 duration=0.012s drained=1 dropped=40 "
            "abandoned=- success=yes"
        )

    def test_several_partitions_make_no_space_in_the_line(self) -> None:
        value = Rebalance(LOST, "consumer", (), orders(1, 2), (), START, 2.0, 0, 0, orders(2), False)
        assert str(value) == (
            "reason=lost protocol=consumer gained=- gone=orders/1,orders/2 kept=0 duration=2.000s drained=0 dropped=0 "
            "abandoned=orders/2 success=no"
        )
        assert all(field.count("=") == 1 for field in str(value).split(" "))

    def test_moved_names_what_came_or_went_once_and_sorted(self) -> None:
        value = dataclasses.replace(rebalance(), gained=orders(10, 2), gone=orders(2, 1), kept=orders(5))
        assert value.moved == orders(1, 2, 10)

    def test_it_cannot_be_changed(self) -> None:
        with pytest.raises(dataclasses.FrozenInstanceError):
            rebalance().reason = LEFT  # type: ignore[misc]

    def test_the_reasons_are_these(self) -> None:
        assert [JOINED, MEMBERS, PARTITIONS, SUBSCRIPTION, LOST, LEFT] == [
            "joined", "members", "partitions", "subscription", "lost", "left",
        ]  # fmt: skip


class TestRing:
    def test_the_newest_is_last_and_the_oldest_falls_out(self) -> None:
        made = [rebalance(n) for n in range(5)]
        assert history_of(*made, ring=3).recent == tuple(made[2:])

    def test_what_was_read_before_does_not_change(self) -> None:
        history = history_of(rebalance(1))
        before = history.recent
        history.add(rebalance(2))
        assert before == (rebalance(1),)

    def test_a_ring_without_room_is_refused(self) -> None:
        with pytest.raises(ConfigurationError, match="at least 1"):
            History(START, ring=0)


class TestStatistics:
    def test_of_nothing(self) -> None:
        assert History(START).statistics(at(60)) == Statistics(0, 0.0, 0.0, 0.0, 1.0)

    def test_at_the_very_start_there_is_no_time_to_share(self) -> None:
        assert history_of(rebalance()).statistics(START) == Statistics(1, 0.0, 0.0, 0.0, 1.0)

    def test_a_clock_that_was_set_back_is_survived(self) -> None:
        assert history_of(rebalance(0, 2)).statistics(at(-10)) == Statistics(1, 0.0, 2.0, 0.0, 1.0)

    def test_a_young_history_is_measured_since_its_start(self) -> None:
        got = history_of(rebalance(0, 30), rebalance(600, 90, success=False)).statistics(at(1800))
        assert got == Statistics(2, 4.0, 60.0, 120 / 1800, 0.5)

    def test_what_ended_more_than_an_hour_ago_no_longer_counts(self) -> None:
        history = history_of(rebalance(10, 5), rebalance(2000, 1))
        assert history.statistics(at(15 + HOUR)).count == 2
        assert history.statistics(at(16 + HOUR)).count == 1
        assert history.statistics(at(2002 + HOUR)) == Statistics(0, 0.0, 0.0, 0.0, 1.0)

    def test_of_a_rebalance_that_reaches_into_the_hour_only_that_part_is_time_of_it(self) -> None:
        got = history_of(rebalance(0, 100)).statistics(at(HOUR + 60))
        assert got.count == 1
        assert got.mean_duration == 100
        assert got.share_of_time == pytest.approx(40 / HOUR)

    def test_the_share_is_never_more_than_all(self) -> None:
        history = history_of(*(rebalance(0, 50) for _ in range(5)))
        assert history.statistics(at(60)).share_of_time == 1.0


class TestStorm:
    def test_the_rate_is_right_when_the_ring_has_no_room_for_the_hour(self) -> None:
        history = history_of(*(rebalance(n, 0.5, success=n % 2 == 0) for n in range(3600)), ring=8)
        got = history.statistics(at(3600))
        assert (got.count, got.per_hour) == (3600, 3600.0)
        assert (got.mean_duration, got.share_of_time, got.success_rate) == (0.5, 0.5, 0.5)
        assert len(history.recent) == 8

    def test_a_storm_is_remembered_for_an_hour_and_not_longer(self) -> None:
        history = history_of(*(rebalance(n / 10, 0.05) for n in range(600)), ring=8)
        assert history.statistics(at(HOUR - 60)).count == 600
        assert history.statistics(at(HOUR + 180)).count == 0

    def test_what_is_remembered_does_not_grow_with_the_storm(self) -> None:
        history = history_of(*(rebalance(n * 2.0, 0.1) for n in range(10_000)), ring=8)
        assert len(history._snapshot.minutes) <= 62

    def test_control_a_ring_alone_would_have_got_it_wrong(self) -> None:
        history = history_of(*(rebalance(n, 0.5) for n in range(3600)), ring=8)
        assert sum(r.ended >= START for r in history.recent) == 8 != history.statistics(at(3600)).count


@st.composite
def lives(draw: st.DrawFn) -> tuple[list[Rebalance], float]:
    """Rebalances one after the other, over up to three hours, and a moment after the last."""
    moment, made = 0.0, []
    for _ in range(draw(st.integers(0, 60))):
        moment += draw(st.integers(0, 180))
        duration = draw(st.integers(0, 90))
        made.append(rebalance(moment, duration, success=draw(st.booleans())))
        moment += duration
    return made, moment + draw(st.integers(1, 5000))


def counted(rebalances: list[Rebalance], now: float) -> Statistics:
    """Straight from the words of the definition, with everything remembered."""
    start = max(0.0, now - HOUR)
    spans = [((r.began - START).total_seconds(), r) for r in rebalances]
    inside = [(began, r) for began, r in spans if began + r.duration >= start]
    n, window = len(inside), now - start
    return Statistics(
        count=n,
        per_hour=n * HOUR / window,
        mean_duration=sum(r.duration for _, r in inside) / n if n else 0.0,
        share_of_time=sum(began + r.duration - max(began, start) for began, r in inside) / window,
        success_rate=sum(r.success for _, r in inside) / n if n else 1.0,
    )


class TestProperties:
    @given(lives())
    def test_with_room_in_the_ring_it_is_exact(self, life: tuple[list[Rebalance], float]) -> None:
        made, now = life
        got, wanted = history_of(*made).statistics(at(now)), counted(made, now)
        assert dataclasses.astuple(got) == pytest.approx(dataclasses.astuple(wanted))

    @given(lives(), st.integers(1, 10))
    def test_without_it_is_right_to_a_minute(self, life: tuple[list[Rebalance], float], ring: int) -> None:
        made, now = life
        got = history_of(*made, ring=ring).statistics(at(now))
        exact, longer = counted(made, now), [r for r in made if r.ended >= at(max(0.0, now - HOUR) - 60)]
        assert exact.count <= got.count <= len(longer)

    @given(lives(), st.integers(1, 10))
    def test_in_the_first_hour_the_size_of_the_ring_makes_no_difference(
        self, life: tuple[list[Rebalance], float], ring: int
    ) -> None:
        made = [r for r in life[0] if r.ended < at(HOUR)]
        got, wanted = history_of(*made, ring=ring).statistics(at(HOUR)), counted(made, HOUR)
        assert dataclasses.astuple(got) == pytest.approx(dataclasses.astuple(wanted))

    @given(lives(), st.integers(1, 200), st.integers(-100, 20_000))
    def test_shares_and_rates_stay_within_their_bounds(
        self, life: tuple[list[Rebalance], float], ring: int, now: int
    ) -> None:
        got = history_of(*life[0], ring=ring).statistics(at(now))
        assert 0.0 <= got.share_of_time <= 1.0
        assert 0.0 <= got.success_rate <= 1.0
        assert got.count >= 0 <= got.per_hour
        assert got.mean_duration >= 0.0


def test_readers_see_each_rebalance_wholly_or_not_at_all() -> None:
    history, done, torn = History(START, ring=4), threading.Event(), []

    def read() -> None:
        while not done.is_set():
            got = history.statistics(at(3000))
            if got.count and got.mean_duration != 1.0:
                torn.append(got)

    readers = [threading.Thread(target=read) for _ in range(3)]
    for reader in readers:
        reader.start()
    for n in range(2000):
        history.add(rebalance(n, 1.0))
    done.set()
    for reader in readers:
        reader.join(30)
    assert torn == []
    assert history.statistics(at(3000)).count == 2000

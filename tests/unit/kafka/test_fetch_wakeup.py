"""When the client is woken after a rebalance: for a while, now and then, and not otherwise."""

from __future__ import annotations

from itertools import pairwise

from kconsume._kafka.fetch_wakeup import FetchWakeup


class Watch:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def times(wakeup: FetchWakeup, watch: Watch, seconds: float, step: float = 0.005) -> list[float]:
    began, due = watch.now, []
    while watch.now < began + seconds:
        if wakeup.due():
            due.append(round(watch.now - began, 3))
        watch.now += step
    return due


def test_without_a_rebalance_there_are_none() -> None:
    watch = Watch()
    assert times(FetchWakeup(watch), watch, 5) == []


def test_after_one_there_are_some_at_once_and_soon_none() -> None:
    watch = Watch()
    wakeup = FetchWakeup(watch)
    wakeup.begin()
    due = times(wakeup, watch, 5)
    assert due[0] == 0.0
    assert all(later - earlier >= FetchWakeup.INTERVAL - 1e-6 for earlier, later in pairwise(due))
    assert due[-1] < FetchWakeup.DURATION
    assert len(due) > 5


def test_the_next_one_begins_them_anew() -> None:
    watch = Watch()
    wakeup = FetchWakeup(watch)
    for _ in range(3):
        wakeup.begin()
        assert len(times(wakeup, watch, 2)) > 5


def test_who_does_not_answer_is_not_asked_again() -> None:
    watch = Watch()
    wakeup = FetchWakeup(watch)
    wakeup.begin()
    assert wakeup.due()
    wakeup.rest()
    assert times(wakeup, watch, 5) == []


def test_who_does_not_answer_is_not_asked_after_the_next_rebalances_either_until_the_rest_is_over() -> None:
    """Each request that is not answered closes the connection on which partitions are fetched."""
    watch = Watch()
    wakeup = FetchWakeup(watch)
    wakeup.begin()
    assert wakeup.due()
    wakeup.rest()
    for _ in range(5):
        wakeup.begin()
        assert times(wakeup, watch, 5) == []
    watch.now += FetchWakeup.REST
    wakeup.begin()
    assert len(times(wakeup, watch, 2)) > 5

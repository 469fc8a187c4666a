"""When the client is woken after a rebalance: for a while, now and then, and not otherwise."""

from __future__ import annotations

from itertools import pairwise

from kconsume.runtime.nudges import Nudges


class Watch:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def times(nudges: Nudges, watch: Watch, seconds: float, step: float = 0.005) -> list[float]:
    began, due = watch.now, []
    while watch.now < began + seconds:
        if nudges.due():
            due.append(round(watch.now - began, 3))
        watch.now += step
    return due


def test_without_a_rebalance_there_are_none() -> None:
    watch = Watch()
    assert times(Nudges(watch), watch, 5) == []


def test_after_one_there_are_some_at_once_and_soon_none() -> None:
    watch = Watch()
    nudges = Nudges(watch)
    nudges.begin()
    due = times(nudges, watch, 5)
    assert due[0] == 0.0
    assert all(later - earlier >= Nudges.EVERY - 1e-6 for earlier, later in pairwise(due))
    assert due[-1] < Nudges.FOR
    assert len(due) > 5


def test_the_next_one_begins_them_anew() -> None:
    watch = Watch()
    nudges = Nudges(watch)
    for _ in range(3):
        nudges.begin()
        assert len(times(nudges, watch, 2)) > 5


def test_who_does_not_answer_is_not_asked_again() -> None:
    watch = Watch()
    nudges = Nudges(watch)
    nudges.begin()
    assert nudges.due()
    nudges.end()
    assert times(nudges, watch, 5) == []

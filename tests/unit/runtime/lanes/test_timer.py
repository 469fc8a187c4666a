"""Lanes that wait are handed back in time, in the order of their times, and by one thread."""

from __future__ import annotations

import threading
import time
from queue import SimpleQueue
from typing import cast

import pytest

from kconsume._runtime.lanes import timer
from kconsume._runtime.lanes.lane import Lane
from kconsume._runtime.lanes.timer import LaneTimer
from tests.waiting import eventually

Woken = SimpleQueue[tuple[str, float]]


class Clock:
    """Stands still until it is told to go: on a busy machine, seconds may pass between two lines of a test."""

    def __init__(self) -> None:
        self.began = time.monotonic()
        self.goes = False

    def monotonic(self) -> float:
        return time.monotonic() if self.goes else self.began


def alarm_of(woken: Woken, name: str) -> LaneTimer:
    return LaneTimer(name, lambda lane: woken.put((str(lane), time.monotonic())))


def threads(name: str) -> int:
    return [thread.name for thread in threading.enumerate()].count(f"{name}-timer")


def test_each_comes_back_not_early_and_the_next_one_first(monkeypatch: pytest.MonkeyPatch) -> None:
    woken: Woken = SimpleQueue()
    clock, alarm = Clock(), alarm_of(woken, "kconsume-in-time")
    monkeypatch.setattr(timer, "time", clock)
    for name, seconds in (("late", 0.3), ("soon", 0.1), ("now", 0.0)):
        alarm.wake(cast(Lane, name), seconds)
    clock.goes = True
    came = [woken.get(timeout=30) for _ in range(3)]
    assert [name for name, _ in came] == ["now", "soon", "late"]
    assert all(at - clock.began >= due for (_, at), due in zip(came, (0.0, 0.1, 0.3), strict=True))
    assert threads("kconsume-in-time") == 1


def test_the_thread_ends_when_nothing_comes_and_the_next_one_starts_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LaneTimer, "IDLE_SECONDS", 0.05)
    woken: Woken = SimpleQueue()
    alarm = alarm_of(woken, "kconsume-lingers")
    for _ in range(2):
        alarm.wake(cast(Lane, "one"), 0.0)
        woken.get(timeout=30)
        eventually(lambda: threads("kconsume-lingers") == 0, what="its thread has ended")


def test_a_lane_that_comes_while_the_idle_wait_times_out_is_woken(monkeypatch: pytest.MonkeyPatch) -> None:
    woken: Woken = SimpleQueue()
    alarm, late = alarm_of(woken, "kconsume-late"), ["late"]

    class Overtaken(threading.Condition):
        """Each wait times out, and another thread has the lock before the waiting thread gets it back."""

        def wait(self, timeout: float | None = None) -> bool:
            if late:
                alarm.wake(cast(Lane, late.pop()), 0.0)
            return False

    monkeypatch.setattr(LaneTimer, "IDLE_SECONDS", 0.05)
    alarm._changed = Overtaken()
    alarm.wake(cast(Lane, "first"), 0.0)
    assert [woken.get(timeout=10)[0] for _ in range(2)] == ["first", "late"]

"""Lanes that wait are handed back in time, in the order of their times, and by one thread."""

from __future__ import annotations

import threading
import time
from queue import SimpleQueue
from typing import cast

import pytest

from kconsume.runtime.lanes import Alarm, Lane
from tests.waiting import eventually

Woken = SimpleQueue[tuple[str, float]]


def alarm_of(woken: Woken) -> Alarm:
    return Alarm("kconsume-test", lambda lane: woken.put((str(lane), time.monotonic())))


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "kconsume-test-alarm"]


def test_each_comes_back_not_early_and_the_next_one_first() -> None:
    woken: Woken = SimpleQueue()
    alarm, began = alarm_of(woken), time.monotonic()
    for name, seconds in (("late", 0.3), ("soon", 0.1), ("now", 0.0)):
        alarm.wake(cast(Lane, name), seconds)
    came = [woken.get(timeout=10) for _ in range(3)]
    assert [name for name, _ in came] == ["now", "soon", "late"]
    assert all(at - began >= due for (_, at), due in zip(came, (0.0, 0.1, 0.3), strict=True))
    assert len(threads()) == 1


def test_the_thread_ends_when_nothing_comes_and_the_next_one_starts_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Alarm, "LINGERS", 0.05)
    woken: Woken = SimpleQueue()
    alarm = alarm_of(woken)
    before = len(threads())
    for _ in range(2):
        alarm.wake(cast(Lane, "one"), 0.0)
        woken.get(timeout=10)
        eventually(lambda: len(threads()) == before, what="its thread has ended")

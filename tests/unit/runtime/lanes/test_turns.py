"""Slices of a handler side by side, or in turns: by whether it computes or waits."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from kconsume._runtime.lanes import turns as implementation
from kconsume._runtime.lanes.turns import Turns


def compute(seconds: float) -> None:
    began = time.thread_time()
    while time.thread_time() - began < seconds:
        pass


def computing() -> Turns:
    """As it is when nobody else wants the machine: a slice that computes does nothing else."""
    return Turns(clock=time.thread_time)


def most_at_once(turns: Turns, busy: bool, slices: int = 60) -> int:
    """How many slices ran at once at the end, of four threads that keep coming."""
    running, most, lock = 0, 0, threading.Lock()

    def slice_(number: int) -> None:
        nonlocal running, most
        with turns.take():
            with lock:
                running += 1
                if number > slices // 2:
                    most = max(most, running)
            compute(0.015) if busy else time.sleep(0.015)
            with lock:
                running -= 1

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(slice_, range(slices)))
    return most


class Noted:
    """A lock that tells when it is asked for while somebody has it."""

    def __init__(self) -> None:
        self.asked = threading.Event()
        self._lock = threading.Lock()

    def acquire(self, timeout: float) -> bool:
        if self._lock.locked():
            self.asked.set()
        return self._lock.acquire(timeout=timeout)

    def release(self) -> None:
        self._lock.release()


def test_a_handler_that_computes_takes_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(implementation, "_LONG", 60.0)  # a busy machine may stop a slice for as long as it likes
    assert most_at_once(computing(), busy=True) == 1


def test_a_handler_that_waits_runs_side_by_side() -> None:
    assert most_at_once(Turns(), busy=False) > 1


def test_one_that_seemed_busy_and_waits_when_it_is_alone_runs_side_by_side_again() -> None:
    turns = Turns()
    with turns.take():
        compute(0.015)
    for _ in range(6):
        with turns.take():
            time.sleep(0.1)
    assert most_at_once(turns, busy=False) > 1


def test_the_wait_for_a_turn_is_told_so_that_it_is_not_taken_for_work(monkeypatch: pytest.MonkeyPatch) -> None:
    turns, lock = computing(), Noted()
    monkeypatch.setattr(turns, "_turn", lock)
    with turns.take():
        compute(0.015)
    begun = threading.Event()

    def other() -> None:
        with turns.take():
            begun.set()
            assert lock.asked.wait(20)
            compute(0.05)

    thread = threading.Thread(target=other)
    thread.start()
    assert begun.wait(20)
    with turns.take() as turn:
        pass
    thread.join()
    assert turn.waited > 0.02


def test_an_error_gives_the_turn_back() -> None:
    turns = Turns()
    for _ in range(3):
        try:
            with turns.take():
                compute(0.015)
                raise LookupError
        except LookupError:
            continue


def test_a_slice_that_takes_long_holds_up_nobody_else() -> None:
    turns = computing()
    with turns.take():
        compute(0.015)
    begun, release = threading.Event(), threading.Event()

    def stuck() -> None:
        with turns.take():
            begun.set()
            release.wait(20)

    thread = threading.Thread(target=stuck)
    thread.start()
    try:
        assert begun.wait(20)
        for _ in range(50):  # a wait for each of them would be ten seconds
            with turns.take():
                assert not release.is_set()
    finally:
        release.set()
        thread.join()

"""A `with` block on the main thread that another thread can end, and that nothing else can."""

from __future__ import annotations

import signal
import sys
import threading
import time

import pytest

from kconsume._runtime import interrupt
from kconsume._runtime.interrupt import Interrupted, InterruptibleBlock
from tests.waiting import eventually

LONG = 30.0


def interrupt_later(body: InterruptibleBlock) -> threading.Thread:
    def wait_and_interrupt() -> None:
        eventually(lambda: body._active, what="the block")
        body.interrupt()

    thread = threading.Thread(target=wait_and_interrupt)
    thread.start()
    return thread


def test_a_sleeping_block_is_ended_from_another_thread() -> None:
    body = InterruptibleBlock()
    slept_through = False
    thread = interrupt_later(body)
    with body:
        time.sleep(LONG)
        slept_through = True
    thread.join()
    assert not slept_through


def test_a_block_that_waits_for_a_lock_is_ended_too() -> None:
    body = InterruptibleBlock()
    never = threading.Event()
    thread = interrupt_later(body)
    with body:
        assert never.wait(LONG), "woken by the interrupt, not by the deadline"
        pytest.fail("the wait came back")
    thread.join()


def test_a_busy_block_is_ended_too() -> None:
    body = InterruptibleBlock()
    deadline = time.monotonic() + LONG
    thread = interrupt_later(body)
    with body:
        while time.monotonic() < deadline:
            pass
        pytest.fail("the loop ran to its end")
    thread.join()


def run_without_a_call(body: InterruptibleBlock) -> None:
    """Enter `body` with a loop that handles signals nowhere but at its jump back."""
    going = [True]
    give_up = threading.Timer(LONG, going.clear)
    give_up.start()
    thread = interrupt_later(body)
    try:
        with body:
            while going:
                pass
            pytest.fail("the loop ran to its end")
    finally:
        give_up.cancel()
        thread.join()


def test_a_busy_block_without_a_call_is_ended_too() -> None:
    tracing = sys.gettrace()
    body = InterruptibleBlock()
    run_without_a_call(body)
    assert body.over
    assert sys.gettrace() is tracing


@pytest.mark.skipif(sys.version_info[:2] != (3, 13), reason="only Python 3.13's loops surely skip their handlers")
def test_control_an_interrupt_raised_at_once_leaves_a_busy_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interrupt, "_skips_handlers", lambda frame: False)
    body, before = InterruptibleBlock(), signal.getsignal(signal.SIGURG)
    with pytest.raises(Interrupted):
        run_without_a_call(body)
    assert not body.over
    signal.signal(signal.SIGURG, before)


def test_cleaning_up_in_the_block_is_done_when_it_is_ended() -> None:
    body, cleaned = InterruptibleBlock(), []
    thread = interrupt_later(body)
    with body:
        try:
            time.sleep(LONG)
        finally:
            cleaned.append(True)
    thread.join()
    assert cleaned == [True]


def test_an_exception_of_the_block_leaves_it_as_it_is() -> None:
    with pytest.raises(LookupError, match="mine"), InterruptibleBlock():
        raise LookupError("mine")


def test_the_signal_s_handler_is_as_before_when_the_block_has_ended() -> None:
    before = signal.getsignal(signal.SIGURG)
    with InterruptibleBlock():
        assert signal.getsignal(signal.SIGURG) is not before
    assert signal.getsignal(signal.SIGURG) is before


def test_an_interrupt_after_the_block_harms_nobody() -> None:
    body = InterruptibleBlock()
    with body:
        pass
    body.interrupt()
    signal.raise_signal(signal.SIGURG)  # its default is to be ignored


def test_a_block_within_a_block_is_ended_alone() -> None:
    outer, inner = InterruptibleBlock(), InterruptibleBlock()
    reached = False
    thread = interrupt_later(inner)
    with outer:
        with inner:
            time.sleep(LONG)
            pytest.fail("the inner block went on")
        reached = True
    thread.join()
    assert reached


def test_elsewhere_than_on_the_main_thread_it_is_not_ended_early() -> None:
    body, entered, leave, ended = InterruptibleBlock(), threading.Event(), threading.Event(), []

    def block() -> None:
        with body:
            entered.set()
            ended.append(leave.wait(LONG))

    thread = threading.Thread(target=block)
    thread.start()
    assert entered.wait(LONG)
    body.interrupt()
    leave.set()
    thread.join()
    assert ended == [True]


def test_an_interrupt_that_comes_before_the_block_begins_is_not_lost() -> None:
    """The app is started first and its block entered then; it may have failed in between."""
    body = InterruptibleBlock()
    body.interrupt()
    with body:
        for _ in range(1500):
            time.sleep(0.02)
        pytest.fail("the block went on, though the app had failed")


def test_an_interrupt_in_the_very_moment_the_block_ends_does_not_leave_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The signal arrives while `__exit__` already runs."""
    body = InterruptibleBlock()
    before = signal.getsignal(signal.SIGURG)
    is_set = body._over.set

    def too_late() -> None:
        body._active = True
        signal.raise_signal(signal.SIGURG)
        is_set()

    monkeypatch.setattr(body._over, "set", too_late)
    try:
        with body:
            pass
    except Interrupted:
        signal.signal(signal.SIGURG, before)
        pytest.fail("Interrupted left the block")
    assert signal.getsignal(signal.SIGURG) is before


def test_ten_thousand_blocks_that_end_while_they_are_interrupted() -> None:
    before = signal.getsignal(signal.SIGURG)
    patience = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    current = InterruptibleBlock()
    done = threading.Event()

    def interrupt() -> None:
        while not done.is_set():
            current.interrupt()

    thread = threading.Thread(target=interrupt)
    thread.start()
    escaped = 0
    try:
        for _ in range(10_000):
            current = InterruptibleBlock()
            try:
                with current:
                    pass
            except Interrupted:
                escaped += 1
    finally:
        done.set()
        thread.join()
        sys.setswitchinterval(patience)
        signal.signal(signal.SIGURG, before)
    assert escaped == 0, f"Interrupted left the block {escaped} times"

"""What may block, done elsewhere, in order, with the answer and the error kept."""

from __future__ import annotations

import functools
import threading

import pytest

from kconsume._runtime.background import BackgroundThread

DEADLINE = 20.0


def test_calls_are_run_in_order_on_one_other_thread() -> None:
    background = BackgroundThread("background")
    order: list[int] = []

    def call(number: int) -> int:
        order.append(number)
        return threading.get_ident()

    futures = [background.send(functools.partial(call, number)) for number in range(50)]
    (thread,) = {future.result(DEADLINE) for future in futures}
    assert thread != threading.get_ident()
    assert order == list(range(50))
    assert background.close(DEADLINE)


@pytest.mark.parametrize("error", [LookupError("x"), SystemExit(3), KeyboardInterrupt()])
def test_an_error_is_raised_where_the_answer_is_read_and_the_next_call_is_run(error: BaseException) -> None:
    def fail() -> None:
        raise error

    background = BackgroundThread("background")
    failed, after = background.send(fail), background.send(lambda: "done")
    assert failed.exception(DEADLINE) is error
    assert after.result(DEADLINE) == "done"
    assert background.close(DEADLINE)


def test_closing_finishes_what_waits() -> None:
    background, gate = BackgroundThread("background"), threading.Event()
    background.send(lambda: gate.wait(DEADLINE))
    last = background.send(lambda: "done")
    gate.set()
    assert background.close(DEADLINE)
    assert last.result(0) == "done"


def test_closing_does_not_wait_for_ever_and_says_so() -> None:
    background, gate = BackgroundThread("background"), threading.Event()
    hanging = background.send(lambda: gate.wait(DEADLINE))
    assert not background.close(0.01)
    gate.set()
    hanging.result(DEADLINE)

"""What may block, done elsewhere, in order, with the answer and the error kept."""

from __future__ import annotations

import functools
import threading

import pytest

from kconsume.runtime.errands import Errands

DEADLINE = 20.0


def test_errands_are_run_in_order_on_one_other_thread() -> None:
    errands = Errands("errands")
    order: list[int] = []

    def errand(number: int) -> int:
        order.append(number)
        return threading.get_ident()

    futures = [errands.send(functools.partial(errand, number)) for number in range(50)]
    (thread,) = {future.result(DEADLINE) for future in futures}
    assert thread != threading.get_ident()
    assert order == list(range(50))
    assert errands.close(DEADLINE)


@pytest.mark.parametrize("error", [LookupError("x"), SystemExit(3), KeyboardInterrupt()])
def test_an_error_is_raised_where_the_answer_is_read_and_the_next_errand_is_run(error: BaseException) -> None:
    def fail() -> None:
        raise error

    errands = Errands("errands")
    failed, after = errands.send(fail), errands.send(lambda: "done")
    assert failed.exception(DEADLINE) is error
    assert after.result(DEADLINE) == "done"
    assert errands.close(DEADLINE)


def test_closing_finishes_what_waits() -> None:
    errands, gate = Errands("errands"), threading.Event()
    errands.send(lambda: gate.wait(DEADLINE))
    last = errands.send(lambda: "done")
    gate.set()
    assert errands.close(DEADLINE)
    assert last.result(0) == "done"


def test_closing_does_not_wait_for_ever_and_says_so() -> None:
    errands, gate = Errands("errands"), threading.Event()
    hanging = errands.send(lambda: gate.wait(DEADLINE))
    assert not errands.close(0.01)
    gate.set()
    hanging.result(DEADLINE)

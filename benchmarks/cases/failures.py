"""The cost of failure policies: while nothing fails, and while one record of a hundred fails.

Both sides are kconsume, with the default executor. `policies` compares CPU time, because the wall time of two runs of
one program differs by more than two percent. It takes the lowest of several passes, because other work on the machine
can only increase CPU time. In `dead-letters` the letters are sent, confirmed and counted.
"""

from __future__ import annotations

from collections.abc import Callable

from benchmarks import orders
from benchmarks.case import Case, Measured, Task, Unit
from benchmarks.consumed import catch_up, cost, rate
from benchmarks.marks import mark, noop, restart
from benchmarks.ratios import Bar
from benchmarks.targets import records_in, target_topic
from kconsume import App, DeadLetter, Retry

_ONE_OF = 100
_PASSES = 5


class Policies(Case):
    name = "policies"
    about = "CPU of a no-op on bytes with Retry and DeadLetter, nothing fails, against the same without them"
    bar = Bar(1.02, at_least=False, digits=3)
    unit = Unit("{:,.0f} ns")
    names = ("with them", "without them")

    def ours(self, task: Task) -> Measured:
        def register(app: App) -> None:
            app.consume(task.topic, retry=Retry(5), on_error=DeadLetter("bench.dlq"))(noop)

        return _lowest_cost(task, register)

    def theirs(self, task: Task) -> Measured:
        def register(app: App) -> None:
            app.consume(task.topic)(noop)

        return _lowest_cost(task, register)


def _lowest_cost(task: Task, register: Callable[[App], None]) -> Measured:
    """Return the lowest cost of several passes over the topic, each with its own app and group."""
    passes: list[Measured] = []
    for number in range(_PASSES):
        restart()
        app = App(task.bootstrap, group=f"{task.group}-{number}")
        register(app)
        passes.append(cost(task, catch_up(app, task)))
    return min(passes, key=lambda measured: measured.figure)


class DeadLetters(Case):
    name = "dead-letters"
    about = "a no-op on bytes that fails on one record of a hundred, with DeadLetter, against the same that never fails"
    bar = Bar(0.8)
    names = ("1 % dead", "none")

    def ours(self, task: Task) -> Measured:
        with target_topic(task.bootstrap) as dead:
            handler, failed = _failing(True)
            app = App(task.bootstrap, group=task.group)
            app.consume(task.topic, on_error=DeadLetter(dead))(handler)
            report = app.catch_up(idle=0.5)
            letters = records_in(task.bootstrap, dead)
        wanted = orders.total(task.records)
        if (report.handled + report.skipped, report.skipped, letters) != (wanted, failed(), failed()):
            raise AssertionError(
                f"{report.handled} handled, {report.skipped} dead, {letters} letters; {wanted} records"
            )
        return rate(task, wanted)

    def theirs(self, task: Task) -> Measured:
        handler, _ = _failing(False)
        app = App(task.bootstrap, group=task.group)
        app.consume(task.topic)(handler)
        return rate(task, catch_up(app, task))


def _failing(fails: bool) -> tuple[Callable[[bytes], None], Callable[[], int]]:
    """Return a handler that counts its calls, and a function that returns how many calls failed."""
    calls, failed = 0, 0

    def handle(value: bytes) -> None:
        nonlocal calls, failed
        if not value:
            mark()
            return
        calls += 1
        if not calls % _ONE_OF and fails:
            failed += 1
            raise LookupError("no such order")

    return handle, lambda: failed

"""What a resource costs a record that is handled with it: both sides are kconsume.

The figure is CPU time, because a hundredth is less than what the time on the wall differs between two runs of one
program; and the polling thread, because handing over to workers is the larger part of that difference.
"""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.case import Case, Measured, Task, Unit
from benchmarks.consumed import catch_up, cost
from benchmarks.marks import Stock, noop, stocked_noop
from benchmarks.ratios import Bar
from kconsume import App


class Resource(Case):
    name = "resource"
    about = 'CPU of a no-op on bytes that gets a resource too, executor="inline", against the same without it'
    bar = Bar(1.01, at_least=False, digits=3)
    unit = Unit("{:,.0f} ns")
    names = ("with it", "without it")

    def ours(self, task: Task) -> Measured:
        app = App(task.bootstrap, group=task.group)
        states: list[str] = []

        @app.resource
        def stock() -> Iterator[Stock]:
            states.append("opened")
            yield Stock()
            states.append("closed")

        app.consume(task.topic, executor="inline")(stocked_noop)
        measured = cost(task, catch_up(app, task))
        if states != ["opened", "closed"]:
            raise AssertionError(f"the resource was {states}, and one run opens and closes it once")
        return measured

    def theirs(self, task: Task) -> Measured:
        app = App(task.bootstrap, group=task.group)
        app.consume(task.topic, executor="inline")(noop)
        return cost(task, catch_up(app, task))

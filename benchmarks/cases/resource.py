"""The cost of a resource for each record. Both sides are kconsume.

The figure is CPU time, because the wall time of two runs of one program differs by more than one percent. The handler
runs on the polling thread, because passing records to workers causes most of that difference.
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
            raise AssertionError(f"the resource was {states}, but one run must open and close it once")
        return measured

    def theirs(self, task: Task) -> Measured:
        app = App(task.bootstrap, group=task.group)
        app.consume(task.topic, executor="inline")(noop)
        return cost(task, catch_up(app, task))

"""A handler of `list[bytes]` that does nothing, against the bare loop that calls it with the values of each poll."""

from __future__ import annotations

from benchmarks import bare, orders
from benchmarks.case import Case, Measured, Task
from benchmarks.consumed import catch_up, rate
from benchmarks.marks import batch_noop
from benchmarks.ratios import Bar
from kconsume import App, Batching

SAME_AS_BARE = Batching(records=1000, wait=0.1)
"""The same limits as `consume(1000, 0.1)`. A batch has records of one partition, and of several polls."""


class Batch(Case):
    name = "batch"
    about = "no-op on list[bytes], default executor, against the bare loop that calls the no-op once for each poll"
    bar = Bar(0.85)

    def ours(self, task: Task) -> Measured:
        app = App(task.bootstrap, group=task.group)
        app.consume(task.topic, batch=SAME_AS_BARE)(batch_noop)
        return rate(task, catch_up(app, task))

    def theirs(self, task: Task) -> Measured:
        settings = bare.same_settings(task.bootstrap, task.group)
        return rate(task, bare.consume_values(settings, task.topic, batch_noop, orders.total(task.records)))

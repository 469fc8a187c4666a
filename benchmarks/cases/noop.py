"""A handler of bytes that does nothing: the cost of kconsume itself for each record.

Three cases with the same handler. `inline` (on the polling thread) and `thread` (default executor) are compared with
the bare loop with the same client settings. `defaults` is compared with the bare loop with the client's own defaults.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from benchmarks import bare, orders
from benchmarks.case import Case, Measured, Task
from benchmarks.consumed import catch_up, rate
from benchmarks.marks import noop
from benchmarks.ratios import Bar
from kconsume import App


class Inline(Case):
    name = "inline"
    about = 'no-op on bytes, executor="inline", against the bare loop with the same client settings'
    bar = Bar(0.95)
    executor: ClassVar[Literal["inline", "thread"]] = "inline"

    def ours(self, task: Task) -> Measured:
        app = App(task.bootstrap, group=task.group)
        app.consume(task.topic, executor=self.executor)(noop)
        return rate(task, catch_up(app, task))

    def theirs(self, task: Task) -> Measured:
        settings = bare.same_settings(task.bootstrap, task.group)
        return rate(task, bare.consume(settings, task.topic, noop, orders.total(task.records)))


class Thread(Inline):
    name = "thread"
    about = "no-op on bytes, default executor, against the bare loop with the same client settings"
    bar = Bar(0.70)
    executor = "thread"


class Defaults(Thread):
    name = "defaults"
    about = "no-op on bytes, default executor, against the bare loop with the client's own defaults"
    bar = Bar(4.0)
    names = ("kconsume", "bare, defaults")

    def theirs(self, task: Task) -> Measured:
        settings = bare.own_defaults(task.bootstrap, task.group)
        return rate(task, bare.consume(settings, task.topic, noop, orders.total(task.records)))

"""An `async def` handler that does nothing, against the bare loop inside `asyncio.run` that awaits it."""

from __future__ import annotations

from benchmarks import bare, orders
from benchmarks.case import Case, Measured, Task
from benchmarks.consumed import catch_up, rate
from benchmarks.marks import async_noop
from benchmarks.ratios import Bar
from kconsume import App


class Async(Case):
    name = "async"
    about = "async no-op on bytes, against the bare loop in asyncio.run that awaits it, same client settings"
    bar = Bar(0.55)

    def ours(self, task: Task) -> Measured:
        app = App(task.bootstrap, group=task.group)
        app.consume(task.topic)(async_noop)
        return rate(task, catch_up(app, task))

    def theirs(self, task: Task) -> Measured:
        settings = bare.same_settings(task.bootstrap, task.group)
        return rate(task, bare.consume_async(settings, task.topic, async_noop, orders.total(task.records)))

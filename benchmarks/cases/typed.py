"""A handler annotated with a msgspec Struct, against the bare loop with the same decoder."""

from __future__ import annotations

import msgspec

from benchmarks import bare, orders
from benchmarks.case import Case, Measured, Task, Topics
from benchmarks.consumed import catch_up, rate
from benchmarks.marks import typed_noop
from benchmarks.orders import Order
from benchmarks.ratios import Bar
from kconsume import App


class Typed(Case):
    name = "typed"
    about = "handler of a msgspec Struct, default executor, against the bare loop with the same decoder"
    bar = Bar(0.85)

    def tasks(self, topics: Topics, records: int) -> tuple[Task, Task]:
        task = topics.orders(records, "typed")
        return task, task

    def ours(self, task: Task) -> Measured:
        app = App(task.bootstrap, group=task.group)
        app.consume(task.topic)(typed_noop)
        return rate(task, catch_up(app, task))

    def theirs(self, task: Task) -> Measured:
        settings = bare.same_settings(task.bootstrap, task.group)
        decode = msgspec.json.Decoder(Order).decode
        total = orders.total(task.records)
        return rate(task, bare.consume_decoded(settings, task.topic, decode, typed_noop, total))

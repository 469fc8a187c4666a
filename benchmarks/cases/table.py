"""The cost of a `pyarrow.Table` for each record: kconsume's handler gets a table, the bare loop a list of messages.

The bare loop reads only the errors of its messages. The figure is the difference of the CPU times, which is the cost of
the columns and of kconsume itself. A ratio to a loop that does nothing would mean nothing.
"""

from __future__ import annotations

from benchmarks import bare, orders
from benchmarks.case import Case, Measured, Task, Unit
from benchmarks.cases.batch import SAME_AS_BARE
from benchmarks.consumed import catch_up, tallied_cost
from benchmarks.marks import tally
from benchmarks.ratios import Bar
from kconsume import App


class Table(Case):
    name = "table"
    about = "CPU of a handler that gets a pyarrow.Table, against the bare loop that reads no field of its messages"
    bar = Bar(600, at_least=False, unit="ns")
    unit = Unit("{:,.0f} ns")

    def ours(self, task: Task) -> Measured:
        import pyarrow  # imported here, because the other cases are measured without it

        app = App(task.bootstrap, group=task.group)
        columns: set[int] = set()

        @app.consume(task.topic, batch=SAME_AS_BARE)
        def count(table: pyarrow.Table) -> None:
            tally(table.num_rows)
            columns.add(table.num_columns)

        measured = tallied_cost(task, catch_up(app, task))
        if columns != {7}:
            raise AssertionError(f"tables had {columns} columns, and a table of records has 7")
        return measured

    def theirs(self, task: Task) -> Measured:
        settings = bare.same_settings(task.bootstrap, task.group)
        total = orders.total(task.records)
        return tallied_cost(task, bare.consume_messages(settings, task.topic, lambda m: tally(len(m)), total))

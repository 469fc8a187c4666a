"""The kconsume side of the cases that read a topic to its end, and the check of its counts.

Uses only the public API: `App`, the decorator, `catch_up`, its report.
"""

from __future__ import annotations

import msgspec

from benchmarks import marks, orders
from benchmarks.case import Measured, Task
from kconsume import App


def catch_up(app: App, task: Task) -> int:
    """Consume the whole topic, and commit every partition to its end. Returns how many records were handled."""
    report = app.catch_up(idle=0.5)
    wanted = orders.total(task.records)
    seen = (report.handled, report.skipped, sum(report.committed.values()))
    if seen != (wanted, 0, wanted):
        raise AssertionError(f"handled, skipped, committed: {seen}, and the topic has {wanted} records")
    return report.handled


def rate(task: Task, seen: int, between: int | None = None) -> Measured:
    """Return the records per second of one side. `seen` is the number of records that the side has handled.

    between: how many records were handled from the first mark to the last. Default: the number of orders. In a
        partition that ends early, the records after its last mark are not counted, on either side.
    """
    _check(task, seen)
    seconds, cpu = marks.span()
    count = between or task.records
    return Measured(count / seconds, cpu, count)


def cost(task: Task, seen: int) -> Measured:
    """Return the nanoseconds of CPU per record, for cases whose bar is too close for a measurement of wall time."""
    measured = rate(task, seen)
    return msgspec.structs.replace(measured, figure=measured.cpu / measured.records * 1e9)


def tallied_cost(task: Task, seen: int) -> Measured:
    """The same as `cost`, for handlers that count whole batches."""
    _check(task, seen)
    _check(task, marks.tallied())
    span, count = marks.stretch(task.records)
    return Measured(span.cpu / count * 1e9, span.cpu, count)


def committed_rate(task: Task, effects: int) -> Measured:
    """Return the records per second of one side, timed by its commits. `effects` is the number of rows found."""
    _check(task, effects)
    _check(task, marks.tallied())
    span, count = marks.stretch(task.records)
    return Measured(count / span.seconds, span.cpu, count, marks.mean_tally())


def _check(task: Task, seen: int) -> None:
    wanted = orders.total(task.records)
    if seen != wanted:
        raise AssertionError(f"{seen} records were handled, and the topic has {wanted}")

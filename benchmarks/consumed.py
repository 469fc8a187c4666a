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
    """Return the records per second of either side, after all records were `seen`.

    between: how many records were handled from the first mark to the last, if that is known. By default the number of
        orders: records behind the last mark of a partition that ends early count for neither side.
    """
    _check(task, seen)
    seconds, cpu = marks.span()
    count = between or task.records
    return Measured(count / seconds, cpu, count)


def cost(task: Task, seen: int) -> Measured:
    """Return the nanoseconds of CPU per record, for cases whose bar is finer than wall time can measure."""
    measured = rate(task, seen)
    return msgspec.structs.replace(measured, figure=measured.cpu / measured.records * 1e9)


def tallied_cost(task: Task, seen: int) -> Measured:
    """The same as `cost`, for handlers that count whole batches."""
    _check(task, seen)
    _check(task, marks.tallied())
    span, count = marks.stretch(task.records)
    return Measured(span.cpu / count * 1e9, span.cpu, count)


def committed_rate(task: Task, effects: int) -> Measured:
    """Return the records per second by the commits of either side, after this many `effects` were found."""
    _check(task, effects)
    _check(task, marks.tallied())
    span, count = marks.stretch(task.records)
    return Measured(count / span.seconds, span.cpu, count, marks.mean_tally())


def _check(task: Task, seen: int) -> None:
    wanted = orders.total(task.records)
    if seen != wanted:
        raise AssertionError(f"{seen} records were handled, and the topic has {wanted}")

"""The kconsume side of the cases that read a topic to its end, and the check of its counts.

Uses what every user has: `App`, the decorator, `catch_up`, its report.
"""

from __future__ import annotations

from benchmarks import marks, orders
from benchmarks.case import Measured, Task
from kconsume import App


def catch_up(app: App, task: Task) -> int:
    """Consume the whole topic, every partition committed to its end; answers how many records were handled."""
    report = app.catch_up(idle=0.5)
    wanted = orders.total(task.records)
    seen = (report.handled, report.skipped, sum(report.committed.values()))
    if seen != (wanted, 0, wanted):
        raise AssertionError(f"handled, skipped, committed: {seen}, and the topic has {wanted} records")
    return report.handled


def rate(task: Task, seen: int, between: int | None = None) -> Measured:
    """Records a second, for either side, after all records were `seen`.

    `between`: how many were handled from the first mark to the last, where that is known. Elsewhere it is taken
    as the orders alone: what partitions that end early add of their lead-out counts for neither side.
    """
    wanted = orders.total(task.records)
    if seen != wanted:
        raise AssertionError(f"{seen} records were handled, and the topic has {wanted}")
    seconds, cpu = marks.span()
    count = between or task.records
    return Measured(count / seconds, cpu, count)

"""Exactly once in Redis, one command a record, against the same commands in redis-py's pipelines without Kafka.

The code is in `in_redis.py`, which is imported when the case runs. The other side has its values in memory, one
connection in one thread, and no offsets. Its transactions have the size of kconsume's transactions.
"""

from __future__ import annotations

from benchmarks.case import Case, Measured, Task, Topics
from benchmarks.ratios import Bar


class Redis(Case):
    name = "redis"
    about = "exactly once in Redis, one command a record, against the same commands in redis-py's pipelines"
    bar = Bar(1.1)
    names = ("kconsume", "redis-py pipeline")
    needs = ("redis",)

    def tasks(self, topics: Topics, records: int) -> tuple[Task, Task]:
        task = topics.orders(records * 3 // 10)
        return task, task

    def ours(self, task: Task) -> Measured:
        from benchmarks import in_redis

        return in_redis.by_kconsume(task)

    def theirs(self, task: Task) -> Measured:
        from benchmarks import in_redis

        return in_redis.by_pipelines(task)

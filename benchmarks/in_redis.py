"""Push orders to a list in Redis: with kconsume, exactly once, and with redis-py's own pipelines.

Both sides call the same handler and count after each transaction. This module is imported only when a case runs,
so that other cases do not load redis-py.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from redis import Redis
from redis.client import Pipeline

from benchmarks import orders
from benchmarks.case import Measured, Task
from benchmarks.consumed import catch_up, committed_rate
from benchmarks.marks import tally
from benchmarks.orders import MARKS, PARTITIONS
from benchmarks.witness import WitnessedTx, witnessed
from kconsume import App
from kconsume.backends.redis.store import RedisStore
from kconsume.records import Partition

_LIST = "bench:orders"


def push(value: bytes, pipeline: Pipeline) -> None:
    pipeline.rpush(_LIST, value)


class WitnessedRedis(RedisStore):
    @contextmanager
    def transaction(self, group: str, partition: Partition, epoch: int) -> Iterator[WitnessedTx]:  # type: ignore[override]
        with witnessed(super().transaction(group, partition, epoch)) as tx:
            yield tx


def by_kconsume(task: Task) -> Measured:
    with _emptied(task.redis) as client:
        store = WitnessedRedis(task.redis)
        app = App(task.bootstrap, group=task.group, offsets=store)
        app.consume(task.topic)(push)
        catch_up(app, task)
        measured = committed_rate(task, _effects(client))
        store.delete(task.group)
        store.close()
        return measured


def by_pipelines(task: Task) -> Measured:
    """MULTI, as many commands as kconsume had in a transaction, and EXEC, until all values are written."""
    assert task.transaction is not None  # known, because kconsume's side runs first in the warm-up
    size = task.transaction
    values = [value for partition in range(PARTITIONS) for value in orders.values(partition, task.records, "bytes")]
    with _emptied(task.redis) as client:
        with client.pipeline(transaction=True) as pipeline:
            for first in range(0, len(values), size):
                part = values[first : first + size]
                for value in part:
                    push(value, pipeline)
                pipeline.execute()
                tally(len(part))
        return committed_rate(task, _effects(client))


@contextmanager
def _emptied(address: str) -> Iterator[Redis]:
    """Yield a client. The list is deleted before and afterwards."""
    with Redis.from_url(address) as client:
        client.delete(_LIST)
        try:
            yield client
        finally:
            client.delete(_LIST)


def _effects(client: Redis) -> int:
    """Return the number of values. Raises if a value was written twice. Only the marks are equal."""
    values = client.lrange(_LIST, 0, -1)
    distinct = len(set(values))
    if len(values) - MARKS != distinct - 1:
        raise AssertionError(f"{len(values)} values, {distinct} of them distinct: a record had its effect twice")
    return len(values)

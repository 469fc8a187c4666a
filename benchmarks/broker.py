"""The topics of a run on the real broker. Each is created when a case first needs it, and deleted at the end.

Records are written before a measurement, never during one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from confluent_kafka.admin import AdminClient

from benchmarks import orders
from benchmarks.case import Task
from benchmarks.orders import PARTITIONS, Form
from tests.fix_kafka import create_topic, delete_topics, produce, unique


class OrderTopics:
    """Implements `case.Topics`."""

    def __init__(self, bootstrap: str, say: Callable[[str], None]) -> None:
        self._bootstrap = bootstrap
        self._admin = AdminClient({"bootstrap.servers": bootstrap, "log_level": 0})
        self._say = say
        self._made: dict[tuple[int, Form], str] = {}

    def orders(self, records: int, form: Form = "bytes") -> Task:
        if (records, form) not in self._made:
            name = unique(f"bench-{form}")
            self._made[records, form] = name
            create_topic(self._admin, name, PARTITIONS)
            self._fill(name, records, form)
        return Task(self._bootstrap, self._made[records, form], orders.counted(records))

    def drop(self) -> None:
        """Delete every created topic, and with it the offsets of the groups."""
        delete_topics(self._admin, list(self._made.values()))
        self._made.clear()

    def _fill(self, name: str, records: int, form: Form) -> None:
        self._say(f"writing {records:,} orders for handlers of {form} to {name} …")
        for partition in range(PARTITIONS):
            produce(self._bootstrap, name, orders.values(partition, records, form), partition=partition)


@contextmanager
def order_topics(bootstrap: str, say: Callable[[str], None]) -> Iterator[OrderTopics]:
    topics = OrderTopics(bootstrap, say)
    try:
        yield topics
    finally:
        topics.drop()

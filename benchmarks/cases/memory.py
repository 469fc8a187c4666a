"""Peak memory (VmHWM) with a long lag against a short one: memory must not depend on the lag.

Both sides are kconsume, with the same handler for the same time. The handler is slower than the broker. If the memory
were not bounded, it would grow by gigabytes at ten million records of lag.
"""

from __future__ import annotations

import itertools
import threading
import time
from pathlib import Path

from confluent_kafka import Consumer, TopicPartition

from benchmarks.case import Case, Measured, Task, Topics, Unit
from benchmarks.orders import PARTITIONS
from benchmarks.ratios import Bar
from kconsume import App

SECONDS = 8.0
_HANDLER_SECONDS = 0.0002
_FIRST_RECORD_WITHIN = 60.0


class Memory(Case):
    name = "memory"
    about = "peak memory with 20 times the lag, slow handler (at the default --records: 10,000,000 against 500,000)"
    bar = Bar(1.1, at_least=False)
    unit = Unit("{:.1f} MB")
    names = ("long lag", "short lag")
    most_rounds = 3
    warm_up = False
    own_topics = True

    def tasks(self, topics: Topics, records: int) -> tuple[Task, Task]:
        return topics.orders(10 * records), topics.orders(records // 2)

    def ours(self, task: Task) -> Measured:
        calls, began = itertools.count(), threading.Event()
        app = App(task.bootstrap, group=task.group)

        @app.consume(task.topic)
        def slow(value: bytes) -> None:  # noqa: ARG001  (the annotation decides what is kept in memory)
            next(calls)
            began.set()
            time.sleep(_HANDLER_SECONDS)

        with app.running():
            if not began.wait(_FIRST_RECORD_WITHIN):
                raise AssertionError(f"no record within {_FIRST_RECORD_WITHIN:.0f} s")
            time.sleep(SECONDS)
        peak, cpu, handled = peak_memory(), time.process_time(), next(calls)
        committed = _committed(task)
        if handled != committed:
            raise AssertionError(f"{handled} records were handled, and the group has committed {committed}")
        return Measured(peak / 1e6, cpu, handled)

    theirs = ours


def peak_memory() -> int:
    """Return the highest number of bytes that this process had in memory."""
    return parse_peak(Path("/proc/self/status").read_text())


def parse_peak(status: str) -> int:
    for line in status.splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise ValueError("the kernel reports no VmHWM: the memory case needs Linux")


def _committed(task: Task) -> int:
    """Return the sum of the group's offsets. After a clean stop it is the number of handled records."""
    consumer = Consumer({"bootstrap.servers": task.bootstrap, "group.id": task.group})
    places = consumer.committed([TopicPartition(task.topic, n) for n in range(PARTITIONS)], timeout=20)
    consumer.close()
    return sum(place.offset for place in places)

"""Measures how long partitions that do not move get no records in a rebalance (promise P6).

    .venv/bin/python -m benchmarks.gaps --rounds 10

Every partition gets a record every 10 ms. One member stays; another member joins and leaves. Around each join and
leave, the longest time between two handled records is measured, in the partitions that the first member keeps. The
same is measured without a rebalance. The run asserts that no record was lost, and that each partition kept its order.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient

from kconsume import App, Record
from kconsume._config.client_settings import ClientValue
from kconsume.testing.services import kafka_service
from tests.fix_arena import PROTOCOLS
from tests.fix_kafka import create_topic, unique
from tests.waiting import eventually

PARTITIONS = 8
EVERY = 0.01
AROUND = 3.0
"""Seconds that are measured after each join or leave."""
BUDGET = 1.0
"""Seconds: the bound of P6, for fenced stores."""

Seen = dict[int, list[tuple[float, int]]]
"""For each partition, the time and the offset of each handled record."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=10)
    rounds: int = parser.parse_args().rounds
    print("longest time without a record, in partitions that do not move, around a join or a leave")
    print(f"{'protocol':<12} {'work':<9} {'at rest':>9} {'median':>9} {'longest':>9}")
    missed = False
    with kafka_service() as kafka:
        for protocol in ("cooperative", "consumer"):
            for work, seconds in (("none", 0.0), ("50 ms", 0.05)):
                still, gaps = measure(kafka.bootstrap, PROTOCOLS[protocol], rounds, seconds)
                missed = missed or max(gaps) > BUDGET
                median = statistics.median(gaps)
                print(f"{protocol:<12} {work:<9} {still:>7.3f} s {median:>7.3f} s {max(gaps):>7.3f} s   of {len(gaps)}")
    return int(missed)


def measure(
    bootstrap: str, protocol: Mapping[str, ClientValue], rounds: int, seconds: float
) -> tuple[float, list[float]]:
    """Return the longest gap at rest, and the gaps of all joins and leaves.

    seconds: how long the handling of every hundredth record takes.
    """
    topic, group, seen = unique("gaps"), unique("gaps"), {n: list[tuple[float, int]]() for n in range(PARTITIONS)}
    create_topic(AdminClient({"bootstrap.servers": bootstrap, "log_level": 0}), topic, PARTITIONS)
    with tempfile.TemporaryDirectory() as folder:

        def member(notes: Seen) -> App:
            app = App(bootstrap, group=group, offsets=f"sqlite:///{Path(folder) / 'gaps.db'}", kafka=protocol)

            @app.consume(topic, concurrency=PARTITIONS)
            def handle(record: Record) -> None:
                notes[record.partition].append((time.monotonic(), record.offset))
                if seconds and record.offset % 100 == 0:
                    time.sleep(seconds)

            return app

        other: Seen = {n: [] for n in range(PARTITIONS)}
        with writing(bootstrap, topic) as written, member(seen).running() as first:
            eventually(lambda: all(seen.values()), what="the first member works")
            time.sleep(AROUND)
            still = gap(seen, set(range(PARTITIONS)), time.monotonic() - AROUND)
            gaps = [one for _ in range(rounds) for one in join_and_leave(lambda: member(other), first, seen)]
        _check(written(), seen, other)
    return still, gaps


def join_and_leave(member: Callable[[], App], first: App, seen: Seen) -> Iterator[float]:
    began = time.monotonic()
    with member().running() as second:
        # Wait for the end of the rebalance: the new member learns its partitions at its next heartbeat.
        eventually(lambda: len(held(first)) == len(held(second)) == PARTITIONS // 2, what="half the partitions moved")
        staying = held(first)
        time.sleep(max(0.0, began + AROUND - time.monotonic()))
        yield gap(seen, staying, began)
        began = time.monotonic()
    eventually(lambda: len(held(first)) == PARTITIONS, what="the first member has all partitions again")
    time.sleep(max(0.0, began + AROUND - time.monotonic()))
    yield gap(seen, staying, began)


def held(app: App) -> set[int]:
    supervisor = app._supervisor
    assert supervisor is not None
    return {p.number for p in list(supervisor.consumers[0].assignment.partitions)}


def gap(seen: Seen, partitions: set[int], since: float) -> float:
    """Return the longest time without a record in one of these partitions, from `since` on."""
    longest = 0.0
    for partition in partitions:
        times = [at for at, _ in list(seen[partition]) if at >= since - EVERY]
        longest = max([longest, *(later - earlier for earlier, later in pairwise(times))])
    return longest


@contextmanager
def writing(bootstrap: str, topic: str) -> Iterator[Callable[[], int]]:
    """Write a record to each partition every 10 ms. The yielded function stops the writer, and returns its count."""
    done, count = threading.Event(), 0
    producer = Producer({"bootstrap.servers": bootstrap, "linger.ms": 0, "enable.idempotence": True})

    def write() -> None:
        nonlocal count
        while not done.wait(EVERY):
            for partition in range(PARTITIONS):
                producer.produce(topic, b"x", partition=partition)
            producer.poll(0)
            count += PARTITIONS

    def written() -> int:
        done.set()
        writer.join()
        assert producer.flush(20) == 0
        return count

    writer = threading.Thread(target=write)
    writer.start()
    try:
        yield written
    finally:
        written()


def _check(written: int, first: Seen, second: Seen) -> None:
    """Check that no offset is missing, and that each member kept the order. Both members must have ended."""
    for partition in range(PARTITIONS):
        for seen in (first, second):
            offsets = [offset for _, offset in seen[partition]]
            assert offsets == sorted(offsets), f"partition {partition} lost its order"
        handled = {offset for seen in (first, second) for _, offset in seen[partition]}
        assert handled == set(range(len(handled))), f"partition {partition} has a gap in its offsets"
    total = sum(len(seen[n]) for seen in (first, second) for n in range(PARTITIONS))
    assert total <= written, "some records were handled twice"
    assert total > written * 0.9, f"{total} handled of {written}"


if __name__ == "__main__":
    sys.exit(main())

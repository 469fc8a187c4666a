"""After a fault every partition goes on: what counts effects up to an expected end cannot see one that stands still.

`assert_liveness` writes one record to each partition and waits until each stored offset has passed it. Where one has
not, the test fails with that partition, its offset, the end of its log, and the cause that the app gives (P12).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from confluent_kafka import KafkaError, Message, Producer

from kconsume import App, Partition
from kconsume.backends import OffsetStore, open_store
from tests.waiting import eventually

Offsets = Mapping[Partition, int]
Causes = Mapping[Partition, str]

WITHIN = 45.0
"""Seconds in which every offset must have moved: above the longest pause between two claims, and a session's end."""


def assert_liveness(
    write: Callable[[], Offsets],
    stored: Callable[[], Offsets],
    causes: Callable[[], Causes],
    *,
    within: float = WITHIN,
) -> None:
    """`write` adds a record to each partition and returns where each log then ends; `stored` returns the offsets that
    the group's store has, and `causes` why partitions stand still, where anybody knows."""
    ends = write()

    def passed() -> bool:
        now = stored()
        return all(now.get(partition, -1) >= end for partition, end in ends.items())

    try:
        eventually(passed, within=within, what="every offset passes the new record")
    except AssertionError:
        now, said = stored(), causes()
        still = {partition: end for partition, end in ends.items() if now.get(partition, -1) < end}
        if not still:
            return  # the last of them came with this look
        lines = [
            f"{partition} stored={now.get(partition)} end={end} cause={said.get(partition, 'nobody has it')}"
            for partition, end in sorted(still.items())
        ]
        raise AssertionError(
            f"{len(still)} of {len(ends)} partitions stand still after {within:g} s:\n" + "\n".join(lines)
        ) from None


# What it is given by most tests


def assert_app_lives(
    *apps: App,
    bootstrap: str,
    topic: str,
    group: str,
    offsets: str | OffsetStore,
    partitions: int = 4,
    value: bytes | str = b"x",
    within: float = WITHIN,
) -> None:
    """Of apps in this process: one of them handles a new record of each partition. `value` should be one that they can
    handle."""
    with offsets_of(offsets, group, topic, partitions, bootstrap) as stored:
        write = partial(write_one_each, bootstrap, topic, partitions, value)
        assert_liveness(write, stored, partial(causes_of, apps), within=within)


def write_one_each(bootstrap: str, topic: str, partitions: int, value: bytes | str = b"x") -> dict[Partition, int]:
    """A record in each partition; where each log ends behind it."""
    ends, refused = dict[Partition, int](), list[str]()

    def note(error: KafkaError | None, message: Message) -> None:
        if error is not None:
            refused.append(str(error))
        ends[Partition(topic, message.partition() or 0)] = (message.offset() or 0) + 1

    producer = Producer({"bootstrap.servers": bootstrap, "acks": "all", "log_level": 0})
    for number in range(partitions):
        producer.produce(topic, value, partition=number, on_delivery=note)
    unconfirmed = producer.flush(60)
    assert not refused, f"not written to {topic}: {refused[0]}"
    assert not unconfirmed, f"{unconfirmed} records to {topic} were not confirmed within 60 s"
    return ends


@contextmanager
def offsets_of(
    offsets: str | OffsetStore, group: str, topic: str, partitions: int, bootstrap: str = ""
) -> Iterator[Callable[[], Offsets]]:
    """A look at what a store has of the topic: by its address, or the store itself, as `memory://` needs it."""
    places = [Partition(topic, number) for number in range(partitions)]
    store = open_store(offsets, brokers=bootstrap) if isinstance(offsets, str) else offsets
    try:
        yield lambda: {p: row.next_offset for p, row in store.load(group, places).items()}
    finally:
        if isinstance(offsets, str):
            store.close()


def causes_of(apps: Iterable[App]) -> dict[Partition, str]:
    """Why each partition of these apps does not flow, as their engines publish it."""
    said = dict[Partition, str]()
    for app in apps:
        supervisor = app._supervisor
        for consumer in () if supervisor is None else supervisor.consumers:
            snapshot, trouble = (
                consumer.loop.snapshot,
                consumer.assignment.claiming.last_error or consumer.loop.last_connection_error,
            )
            for partition, cause in snapshot.causes.items():
                said[partition] = f"{cause.code}: {cause.detail}" if cause.detail else cause.code
                said[partition] += f" (trouble: {trouble})" if trouble else ""
                said[partition] += f" (failed: {consumer.loop.failure})" if consumer.loop.failure else ""
    return said


# Across processes


def publish(apps: Iterable[App], file: Path) -> None:
    """Write the causes where another process can read them."""
    told = {str(partition): cause for partition, cause in causes_of(apps).items()}
    half = file.with_suffix(".half")
    half.write_text(json.dumps(told))
    half.rename(file)


def published(file: Path) -> dict[Partition, str]:
    """What another process has written, if it has."""
    if not file.exists():
        return {}
    told: dict[str, str] = json.loads(file.read_text())
    return {Partition.parse(name): cause for name, cause in told.items()}

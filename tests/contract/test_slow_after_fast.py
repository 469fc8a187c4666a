"""A handler that was fast and then takes long costs neither polling nor order (P5, P7)."""

from __future__ import annotations

import threading

import pytest

from kconsume import App, Record
from kconsume._config.options import Executor
from tests.fix_arena import IMPATIENT, POLL_INTERVAL, Arena
from tests.waiting import eventually

EACH = 3000


def held_up(
    arena: Arena, group: str, executor: Executor
) -> tuple[App, list[tuple[int, int]], threading.Event, threading.Event, str]:
    """An app whose handler is fast, until it meets a record that holds it up."""
    topic = arena.topic(2)
    app = arena.app(group, kafka=IMPATIENT)
    seen: list[tuple[int, int]] = []
    entered, release = threading.Event(), threading.Event()

    @app.consume(topic, executor=executor)
    def handle(record: Record) -> None:
        if record.value == b"hold":
            entered.set()
            release.wait(60)
        seen.append((record.partition, record.offset))

    return app, seen, entered, release, topic


def warm_up(arena: Arena, topic: str, seen: list[tuple[int, int]]) -> None:
    for partition in range(2):
        arena.produce(topic, [b"x"] * EACH, partition)
    eventually(lambda: len(seen) == 2 * EACH, what="the first records")


@pytest.mark.dense
def test_a_fast_handler_that_is_held_up_stops_neither_polling_nor_other_partitions(arena: Arena, group: str) -> None:
    app, seen, entered, release, topic = held_up(arena, group, "thread")
    with app.running():
        try:
            warm_up(arena, topic, seen)
            arena.produce(topic, [b"hold", b"after"], 0)
            assert entered.wait(20)
            arena.produce(topic, [b"x"] * 500, 1)
            eventually(lambda: sum(p == 1 for p, _ in seen) == EACH + 500, what="the other partition flows")
            supervisor = app._supervisor
            assert supervisor is not None
            consumer = supervisor.consumers[0]
            before = consumer.loop.snapshot
            eventually(lambda: consumer.loop.snapshot is not before, what="the loop goes on polling and publishing")
            assert (0, EACH) not in seen, "still held up"
        finally:
            release.set()
        eventually(lambda: (0, EACH + 1) in seen, what="the held-up partition goes on")
    for partition, count in ((0, EACH + 2), (1, EACH + 500)):
        assert [offset for p, offset in seen if p == partition] == list(range(count)), "each once, in order"


@pytest.mark.dense
def test_a_fast_async_handler_that_blocks_the_loop_does_not_stop_polling(arena: Arena, group: str) -> None:
    topic = arena.topic(2)
    app = arena.app(group, kafka=IMPATIENT)
    seen: list[tuple[int, int]] = []
    entered, release = threading.Event(), threading.Event()

    @app.consume(topic)
    async def handle(record: Record) -> None:
        if record.value == b"hold":
            entered.set()
            release.wait(60)
        seen.append((record.partition, record.offset))

    with app.running():
        try:
            for partition in range(2):
                arena.produce(topic, [b"x"] * EACH, partition)
            eventually(lambda: len(seen) == 2 * EACH, what="the first records")
            arena.produce(topic, [b"hold", b"after"], 0)
            assert entered.wait(20)
            supervisor = app._supervisor
            assert supervisor is not None
            consumer = supervisor.consumers[0]
            for _ in range(int(POLL_INTERVAL) + 1):  # a second each: longer than the poll interval
                before = consumer.loop.snapshot
                eventually(lambda: consumer.loop.snapshot is not before, what="the loop goes on")  # noqa: B023  (used at once)
            assert (0, EACH) not in seen, "still held up"
            assert len(consumer.assignment.partitions) == 2, "still a member"
        finally:
            release.set()
        eventually(lambda: (0, EACH + 1) in seen, what="the held-up partition goes on")
        arena.produce(topic, [b"x"], 1)
        eventually(lambda: (1, EACH) in seen, what="the other goes on")
    for partition, count in ((0, EACH + 2), (1, EACH + 1)):
        assert [offset for p, offset in seen if p == partition] == list(range(count)), "each once, in order"


@pytest.mark.dense
def test_control_on_the_polling_thread_the_same_handler_stops_everything(arena: Arena, group: str) -> None:
    app, seen, entered, release, topic = held_up(arena, group, "inline")
    with app.running():
        try:
            warm_up(arena, topic, seen)
            arena.produce(topic, [b"hold"], 0)
            assert entered.wait(20)
            arena.produce(topic, [b"x"] * 500, 1)
            with pytest.raises(AssertionError, match="the other partition flows"):
                eventually(lambda: len(seen) > 2 * EACH, within=1.5, what="the other partition flows")
        finally:
            release.set()

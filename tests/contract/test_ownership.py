"""Swift handlers run on the owner thread; one that takes long after all costs neither polling nor order (P5, P7)."""

from __future__ import annotations

import threading

import pytest

from kconsume import App, Record
from kconsume._runtime.lanes.pacing import Pace
from kconsume._runtime.ownership import Ownership
from tests.fix_arena import IMPATIENT, Arena
from tests.waiting import eventually

EACH = 3000


def held_up(arena: Arena, group: str) -> tuple[App, list[tuple[int, int]], threading.Event, threading.Event, str]:
    """An app whose handler is swift, until it meets a record that holds it up."""
    topic = arena.topic(2)
    app = arena.app(group, kafka=IMPATIENT)
    seen: list[tuple[int, int]] = []
    entered, release = threading.Event(), threading.Event()

    @app.consume(topic)
    def handle(record: Record) -> None:
        if record.value == b"hold":
            entered.set()
            release.wait(60)
        seen.append((record.partition, record.offset))

    return app, seen, entered, release, topic


def warm_up(arena: Arena, app: App, topic: str, seen: list[tuple[int, int]]) -> None:
    """Until both lanes are known to be swift and are run by the owner."""
    for partition in range(2):
        arena.produce(topic, [b"x"] * EACH, partition)
    eventually(lambda: len(seen) == 2 * EACH, what="the first records")
    supervisor = app._supervisor
    assert supervisor is not None
    lanes = [h.lane for h in supervisor.consumers[0].assignment.partitions.values()]
    assert all(lane is not None and lane.pace.is_fast for lane in lanes), "the handler is not swift here"


@pytest.mark.dense
def test_a_swift_handler_that_is_held_up_stops_neither_polling_nor_other_partitions(
    arena: Arena, group: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Pace, "FAST", 10.0)  # swift whatever it takes, as on a busy machine
    app, seen, entered, release, topic = held_up(arena, group)
    with app.running():
        try:
            warm_up(arena, app, topic, seen)
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
def test_without_a_deputy_the_same_handler_stops_everything(
    arena: Arena, group: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Pace, "FAST", 10.0)
    monkeypatch.setattr(Ownership, "HELD_UP", 3600.0)
    app, seen, entered, release, topic = held_up(arena, group)
    with app.running():
        try:
            warm_up(arena, app, topic, seen)
            arena.produce(topic, [b"hold"], 0)
            assert entered.wait(20)
            arena.produce(topic, [b"x"] * 500, 1)
            with pytest.raises(AssertionError, match="the other partition flows"):
                eventually(lambda: len(seen) > 2 * EACH, within=1.5, what="the other partition flows")
        finally:
            release.set()


@pytest.mark.dense
def test_an_owner_that_is_held_up_again_and_again_is_replaced_each_time(
    arena: Arena, group: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Pace, "FAST", 10.0)  # swift whatever it takes: every long record changes the owner
    topic = arena.topic(2)
    app = arena.app(group)
    seen: list[tuple[int, int]] = []
    threads: set[str] = set()

    @app.consume(topic)
    def handle(record: Record) -> None:
        if record.value == b"long":
            threading.Event().wait(0.2)
        threads.add(threading.current_thread().name)
        seen.append((record.partition, record.offset))

    with app.running():
        for round_ in range(1, 7):
            for partition in range(2):
                arena.produce(topic, [b"x"] * 50 + [b"long"], partition)
            expected = 102 * round_
            eventually(lambda: len(seen) == expected, what=f"round {round_}")  # noqa: B023  (used at once)
    assert any(name.endswith("-deputy") for name in threads), "a deputy became the owner, and ran handlers itself"
    for partition in range(2):
        assert [offset for p, offset in seen if p == partition] == list(range(306)), "each once, in order"

"""Saves beside claims: none waits for those of other partitions, and for one partition they stay in order."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import pytest

from kconsume import App, Partition
from kconsume.backends import MemoryStore, Position
from kconsume.backends.base import ClaimTerms, Positions, Refused, Start
from tests.fix_arena import Arena
from tests.waiting import eventually

pytestmark = pytest.mark.parametrize("arena", ["embedded"], indirect=True)

T = TypeVar("T")


class SlowStore(MemoryStore):
    """Answers when the test lets it, and notes in which order."""

    def __init__(self) -> None:
        super().__init__()
        self.claims, self.saves = threading.Event(), threading.Event()
        self.asked: set[str] = set()
        self.done: list[str] = []
        for gate in (self.claims, self.saves):
            gate.set()

    def claim(
        self, group: str, partitions: Sequence[Partition], owner: str, start: Start, terms: ClaimTerms | None = None
    ) -> dict[Partition, Position | Refused]:
        claim = super().claim
        return self._ask("claim", partitions, self.claims, lambda: claim(group, partitions, owner, start, terms))

    def save(self, group: str, positions: Positions) -> None:
        save = super().save
        self._ask("save", positions, self.saves, lambda: save(group, positions))

    def _ask(self, name: str, partitions: Iterable[Partition], gate: threading.Event, do: Callable[[], T]) -> T:
        asked = {f"{name} {partition}" for partition in partitions}
        self.asked |= asked
        assert gate.wait(60)
        try:
            return do()
        finally:
            self.done += sorted(asked)


def app_on(arena: Arena, group: str, store: SlowStore, topic: str, seen: list[str]) -> App:
    app = App(arena.bootstrap, group=group, offsets=store, kafka=arena.quick({}))

    @app.consume(topic)
    def handle(value: str) -> None:
        seen.append(value)

    return app


@pytest.mark.dense
def test_a_slow_claim_delays_no_save_of_another_partition(arena: Arena, group: str) -> None:
    topic, store, seen = arena.topic(2), SlowStore(), list[str]()
    app = app_on(arena, group, store, topic, seen)
    healthy, claimed = Partition(topic, 0), Partition(topic, 1)
    with app.running():
        store.claims.clear()
        store.asked.clear()
        app.seek(claimed, 0)
        eventually(lambda: f"claim {claimed}" in store.asked, what="the store is asked for the other partition")
        arena.produce(topic, ["a", "b"], healthy.number)
        eventually(lambda: store.load(group, [healthy])[healthy].next_offset == 2, what="saved")
        assert not store.claims.is_set()
        store.claims.set()
    assert seen == ["a", "b"]


def test_the_next_claim_of_a_partition_waits_for_the_save_of_its_last_lane(arena: Arena, group: str) -> None:
    """Overtaken by the claim, the save would be refused, and its records be handled again."""
    topic, other, store, seen = arena.topic(1), arena.topic(1), SlowStore(), list[str]()
    place = Partition(topic, 0)
    app = app_on(arena, group, store, topic, seen)

    def has() -> set[str]:
        assert app._supervisor is not None
        return {p.topic for p in app._supervisor.consumers[0].assignment.partitions}

    with app.running():
        store.saves.clear()
        arena.produce(topic, ["a", "b"], 0)
        eventually(lambda: f"save {place}" in store.asked, what="a save is under way")
        store.asked.clear()
        store.done.clear()
        app.subscribe(other)
        eventually(lambda: has() == {other}, what="the partition is gone, with its save under way")
        app.subscribe(topic, other)
        eventually(lambda: has() == {topic, other}, what="and back")
        arena.produce(other, ["c"], 0)
        eventually(lambda: "c" in seen, what="what is claimed beside it flows meanwhile")
        assert f"claim {place}" not in store.asked
        store.saves.set()
        arena.produce(topic, ["d"], 0)
        eventually(lambda: "d" in seen, what="the partition is open again")
    assert store.done.index(f"save {place}") < store.done.index(f"claim {place}")
    assert sorted(seen) == ["a", "b", "c", "d"], "none was handled again"

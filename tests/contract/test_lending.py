"""Swift `async` handlers run where they are fetched; one that holds the loop up costs neither polling nor order."""

from __future__ import annotations

import threading

import pytest

from kconsume import App, Record
from kconsume._kafka.consumer import KafkaConsumer
from kconsume._kafka.fetched import Runs
from kconsume._runtime.assignment.partition import OwnedPartition
from kconsume._runtime.lanes import lending
from kconsume._runtime.lanes.lending import Lending
from kconsume._runtime.lanes.pacing import Pace
from tests.fix_arena import IMPATIENT, POLL_INTERVAL, Arena
from tests.waiting import eventually

EACH = 3000


class Scene:
    """An app whose handler is swift, until it meets a record that blocks the event loop."""

    def __init__(self, arena: Arena, group: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(Pace, "FAST", 10.0)  # swift whatever it takes, as on a busy machine
        monkeypatch.setattr(KafkaConsumer, "fetch", self._noted(KafkaConsumer.fetch))
        monkeypatch.setattr(Lending, "_burst", self._marked(Lending._burst))
        self.arena = arena
        self.topic = arena.topic(2)
        self.app = arena.app(group, kafka=IMPATIENT)
        self.seen: list[tuple[int, int]] = []
        self.entered, self.release = threading.Event(), threading.Event()
        self.fetchers: list[str] = []
        """The threads that records came from."""
        self.bursting = False
        """Whether the consumer is lent; the loop alone changes it."""
        self.only_in_bursts = False
        """Whether a record blocks the loop only while the consumer is lent: one that a burst has fetched may well be
        handled after the burst, when the owner has the consumer again."""
        self.app.consume(self.topic)(self.handle)

    async def handle(self, record: Record) -> None:
        if record.value == b"hold" and (self.bursting or not self.only_in_bursts):
            self.entered.set()
            self.release.wait(60)
        self.seen.append((record.partition, record.offset))

    def warm_up(self) -> None:
        for partition in range(2):
            self.arena.produce(self.topic, [b"x"] * EACH, partition)
        eventually(lambda: len(self.seen) == 2 * EACH, what="the first records")
        lanes = [owned.lane for owned in owned_partitions(self.app)]
        assert all(lane is not None and lane.pace.is_fast for lane in lanes), "the handler is not swift here"

    def produce(self, partition: int, *values: bytes) -> None:
        self.arena.produce(self.topic, values, partition)

    def _marked(self, burst: object) -> object:
        assert callable(burst)

        async def marked(lending: Lending, lease: object) -> None:
            self.bursting = True
            try:
                await burst(lending, lease)
            finally:
                self.bursting = False

        return marked

    def _noted(self, fetch: object) -> object:
        assert callable(fetch)

        def noted(source: KafkaConsumer, timeout: float, most: int | None = None) -> Runs:
            runs: Runs = fetch(source, timeout, most)
            if runs:
                self.fetchers.append(threading.current_thread().name)
            return runs

        return noted


@pytest.fixture
def scene(arena: Arena, group: str, monkeypatch: pytest.MonkeyPatch) -> Scene:
    return Scene(arena, group, monkeypatch)


def owned_partitions(app: App) -> list[OwnedPartition]:
    supervisor = app._supervisor
    assert supervisor is not None
    return list(supervisor.consumers[0].assignment.partitions.values())


@pytest.mark.dense
def test_a_swift_async_handler_is_run_where_its_records_are_fetched(scene: Scene, group: str) -> None:
    with scene.app.running():
        scene.warm_up()
        scene.fetchers.clear()
        more = 0

        def lent() -> bool:
            """It is when there is more than the owner took; on a busy machine a loan may not begin in time, and the
            next one is some seconds later."""
            nonlocal more
            scene.produce(0, *[b"x"] * 5000)
            more += 5000
            eventually(lambda: len(scene.seen) == 2 * EACH + more, within=60, what="all handled")
            return f"kconsume-loop-{group}" in scene.fetchers

        eventually(lent, within=60, what="the consumer is lent")
    for partition, count in ((0, EACH + more), (1, EACH)):
        assert [offset for p, offset in scene.seen if p == partition] == list(range(count)), "each once, in order"


@pytest.mark.dense
def test_a_swift_async_handler_that_blocks_the_loop_does_not_stop_polling(scene: Scene) -> None:
    with scene.app.running():
        try:
            scene.warm_up()
            scene.produce(0, b"hold", b"after")
            assert scene.entered.wait(20)
            supervisor = scene.app._supervisor
            assert supervisor is not None
            loop = supervisor.consumers[0].loop
            for _ in range(int(POLL_INTERVAL) + 2):  # a second each, which is longer than the poll interval
                before = loop.snapshot
                eventually(lambda: loop.snapshot is not before, what="the loop goes on")  # noqa: B023  (used at once)
            assert (0, EACH) not in scene.seen, "still held up"
            assert len(owned_partitions(scene.app)) == 2, "still a member"
        finally:
            scene.release.set()
        eventually(lambda: (0, EACH + 1) in scene.seen, what="the held-up partition goes on")
        scene.produce(1, b"x")
        eventually(lambda: (1, EACH) in scene.seen, what="the other goes on")
    for partition, count in ((0, EACH + 2), (1, EACH + 1)):
        assert [offset for p, offset in scene.seen if p == partition] == list(range(count)), "each once, in order"


def test_an_owner_that_does_not_take_the_consumer_back_stops_polling(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lending, "HELD_UP", 3600.0)
    with scene.app.running():
        try:
            scene.warm_up()
            scene.only_in_bursts = True

            def held() -> bool:
                scene.produce(0, *[b"x"] * 1000, b"hold")
                return scene.entered.wait(0.05)

            eventually(held, within=60, what="a record blocks the loop while the consumer is lent")
            supervisor = scene.app._supervisor
            assert supervisor is not None
            before = supervisor.consumers[0].loop.snapshot
            with pytest.raises(AssertionError, match="the loop goes on"):
                eventually(
                    lambda: supervisor.consumers[0].loop.snapshot is not before, within=2.5, what="the loop goes on"
                )
        finally:
            scene.release.set()

"""The block of `running()` is entered when the first claim is in, and not at all when there is none in time."""

from __future__ import annotations

import asyncio
import re
import textwrap
import threading
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Consumer
from fastapi import FastAPI

from kconsume import App
from kconsume._config.client_settings import ClientValue
from kconsume._runtime.assignment.topic_checks import TopicChecks
from kconsume.backends import MemoryStore
from kconsume.errors import ConfigurationError, StartTimeout, StoreUnavailable, TopicNotFound
from tests.fix_arena import Arena
from tests.liveness import assert_app_lives
from tests.waiting import eventually

Kafka = Mapping[str, ClientValue]


class SlowStore(MemoryStore):
    """Answers no claim before it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.go = threading.Event()
        self.events: list[str] = []

    def claim(self, *asked, **more):  # type: ignore[no-untyped-def]
        assert self.go.wait(60)
        answer = super().claim(*asked, **more)
        self.events.append("claimed")
        return answer


class AwayStore(MemoryStore):
    """Down for as long as it is said to be."""

    def __init__(self) -> None:
        super().__init__()
        self.away = True
        self.asked = 0

    def load(self, *asked, **more):  # type: ignore[no-untyped-def]
        self._answer()
        return super().load(*asked, **more)

    def claim(self, *asked, **more):  # type: ignore[no-untyped-def]
        self._answer()
        return super().claim(*asked, **more)

    def _answer(self) -> None:
        self.asked += 1
        if self.away:
            raise StoreUnavailable("the shop's database cannot be reached")


def member(arena: Arena, group: str, topic: str, store: MemoryStore, kafka: Kafka, startup: float | None = None) -> App:
    app = App(arena.bootstrap, group=group, offsets=store, kafka=arena.quick(kafka), startup=startup)

    @app.consume(topic)
    def handle(value: str) -> None:
        if value == "poison":
            raise LookupError("poison")

    return app


def holds(app: App) -> int:
    assert app._supervisor is not None
    return sum(len(consumer.assignment.partitions) for consumer in app._supervisor.consumers)


@contextmanager
def later(store: SlowStore, caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """The store answers once the consumer has noticed that it does not."""

    def answer() -> None:
        eventually(lambda: "claim is slow" in caplog.text, what="the claim waits")
        store.go.set()

    thread = threading.Thread(target=answer)
    caplog.set_level("INFO")
    thread.start()
    yield
    thread.join()


@pytest.mark.parametrize("comes_back", [True, False])
def test_a_rebalance_whose_claim_failed_went_well_only_if_the_claim_has_succeeded_since(
    arena: Arena, group: str, comes_back: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    store, topic = AwayStore(), arena.topic(1)
    app = member(arena, group, topic, store, {}, startup=0)
    with app.running():
        eventually(lambda: "claim failed" in caplog.text, what="a claim that failed")
        assert app.rebalances() == (), "not over before it flows"
        store.away = not comes_back
        eventually(lambda: not comes_back or app.rebalances(), what="the claim")
    first = next(line for line in caplog.messages if line.startswith("rebalance ended reason=joined"))
    assert first.endswith("success=True" if comes_back else "success=False")


@pytest.mark.parametrize("startup", [None, 0.0], ids=["waits", "with startup=0 it does not"])
def test_the_block_begins_when_the_partitions_are_claimed(
    arena: Arena, group: str, protocol: Kafka, caplog: pytest.LogCaptureFixture, startup: float | None
) -> None:
    """The control: with `startup=0` the same block is entered first."""
    store, topic = SlowStore(), arena.topic(2)
    app = member(arena, group, topic, store, protocol, startup)
    with later(store, caplog), app.running():
        store.events.append("entered")
        eventually(lambda: "claimed" in store.events, what="the claim")
    assert store.events == (["claimed", "entered"] if startup is None else ["entered", "claimed"])


def test_so_does_the_block_on_an_event_loop(arena: Arena, group: str, caplog: pytest.LogCaptureFixture) -> None:
    store, topic = SlowStore(), arena.topic(2)
    app = member(arena, group, topic, store, {})

    async def main() -> None:
        async with app.running():
            store.events.append("entered")

    with later(store, caplog):
        asyncio.run(main())
    assert store.events == ["claimed", "entered"]


def test_a_member_that_is_assigned_nothing_has_its_assignment_too(arena: Arena, group: str, protocol: Kafka) -> None:
    store, topic = MemoryStore(), arena.topic(1)
    one, two = (member(arena, group, topic, store, protocol) for _ in range(2))
    with one.running(), two.running():
        eventually(lambda: {holds(one), holds(two)} == {0, 1}, what="one has the partition, the other nothing")


def test_a_member_that_is_assigned_nothing_must_reach_its_store_all_the_same(
    arena: Arena, group: str, caplog: pytest.LogCaptureFixture
) -> None:
    topic, away = arena.topic(1), AwayStore()
    with member(arena, group, topic, MemoryStore(), {}).running() as first:
        two = member(arena, group, topic, away, {"partition.assignment.strategy": "cooperative-sticky"}, startup=8)

        def come_back() -> None:
            eventually(lambda: away.asked > 2, what="it is asked again")
            away.away = False

        thread = threading.Thread(target=come_back)
        thread.start()
        with two.running():
            assert not away.away, "entered only when it had answered"
        thread.join()
        eventually(lambda: holds(first) == 1, what="it still has it")


@pytest.mark.parametrize("on_loop", [False, True], ids=["with", "async with"])
def test_a_store_that_does_not_answer_is_raised_in_time_with_its_cause(arena: Arena, group: str, on_loop: bool) -> None:
    store, topic, entered = AwayStore(), arena.topic(1), list[App]()
    app = member(arena, group, topic, store, {}, startup=5)

    async def main() -> None:
        async with app.running():
            entered.append(app)

    def enter() -> None:
        if on_loop:
            asyncio.run(main())
        else:
            with app.running():
                entered.append(app)

    with pytest.raises(StartTimeout, match=r"not ready 5 s after .* the shop's database cannot be reached") as raised:
        enter()
    assert isinstance(raised.value.__cause__, StoreUnavailable)
    assert entered == []
    store.away = False
    with app.running():
        assert holds(app) == 1, "it can be started again"


def test_what_is_wrong_before_the_block_is_raised_without_waiting(arena: Arena, group: str) -> None:
    app = member(arena, group, "nowhere", MemoryStore(), {})
    with pytest.raises(TopicNotFound), app.running():
        pytest.fail("the block was entered")
    assert app._supervisor is None


def test_a_topic_that_the_client_does_not_find_at_first_is_looked_for_before_that_ends_the_app(
    arena: Arena, group: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that has just been made is not known to every broker."""
    survey, asked, go, topic = TopicChecks.survey, threading.Event(), threading.Event(), arena.topic(1)

    def slow(checks: TopicChecks, *what: Any) -> None:
        asked.set()
        assert go.wait(60)
        survey(checks, *what)

    monkeypatch.setattr(TopicChecks, "survey", slow)
    store = MemoryStore()
    app = member(arena, group, topic, store, {}, startup=0)
    with app.running():
        (consumer,) = app._supervisor.consumers  # type: ignore[union-attr]
        eventually(asked.is_set, what="the survey is on its way")
        looked = threading.Event()
        fault = {topic: TopicNotFound("an answer of another broker")}
        consumer.loop.request(lambda: consumer.kafka_consumer._main._fetched.topic_faults.update(fault))
        consumer.loop.request(lambda: consumer.loop.request(lambda: consumer.loop.request(looked.set)))
        eventually(lambda: looked.is_set() or consumer.loop.failure, what="the loop has looked at it")
        assert consumer.loop.failure is None
        go.set()
        assert_app_lives(app, bootstrap=arena.bootstrap, topic=topic, group=group, offsets=store, partitions=1)


@pytest.mark.parametrize("arena", ["real"], indirect=True)
def test_a_group_that_gives_no_assignment_is_named(arena: Arena, group: str) -> None:
    topic = arena.topic(1)
    silent = Consumer({"bootstrap.servers": arena.bootstrap, "group.id": group})
    silent.subscribe([topic], on_revoke=lambda *_: None)
    try:
        eventually(lambda: silent.poll(0.1) or silent.assignment(), what="a member")
        app = member(arena, group, topic, MemoryStore(), {"partition.assignment.strategy": "range"}, startup=3)
        # It sends heartbeats and does not poll, so it does not join again, and the group waits for it.
        with pytest.raises(StartTimeout, match="has not given it an assignment yet"), app.running():
            pytest.fail("the block was entered")
    finally:
        silent.close()


def test_a_record_that_fails_at_once_is_raised_wherever_it_meets_the_block(arena: Arena, group: str) -> None:
    topic = arena.topic(1)
    arena.produce(topic, ["poison"])
    app = member(arena, group, topic, MemoryStore(), {})
    with pytest.raises(LookupError, match="poison"), app.running():
        threading.Event().wait(60)


def test_a_task_that_is_cancelled_while_it_waits_leaves_nothing_behind(arena: Arena, group: str) -> None:
    store, topic = AwayStore(), arena.topic(1)
    app = member(arena, group, topic, store, {})

    async def main() -> None:
        async with asyncio.timeout(1), app.running():
            pytest.fail("the block was entered")

    with pytest.raises(TimeoutError):
        asyncio.run(main())
    assert app._supervisor is None


@pytest.mark.parametrize("startup", [-1, float("nan"), float("inf")])
def test_a_startup_that_is_no_time_is_refused(startup: float) -> None:
    with pytest.raises(ConfigurationError, match="startup="):
        App("127.0.0.1:1", group="shop", startup=startup)


@pytest.mark.parametrize(
    ("settings", "seconds"),
    [({}, 60.0), ({"kafka": {"session.timeout.ms": 90_000}}, 105.0), ({"startup": 7}, 7.0), ({"startup": 0}, 0.0)],
)
def test_by_default_it_waits_longer_than_the_group_waits_for_a_member_that_was_killed(
    settings: dict[str, object], seconds: float
) -> None:
    assert App("127.0.0.1:1", group="shop", **settings).declared.settings.startup_seconds == seconds  # type: ignore[arg-type]


def test_the_pieces_of_the_page_about_running_run(arena: Arena, group: str) -> None:
    page = (Path(__file__).parents[2] / "docs" / "running.md").read_text()
    plain, lifespan, callback = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    app, served = member(arena, group, arena.topic(1), MemoryStore(), {}), list[int]()
    names: dict[str, Any] = {
        "app": app,
        "serve": lambda: served.append(holds(app)),
        "FastAPI": FastAPI,
        "AsyncIterator": AsyncIterator,
        "asynccontextmanager": asynccontextmanager,
    }

    async def enter(code: str) -> None:
        exec(code, names)
        async with names["web"].router.lifespan_context(names["web"]):
            names["serve"]()

    exec(plain, names)
    asyncio.run(enter(lifespan))
    within = textwrap.indent(callback, "    ")
    asyncio.run(enter(f"@asynccontextmanager\nasync def lifespan(web):\n{within}\nweb = FastAPI(lifespan=lifespan)"))
    assert served == [1, 1, 1]

"""A group that does not take this member: it ends with the reason, and only it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from confluent_kafka import Consumer, KafkaError

from kconsume import App
from kconsume._kafka.join_errors import REFUSALS
from kconsume.cli.check.command import examine
from kconsume.errors import ClientFailed, GroupRefused
from tests.fix_arena import Arena
from tests.waiting import eventually

pytestmark = pytest.mark.parametrize("arena", ["real"], indirect=True)

OTHER_ASSIGNOR = KafkaError.INCONSISTENT_GROUP_PROTOCOL


class Loop:
    """The bare loop that a service had before, on the client's default assignor."""

    def __init__(self, arena: Arena, group: str, topic: str) -> None:
        self.refusals = 0
        self.assigned = False
        self._over = threading.Event()
        settings = {"bootstrap.servers": arena.bootstrap, "group.id": group, "session.timeout.ms": 6000}
        self._consumer = Consumer({**settings, "heartbeat.interval.ms": 500})
        self._consumer.subscribe([topic], on_assign=self._on_assign)
        self._thread = threading.Thread(target=self._poll)
        self._thread.start()

    def _on_assign(self, *_: object) -> None:
        self.assigned = True

    def _poll(self) -> None:
        while not self._over.is_set():
            message = self._consumer.poll(0.1)
            error = None if message is None else message.error()
            self.refusals += error is not None and error.code() == OTHER_ASSIGNOR
        self._consumer.close()

    def leave(self) -> None:
        self._over.set()
        self._thread.join()


@contextmanager
def bare_loop(arena: Arena, group: str, topic: str) -> Iterator[Loop]:
    loop = Loop(arena, group, topic)
    try:
        yield loop
    finally:
        loop.leave()


def service(arena: Arena, group: str, topic: str, **kafka: str | int) -> tuple[App, list[str]]:
    app, seen = arena.app(group, kafka=kafka), list[str]()

    @app.consume(topic)
    def handle(value: str) -> None:
        seen.append(value)

    return app, seen


@pytest.fixture
def patience(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    def set_to(seconds: float) -> None:
        monkeypatch.setitem(REFUSALS, OTHER_ASSIGNOR, REFUSALS[OTHER_ASSIGNOR]._replace(patience=seconds))

    return set_to


def test_a_bare_loop_with_another_assignor_ends_the_start_with_both_names(
    arena: Arena, group: str, patience: Callable[[float], None]
) -> None:
    patience(2.0)
    topic = arena.topic(2)
    arena.produce(topic, ["1"], 0)
    app, seen = service(arena, group, topic)
    with bare_loop(arena, group, topic) as loop:
        eventually(lambda: loop.assigned, what="it is a member")
        (found,) = [f for f in examine(app, "shop:app").findings if f.code == "assignor-not-shared"]
        assert found.level == "error", "`kconsume check` says so before"
        assert "'range'" in found.problem
        with pytest.raises(GroupRefused) as refused:
            app.catch_up(idle=0.2)
        with pytest.raises(GroupRefused), app.running():
            pytest.fail("the block was entered")
    said = str(refused.value)
    assert "its assignor is 'cooperative-sticky' and the present members (rdkafka) use 'range'" in said
    assert "stop the other members first, or consume under a new group" in said
    assert "App(kafka={'partition.assignment.strategy': 'range'})" in said
    assert refused.value.exit_code == 1
    assert seen == []


def test_with_the_assignor_of_the_loop_it_is_taken(arena: Arena, group: str) -> None:
    """As the error says, and `kconsume check` has nothing against it."""
    topic = arena.topic(2)
    app, seen = service(arena, group, topic, **{"partition.assignment.strategy": "range"})
    with bare_loop(arena, group, topic) as loop:
        eventually(lambda: loop.assigned, what="it is a member")
        assert "assignor-not-shared" not in [finding.code for finding in examine(app, "shop:app").findings]
        with app.running():
            eventually(lambda: len(app.rebalances()) > 0, what="both are members")
    assert seen == []


@pytest.mark.parametrize("waits", [True, False], ids=["waited out", "without patience it is not"])
def test_a_refusal_that_passes_is_waited_out(
    arena: Arena, group: str, patience: Callable[[float], None], caplog: pytest.LogCaptureFixture, waits: bool
) -> None:
    """The control: without patience the member ends, though the others are leaving."""
    patience(60.0 if waits else 0.0)
    topic = arena.topic(2)
    arena.produce(topic, ["1"], 0)
    app, seen = service(arena, group, topic)
    with bare_loop(arena, group, topic) as loop:
        eventually(lambda: loop.assigned, what="it is a member")

        def leave() -> None:
            eventually(lambda: "broker trouble" in caplog.text, what="the other is refused")
            loop.leave()

        thread = threading.Thread(target=leave)
        thread.start()
        if waits:
            assert app.catch_up(idle=0.2).handled == 1
        else:
            with pytest.raises(GroupRefused):
                app.catch_up(idle=0.2)
        thread.join()
    assert seen == (["1"] if waits else [])


def test_a_newcomer_with_another_assignor_ends_nobody_but_itself(
    arena: Arena, group: str, patience: Callable[[float], None]
) -> None:
    patience(0.0)
    topic = arena.topic(2)
    app, seen = service(arena, group, topic)
    with app.running(), bare_loop(arena, group, topic) as loop:
        eventually(lambda: loop.refusals > 1, what="it is refused")
        arena.produce(topic, ["1"], 0)
        eventually(lambda: seen == ["1"], what="the member goes on")


def test_a_session_that_the_brokers_refuse_ends_at_once_with_its_value(arena: Arena, group: str) -> None:
    hour = 3_600_000
    app, _ = service(arena, group, arena.topic(1), **{"session.timeout.ms": hour, "max.poll.interval.ms": hour})
    with pytest.raises(GroupRefused, match=r"session.timeout.ms=3600000 .* group.max.session.timeout.ms"):
        app.catch_up(idle=0.2)


def test_an_assignor_that_a_kip_848_broker_does_not_have_ends_at_once_with_the_ways_out(
    arena: Arena, group: str
) -> None:
    topic = arena.topic(1)
    app, _ = service(arena, group, topic, **{"group.protocol": "consumer", "group.remote.assignor": "nobody-s"})
    with pytest.raises(ClientFailed, match=r"set group.remote.assignor='uniform' or 'range'") as failed:
        app.catch_up(idle=0.2)
    assert failed.value.exit_code == 1

"""Nothing stands still in silence (P12): a running app names the one cause of a partition in its log and its health."""

from __future__ import annotations

import logging
import threading

import pytest

from kconsume import App, Partition, Rate, Record
from kconsume._runtime.observation import causes, standstill
from tests.fix_arena import Arena
from tests.waiting import eventually


@pytest.fixture(autouse=True)
def attentive(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Causes that count, and lines in the log, within a test."""
    monkeypatch.setattr(causes, "MOVED_RECENTLY", 0.5)
    monkeypatch.setattr(standstill, "LOG_AFTER", 1.0)
    caplog.set_level(logging.INFO, "kconsume")


def codes(app: App, topic: str) -> dict[Partition, str]:
    """By partition, as `app.health()` says."""
    told = {reason.detail.partition(":")[0]: reason.code for reason in app.health().reasons}
    return {Partition(topic, number): told.get(f"{topic}/{number}", "unknown") for number in range(2)}


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.getMessage().startswith("partition stands still")]


def test_a_handler_that_hangs_is_named_and_the_partition_that_has_nothing_to_do_is_not(
    arena: Arena, group: str, caplog: pytest.LogCaptureFixture
) -> None:
    topic, release = arena.topic(2), threading.Event()
    app = arena.app(group)

    @app.consume(topic)
    def handle(record: Record) -> None:
        assert release.wait(120)

    with app.running():
        arena.produce(topic, ["hangs"], 0)
        expected = {Partition(topic, 0): "handler_running", Partition(topic, 1): "caught_up"}
        eventually(lambda: codes(app, topic) == expected, what="each has its cause")
        assert app.health().ok, "a slow handler is no reason to restart"
        (line,) = eventually(lambda: lines(caplog), what="it is logged")
        assert f"partition={topic}/0 code=handler_running" in line
        release.set()
        eventually(lambda: set(codes(app, topic).values()) == {"caught_up"}, what="both are at the end")
    assert len(lines(caplog)) == 1


def test_a_rate_that_is_used_up_is_named(arena: Arena, group: str, caplog: pytest.LogCaptureFixture) -> None:
    topic, seen = arena.topic(2), list[str]()
    app = arena.app(group)

    @app.consume(topic, rate=Rate(1, per=3600))
    def handle(value: str) -> None:
        seen.append(value)

    with app.running():
        arena.produce(topic, ["first", "second"], 0)
        eventually(lambda: codes(app, topic)[Partition(topic, 0)] == "throttled", what="the cause")
        line = eventually(lambda: lines(caplog), what="it is logged")[0]
        assert "code=throttled" in line
    assert seen == ["first"]

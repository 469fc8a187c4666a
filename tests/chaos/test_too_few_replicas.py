"""A dead-letter topic whose `min.insync.replicas` is not met, on two real brokers of which one goes."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from kconsume import App, DeadLetter, Record
from kconsume.testing.services import LocalKafka
from tests.chaos.brokers import another, create
from tests.chaos.form import TIMEOUT
from tests.contract.test_outbox import alter
from tests.contract.test_output import stored, texts
from tests.fix_arena import STEADY, Arena
from tests.fix_kafka import unique
from tests.liveness import assert_app_lives
from tests.waiting import eventually

pytestmark = pytest.mark.timeout(TIMEOUT)


@pytest.mark.parametrize("mended", ["topic", "broker"])
def test_a_dead_letter_waits_for_the_replicas_that_its_topic_asks_for_and_nothing_is_lost(
    caplog: pytest.LogCaptureFixture, mended: str
) -> None:
    """Until its topic asks for fewer, or the broker is back."""
    source, dead, group = unique("source"), unique("dead"), unique("group")
    with LocalKafka() as first, alone(first, source, group) as arena, another(first) as second:
        create(arena.admin, dead, [[1, 2]], {"min.insync.replicas": "2"})
        app, seen = App(first.bootstrap, group=group, kafka={**STEADY, "message.timeout.ms": 2000}), list[str]()

        @app.consume(source, on_error=DeadLetter(dead))
        def handle(value: str, record: Record) -> None:
            if value.startswith("bad"):
                raise LookupError(value)
            seen.append(value)

        def held() -> list[str]:
            return [r.getMessage() for r in caplog.records if r.levelno == logging.ERROR and "held" in r.getMessage()]

        with app.running():
            arena.produce(source, ["0:0", "bad0"], 0)
            eventually(lambda: texts(arena, dead) == ["bad0"], what="with both of them it is written")
            second.stop()
            arena.produce(source, ["bad1"], 0)
            eventually(held, what="it is said")
            assert f"dead letter unwritten record={source}/0@2" in held()[0]
            arena.produce(source, ["0:after"], 0)
            arena.produce(source, ["1:0", "1:1"], 1)
            eventually(lambda: seen == ["0:0", "1:0", "1:1"], what="the other partition flows")
            eventually(lambda: len(held()) > 1, what="it is tried again")
            eventually(lambda: stored(arena, group, source) == 2, what="passed up to it, and no further")
            assert texts(arena, dead) == ["bad0"]
            if mended == "broker":
                second.restart()
            else:
                # By a client of its own: the one that was there may still ask the broker that went.
                alter(Arena("real", first.bootstrap, None).admin, dead, "min.insync.replicas", "1")
            eventually(lambda: "0:after" in seen, within=60, what="it goes on by itself")
            assert_app_lives(
                app, bootstrap=first.bootstrap, topic=source, group=group, offsets="kafka://", partitions=2
            )
        assert texts(arena, dead) == ["bad0", "bad1"]
        assert (stored(arena, group, source), seen) == (5, ["0:0", "1:0", "1:1", "0:after", "x", "x"])


@contextmanager
def alone(kafka: LocalKafka, source: str, group: str) -> Iterator[Arena]:
    """What must not go with the other broker is made before that is there: the source, and Kafka's topic of offsets."""
    arena = Arena("real", kafka.bootstrap, None)
    create(arena.admin, source, [[1], [1]])
    assert stored(arena, group, source) is None
    assert "__consumer_offsets" in arena.admin.list_topics(timeout=20).topics
    yield arena

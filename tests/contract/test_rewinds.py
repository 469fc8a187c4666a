"""Records that are handled again because a user asked for it (a reset, a seek, a delete) are no repeats.

What a group has taken in is remembered for days, so that a record that an outbox sends twice has one effect. Without
the reset in what is remembered, the second pass of a record by its retry topic was dropped: no effect and no letter.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import psycopg
import pytest
from confluent_kafka import Producer

from kconsume import App, DeadLetter, Partition, RetryTopics
from kconsume._runtime.processing import dedup as intake
from kconsume._runtime.processing.dedup import _key as key_of
from kconsume.backends import OffsetStore, open_store
from kconsume.backends.dead_letters.reader import letters_in
from kconsume.backends.dead_letters.sender import sender_in
from kconsume.backends.dead_letters.tables import create
from kconsume.cli.redrive.selection import addressed
from kconsume.failures.letter_headers import redrive_topic
from tests.contract.test_failures_stores import Shop
from tests.contract.test_output import everything
from tests.contract.test_retry_topics import Stage
from tests.fix_arena import Arena
from tests.liveness import assert_app_lives
from tests.waiting import eventually

SOON = (0.3,)
Rewind = Callable[[Stage, App, str], None]


@pytest.fixture
def real(request: pytest.FixtureRequest) -> Iterator[Arena]:
    arena = Arena("real", request.getfixturevalue("kafka").bootstrap, None)
    yield arena
    arena.clean_up()


def by_seek(stage: Stage, app: App, source: str) -> None:
    app.seek(Partition(source, 0), 0)


def by_reset(stage: Stage, app: App, source: str) -> None:
    with_store(stage, lambda store: store.reset(stage.group, {Partition(source, 0): 0}))


def by_reset_of_all(stage: Stage, app: App, source: str) -> None:
    """The retry topics too: what is on them comes again from the source."""
    first = Partition(stage.rungs(source, 1)[0], 0)
    with_store(stage, lambda store: store.reset(stage.group, {Partition(source, 0): 0, first: 0}))


def by_delete(stage: Stage, app: App, source: str) -> None:
    with_store(stage, lambda store: store.delete(stage.group))


def with_store(stage: Stage, do: Callable[[Any], None]) -> None:
    assert stage.shop is not None
    store = open_store(stage.shop.url)
    do(store)
    store.close()


def send_again(arena: Arena, rung: str) -> None:
    """As a relay does that was killed before it could delete the row of what it had sent."""
    message = everything(arena.bootstrap, rung)[-1]
    producer = Producer({"bootstrap.servers": arena.bootstrap, "log_level": 0})
    producer.produce(rung, message.value(), message.key(), message.partition() or 0, headers=message.headers())
    assert not producer.flush(30)


def a_second_pass_has_every_effect_again(stage: Stage, rewind: Rewind) -> None:
    source = stage.arena.topic(1)
    (rung,) = stage.rungs(source, 1)
    stage.fails = lambda record: record.topic == source and record.value == b"b"
    stage.arena.produce(source, ["a", "b", "c"], 0)
    app = stage.app(source, retry=RetryTopics(SOON))
    with app.running():
        eventually(lambda: Counter(stage.effects()) == Counter("abc"), what="the first pass")
        eventually(lambda: stage.passed(rung) == 1, what="the first pass is passed")
    if rewind is not by_seek:
        rewind(stage, app, source)
    app = stage.app(source, retry=RetryTopics(SOON))
    with app.running():
        if rewind is by_seek:
            ours = Partition(source, 0)
            eventually(lambda: any(ours in each.gained for each in app.rebalances()), what="it has the partition")
            rewind(stage, app, source)
        eventually(lambda: len(everything(stage.arena.bootstrap, rung)) == 2, what="it fails again, and is sent")
        send_again(stage.arena, rung)
        eventually(lambda: (stage.passed(source), stage.passed(rung)) == (3, 3), what="all are passed")
        assert stage.shop is not None
        assert_app_lives(
            app, bootstrap=stage.arena.bootstrap, topic=source, group=stage.group, offsets=stage.shop.url, partitions=1
        )
    assert Counter(stage.effects()) == Counter("aabbccx"), "each once in each pass"


@pytest.mark.dense
@pytest.mark.parametrize(
    ("store", "form", "rewind"),
    [
        ("postgres", "tx", by_seek),
        ("postgres", "tx", by_reset_of_all),
        ("postgres", "async tx", by_reset),
        ("postgres", "batch tx", by_delete),
        ("sqlite", "tx", by_reset),
        ("sqlite", "tx", by_delete),
    ],
)
def test_what_fails_after_a_rewind_is_tried_again_as_in_the_first_pass(
    request: pytest.FixtureRequest, real: Arena, group: str, store: str, form: str, rewind: Rewind
) -> None:
    url = request.getfixturevalue(f"{store}_url")
    a_second_pass_has_every_effect_again(Stage(real, group, form, Shop(url)), rewind)


@pytest.mark.dense
def test_control_without_the_reset_in_what_is_remembered_it_vanishes(
    real: Arena, group: str, postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(intake, "RESET", "not-a-header")
    with pytest.raises(AssertionError, match="each once in each pass"):
        a_second_pass_has_every_effect_again(Stage(real, group, "tx", Shop(postgres_url)), by_seek)


def test_a_letter_in_a_table_is_sent_back_in_the_second_pass_as_in_the_first(
    real: Arena, group: str, postgres_url: str
) -> None:
    """The user deletes rows that are dealt with, so the count of times begins again with the next letter."""
    stage = Stage(real, group, "tx", Shop(postgres_url))
    assert stage.shop is not None
    source = real.topic(1)
    real.topic(1, redrive_topic(source, group))
    stage.fails = lambda record: record.topic == source
    real.produce(source, ["a"], 0)
    stage.shop.look(create("failed", "postgres"))
    app = stage.app(source, on_error=DeadLetter(table="failed"))
    with app.running():
        for times in (1, 2):
            eventually(lambda: len(stage.shop.look("select 1 from failed")) == 1, what="a letter", within=30)  # type: ignore[union-attr]
            with_store(stage, partial(send_back, topic=redrive_topic(source, group)))
            eventually(lambda: stage.effects() == ["a"] * times, what="it is handled", within=30)  # noqa: B023
            stage.shop.look("delete from failed")
            by_seek(stage, app, source)


def send_back(store: OffsetStore, topic: str) -> None:
    """As `kconsume dlq redrive` does."""
    (kept,) = letters_in(store, "failed").page(0, 10)
    assert all(not name.startswith("kconsume-") for name, _ in kept.letter.headers)
    sender = sender_in(store, "failed")
    sender.prepare()
    assert sender.send_back([kept.row], lambda letter: addressed(letter, topic)) == 1


def passed_on_twice(real: Arena, group: str, url: str, rewind: Callable[[App, App, str, str], None]) -> list[str]:
    """What the reader of an outbox's output has taken in when its origins came a second time."""
    source, target = real.topic(1), real.topic(1)
    writer, reader, seen = real.app(group, url), real.app(f"{group}-reader", url), list[str]()

    @writer.consume(source, to=target)
    def pass_on(value: str, tx: psycopg.Connection) -> str:
        return value

    @reader.consume(target, repeats="drop")
    def take(value: str, tx: psycopg.Connection) -> None:
        seen.append(value)

    real.produce(source, ["a", "b"], 0)
    with writer.running(), reader.running():
        eventually(lambda: seen == ["a", "b"], what="the first pass")
        rewind(writer, reader, source, target)
        real.produce(source, ["end"], 0)
        eventually(lambda: "end" in seen, what="the last record")
    return seen


def test_output_of_a_second_pass_is_no_repeat_for_who_drops_repeats(real: Arena, group: str, postgres_url: str) -> None:
    seen = passed_on_twice(real, group, postgres_url, lambda writer, _, source, __: writer.seek(f"{source}/0", 0))
    assert seen == ["a", "b", "a", "b", "end"]


def test_who_drops_repeats_and_is_rewound_has_all_again(real: Arena, group: str, postgres_url: str) -> None:
    seen = passed_on_twice(real, group, postgres_url, lambda _, reader, __, target: reader.seek(f"{target}/0", 0))
    assert seen == ["a", "b", "a", "b", "end"]


def test_control_without_the_reset_who_drops_repeats_has_nothing_again(
    real: Arena, group: str, postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(intake, "_key", lambda message, comes_back, _: key_of(message, comes_back, 0))
    seen = passed_on_twice(real, group, postgres_url, lambda _, reader, __, target: reader.seek(f"{target}/0", 0))
    assert seen == ["a", "b", "end"]

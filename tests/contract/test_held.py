"""Trouble stays where it is (P9): a partition with something wrong is held with its cause, and the others go on."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest

from kconsume import App, Partition, Retry
from kconsume._runtime import loop
from kconsume._runtime.assignment import held_watch
from kconsume._runtime.assignment.holds import Holds
from kconsume.backends import OffsetStore, open_store
from kconsume.errors import KconsumeError, OffsetOutOfRange, StartRequired, TopicRecreated
from tests.fix_arena import Arena
from tests.liveness import assert_app_lives
from tests.waiting import eventually


@pytest.fixture(autouse=True)
def attentive(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looks, and words in the log, that come within a test."""
    monkeypatch.setattr(loop, "CHECKUP_EVERY", 0.5)
    monkeypatch.setattr(held_watch, "LOOK_EVERY", 0.1)
    monkeypatch.setattr(held_watch, "SAY_EVERY", 0.5)


@pytest.fixture(params=["kafka", "sqlite"])
def offsets(request: pytest.FixtureRequest, sqlite_url: str) -> str:
    return {"kafka": "kafka://", "sqlite": sqlite_url}[request.param]


@pytest.fixture
def stores() -> Iterator[list[OffsetStore]]:
    opened: list[OffsetStore] = []
    yield opened
    for store in opened:
        store.close()


class Shop:
    """Members of one group that handle one topic, and what they have seen."""

    def __init__(self, arena: Arena, group: str, offsets: str, topic: str, **options: Any) -> None:
        self.arena, self.group, self.offsets, self.topic, self.options = arena, group, offsets, topic, options
        self.seen: list[str] = []

    def member(self) -> App:
        app = self.arena.app(self.group, self.offsets)

        @app.consume(self.topic, **self.options)
        def handle(value: str) -> None:
            self.seen.append(value)

        return app

    def of(self, partition: int) -> list[str]:
        return [value for value in self.seen if value.startswith(f"{partition}:")]


def held(*apps: App) -> dict[Partition, str]:
    """The codes of partitions that are held, as the engines publish them."""
    supervisors = [app._supervisor for app in apps if app._supervisor is not None]
    consumers = [consumer for supervisor in supervisors for consumer in supervisor.consumers]
    return {p: trouble.code for consumer in consumers for p, trouble in consumer.loop.snapshot.held.items()}


def below_the_log(arena: Arena, store: OffsetStore, group: str, topic: str) -> set[str]:
    """Partition 1 of four stands at 5, and its log begins at 50. Returns what can be read."""
    written = arena.fill(topic, 100)
    store.reset(group, {Partition(topic, 1): 5})
    arena.delete_records(topic, 1, 50)
    return {value for value in written if not value.startswith("1:")}


@pytest.mark.dense
def test_one_partition_below_its_log_ends_no_member_and_goes_on_after_a_reset(
    arena: Arena, group: str, sqlite_url: str, stores: list[OffsetStore], caplog: pytest.LogCaptureFixture
) -> None:
    topic = arena.topic()
    stores.append(store := open_store(sqlite_url))
    readable = below_the_log(arena, store, group, topic)
    shop = Shop(arena, group, sqlite_url, topic)
    one, two = shop.member(), shop.member()
    with caplog.at_level(logging.INFO, "kconsume"), one.running(), two.running():
        eventually(lambda: readable <= set(shop.seen), within=60, what="the others are read")
        eventually(lambda: held(one, two) == {Partition(topic, 1): "offset_out_of_range"}, what="the one is held")
        still = f"partition still held partition={topic}/1 code=offset_out_of_range"
        eventually(lambda: any(r.getMessage().startswith(still) for r in caplog.records), what="the log says so again")
        assert shop.of(1) == []
        arena.produce(topic, ["0:later", "2:later"], 0)
        eventually(lambda: "2:later" in shop.seen, what="the others go on")
        store.reset(group, {Partition(topic, 1): 60})
        eventually(lambda: len(shop.of(1)) == 40, within=60, what="it goes on by itself")
        eventually(lambda: held(one, two) == {}, what="nothing is held")
        assert_app_lives(one, two, bootstrap=arena.bootstrap, topic=topic, group=group, offsets=sqlite_url)
    assert shop.of(1) == [f"1:{n}" for n in range(60, 100)]


@pytest.mark.dense
def test_catch_up_ends_with_the_error_after_the_others_are_done(
    arena: Arena, group: str, offsets: str, stores: list[OffsetStore]
) -> None:
    topic = arena.topic()
    stores.append(store := open_store(offsets, brokers=arena.bootstrap))
    readable = below_the_log(arena, store, group, topic)
    shop = Shop(arena, group, offsets, topic)
    with pytest.raises(OffsetOutOfRange, match="Nothing was skipped"):
        shop.member().catch_up(idle=0.2)
    assert sorted(shop.seen) == sorted(readable)
    assert {p.number: row.next_offset for p, row in store.load(group, _all_of(topic)).items()} == {
        0: 100, 1: 5, 2: 100, 3: 100,
    }  # fmt: skip


def test_one_topic_that_was_made_again_leaves_the_other_alone(
    arena: Arena, group: str, sqlite_url: str, stores: list[OffsetStore]
) -> None:
    stays, again = arena.topic(2), arena.topic(1)
    seen: list[str] = []

    def member() -> App:
        app = arena.app(group, sqlite_url)

        @app.consume(stays, again)
        def handle(value: str) -> None:
            seen.append(value)

        return app

    arena.fill(stays, 5, partitions=2)
    arena.produce(again, ["a", "b"], 0)
    member().catch_up(idle=0.2)
    arena.delete_topic(again)
    eventually(lambda: again not in arena.admin.list_topics(timeout=10).topics, what="the topic is gone")
    arena.topic(1, name=again)
    arena.produce(again, ["c", "d", "e"], 0)
    arena.produce(stays, ["later"], 0)
    with pytest.raises(TopicRecreated, match=r"deleted and made again(.|\n)*store\.delete(.|\n)*store\.reset"):
        member().catch_up(idle=0.2)
    assert "later" in seen
    stores.append(store := open_store(sqlite_url))
    app = member()
    with app.running():
        eventually(lambda: held(app) == {Partition(again, 0): "topic_recreated"}, what="it is held")
        assert not {"c", "d", "e"} & set(seen)
        store.delete(group, [Partition(again, 0)])
        eventually(lambda: seen[-3:] == ["c", "d", "e"], what="its row is gone, so it begins where start= says")
        eventually(lambda: held(app) == {}, what="nothing is held")


def test_a_topic_that_goes_and_comes_back_while_it_is_consumed(arena: Arena, group: str, sqlite_url: str) -> None:
    stays, goes = arena.topic(1), arena.topic(1)
    seen: list[str] = []
    app = arena.app(group, sqlite_url)

    @app.consume(stays, goes)
    def handle(value: str) -> None:
        seen.append(value)

    gone = Partition(goes, 0)
    with app.running():
        arena.produce(goes, ["a"], 0)
        eventually(lambda: seen == ["a"], what="it is read")
        arena.delete_topic(goes)
        eventually(lambda: held(app).get(gone) == "topic_missing", within=60, what="it is held")
        arena.produce(stays, ["b"], 0)
        eventually(lambda: seen == ["a", "b"], what="the other goes on")
        arena.topic(1, name=goes)
        eventually(lambda: held(app).get(gone) == "topic_recreated", within=60, what="it is another topic now")
    assert seen == ["a", "b"]


@pytest.mark.dense
def test_start_error_holds_the_partition_without_an_offset_until_it_has_one(
    arena: Arena, group: str, sqlite_url: str, stores: list[OffsetStore]
) -> None:
    topic = arena.topic(2)
    arena.fill(topic, 3, partitions=2)
    stores.append(store := open_store(sqlite_url))
    store.reset(group, {Partition(topic, 0): 0})
    shop = Shop(arena, group, sqlite_url, topic, start="error")
    app = shop.member()
    with app.running():
        eventually(lambda: len(shop.of(0)) == 3, what="the one with an offset is read")
        eventually(lambda: held(app) == {Partition(topic, 1): "start_required"}, what="the other is held")
        store.reset(group, {Partition(topic, 1): 1})
        eventually(lambda: shop.of(1) == ["1:1", "1:2"], what="it starts where it was told to")
    other = Shop(arena, f"{group}-other", "memory://", topic, start="error").member()
    with pytest.raises(StartRequired, match="start='earliest'"):
        other.catch_up(idle=0.2)


@pytest.mark.dense
def test_a_seek_releases_a_held_partition_on_plain_kafka(arena: Arena, group: str, stores: list[OffsetStore]) -> None:
    topic = arena.topic()
    stores.append(store := open_store("kafka://", brokers=arena.bootstrap))
    below_the_log(arena, store, group, topic)
    shop = Shop(arena, group, "kafka://", topic)
    app = shop.member()
    with app.running():
        eventually(lambda: held(app) == {Partition(topic, 1): "offset_out_of_range"}, within=60, what="it is held")
        app.seek(Partition(topic, 1), 90)
        eventually(lambda: shop.of(1) == [f"1:{n}" for n in range(90, 100)], what="it goes on from there")


# on_error="hold"


@pytest.mark.dense
@pytest.mark.parametrize("form", ["record", "batch", "async"])
def test_a_record_that_fails_holds_its_partition_and_no_other(
    arena: Arena, group: str, offsets: str, form: str
) -> None:
    topic, seen, broken = arena.topic(2), list[str](), [True]
    app = arena.app(group, offsets)

    def take(value: str) -> None:
        if broken and value == "1:5":
            raise ValueError("not yet")
        seen.append(value)

    def batch(values: list[str]) -> None:
        for value in values:
            take(value)

    async def on_loop(value: str) -> None:
        take(value)

    handlers: dict[str, Any] = {"record": take, "batch": batch, "async": on_loop}
    app.consume(topic, on_error="hold", retry=Retry(attempts=2, wait=0.01))(handlers[form])
    expected = arena.fill(topic, 20, partitions=2)
    bad = Partition(topic, 1)
    with app.running():
        eventually(lambda: held(app) == {bad: "held"}, within=60, what="it is held")
        eventually(lambda: len({v for v in seen if v.startswith("0:")}) == 20, what="the other is read")
        arena.produce(topic, ["0:later"], 0)
        eventually(lambda: "0:later" in seen, what="the other goes on")
        assert not {v for v in seen if v in {f"1:{n}" for n in range(5, 20)} and form != "batch"}
        eventually(lambda: _stored(app).get(bad, 0) == 5, what="its offset is not passed")
        broken.clear()
        app.resume(bad)
        eventually(lambda: {*expected, "0:later"} == set(seen), what="resumed, it goes on")
        eventually(lambda: held(app) == {}, what="nothing is held")
    if form != "batch":
        assert [v for v in seen if v.startswith("1:")] == [f"1:{n}" for n in range(20)]


@pytest.mark.dense
@pytest.mark.parametrize("arena", ["real"], indirect=True)
def test_a_record_that_fails_in_a_transaction_holds_its_partition_with_the_next_owner_too(
    arena: Arena, group: str, postgres_url: str, database: psycopg.Connection
) -> None:
    """Those before it have their effect, once; each new owner tries it once."""
    topic, tries, broken = arena.topic(2), list[str](), [True]
    database.execute("create table effects (value text)")
    bad = Partition(topic, 1)

    def member(name: str) -> App:
        app = arena.app(group, postgres_url)

        @app.consume(topic, on_error="hold")
        def handle(value: str, tx: psycopg.Connection) -> None:
            tx.execute("insert into effects values (%s)", (value,))
            if broken and value == "1:5":
                tries.append(name)
                raise ValueError("not yet")

        return app

    def effects() -> list[str]:
        return sorted(value for (value,) in database.execute("select value from effects"))

    one, two = member("one"), member("two")
    expected = arena.fill(topic, 10, partitions=2)
    with one.running():
        eventually(lambda: held(one) == {bad: "held"}, what="it is held")
        eventually(lambda: effects() == sorted(expected - {f"1:{n}" for n in range(5, 10)}), what="all else is done")
        before = len(tries)
        with two.running():
            eventually(lambda: len(held(one)) + len(held(two)) == 1 and len(_stored(two)) == 1, what="each has one")
    with two.running():
        eventually(lambda: held(two) == {bad: "held"}, what="the next owner holds it too")
        assert len(tries) > before
        broken.clear()
        two.resume(bad)
        eventually(lambda: effects() == sorted(expected), what="resumed, it goes on")
        eventually(lambda: held(two) == {}, what="nothing is held")


@pytest.mark.dense
def test_catch_up_with_a_held_record_ends_with_the_handler_s_error_after_the_others(
    arena: Arena, group: str, offsets: str
) -> None:
    topic, seen = arena.topic(2), list[str]()
    app = arena.app(group, offsets)

    @app.consume(topic, on_error="hold")
    def handle(value: str) -> None:
        if value == "1:0":
            raise ValueError("never")
        seen.append(value)

    arena.fill(topic, 20, partitions=2)
    with pytest.raises(ValueError, match="never") as failed:
        app.catch_up(idle=0.2)
    assert any(f"{topic}/1@0" in note for note in failed.value.__notes__)
    assert sorted(seen) == sorted(f"0:{n}" for n in range(20))


def test_an_app_that_is_stopped_with_a_held_partition_ends_well_and_names_it(arena: Arena, group: str) -> None:
    topic = arena.topic(1)
    app = arena.app(group)

    @app.consume(topic, on_error="hold")
    def handle(value: str) -> None:
        raise ValueError("never")

    arena.produce(topic, ["x"], 0)
    supervisor = app._start()
    eventually(lambda: held(app) == {Partition(topic, 0): "held"}, within=60, what="it is held")
    supervisor.stop()
    report = app._finish(supervisor)
    assert report.exit_code == 0
    assert "ValueError: never" in str(report.held[Partition(topic, 0)])


@pytest.mark.dense
def test_control_where_trouble_is_not_held_the_app_ends(
    arena: Arena, group: str, sqlite_url: str, stores: list[OffsetStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = arena.topic()
    stores.append(store := open_store(sqlite_url))
    below_the_log(arena, store, group, topic)

    def end(holds: Holds, owned: object, error: KconsumeError, **_: object) -> None:
        raise error

    monkeypatch.setattr(Holds, "put_on_hold", end)
    app = Shop(arena, group, sqlite_url, topic).member()

    def run() -> None:
        with app.running():
            eventually(lambda: False, within=60, what="the app ends")

    with pytest.raises(OffsetOutOfRange):
        run()


def _all_of(topic: str) -> list[Partition]:
    return [Partition(topic, number) for number in range(4)]


def _stored(app: App) -> dict[Partition, int]:
    supervisor = app._supervisor
    consumers = supervisor.consumers if supervisor is not None else ()
    return {p: offset for consumer in consumers for p, offset in consumer.loop.snapshot.stored.items()}

"""Listeners in a running app: when they are called, with what, and that none of them harms the assignment."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Mapping, Sequence
from contextlib import ExitStack

import pytest

from kconsume import App, Partition, Record
from kconsume._config.client_settings import ClientValue
from kconsume._runtime import loop
from kconsume._runtime.assignment import claiming
from kconsume._runtime.assignment.assignment import Assignment
from kconsume.backends import SqliteStore
from kconsume.rebalance import PartitionState, Rebalance, RebalanceListener
from tests.contract.test_rebalance import assigned, half, owned_partitions
from tests.fix_arena import Arena
from tests.waiting import eventually


class Told:
    """What an app's listeners heard and its handler saw, in the order in which it happened."""

    def __init__(self, app: App, topic: str) -> None:
        self.events: list[tuple[str, tuple[int, ...]]] = []
        self.rebalances: list[Rebalance] = []
        app.listen(self)
        app.consume(topic, concurrency=4)(self.handle)

    def on_assigned(self, partitions: Sequence[Partition], rebalance: Rebalance) -> None:
        self._note("assigned", partitions)
        self.rebalances.append(rebalance)

    def on_revoked(self, partitions: Sequence[Partition]) -> None:
        self._note("revoked", partitions)

    def on_lost(self, partitions: Sequence[Partition]) -> None:
        self._note("lost", partitions)

    def handle(self, record: Record) -> None:
        self.events.append(("record", (record.partition,)))

    def _note(self, event: str, partitions: Sequence[Partition]) -> None:
        self.events.append((event, tuple(p.number for p in partitions)))

    def of(self, partition: int) -> list[str]:
        """What happened to one partition, with repeats of records left out."""
        events = [event for event, partitions in self.events if partition in partitions]
        return [event for n, event in enumerate(events) if n == 0 or event != "record" or events[n - 1] != "record"]


def test_records_flow_between_assigned_and_revoked_and_never_outside(
    arena: Arena, group: str, protocol: Mapping[str, ClientValue], sqlite_url: str
) -> None:
    topic = arena.topic(4)
    arena.fill(topic, 20)
    one, two = (arena.app(group, sqlite_url, protocol) for _ in range(2))
    first, second = Told(one, topic), Told(two, topic)
    with one.running():
        eventually(lambda: len(first.events) >= 81, what="all handled")
        with two.running():
            moved = eventually(lambda: half(two), what="handed over")
            arena.fill(topic, 20)
            eventually(
                lambda: {p for e, (*p_,) in second.events if e == "record" for p in p_} == moved,
                what="the second works",
            )
    for partition in range(4):
        expected = ["assigned", "record", "revoked"]
        theirs = second.of(partition)
        assert first.of(partition)[:3] == expected
        assert theirs == ([] if partition not in moved else expected), "each partition: ours, records, given up"
    assert first.rebalances[0].reason == "joined"
    assert first.rebalances[0].protocol == {"range": "eager"}.get(
        str(protocol.get("partition.assignment.strategy")), str(protocol.get("group.protocol", "cooperative"))
    )
    assert {p.number for p in first.rebalances[0].gained} == set(range(4))


def lost_is_told_and_not_saved(
    arena: Arena, group: str, protocol: Mapping[str, ClientValue], sqlite_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "COMMIT_EVERY", 3600.0)  # nothing is saved but what is given up
    topic = arena.topic(2)
    arena.fill(topic, 5, partitions=2)
    app = arena.app(group, sqlite_url, protocol)
    told = Told(app, topic)

    def finished() -> set[int]:
        return {0 if owned.lane is None else owned.progress.watermark for owned in owned_partitions(app).values()}

    with app.running():
        eventually(lambda: finished() == {5}, what="all handled")
        arena.put_out(group, protocol)
        eventually(lambda: all(told.of(number).count("assigned") == 2 for number in range(2)), what="assigned anew")
        stored = SqliteStore.from_url(sqlite_url).load(group, [Partition(topic, n) for n in range(2)])
        assert {position.next_offset for position in stored.values()} == {0}, "nothing of what was lost is saved"
        eventually(lambda: finished() == {5}, what="all handled again")
        (lost,) = [each for each in app.rebalances() if not each.success]
    for partition in range(2):
        assert told.of(partition) == ["assigned", "record", "lost", "assigned", "record", "revoked"]
    assert told.events.count(("record", (0,))) == 10
    assert (lost.reason, {p.number for p in lost.gone}) == ("lost", {0, 1})


@pytest.mark.dense
def test_lost_partitions_are_told_as_lost_and_nothing_of_them_is_saved(
    arena: Arena,
    group: str,
    protocol: Mapping[str, ClientValue],
    sqlite_url: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lost_is_told_and_not_saved(arena, group, protocol, sqlite_url, monkeypatch)


@pytest.mark.dense
@pytest.mark.parametrize("arena", ["embedded"], indirect=True)
@pytest.mark.parametrize("protocol", ["consumer"], indirect=True)
def test_control_if_lost_partitions_are_given_up_like_revoked_ones_that_is_seen(
    arena: Arena,
    group: str,
    protocol: Mapping[str, ClientValue],
    sqlite_url: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Assignment, "lost", Assignment.revoked)
    with pytest.raises(AssertionError, match="nothing of what was lost is saved"):
        lost_is_told_and_not_saved(arena, group, protocol, sqlite_url, monkeypatch)


@pytest.mark.dense
def test_what_a_listener_loads_is_there_before_the_first_record_and_what_it_saves_is_the_last_word(
    arena: Arena, group: str, sqlite_url: str
) -> None:
    topic, kept = arena.topic(4), dict[Partition, int]()
    one, two = (arena.app(group, sqlite_url) for _ in range(2))

    def counting(app: App) -> PartitionState[int]:
        counts: PartitionState[int] = PartitionState(
            load=lambda partition: kept.get(partition, 0), save=kept.__setitem__
        )
        app.listen(counts)

        @app.consume(topic)
        def count(record: Record) -> None:
            counts[Partition(record.topic, record.partition)] += 1

        return counts

    here, there = counting(one), counting(two)
    with one.running():
        eventually(lambda: len(here.partitions) == 4, what="all loaded")
        arena.fill(topic, 30)
        eventually(lambda: sum(here[p] for p in here.partitions) == 120, what="all counted")
        with two.running():
            eventually(lambda: len(here.partitions) == len(there.partitions) == 2, what="two each")
            arena.fill(topic, 30)
            eventually(
                lambda: sum(counts[p] for counts in (here, there) for p in counts.partitions) == 240,
                what="the second has gone on where the first ended",
            )
    assert kept == {Partition(topic, n): 60 for n in range(4)}


def test_an_async_listener_is_awaited_on_the_loop_of_the_handlers(arena: Arena, group: str) -> None:
    topic = arena.topic(2)
    arena.fill(topic, 5, partitions=2)
    app, events = arena.app(group), list[str]()

    @app.on_assigned
    async def prepare(partitions: Sequence[Partition]) -> None:
        await asyncio.sleep(0.05)
        events.append(threading.current_thread().name)

    @app.consume(topic)
    async def handle(value: str) -> None:
        events.append(threading.current_thread().name)

    with app.running():
        eventually(lambda: len(events) == 11, what="prepared, and all handled")
    assert set(events) == {f"kconsume-loop-{group}"}


@pytest.mark.dense
@pytest.mark.parametrize("event", ["on_assigned", "on_revoked", "on_lost"])
def test_a_listener_that_raises_is_reported_and_harms_nobody(
    arena: Arena, group: str, event: str, sqlite_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    topic = arena.topic(2)
    arena.fill(topic, 20, partitions=2)
    app, seen, heard = arena.app(group, sqlite_url), list[int](), list[str]()

    def breaks(partitions: Sequence[Partition]) -> None:
        raise LookupError("no such table")

    getattr(app, event)(breaks)
    app.on_assigned(lambda partitions: heard.append("assigned"))
    app.on_revoked(lambda partitions: heard.append("revoked"))
    app.on_lost(lambda partitions: heard.append("lost"))
    loses = event == "on_lost"

    @app.consume(topic)
    def handle(record: Record) -> None:
        seen.append(record.offset)

    with caplog.at_level(logging.ERROR), app.running():
        eventually(lambda: len(seen) == 40, what="all handled")
        if loses:
            arena.put_out(group, {})
            eventually(lambda: heard.count("assigned") == 2, what="assigned anew")
            arena.fill(topic, 1, partitions=2)
            eventually(lambda: seen.count(20) == 2, what="records flow")
    expected = ["assigned", "lost", "assigned", "revoked"] if loses else ["assigned", "revoked"]
    assert heard == expected, "the others are called"
    assert f"listener failed listener=breaks called_for={event.removeprefix('on_')}" in caplog.text
    assert "no such table" in caplog.text


@pytest.mark.dense
def test_a_listener_that_hangs_holds_nobody_up_beyond_the_budget(
    arena: Arena,
    group: str,
    protocol: Mapping[str, ClientValue],
    sqlite_url: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(claiming, "LISTENERS_PATIENCE", 1.0)
    topic, release, seen = arena.topic(4), threading.Event(), list[tuple[int, int]]()
    one = App(arena.bootstrap, group=group, offsets=sqlite_url, kafka=arena.quick(protocol), shutdown=6.0)
    two = arena.app(group, sqlite_url, protocol)

    class Stuck(RebalanceListener):
        def on_assigned(self, partitions: Sequence[Partition], rebalance: Rebalance) -> None:
            release.wait(60)

        def on_revoked(self, partitions: Sequence[Partition], rebalance: Rebalance) -> None:
            release.wait(60)

    def handle(record: Record) -> None:
        seen.append((record.partition, record.offset))

    one.listen(Stuck())
    one.consume(topic)(handle)
    two.consume(topic)(handle)
    with caplog.at_level(logging.ERROR), ExitStack() as stack:
        stack.callback(release.set)
        stack.enter_context(one.running())
        eventually(lambda: len(assigned(one)) == 4, what="assigned although the listener hangs", within=20)
        arena.fill(topic, 10)
        eventually(lambda: len(seen) == 40, what="records flow")
        stack.enter_context(two.running())
        eventually(lambda: half(two), what="handed over although the listener hangs", within=30)
        arena.fill(topic, 10)
        eventually(lambda: len(set(seen)) == 80, what="all handled")
    assert len(seen) == 80, "and nothing twice"
    assert "listener timed out listener=Stuck.on_revoked" in caplog.text

"""The assign and revoke contract with several members: three protocols, on the embedded and on the real broker."""

from __future__ import annotations

import sqlite3
import threading
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import ExitStack
from typing import NamedTuple

import pytest

from kconsume import App, Partition, Record
from kconsume._config.client_settings import ClientValue
from kconsume._runtime.assignment.assignment import Assignment
from kconsume._runtime.assignment.partition import OwnedPartition
from kconsume._runtime.consumer import RunningConsumer
from kconsume._runtime.deadlines import Deadline
from kconsume.errors import ConfigurationError
from kconsume.testing.services import KafkaService
from tests.fix_arena import Arena
from tests.fix_kafka import MakeTopic
from tests.waiting import eventually


class Seen(NamedTuple):
    member: str
    partition: int
    offset: int


def consumer_of(app: App) -> RunningConsumer:
    assert app._supervisor is not None
    return app._supervisor.consumers[0]


def owned_partitions(app: App) -> dict[Partition, OwnedPartition]:
    return {} if app._supervisor is None else dict(consumer_of(app).assignment.partitions)


def assigned(app: App) -> set[int]:
    """The partitions that a running app has open."""
    return {p.number for p, h in owned_partitions(app).items() if h.lane is not None and h.state.value == "open"}


def half(app: App) -> set[int]:
    """The partitions of a member that has its two of four, and nothing before: they are opened one by one."""
    mine = assigned(app)
    return mine if len(mine) == 2 else set()


def store_that_takes_the_last_offset(arena: Arena, sqlite_url: str) -> str:
    """A real coordinator takes a member's commit while the group prepares a rebalance; the embedded broker may refuse
    it, and then a record is repeated. So `kafka://` is exact on the real one only."""
    return "kafka://" if arena.kind == "real" else sqlite_url


def busy(app: App) -> int:
    """How many lanes have a handler running."""
    return sum(h.lane is not None and h.lane.busy for h in owned_partitions(app).values())


def in_hand(app: App) -> dict[int, int]:
    """By partition, how many records its lane has."""
    return {p.number: h.lane.queued_records for p, h in owned_partitions(app).items() if h.lane is not None}


def member(
    arena: Arena,
    name: str,
    topic: str,
    group: str,
    seen: list[Seen],
    kafka: Mapping[str, ClientValue],
    offsets: str = "kafka://",
) -> App:
    app = arena.app(group, offsets, kafka)

    @app.consume(topic)
    def handle(record: Record) -> None:
        seen.append(Seen(name, record.partition, record.offset))

    return app


@pytest.mark.dense
def test_members_share_the_partitions_and_a_leaver_hands_over_without_loss_or_repeat(
    arena: Arena, group: str, sqlite_url: str, protocol: Mapping[str, ClientValue]
) -> None:
    topic = arena.topic(4)
    seen: list[Seen] = []
    offsets = store_that_takes_the_last_offset(arena, sqlite_url)
    one = member(arena, "one", topic, group, seen, protocol, offsets)
    two = member(arena, "two", topic, group, seen, protocol, offsets)
    with one.running():
        eventually(lambda: assigned(one) == {0, 1, 2, 3}, what="the first member has all")
        arena.fill(topic, 50)
        with two.running():
            eventually(
                lambda: len(assigned(one)) == len(assigned(two)) == 2 and not assigned(one) & assigned(two),
                what="two each, none twice",
            )
            arena.fill(topic, 50)
            eventually(lambda: len(seen) >= 400, what="all handled by the two")
        eventually(lambda: assigned(one) == {0, 1, 2, 3}, what="the first member has all again")
        arena.fill(topic, 50)
        eventually(lambda: len(seen) >= 600, what="all handled")
    counts = Counter((s.partition, s.offset) for s in seen)
    assert counts == Counter((p, n) for p in range(4) for n in range(150)), "an orderly hand-over repeats nothing"
    assert {s.member for s in seen} == {"one", "two"}
    for number in range(4):
        assert [s.offset for s in seen if s.partition == number] == list(range(150)), "order by partition (P7)"


@pytest.mark.dense
def test_a_record_that_runs_when_its_partition_is_revoked_is_finished_and_committed(
    arena: Arena, group: str, sqlite_url: str, protocol: Mapping[str, ClientValue]
) -> None:
    topic = arena.topic(4)
    seen: list[Seen] = []
    offsets = store_that_takes_the_last_offset(arena, sqlite_url)
    one = arena.app(group, offsets, protocol)

    def braked(number: int) -> bool:
        return any(
            h.lane is not None and h.lane.stop_reasons for p, h in owned_partitions(one).items() if p.number == number
        )

    joined = threading.Event()

    @one.consume(topic, concurrency=4)
    def handle(record: Record) -> None:
        if record.value == b"hold":
            eventually(lambda: joined.is_set() or braked(record.partition), what="the revoke")
        seen.append(Seen("one", record.partition, record.offset))

    two = member(arena, "two", topic, group, seen, protocol, offsets)
    with one.running():
        eventually(lambda: len(assigned(one)) == 4, what="all assigned")
        for partition in range(4):
            arena.produce(topic, ["hold", "after"], partition)
        eventually(lambda: busy(one) == 4, what="four handlers run")
        with two.running():
            moved = eventually(lambda: half(two), what="handed over")
            joined.set()
            eventually(lambda: len(seen) == 8, what="all handled")
    expected = {Seen("two" if p in moved and n == 1 else "one", p, n) for p in range(4) for n in range(2)}
    assert Counter(seen) == Counter(expected), "the running record stays with the old owner, the next goes to the new"


class HeldRevoke:
    """The revoke callback of one app: when it has done all that it does, it is held until the test lets it return."""

    def __init__(self, app: App, monkeypatch: pytest.MonkeyPatch) -> None:
        self.done, self.may_return = threading.Event(), threading.Event()
        self.moved: set[int] = set()
        self.granted: list[float] = []
        """Seconds that it gave what ran, and its listeners."""
        revoked, drain = Assignment.revoked, Assignment.drain

        def held(assignment: Assignment, partitions: list[Partition]) -> None:
            revoked(assignment, partitions)
            if assignment is consumer_of(app).assignment:
                self.moved |= {partition.number for partition in partitions}
                self.done.set()
                self.may_return.wait(60)

        def noted(assignment: Assignment, leaving: list[OwnedPartition], deadline: Deadline) -> int:
            if assignment is consumer_of(app).assignment:
                self.granted.append(deadline.seconds)
            return drain(assignment, leaving, deadline)

        monkeypatch.setattr(Assignment, "revoked", held)
        monkeypatch.setattr(Assignment, "drain", noted)


IN_HAND = 100


def unmoved_do_not_stop(
    arena: Arena, group: str, protocol: Mapping[str, ClientValue], sqlite_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the callback runs nothing is fetched, by design: what is promised of that time is what is in hand."""
    topic = arena.topic(4)
    seen: list[Seen] = []
    one = arena.app(group, sqlite_url, protocol)
    release = [threading.Event() for _ in range(4)]

    @one.consume(topic, concurrency=4)
    def handle(record: Record) -> None:
        if record.value == b"hold":
            release[record.partition].wait(60)
        seen.append(Seen("one", record.partition, record.offset))

    two = member(arena, "two", topic, group, seen, protocol, sqlite_url)
    with one.running(), ExitStack() as stack:
        eventually(lambda: len(assigned(one)) == 4, what="all assigned")
        for partition in range(4):
            arena.produce(topic, ["hold", *map(str, range(IN_HAND))], partition)
        eventually(lambda: in_hand(one) == dict.fromkeys(range(4), 1 + IN_HAND), what="all in hand")
        eventually(lambda: busy(one) == 4, what="four handlers run")
        callback = HeldRevoke(one, monkeypatch)
        two.startup = 0  # it is given nothing before the callback returns
        stack.enter_context(two.running())
        for event in (*release, callback.may_return):
            stack.callback(event.set)

        eventually(callback.done.is_set, what="two are given up although their handlers hang")
        staying = {0, 1, 2, 3} - callback.moved
        assert len(staying) == 2
        assert max(callback.granted) <= 1.0, "what is not in hand waits for its fetch no longer than that"
        for partition in staying:
            release[partition].set()
        eventually(lambda: not busy(one), what="the unmoved come to rest")
        for partition in staying:
            worked_off = [s.offset for s in seen if s.partition == partition]
            assert worked_off == list(range(1 + IN_HAND)), "what is in hand is worked off, in order, in the callback"

        callback.may_return.set()
        for partition in staying:
            arena.produce(topic, ["later"], partition)
        later = {(partition, 1 + IN_HAND) for partition in staying}
        eventually(lambda: later <= {s[1:] for s in seen}, what="the unmoved flow while the moved ones still hang")


@pytest.mark.dense
@pytest.mark.parametrize("protocol", ["cooperative", "consumer"], indirect=True)
def test_partitions_that_do_not_move_do_not_stop_while_a_moved_one_hangs(
    arena: Arena,
    group: str,
    protocol: Mapping[str, ClientValue],
    sqlite_url: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    unmoved_do_not_stop(arena, group, protocol, sqlite_url, monkeypatch)


@pytest.mark.dense
@pytest.mark.parametrize("protocol", ["cooperative"], indirect=True)
def test_control_partitions_that_do_not_move_are_seen_to_stop_if_all_are_told_to(
    arena: Arena,
    group: str,
    protocol: Mapping[str, ClientValue],
    sqlite_url: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    brake = Assignment._brake
    monkeypatch.setattr(Assignment, "_brake", lambda self, _, reason: brake(self, [*self.partitions.values()], reason))
    with pytest.raises(AssertionError, match="what is in hand is worked off"):
        unmoved_do_not_stop(arena, group, protocol, sqlite_url, monkeypatch)


def test_a_handler_that_does_not_end_does_not_hold_its_partition_back(
    arena: Arena, group: str, sqlite_url: str, protocol: Mapping[str, ClientValue]
) -> None:
    topic = arena.topic(2)
    rows = sqlite3.connect(sqlite_url.removeprefix("sqlite:///"), isolation_level=None)
    rows.execute("create table seen (member text, value text)")
    release = threading.Event()
    one = App(
        arena.bootstrap,
        group=group,
        offsets=sqlite_url,
        kafka=arena.quick(protocol),
        shutdown=2.0,
    )
    two = arena.app(group, sqlite_url, protocol)

    @one.consume(topic)
    def stuck(value: str) -> None:
        release.wait(30)

    @two.consume(topic)
    def free(value: str, tx: sqlite3.Connection) -> None:
        tx.execute("insert into seen values ('two', ?)", (value,))

    with ExitStack() as stack:
        stack.callback(release.set)
        stack.enter_context(one.running())
        eventually(lambda: len(assigned(one)) == 2, what="all assigned")
        for partition in range(2):
            arena.produce(topic, [f"{partition}"], partition)
        eventually(lambda: busy(one) == 2, what="2 run")
        stack.enter_context(two.running())
        moved = eventually(lambda: assigned(two), what="a partition moves although its handler hangs", within=30)
        eventually(
            lambda: rows.execute("select value from seen").fetchall() == [(str(p),) for p in moved],
            what="the record that was not finished is handled by the new owner",
        )
        release.set()
    assert rows.execute("select count(*) from seen").fetchone() == (len(moved),)


@pytest.mark.dense
@pytest.mark.parametrize("size", [1, 5])
def test_more_members_than_partitions_leave_some_idle_and_nothing_breaks(
    arena: Arena, group: str, size: int, protocol: Mapping[str, ClientValue]
) -> None:
    topic = arena.topic(2)
    seen: list[Seen] = []
    apps = [member(arena, str(n), topic, group, seen, protocol) for n in range(size)]
    with ExitStack() as stack:
        for app in apps:
            stack.enter_context(app.running())
        eventually(lambda: sum(len(assigned(app)) for app in apps) == 2, what="both partitions are owned", within=40)
        arena.fill(topic, 30, partitions=2)
        eventually(lambda: len({s[1:] for s in seen}) == 60, what="all handled")


def test_statistics_are_by_group_and_add_up_what_its_rebalances_were(arena: Arena, group: str) -> None:
    topic, app = arena.topic(1), arena.app(group)
    second = f"{group}-two"

    @app.consume(topic)
    def handle(value: bytes) -> None: ...

    @app.consume(topic, group=second)
    def look(value: bytes) -> None: ...

    def counts() -> list[int]:
        return sorted(each.count for each in app.rebalance_statistics().values())

    with pytest.raises(ConfigurationError, match="rebalance_statistics"):
        app.rebalance_statistics()
    with app.running():
        eventually(lambda: counts() == [1, 1], what="each has joined")
        assert {name: each.success_rate for name, each in app.rebalance_statistics().items()} == {group: 1, second: 1}
        arena.put_out(group, {})
        eventually(lambda: counts() == [1, 2], what="one was put out, and has joined anew")
        statistics = app.rebalance_statistics().values()
        assert sorted(each.success_rate for each in statistics) == [0.5, 1.0]
        took = sum(each.count * each.mean_duration for each in statistics)
        assert took == pytest.approx(sum(rebalance.duration for rebalance in app.rebalances()))
        for each in statistics:
            assert each.per_hour > each.count, "it has not run for an hour"
            assert each.share_of_time == pytest.approx(each.per_hour * each.mean_duration / 3600)


@pytest.mark.parametrize("after", [0.05, 1.0])
def test_a_member_that_leaves_in_the_middle_of_a_rebalance_does_not_keep_the_others_waiting(
    kafka: KafkaService, topic: MakeTopic, group: str, after: float
) -> None:
    """With the client's own times: a session of 45 s, which nobody should have to wait for."""
    name, moved = topic(4), threading.Event()
    one, two = (App(kafka.bootstrap, group=group) for _ in range(2))
    one.on_revoked(lambda partitions: moved.set())
    seen: list[bytes] = []
    for app in (one, two):

        @app.consume(name)
        def handle(value: bytes) -> None:
            seen.append(value)

    with one.running():
        eventually(lambda: assigned(one) == {0, 1, 2, 3}, what="the first member has all")
        with two.running():
            assert moved.wait(20)
            time.sleep(after)  # the fault's own timing
        eventually(lambda: assigned(one) == {0, 1, 2, 3}, within=30, what="the first member has all again")

"""Commits and heartbeats that the broker refuses, each error by itself, on the embedded broker (`notes/reliability.md`
1.7 and 1.8): nothing is lost, nothing of others is committed, and what cannot go on ends with the reason.

The protocols of a case are those under which a broker gives that answer.
"""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Callable, Iterator
from itertools import product
from typing import NamedTuple

import pytest
from confluent_kafka import KafkaError

from kconsume import App, Partition, Record
from kconsume._embedded.controls import KafkaControls
from kconsume._embedded.mock_cluster import EmbeddedKafka
from kconsume._kafka.commit_result import OffsetToCommit
from kconsume._kafka.consumer import KafkaConsumer
from kconsume._kafka.fetched import Runs
from kconsume._runtime import loop
from kconsume._runtime.assignment import committer, held_watch
from kconsume._runtime.assignment.assignment import Assignment
from kconsume._runtime.assignment.committer import GroupCommitter
from kconsume.backends import open_store
from kconsume.errors import ClientFailed, InstanceTaken, KconsumeError
from kconsume.rebalance.events import LOST, MEMBERS
from tests.fix_arena import PROTOCOLS, Arena
from tests.liveness import assert_app_lives
from tests.waiting import eventually

CLASSIC = ("cooperative", "eager")
CONSUMER = ("consumer",)
ALL = (*CLASSIC, *CONSUMER)
EACH = 40

# The client sends these again by itself; nobody sees more than a delay.
SILENT = (
    KafkaError.COORDINATOR_LOAD_IN_PROGRESS,
    KafkaError.NOT_COORDINATOR,
    KafkaError.COORDINATOR_NOT_AVAILABLE,
    KafkaError.REQUEST_TIMED_OUT,
    KafkaError._TRANSPORT,
)
AGAIN = (
    *product([KafkaError.REBALANCE_IN_PROGRESS], CLASSIC),
    *product([KafkaError.STALE_MEMBER_EPOCH, KafkaError.FENCED_MEMBER_EPOCH, KafkaError.UNKNOWN_MEMBER_ID], CONSUMER),
)
DISOWNED = tuple(product([KafkaError.ILLEGAL_GENERATION, KafkaError.UNKNOWN_MEMBER_ID], CLASSIC))
REFUSED = {
    KafkaError.GROUP_AUTHORIZATION_FAILED: "allow this user READ on the group",
    KafkaError.TOPIC_AUTHORIZATION_FAILED: "allow this user READ on the topic",
    KafkaError.OFFSET_METADATA_TOO_LARGE: r"offset\.metadata\.max\.bytes",
}
ENDS = {error: fix for error, fix in REFUSED.items() if error != KafkaError.TOPIC_AUTHORIZATION_FAILED}


def named(value: object) -> str | None:
    return KafkaError(value).name() if isinstance(value, int) and value else None


@pytest.fixture(autouse=True)
def _commits_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    """Also what is no warning: a commit that meets a rebalance."""
    caplog.set_level(logging.INFO, logger="kconsume.commits")


@pytest.fixture
def arena(embedded: KafkaControls, monkeypatch: pytest.MonkeyPatch) -> Iterator[Arena]:
    """The embedded broker, with nothing left to fail; apps commit often."""
    monkeypatch.setattr(loop, "COMMIT_EVERY", 0.1)
    yield Arena("embedded", embedded.bootstrap, embedded)
    embedded.broker_up()
    for api in ("OffsetCommit", "Heartbeat", "ConsumerGroupHeartbeat"):
        embedded.clear_failures(api)


@pytest.fixture
def strangers(monkeypatch: pytest.MonkeyPatch) -> list[Partition]:
    """What was committed by a member to whom it was not assigned, as its client sees it."""
    commit, found = KafkaConsumer.commit, list[Partition]()

    def watched(source: KafkaConsumer, marks: dict[Partition, OffsetToCommit]) -> None:
        assigned = {Partition(e.topic, e.partition) for e in source._consumer.assignment()}
        found.extend(marks.keys() - assigned)
        commit(source, marks)

    monkeypatch.setattr(KafkaConsumer, "commit", watched)
    return found


class Place(NamedTuple):
    partition: int
    offset: int


class Shop:
    """One group of a topic with two partitions, and what its members have handled."""

    def __init__(
        self, arena: Arena, group: str, protocol: str, offsets: str = "kafka://", instance: str | None = None
    ) -> None:
        assert arena.embedded is not None
        self.arena, self.broker, self.group, self.protocol = arena, arena.embedded, group, protocol
        self.offsets, self.instance = offsets, instance
        self.topic = arena.topic(2)
        self.written = 0
        self.seen: list[Place] = []
        self.apps: list[App] = []
        self._group = open_store("kafka://", brokers=arena.bootstrap)

    def member(self, shutdown: float = 8.0, handle: Callable[[Record], None] | None = None) -> App:
        app = App(
            self.arena.bootstrap,
            group=self.group,
            offsets=self.offsets,
            kafka=self.arena.quick(PROTOCOLS[self.protocol]),
            instance=self.instance,
            shutdown=shutdown,
        )

        def note(record: Record) -> None:
            self.seen.append(Place(record.partition, record.offset))

        app.consume(self.topic, executor="thread")(handle or note)
        self.apps.append(app)
        return app

    def run_until_it_fails(self, then: Callable[[], None] = lambda: None, app: App | None = None) -> None:
        app = app or self.member()
        with app.running():
            eventually(lambda: self.owned(app) == 2, what="assigned")
            then()
            eventually(lambda: False, what="the failure ends this")

    def write(self, each: int = EACH) -> None:
        self.arena.fill(self.topic, each, partitions=2)
        self.written += each

    def await_pinned(self, app: App) -> None:
        """Both partitions are open, and where they start is committed: the next commit is of records."""
        eventually(lambda: self.owned(app) == 2 and self.committed() == {0: 0, 1: 0}, what="pinned")

    def held(self, app: App) -> dict[Partition, str]:
        supervisor = app._supervisor
        consumers = supervisor.consumers if supervisor is not None else ()
        return {p: trouble.code for consumer in consumers for p, trouble in consumer.loop.snapshot.held.items()}

    def owned(self, app: App) -> int:
        supervisor = app._supervisor
        return 0 if supervisor is None else sum(h.lane is not None for h in _assignment(app).partitions.values())

    def committed(self) -> dict[int, int]:
        """What the Kafka group says."""
        partitions = [Partition(self.topic, number) for number in range(2)]
        return {p.number: position.next_offset for p, position in self._group.load(self.group, partitions).items()}

    def stored(self) -> dict[int, int]:
        """Where the next process begins."""
        partitions = [Partition(self.topic, number) for number in range(2)]
        store = open_store(self.offsets, brokers=self.arena.bootstrap)
        return {p.number: position.next_offset for p, position in store.load(self.group, partitions).items()}

    def passed(self) -> set[Place]:
        """What would never be handled: the next process begins after it."""
        return {Place(p, n) for p, offset in self.stored().items() for n in range(offset)} - set(self.seen)

    def missing(self) -> set[Place]:
        return {Place(partition, n) for partition in range(2) for n in range(self.written)} - set(self.seen)

    def await_all(self, why: str) -> None:
        """And one record more of each partition."""
        eventually(lambda: not self.missing(), what=f"all handled {why}")
        eventually(lambda: self.committed() == {0: self.written, 1: self.written}, what=f"all committed {why}")
        self.written += 1
        assert_app_lives(
            *self.apps, bootstrap=self.arena.bootstrap, topic=self.topic, group=self.group, offsets="kafka://",
            partitions=2,
        )  # fmt: skip

    def catch_up(self) -> int:
        """Another process goes on; how many records that were."""
        return self.member().catch_up(idle=0.2).handled


def _assignment(app: App) -> Assignment:
    assert app._supervisor is not None
    return app._supervisor.consumers[0].assignment


def _reasons(app: App) -> list[str]:
    assert app._supervisor is not None
    return [rebalance.reason for rebalance in app._supervisor.consumers[0].history.recent]


def _said(error: int) -> str:
    return KafkaError(error).str()


# OffsetCommit: what may be said again


@pytest.mark.dense
@pytest.mark.parametrize("store", ["kafka", "sqlite"])
@pytest.mark.parametrize(("error", "protocol"), AGAIN, ids=named)
def test_a_commit_that_met_a_rebalance_is_said_again_and_nothing_is_repeated(
    arena: Arena,
    group: str,
    sqlite_url: str,
    strangers: list[Partition],
    caplog: pytest.LogCaptureFixture,
    error: int,
    protocol: str,
    store: str,
) -> None:
    shop = Shop(arena, group, protocol, {"kafka": "kafka://", "sqlite": sqlite_url}[store])
    with shop.member().running() as app:
        shop.await_pinned(app)
        shop.broker.fail_next("OffsetCommit", error)
        shop.write()
        shop.await_all("while it runs: by the next commit, and not by the last")
        assert LOST not in _reasons(app)
    assert _said(error) in caplog.text, "the error was met"
    assert len(shop.seen) == len(set(shop.seen))
    assert strangers == []


@pytest.mark.dense
@pytest.mark.parametrize("store", ["kafka", "sqlite"])
@pytest.mark.parametrize("protocol", ALL)
def test_a_commit_that_is_not_answered_is_sent_again_and_one_that_arrives_late_takes_nothing_back(
    arena: Arena, group: str, sqlite_url: str, monkeypatch: pytest.MonkeyPatch, protocol: str, store: str
) -> None:
    """The commit of a half goes nowhere. It arrives behind that of the whole, and the group is back at the half."""
    commit, strays, arrived = KafkaConsumer.commit, list[dict[Partition, OffsetToCommit]](), threading.Event()
    shop = Shop(arena, group, protocol, {"kafka": "kafka://", "sqlite": sqlite_url}[store])

    def astray(source: KafkaConsumer, marks: dict[Partition, OffsetToCommit]) -> None:
        if not strays and max(mark.offset for mark in marks.values()) > 0:
            strays.append(marks)
            return
        commit(source, marks)
        if min(mark.offset for mark in marks.values()) == 2 * EACH and not arrived.is_set():
            arrived.set()
            commit(source, strays[0])

    with shop.member().running() as app:
        shop.await_pinned(app)
        monkeypatch.setattr(committer, "UNANSWERED", 0.5)
        monkeypatch.setattr(KafkaConsumer, "commit", astray)
        shop.write()
        eventually(lambda: strays and not shop.missing(), what="the first half is handled")
        eventually(
            lambda: shop.committed() == {0: EACH, 1: EACH},
            what="the second commit is sent, though the first is not answered",
        )
        shop.write()
        eventually(arrived.is_set, what="the first commit arrives behind the last")
        shop.await_all("and the last stands")
    assert len(shop.seen) == len(set(shop.seen))


@pytest.mark.dense
@pytest.mark.parametrize("store", ["kafka", "sqlite"])
@pytest.mark.parametrize(("error", "protocol"), DISOWNED, ids=named)
def test_a_member_that_the_broker_disowns_commits_nothing_until_it_has_joined_again(
    arena: Arena,
    group: str,
    sqlite_url: str,
    strangers: list[Partition],
    caplog: pytest.LogCaptureFixture,
    error: int,
    protocol: str,
    store: str,
) -> None:
    shop = Shop(arena, group, protocol, {"kafka": "kafka://", "sqlite": sqlite_url}[store])
    with shop.member().running() as app:
        shop.await_pinned(app)
        shop.broker.fail_next("OffsetCommit", error)
        shop.write()
        eventually(lambda: LOST in _reasons(app), what="lost, and assigned again")
        shop.write()
        shop.await_all("while it runs: after it has joined again")
    assert _said(error) in caplog.text, "the error was met"
    assert strangers == []


@pytest.mark.dense
def test_control_a_member_that_does_not_forget_what_it_lost_commits_what_is_not_its_own(
    arena: Arena, group: str, strangers: list[Partition], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Assignment, "_forget", lambda *_: None)
    shop = Shop(arena, group, "cooperative")
    with shop.member().running() as app:
        shop.await_pinned(app)
        shop.broker.fail_next("OffsetCommit", KafkaError.ILLEGAL_GENERATION)
        shop.write()
        eventually(lambda: strangers, what="the test above would fail")


@pytest.mark.dense
@pytest.mark.parametrize("protocol", ALL)
@pytest.mark.parametrize("error", SILENT, ids=named)
def test_a_coordinator_that_is_elsewhere_costs_a_delay(
    arena: Arena, group: str, strangers: list[Partition], caplog: pytest.LogCaptureFixture, error: int, protocol: str
) -> None:
    shop = Shop(arena, group, protocol)
    with shop.member().running() as app:
        shop.await_pinned(app)
        # What is met first is not heard of; that it was met is known by what was to be met after it.
        shop.broker.fail_next("OffsetCommit", error, KafkaError.REBALANCE_IN_PROGRESS)
        shop.write()
        shop.await_all("while it runs")
        assert LOST not in _reasons(app)
    assert _said(KafkaError.REBALANCE_IN_PROGRESS) in caplog.text
    assert [r.getMessage() for r in caplog.records if _said(error) in r.getMessage()] == []
    assert len(shop.seen) == len(set(shop.seen))
    assert strangers == []


@pytest.mark.parametrize("protocol", ALL)
def test_a_coordinator_that_moves_costs_a_delay(
    group: str, strangers: list[Partition], monkeypatch: pytest.MonkeyPatch, protocol: str
) -> None:
    monkeypatch.setattr(loop, "COMMIT_EVERY", 0.1)
    with EmbeddedKafka(brokers=2) as brokers:
        shop = Shop(Arena("embedded", brokers.bootstrap, brokers), group, protocol)
        brokers.move_coordinator(group, 1)
        with shop.member().running() as app:
            shop.await_pinned(app)
            brokers.move_coordinator(group, 2)
            shop.write()
            shop.await_all("while it runs, by the other coordinator")
    assert len(shop.seen) == len(set(shop.seen))
    assert strangers == []


@pytest.mark.dense
@pytest.mark.parametrize("protocol", ALL)
def test_brokers_that_are_away_cost_a_delay(
    arena: Arena, group: str, strangers: list[Partition], caplog: pytest.LogCaptureFixture, protocol: str
) -> None:
    shop = Shop(arena, group, protocol)
    with shop.member().running() as app:
        shop.await_pinned(app)
        shop.write()
        shop.await_all("before")
        shop.broker.broker_down()
        eventually(lambda: "broker trouble" in caplog.text, what="noticed")
        shop.broker.broker_up()
        shop.write()
        shop.await_all("while it runs")
    assert strangers == []


# … at the worst moment: the last commit


@pytest.mark.dense
@pytest.mark.parametrize(
    ("error", "protocol"),
    [*AGAIN, *DISOWNED[:2], *product([KafkaError.NOT_COORDINATOR], ALL)],
    ids=named,
)
def test_the_last_commit_is_said_again_or_its_records_come_again(
    arena: Arena,
    group: str,
    strangers: list[Partition],
    monkeypatch: pytest.MonkeyPatch,
    error: int,
    protocol: str,
) -> None:
    monkeypatch.setattr(loop, "COMMIT_EVERY", 60.0)
    shop = Shop(arena, group, protocol)
    with shop.member().running() as app:
        eventually(lambda: shop.owned(app) == 2, what="assigned")
        shop.write()
        eventually(lambda: not shop.missing(), what="all handled")
        assert shop.written not in shop.committed().values(), "and not yet committed"
        shop.broker.fail_next("OffsetCommit", error)
    again = shop.catch_up()
    assert (again > 0) == ((error, protocol) in DISOWNED), "what was disowned was not committed, and came again"
    assert shop.committed() == {0: EACH, 1: EACH}
    assert strangers == []


@pytest.mark.dense
def test_a_last_commit_that_is_refused_all_the_time_ends_by_the_deadline_and_is_not_hurried(
    arena: Arena, group: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "COMMIT_EVERY", 60.0)
    shop, shutdown = Shop(arena, group, "cooperative"), 2.0
    with shop.member(shutdown).running() as app:
        eventually(lambda: shop.owned(app) == 2, what="assigned")
        shop.write()
        eventually(lambda: not shop.missing(), what="all handled")
        shop.broker.fail_next("OffsetCommit", *[KafkaError.REBALANCE_IN_PROGRESS] * 1000)
        sent, commit = list[dict[Partition, OffsetToCommit]](), KafkaConsumer.commit

        def counted(source: KafkaConsumer, marks: dict[Partition, OffsetToCommit]) -> None:
            sent.append(marks)
            commit(source, marks)

        monkeypatch.setattr(KafkaConsumer, "commit", counted)
    assert "not committed" in caplog.text
    assert caplog.text.count(_said(KafkaError.REBALANCE_IN_PROGRESS)) == 1, "reported once"
    assert len(sent) <= shutdown / loop._ROOM_POLL
    shop.broker.clear_failures("OffsetCommit")
    assert shop.catch_up() == 2 * EACH
    assert shop.committed() == {0: EACH, 1: EACH}


@pytest.mark.dense
@pytest.mark.parametrize(
    ("error", "protocol"),
    [
        *product([KafkaError.REBALANCE_IN_PROGRESS, KafkaError.ILLEGAL_GENERATION], CLASSIC),
        *product([KafkaError.STALE_MEMBER_EPOCH], CONSUMER),
        *product([KafkaError.NOT_COORDINATOR], ALL),
    ],
    ids=named,
)
def test_a_commit_that_is_refused_at_the_hand_over_loses_nothing(
    arena: Arena, group: str, strangers: list[Partition], monkeypatch: pytest.MonkeyPatch, error: int, protocol: str
) -> None:
    monkeypatch.setattr(loop, "COMMIT_EVERY", 60.0)
    shop = Shop(arena, group, protocol)
    with shop.member().running() as one:
        eventually(lambda: shop.owned(one) == 2, what="assigned")
        shop.write()
        eventually(lambda: not shop.missing(), what="all handled")
        shop.broker.fail_next("OffsetCommit", error)
        with shop.member().running() as two:
            eventually(lambda: shop.owned(one) == shop.owned(two) == 1, what="one each")
            shop.write()
            eventually(lambda: not shop.missing(), what="all handled")
    shop.catch_up()
    assert shop.committed() == {0: shop.written, 1: shop.written}
    assert strangers == []


# OffsetCommit: what no later commit changes


@pytest.mark.dense
@pytest.mark.parametrize("protocol", ALL)
@pytest.mark.parametrize(("error", "fix"), ENDS.items(), ids=named)
def test_a_commit_that_is_refused_for_good_ends_the_app_with_the_fix(
    arena: Arena, group: str, strangers: list[Partition], error: int, fix: str, protocol: str
) -> None:
    shop = Shop(arena, group, protocol)
    shop.write()
    shop.broker.fail_next("OffsetCommit", error)
    with pytest.raises(ClientFailed, match=rf"refused the offset commit \({_said(error)}\): .*{fix}") as caught:
        shop.run_until_it_fails()
    assert caught.value.exit_code == 1
    assert shop.passed() == set(), "also by what was committed when it ended"
    shop.catch_up()
    assert shop.missing() == set()
    assert shop.committed() == {0: EACH, 1: EACH}
    assert strangers == []


@pytest.mark.dense
@pytest.mark.parametrize("protocol", ALL)
def test_a_commit_that_a_topic_s_rights_refuse_holds_its_partitions_until_they_are_given(
    arena: Arena, group: str, strangers: list[Partition], protocol: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(held_watch, "READ_AGAIN_EVERY", 1.0)
    shop = Shop(arena, group, protocol)
    with shop.member().running() as app:
        shop.await_pinned(app)
        shop.broker.fail_next("OffsetCommit", KafkaError.TOPIC_AUTHORIZATION_FAILED)
        shop.write()
        eventually(lambda: "authorization_lost" in shop.held(app).values(), what="held")
        eventually(lambda: not shop.held(app), what="read again, and released")
        shop.write()
        eventually(lambda: shop.committed() == {0: 2 * EACH, 1: 2 * EACH}, what="all is committed")
    assert shop.missing() == set()
    assert strangers == []


@pytest.mark.dense
@pytest.mark.parametrize("protocol", ALL)
@pytest.mark.parametrize("error", REFUSED, ids=named)
def test_a_commit_that_is_only_for_tools_to_see_never_ends_the_app(
    arena: Arena, group: str, sqlite_url: str, caplog: pytest.LogCaptureFixture, error: int, protocol: str
) -> None:
    shop = Shop(arena, group, protocol, sqlite_url)
    with shop.member().running() as app:
        shop.await_pinned(app)
        shop.broker.fail_next("OffsetCommit", *[error] * 3)
        shop.write()
        shop.await_all("while it runs, and what tools see is right again")
    assert len(shop.seen) == len(set(shop.seen))
    assert caplog.text.count(_said(error)) == 1, "reported once"


@pytest.mark.dense
def test_control_a_commit_that_is_not_known_to_be_advisory_ends_the_app(
    arena: Arena, group: str, sqlite_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    init = GroupCommitter.__init__
    monkeypatch.setattr(GroupCommitter, "__init__", lambda self, source, **_: init(self, source))
    shop = Shop(arena, group, "cooperative", sqlite_url)
    shop.write()
    shop.broker.fail_next("OffsetCommit", KafkaError.GROUP_AUTHORIZATION_FAILED)
    with pytest.raises(ClientFailed):
        shop.run_until_it_fails()


# A client that has died


class Death(NamedTuple):
    api: str
    error: int
    protocol: str
    cause: type[KconsumeError]
    exit_code: int


DEATHS = [
    *(Death("OffsetCommit", KafkaError.FENCED_INSTANCE_ID, protocol, InstanceTaken, 2) for protocol in ALL),
    *(Death("Heartbeat", KafkaError.FENCED_INSTANCE_ID, protocol, InstanceTaken, 2) for protocol in CLASSIC),
    Death("ConsumerGroupHeartbeat", KafkaError.UNRELEASED_INSTANCE_ID, "consumer", InstanceTaken, 2),
    Death("ConsumerGroupHeartbeat", KafkaError.INVALID_REQUEST, "consumer", ClientFailed, 1),
]


@pytest.mark.dense
@pytest.mark.parametrize("store", ["kafka", "sqlite"])
@pytest.mark.parametrize("death", DEATHS, ids=lambda d: f"{d.api}-{named(d.error)}-{d.protocol}")
def test_a_client_that_has_died_ends_the_app_whatever_the_store(
    arena: Arena, group: str, sqlite_url: str, death: Death, store: str
) -> None:
    shop = Shop(arena, group, death.protocol, {"kafka": "kafka://", "sqlite": sqlite_url}[store], "pod-1")
    shop.write()
    with pytest.raises(death.cause, match=re.escape(_said(death.error))) as caught:
        shop.run_until_it_fails(lambda: shop.broker.fail_next(death.api, death.error))
    assert caught.value.exit_code == death.exit_code
    assert shop.passed() == set()
    if death.protocol in CLASSIC:  # the embedded broker keeps a dead member of a KIP-848 group for half a minute
        shop.catch_up()
        assert shop.missing() == set()
        assert set(shop.stored().values()) == {EACH}


def ended_before_the_app(arena: Arena, group: str, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Offsets whose handler ran when the client died, and ended before the app did: by then the client has been polled
    for a while, and has said that it is dead."""
    shop, ended, polls, poll = (
        Shop(arena, group, "consumer", instance="pod-1"),
        list[int](),
        list[None](),
        KafkaConsumer.poll,
    )

    def polled(source: KafkaConsumer) -> Runs:
        polls.append(None)
        return poll(source)

    started = threading.Event()

    def slow(record: Record) -> None:
        if record.partition == 1:
            assert started.wait(20), "the other handler does not begin"  # before there is anything to commit
            return
        started.set()
        eventually(lambda: len(polls) > 20, what="the client is polled while the app drains")
        ended.append(record.offset)

    def write() -> None:
        shop.await_pinned(app)  # or it would die of that commit, before a handler runs
        shop.broker.fail_next("OffsetCommit", KafkaError.FENCED_INSTANCE_ID)
        arena.produce(shop.topic, ["slow"], 0)
        arena.produce(shop.topic, ["swift"], 1)

    app = shop.member(shutdown=30.0, handle=slow)
    monkeypatch.setattr(KafkaConsumer, "poll", polled)
    with pytest.raises(InstanceTaken):
        shop.run_until_it_fails(write, app)
    return list(ended)


@pytest.mark.dense
def test_a_handler_that_runs_when_the_client_dies_is_not_cut_short(
    arena: Arena, group: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert ended_before_the_app(arena, group, monkeypatch) == [0]


@pytest.mark.dense
def test_control_a_drain_that_the_client_can_end_leaves_the_handler_running(
    arena: Arena, group: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop.Loop, "_serve", lambda self: self._consumer.poll())
    assert ended_before_the_app(arena, group, monkeypatch) == []


# Heartbeats


@pytest.mark.dense
@pytest.mark.parametrize(
    ("error", "protocol", "reason"),
    [
        *product([KafkaError.ILLEGAL_GENERATION, KafkaError.UNKNOWN_MEMBER_ID], CLASSIC, [LOST]),
        *product([KafkaError.FENCED_MEMBER_EPOCH, KafkaError.UNKNOWN_MEMBER_ID], CONSUMER, [LOST]),
        *product([KafkaError.REBALANCE_IN_PROGRESS], CLASSIC, [MEMBERS]),
    ],
    ids=named,
)
@pytest.mark.parametrize("store", ["kafka", "sqlite"])
def test_a_heartbeat_that_is_refused_means_a_rebalance_and_no_loss(
    arena: Arena,
    group: str,
    sqlite_url: str,
    strangers: list[Partition],
    error: int,
    protocol: str,
    reason: str,
    store: str,
) -> None:
    shop = Shop(arena, group, protocol, {"kafka": "kafka://", "sqlite": sqlite_url}[store])
    with shop.member().running() as app:
        shop.await_pinned(app)
        shop.broker.fail_next("ConsumerGroupHeartbeat" if protocol == "consumer" else "Heartbeat", error)
        shop.write()
        eventually(lambda: reason in _reasons(app), what=f"a rebalance: {reason}")
        shop.write()
        shop.await_all("while it runs")
    assert strangers == []

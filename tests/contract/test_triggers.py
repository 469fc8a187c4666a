"""What sets a rebalance off, one trigger a test: none of them loses a record, and the group goes on by itself."""

from __future__ import annotations

import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import pytest
from confluent_kafka import Consumer, KafkaError
from confluent_kafka.admin import NewPartitions  # type: ignore[attr-defined]

from kconsume import App, Partition, Record
from kconsume._config.client_settings import ClientValue
from kconsume._config.options import StartPolicy
from kconsume._runtime import loop
from kconsume.backends import open_store
from kconsume.errors import ConfigurationError, GroupRefused
from kconsume.testing import EmbeddedKafka
from kconsume.testing.services import LocalKafka
from tests.contract.test_rebalance import owned_partitions
from tests.fix_arena import PROTOCOLS, Arena
from tests.fix_kafka import await_partitions, produce, unique
from tests.liveness import assert_app_lives
from tests.waiting import eventually

Kafka = Mapping[str, ClientValue]

ATTENTIVE: Kafka = {"topic.metadata.refresh.interval.ms": 500}
"""Classic groups learn of topics and partitions when a member looks."""


class Seen(NamedTuple):
    member: str
    topic: str
    value: str


class Members:
    """The members of one group on one broker, and what they have seen."""

    def __init__(self, arena: Arena, group: str, kafka: Kafka, offsets: str = "kafka://") -> None:
        self.arena = arena
        self.group = group
        self.kafka = kafka
        self.offsets = offsets
        self.seen: list[Seen] = []

    def member(self, name: str, *topics: str, pattern: str | None = None, start: StartPolicy = "earliest") -> App:
        app = self.arena.app(self.group, self.offsets, self.kafka)

        @app.consume(*topics, pattern=pattern, start=start)
        def handle(value: str, record: Record) -> None:
            self.seen.append(Seen(name, record.topic, value))

        return app

    def values(self, topic: str) -> set[str]:
        return {s.value for s in self.seen if s.topic == topic}

    def see(self, topic: str, *values: str, within: float = 20.0) -> None:
        eventually(lambda: self.values(topic) >= set(values), within=within, what=f"{values} of {topic} are handled")


def has(app: App) -> set[str]:
    """The partitions that a running app has open."""
    return {str(p) for p, h in owned_partitions(app).items() if h.lane is not None and h.state.value == "open"}


def saved(app: App) -> int:
    """How many records are committed, of all partitions that it has, each read from its first."""
    return sum(h.stored or 0 for h in owned_partitions(app).values())


def every(topic: str, partitions: int) -> set[str]:
    return {f"{topic}/{number}" for number in range(partitions)}


def add_partitions(arena: Arena, topic: str, total: int) -> None:
    (done,) = arena.admin.create_partitions([NewPartitions(topic, total)]).values()
    done.result(timeout=20)
    await_partitions(arena.admin, topic, total)


def write(arena: Arena, topic: str, partition: int, *values: str) -> None:
    produce(arena.bootstrap, topic, values, partition=partition, anew=True)


# Members


def test_a_member_that_joins_and_leaves_is_a_rebalance_of_each_in_which_only_what_moves_changes_hands(
    arena: Arena, group: str, protocol: Kafka
) -> None:
    members, topic = Members(arena, group, protocol), arena.topic(4)
    one, two = members.member("one", topic), members.member("two", topic)
    with one.running():
        eventually(lambda: has(one) == every(topic, 4), what="the first member has all")
        with two.running():
            eventually(lambda: len(has(one)) == len(has(two)) == 2 and not has(one) & has(two), what="two each")
            (joined,) = eventually(two.rebalances, what="the second has its record")[:1]
        eventually(lambda: has(one) == every(topic, 4), what="the first member has all again")
        reasons = [r.reason for r in one.rebalances()]
        shared, alone = (r for r in one.rebalances() if r.reason == "members" and len(r.gained) != len(r.gone))
        assert all(r.success for r in one.rebalances())
    assert reasons[0] == joined.reason == "joined"
    assert set(reasons[1:]) == {"members"}
    assert len(shared.gone) == len(shared.gained) + 2, "two went to the one that joined"
    assert len(alone.gained) == len(alone.gone) + 2, "and came back when it left"


@pytest.mark.parametrize("offsets", ["kafka", "sqlite"])
def test_members_that_work_while_one_joins_warn_of_nothing(
    arena: Arena,
    group: str,
    offsets: str,
    sqlite_url: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """That the group rebalances cannot be told from here yet, so a commit meets it: as when the tutorial starts a
    second service."""
    monkeypatch.setattr(loop, "COMMIT_EVERY", 0.01)
    caplog.set_level("INFO")
    topic, done = arena.topic(4), list[str]()
    arena.fill(topic, 400)

    def member() -> App:
        app = arena.app(group, sqlite_url if offsets == "sqlite" else "kafka://")

        @app.consume(topic, chunk=1)
        def handle(value: str) -> None:
            time.sleep(0.01)  # there is always something new to commit
            done.append(value)

        return app

    one, two = member(), member()
    with one.running():
        eventually(lambda: len(done) > 10, what="the first member works")
        with two.running():
            eventually(lambda: len(has(one)) == len(has(two)) == 2 and not has(one) & has(two), what="two each")
    said = [record for record in caplog.records if record.name == "kconsume.commits"]
    assert said or arena.kind == "real", "a real broker says so for a moment only"
    assert [record.getMessage() for record in said if record.levelname != "INFO"] == []


VICTIM = """
import sys
from kconsume import App
bootstrap, group, topic = sys.argv[1:4]
app = App(bootstrap, group=group, kafka=dict(a.split("=") for a in sys.argv[4:]))
@app.consume(topic)
def handle(value: str) -> None:
    print(value, flush=True)
app.run()
"""


def test_the_partitions_of_a_member_that_is_killed_come_to_the_survivor_with_all_their_records(
    arena: Arena, group: str, protocol: Kafka, tmp_path: Path
) -> None:
    if arena.kind == "embedded" and protocol == PROTOCOLS["consumer"]:
        pytest.skip("the embedded broker's session is 30 s under KIP-848")
    members, topic = Members(arena, group, protocol), arena.topic(4)
    survivor = members.member("survivor", topic)
    (tmp_path / "victim.py").write_text(VICTIM)
    kafka = [f"{name}={value}" for name, value in arena.quick(protocol).items()]
    with survivor.running():
        eventually(lambda: has(survivor) == every(topic, 4), what="the survivor has all")
        victim = subprocess.Popen(
            [sys.executable, "victim.py", arena.bootstrap, group, topic, *kafka],
            cwd=tmp_path,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            eventually(lambda: len(has(survivor)) == 2, what="the two share")
        finally:
            victim.kill()
            victim.wait(10)
        written = arena.fill(topic, 25)
        eventually(lambda: has(survivor) == every(topic, 4), what="its partitions come, when its session is over")
        members.see(topic, *written)
        assert_app_lives(survivor, bootstrap=arena.bootstrap, topic=topic, group=group, offsets="kafka://")


def test_a_handler_that_is_slower_than_the_poll_interval_costs_no_membership(
    arena: Arena, group: str, protocol: Kafka
) -> None:
    limit: Kafka = {**protocol, "max.poll.interval.ms": 2000}
    members, topic = Members(arena, group, limit), arena.topic(2)
    slow, other = arena.app(group, kafka=limit), members.member("other", topic)
    busy: list[str] = []

    @slow.consume(topic)
    def handle(value: str) -> None:
        busy.append(value)
        time.sleep(3.5)  # beyond the limit and the session: what the test is about
        members.seen.append(Seen("slow", topic, value))

    with slow.running(), other.running(), ExitStack() as stack:
        eventually(lambda: len(has(slow)) == len(has(other)) == 1, what="one each")
        idle = bare(arena, unique("bare"), topic, limit)
        stack.callback(idle.close)
        before = slow.rebalances(), other.rebalances()
        arena.fill(topic, 1, partitions=2)
        members.see(topic, "0:0", "1:0")
        assert [s.member for s in members.seen] == ["other", "slow"]
        assert (slow.rebalances(), other.rebalances()) == before, "nobody was put out"
        # The control: one who does not poll meanwhile is.
        eventually(lambda: said(idle) == KafkaError._MAX_POLL_EXCEEDED, what="who does not poll is told")


def bare(arena: Arena, group: str, topic: str, kafka: Kafka) -> Consumer:
    """A consumer as people write it, with partitions."""
    consumer = Consumer({**arena.quick(kafka), "bootstrap.servers": arena.bootstrap, "group.id": group, "log_level": 0})
    consumer.subscribe([topic])
    eventually(lambda: consumer.poll(0.1) is None and consumer.assignment(), what="it has partitions")
    return consumer


def said(consumer: Consumer) -> int | None:
    """The code of an error that it hands out."""
    message = consumer.poll(0.1)
    error = None if message is None else message.error()
    return None if error is None else error.code()


# Partitions


@pytest.mark.parametrize("arena", ["real"], indirect=True)
def test_what_is_written_to_a_new_partition_is_handled_also_when_the_group_begins_at_the_end(
    arena: Arena, group: str, protocol: Kafka
) -> None:
    members, topic = Members(arena, group, {**protocol, **ATTENTIVE}), arena.topic(1)
    arena.produce(topic, ["before the group"], 0)
    app = members.member("one", topic, start="latest")
    with app.running():
        eventually(lambda: has(app) == every(topic, 1), what="joined")
        add_partitions(arena, topic, 3)
        write(arena, topic, 1, "early", "later")
        eventually(lambda: has(app) == every(topic, 3), what="the new ones are noticed")
        write(arena, topic, 2, "last")
        members.see(topic, "early", "later", "last")
        assert app.rebalances()[-1].reason == "partitions"
    assert Counter(s.value for s in members.seen) == Counter(["early", "later", "last"])


@pytest.mark.parametrize("arena", ["real"], indirect=True)
@pytest.mark.parametrize("store", ["kafka", "sqlite"])
def test_what_was_written_to_a_new_partition_while_nobody_looked_is_handled(
    arena: Arena, group: str, protocol: Kafka, sqlite_url: str, store: str
) -> None:
    offsets = sqlite_url if store == "sqlite" else "kafka://"
    members, topic = Members(arena, group, protocol, offsets), arena.topic(1)
    members.member("one", topic, start="latest").catch_up(idle=0.1)
    add_partitions(arena, topic, 2)
    write(arena, topic, 1, "early")
    members.member("two", topic, start="latest").catch_up(idle=0.1)
    assert members.seen == [Seen("two", topic, "early")]


# Subscriptions


@pytest.mark.dense
def test_an_app_that_subscribes_to_another_topic_gives_the_first_up_and_gets_it_back(
    arena: Arena, group: str, protocol: Kafka
) -> None:
    members, first, second = Members(arena, group, protocol), arena.topic(2), arena.topic(2)
    app = members.member("one", first)
    with app.running():
        eventually(lambda: has(app) == every(first, 2), what="the first topic")
        arena.produce(first, ["1"], 0)
        members.see(first, "1")
        eventually(lambda: saved(app) == 1, what="it is committed")
        app.subscribe(second)
        eventually(lambda: has(app) == every(second, 2), what="the second topic alone")
        arena.produce(first, ["2"], 0)
        arena.produce(second, ["3"], 1)
        members.see(second, "3")
        assert members.values(first) == {"1"}, "what was given up is not handled"
        app.subscribe(first, second)
        eventually(lambda: has(app) == every(first, 2) | every(second, 2), what="both")
        members.see(first, "1", "2")
    assert Counter(s.value for s in members.seen) == Counter("123"), "each once"


def test_a_topic_that_comes_into_being_is_consumed_if_the_pattern_matches_its_whole_name(
    arena: Arena, group: str, protocol: Kafka
) -> None:
    members, prefix = Members(arena, group, {**protocol, **ATTENTIVE}), unique("orders")
    first = arena.topic(2, name=f"{prefix}-eu")
    app = members.member("one", pattern=f"{prefix}-[a-z]+")
    with app.running():
        eventually(lambda: has(app) == every(first, 2), what="the topic that is there")
        others = [arena.topic(1, name=name) for name in (f"x{prefix}-eu", f"{prefix}-eu2", f"{prefix}-")]
        second = arena.topic(2, name=f"{prefix}-us")
        for name in (first, second, *others):
            arena.produce(name, ["1"], 0)
        eventually(lambda: has(app) == every(first, 2) | every(second, 2), within=40, what="the new one, and no other")
        members.see(second, "1")
        members.see(first, "1")
    assert {s.topic for s in members.seen} == {first, second}


def test_a_pattern_that_matches_nothing_yet_waits_for_its_first_topic(
    arena: Arena, group: str, protocol: Kafka
) -> None:
    members, prefix = Members(arena, group, {**protocol, **ATTENTIVE}), unique("orders")
    app = members.member("one", pattern=f"{prefix}-.*")
    with app.running():
        topic = arena.topic(2, name=f"{prefix}-eu")
        arena.produce(topic, ["1"], 0)
        members.see(topic, "1", within=40)


def test_two_patterns_that_match_one_topic_are_an_error_when_there_is_one(arena: Arena, group: str) -> None:
    prefix = unique("orders")
    topic = arena.topic(1, name=f"{prefix}-eu")
    arena.produce(topic, ["1"], 0)
    members = Members(arena, group, {})
    app = members.member("one", pattern=f"{prefix}-.*")

    @app.consume(pattern=f"{prefix}-e.*")
    def european(value: str) -> None: ...

    with pytest.raises(ConfigurationError, match=f"handle and european both match topic '{topic}'"):
        app.catch_up(idle=0.2)
    assert not members.seen


@pytest.mark.dense
@pytest.mark.parametrize(
    "protocol",
    [
        "cooperative",
        "eager",
        "consumer",
    ],
    indirect=True,
)
@pytest.mark.parametrize("arena", ["real"], indirect=True)
def test_what_is_no_longer_subscribed_to_is_given_up_in_order(arena: Arena, group: str, protocol: Kafka) -> None:
    """Else the state that a listener keeps would not be saved, and what was not committed yet would be repeated."""
    members, first, second = Members(arena, group, protocol), arena.topic(2), arena.topic(2)
    app = members.member("one", first)
    revoked: list[str] = []
    app.on_revoked(lambda partitions: revoked.extend(map(str, partitions)))
    with app.running():
        eventually(lambda: has(app) == every(first, 2), what="the first topic")
        app.subscribe(second)
        eventually(lambda: has(app) == every(second, 2), what="the second topic alone")
        assert "subscription" in [r.reason for r in app.rebalances()]
        assert set(revoked) == every(first, 2)


def test_in_a_rolling_deployment_each_member_gets_only_what_it_asked_for_and_all_is_handled(
    arena: Arena, group: str, protocol: Kafka
) -> None:
    members, old, new = Members(arena, group, protocol), arena.topic(4), arena.topic(4)
    first, second = members.member("old", old), members.member("old", old)
    updated = members.member("new", old, new)
    with updated.running() as third, ExitStack() as stack:
        for app in (first, second):
            stack.enter_context(app.running())
        eventually(lambda: has(first) and has(second), what="the old members have some")
        eventually(
            lambda: has(first) | has(second) | has(third) == every(old, 4) | every(new, 4), what="all have an owner"
        )
        for topic in (old, new):
            written = arena.fill(topic, 20)
            members.see(topic, *written)
        assert not (has(first) | has(second)) & every(new, 4)
    assert {s.member for s in members.seen if s.topic == new} == {"new"}


@pytest.mark.parametrize("arena", ["real"], indirect=True)
@pytest.mark.parametrize("store", ["kafka", "sqlite"])
def test_partitions_that_a_person_chose_are_refused_in_a_group_that_has_members_and_harm_none_of_them(
    arena: Arena, group: str, protocol: Kafka, sqlite_url: str, store: str
) -> None:
    offsets = sqlite_url if store == "sqlite" else "kafka://"
    members, topic = Members(arena, group, protocol, offsets), arena.topic(2)
    app, alone = members.member("one", topic), arena.app(group, offsets, protocol)

    @alone.consume(topic, partitions=[0])
    def handle(value: str) -> None: ...

    with app.running():
        eventually(lambda: has(app) == every(topic, 2), what="joined")
        epochs = {p: h.epoch for p, h in owned_partitions(app).items()}
        with pytest.raises(ConfigurationError, match=f"group '{group}' has members .*give this handler a group="):
            alone.catch_up(idle=0.2)
        arena.fill(topic, 5, partitions=2)
        eventually(lambda: len(members.seen) == 10, what="the member goes on")
        assert {p: h.epoch for p, h in owned_partitions(app).items()} == epochs, "nobody claimed what is its own"
    assert alone.catch_up(idle=0.2).handled == 0, "when the members have left, it may"


@pytest.mark.parametrize("arena", ["real"], indirect=True)
def test_partitions_that_a_person_chose_end_with_the_cause_when_the_group_has_members_later(
    arena: Arena, group: str, protocol: Kafka
) -> None:
    """The broker takes no offset of theirs any more, and no callback will say so."""
    members, topic = Members(arena, group, protocol), arena.topic(2)
    app, alone, seen = members.member("one", topic), arena.app(group, "kafka://", protocol), list[str]()

    @alone.consume(topic, partitions=[0])
    def handle(value: str) -> None:
        seen.append(value)

    def block() -> None:
        with alone.running():
            arena.produce(topic, ["a"], 0)
            eventually(lambda: seen == ["a"], what="it is handled")
            with app.running():
                eventually(lambda: has(app) == every(topic, 2), what="a member joined")
                arena.produce(topic, ["b"], 0)
                eventually(lambda: False, what="the block is ended by what the broker says of its offsets")

    with pytest.raises(
        GroupRefused, match=f"group '{group}' has members, who share its partitions.*give this handler a group="
    ):
        block()


# Topics


@pytest.mark.dense
@pytest.mark.parametrize("committed", [False, True])
def test_a_topic_that_is_deleted_while_it_is_consumed_ends_no_app_and_is_named(
    arena: Arena,
    group: str,
    protocol: Kafka,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    *,
    committed: bool,
) -> None:
    monkeypatch.setattr(loop, "CHECKUP_EVERY", 1.0)
    members, topic = Members(arena, group, {**protocol, **ATTENTIVE}), arena.topic(2)
    app = members.member("one", topic)

    def told(sentence: str) -> bool:
        return any(sentence in r.getMessage() for r in caplog.records if r.levelname == "ERROR")

    with app.running():
        written = arena.fill(topic, 5, partitions=2)
        members.see(topic, *written)
        if committed:
            eventually(lambda: saved(app) == len(written), what="all is committed")
        arena.delete_topic(topic)
        # The embedded broker makes a topic anew when a client asks for it, which may be at once.
        gone, again = f"{topic}' is not on the cluster", f"topic {topic!r} had id"
        eventually(lambda: told(gone) or (arena.kind == "embedded" and told(again)), what="the log names the topic")
        if arena.kind == "real":  # the embedded broker keeps the offsets of a topic that was deleted
            arena.topic(2, name=topic)
            arena.produce(topic, ["again"], 0)
            # A commit that came after the topic was gone belongs to the old one, and is no place in the new one.
            eventually(
                lambda: "again" in members.values(topic) or told("deleted and made again"),
                within=60,
                what="it is read from its beginning, or held with its cause",
            )


@pytest.mark.dense
@pytest.mark.parametrize("committed", [False, True])
def test_of_the_topics_of_a_pattern_one_that_is_deleted_is_given_up_and_the_others_go_on(
    arena: Arena, group: str, protocol: Kafka, monkeypatch: pytest.MonkeyPatch, *, committed: bool
) -> None:
    monkeypatch.setattr(loop, "CHECKUP_EVERY", 1.0)
    members, prefix = Members(arena, group, {**protocol, **ATTENTIVE}), unique("orders")
    stays, goes = (arena.topic(2, name=f"{prefix}-{place}") for place in ("eu", "us"))
    app = members.member("one", pattern=f"{prefix}-.*")
    with app.running():
        for topic in (stays, goes):
            members.see(topic, *arena.fill(topic, 5, partitions=2), within=40)
        if committed:
            eventually(lambda: saved(app) == 20, what="all is committed")
        arena.delete_topic(goes)
        eventually(lambda: has(app) == every(stays, 2), within=40, what="it is given up")
        arena.produce(stays, ["later"], 0)
        members.see(stays, "later")


# The coordinator


def test_a_coordinator_that_moves_is_followed(protocol: Kafka, group: str, sqlite_url: str) -> None:
    with EmbeddedKafka(brokers=3) as broker:
        arena = Arena("embedded", broker.bootstrap, broker)
        members, topic = Members(arena, group, protocol, sqlite_url), arena.topic(4)
        apps = [members.member(name, topic) for name in ("one", "two")]
        with apps[0].running(), apps[1].running():
            eventually(lambda: has(apps[0]) | has(apps[1]) == every(topic, 4), what="joined")
            for number in (1, 2, 3):
                broker.move_coordinator(group, number)
                values = [f"{number}:{n}" for n in range(20)]
                arena.produce(topic, values)
                members.see(topic, *values)
            places, store = [Partition(topic, number) for number in range(4)], open_store(sqlite_url)
            eventually(
                lambda: sum(p.next_offset for p in store.load(group, places).values()) == 60, what="all is committed"
            )
        assert members.member("again", topic).catch_up(idle=0.2).handled == 0


def test_a_coordinator_that_is_away_for_longer_than_a_session_costs_no_record(protocol: Kafka, group: str) -> None:
    with EmbeddedKafka(brokers=3) as broker:
        arena = Arena("embedded", broker.bootstrap, broker)
        members, topic = Members(arena, group, protocol), arena.topic(4)
        app = members.member("one", topic)
        for number in range(4):
            broker.move_leader(topic, number, 1)
        broker.move_coordinator(group, 2)
        with app.running():
            eventually(lambda: has(app) == every(topic, 4), what="joined")
            broker.broker_down(2)
            written = arena.fill(topic, 10)
            if protocol == PROTOCOLS["consumer"]:
                members.see(topic, *written)  # it hears of nothing, and goes on
            else:
                eventually(lambda: not has(app), what="the session is over, and with it the assignment")
            broker.broker_up(2)
            eventually(lambda: has(app) == every(topic, 4), what="back")
            members.see(topic, *written)
            assert_app_lives(app, bootstrap=broker.bootstrap, topic=topic, group=group, offsets="kafka://")


def test_a_real_coordinator_that_is_killed_and_restarted_costs_no_record_under_any_protocol() -> None:
    with LocalKafka() as broker, ExitStack() as stack:
        broker.start()
        arena = Arena("real", broker.bootstrap, None)
        topic = arena.topic(2)
        groups = [Members(arena, unique(name), kafka) for name, kafka in PROTOCOLS.items()]
        apps = [members.member("one", topic) for members in groups]
        for app in apps:
            stack.enter_context(app.running())
        before = arena.fill(topic, 50, partitions=2)
        for members in groups:
            members.see(topic, *before)
        broker.kill()
        broker.start()
        arena.produce(topic, [f"after {n}" for n in range(50)])
        for members, app in zip(groups, apps, strict=True):
            members.see(topic, *(f"after {n}" for n in range(50)), within=60)
            eventually(lambda app=app: has(app) == every(topic, 2), within=60, what="it has all")  # type: ignore[misc]
            assert_app_lives(
                app, bootstrap=broker.bootstrap, topic=topic, group=members.group, offsets="kafka://", partitions=2
            )

"""Retry and re-drive topics beside the topics that carry the load: who has which, on the real broker.

Where the group's assignor balances totals, they have a member of the group of their own
(`_kafka/two_member_consumer.py`).
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from queue import SimpleQueue
from threading import Event

import pytest
from confluent_kafka import Consumer, TopicPartition

from kconsume import App, DeadLetter, Partition, Record, RetryTopics
from kconsume._config.client_settings import ClientValue
from kconsume._kafka import two_member_consumer as split_source
from kconsume._kafka.cluster import Cluster
from kconsume._kafka.consumer import KafkaConsumer
from kconsume._kafka.fetched import Runs
from kconsume._kafka.two_member_consumer import SplitConsumer
from kconsume.backends import FencedStore, open_store
from kconsume.backends.claim import granted
from kconsume.failures.letter_headers import redrive_topic
from kconsume.failures.retry_topics import retry_topic
from tests.contract.test_rebalance import consumer_of, owned_partitions
from tests.fix_arena import PROTOCOLS, Arena
from tests.waiting import eventually

Kafka = Mapping[str, ClientValue]

pytestmark = pytest.mark.parametrize("arena", ["real"], indirect=True)

of_totals = pytest.mark.parametrize("protocol", ["cooperative", "consumer"], indirect=True)
"""The protocols whose assignors balance the total count of a member's partitions."""

DELAYS = (0.2, 0.2, 0.2)


class Scene:
    """A topic with a re-drive topic that is left from before, and processes of one group that read both."""

    def __init__(self, arena: Arena, group: str, kafka: Kafka, offsets: str = "kafka://") -> None:
        self.arena, self.group, self.kafka, self.offsets = arena, group, kafka, offsets
        self.topic = arena.topic(4)
        self.redrive = arena.topic(4, redrive_topic(self.topic, group))
        self.rungs = [retry_topic(self.topic, group, n + 1) for n in range(len(DELAYS))]
        self.handled: list[tuple[str, str]] = []
        """By which app, and what."""

    def app(self, name: str, *, retries: bool = False, instance: str | None = None) -> App:
        app = App(
            self.arena.bootstrap,
            group=self.group,
            offsets=self.offsets,
            kafka=self.arena.quick(self.kafka),
            instance=instance,
        )
        if retries:
            self.arena._made.update(self.rungs)
        retry = RetryTopics(DELAYS) if retries else None

        @app.consume(self.topic, retry=retry, on_error=DeadLetter(f"{self.topic}.dlq"))
        def handle(value: str, record: Record) -> None:
            if retries and value.startswith("bad") and record.topic not in (self.rungs[-1], self.redrive):
                raise LookupError("not yet")
            self.handled.append((name, value))

        return app

    def has(self, app: App) -> Counter[str]:
        """How many partitions of which topic it has open."""
        return Counter(
            p.topic for p, h in owned_partitions(app).items() if h.lane is not None and h.state.value == "open"
        )

    def fill(self, word: str) -> set[str]:
        """Ten records in each partition, one of them bad, and one of each that was sent back."""
        values = set()
        for partition in range(4):
            mine = [f"{word}-{partition}-{n}" for n in range(9)] + [f"bad-{word}-{partition}"]
            back = f"back-{word}-{partition}"
            self.arena.produce(self.topic, mine, partition)
            self.arena.produce(self.redrive, [back], partition)
            values |= {*mine, back}
        return values

    def values(self) -> set[str]:
        return {value for _, value in self.handled}

    def committed(self) -> dict[Partition, int]:
        """What the Kafka group says of the topics that have records."""
        topics = [self.topic, self.redrive, *self.rungs]
        wanted = [TopicPartition(topic, n) for topic in topics for n in range(4)]
        settings = {"bootstrap.servers": self.arena.bootstrap, "group.id": self.group, "log_level": 0}
        with closing(Consumer(settings)) as asking:
            return {Partition(p.topic, p.partition): p.offset for p in asking.committed(wanted, timeout=20)}

    def ends(self) -> dict[Partition, int]:
        settings = {"bootstrap.servers": self.arena.bootstrap, "group.id": self.group, "log_level": 0}
        with closing(Consumer(settings)) as asking:
            return {
                Partition(topic, n): asking.get_watermark_offsets(TopicPartition(topic, n), timeout=20)[1]
                for topic in [self.topic, self.redrive, *self.rungs]
                for n in range(4)
            }


@pytest.mark.dense
def test_each_process_has_its_share_of_the_partitions_that_carry_the_load(
    arena: Arena, group: str, protocol: Kafka
) -> None:
    scene = Scene(arena, group, protocol)
    one, two = scene.app("one", retries=True), scene.app("two", retries=True)
    topics = {scene.topic, scene.redrive, *scene.rungs}
    everything = Counter(dict.fromkeys(topics, 4))
    with one.running():
        eventually(lambda: scene.has(one) == everything, what="the first has all")
        expected = scene.fill("first")
        eventually(lambda: scene.values() >= expected, what="all handled, those of retry topics too")
        with two.running():
            eventually(
                lambda: (
                    scene.has(one)[scene.topic] == scene.has(two)[scene.topic] == 2
                    and scene.has(one) + scene.has(two) == everything
                ),
                what="two of the four each, and every side partition with one of them",
            )
            expected |= scene.fill("second")
            eventually(lambda: scene.values() >= expected, what="all handled")
        eventually(lambda: scene.has(one) == everything, what="the first has all again")
        expected |= scene.fill("third")
        eventually(lambda: scene.values() >= expected, what="all handled")
    assert scene.values() == expected
    assert {name for name, value in scene.handled if value.startswith("second-")} == {"one", "two"}
    assert Counter(value for _, value in scene.handled) == Counter(expected), "an orderly hand-over repeats nothing"
    ends = scene.ends()
    assert {p: offset for p, offset in scene.committed().items() if ends[p]} == {p: n for p, n in ends.items() if n}


def settled(scene: Scene, apps: list[App]) -> list[int]:
    """How many of the four each has, once all are open and no member has seen a rebalance for two seconds."""
    seen: list[tuple[float, list[Counter[str]], list[int]]] = []

    def at_rest() -> bool:
        now, rounds = [scene.has(app) for app in apps], [len(app.rebalances()) for app in apps]
        if not seen or seen[-1][1:] != (now, rounds):
            seen.append((time.monotonic(), now, rounds))
        complete = sum(now, Counter[str]()) == {scene.topic: 4, scene.redrive: 4} and all(now)
        return complete and time.monotonic() - seen[-1][0] > 2.0

    eventually(at_rest, what="all are open and at rest")
    return [scene.has(app)[scene.topic] for app in apps]


@of_totals
@pytest.mark.parametrize("split", [True, False], ids=["two members", "one member"])
def test_without_a_member_of_their_own_empty_partitions_would_be_a_share(
    arena: Arena, group: str, protocol: Kafka, split: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control: of eight partitions of two topics, the first keeps four, and those are not two of each topic."""
    if not split:
        monkeypatch.setattr(split_source, "balances_the_total", lambda settings: False)
    scene = Scene(arena, group, protocol)
    one, two = scene.app("one"), scene.app("two")
    with one.running():
        eventually(lambda: sum(scene.has(one).values()) == 8, what="the first has all")
        with two.running():
            shares = settled(scene, [one, two])
    assert (shares == [2, 2]) is split


@of_totals
def test_a_process_that_does_not_split_and_one_that_does_share_a_group(
    arena: Arena, group: str, protocol: Kafka, sqlite_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rolling deployment: the version before subscribes to all topics as one member."""
    scene = Scene(arena, group, protocol, sqlite_url)
    old, new = scene.app("old"), scene.app("new")

    def all_once() -> bool:
        both = scene.has(old) + scene.has(new)
        return both == {scene.topic: 4, scene.redrive: 4} and all((scene.has(old), scene.has(new)))

    with ExitStack() as stack:
        with monkeypatch.context() as before:
            before.setattr(split_source, "balances_the_total", lambda settings: False)
            leaving = stack.enter_context(ExitStack())
            leaving.enter_context(old.running())
        eventually(lambda: sum(scene.has(old).values()) == 8, what="the old one has all")
        stack.enter_context(new.running())
        eventually(all_once, what="each partition has one of them")
        expected = scene.fill("both")
        eventually(lambda: scene.values() >= expected, what="all handled by the two")
        leaving.close()
        eventually(lambda: sum(scene.has(new).values()) == 8, what="the new one has all")
        expected |= scene.fill("after")
        eventually(lambda: scene.values() >= expected, what="all handled by the new one")
    assert Counter(value for _, value in scene.handled) == Counter(expected), "each once"


@of_totals
def test_a_static_member_and_its_side_member_come_back_without_a_rebalance(
    arena: Arena, group: str, protocol: Kafka
) -> None:
    kafka = {**protocol} if protocol == PROTOCOLS["consumer"] else {"session.timeout.ms": 15000, **protocol}
    scene = Scene(arena, group, kafka)
    other, restarted = (scene.app(name, instance=name) for name in ("pod-0", "pod-1"))
    with other.running():
        with restarted.running():
            assert settled(scene, [other, restarted]) == [2, 2]
            theirs, before = set(owned_partitions(restarted)), other.rebalances()
        known = Cluster(arena.bootstrap).group(group)
        assert known is not None
        assert {m.instance for m in known.members} == {"pod-0", "pod-0.side", "pod-1", "pod-1.side"}
        with restarted.running():
            eventually(lambda: sum(scene.has(restarted).values()) == 4, what="it has what it had")
            assert set(owned_partitions(restarted)) == theirs
            assert other.rebalances() == before, "nobody else noticed"


@of_totals
def test_what_an_operator_does_reaches_partitions_of_both_members(arena: Arena, group: str, protocol: Kafka) -> None:
    scene = Scene(arena, group, protocol)
    app = scene.app("one")
    back = Partition(scene.redrive, 0)
    with app.running():
        eventually(lambda: sum(scene.has(app).values()) == 8, what="all open")
        app.pause(back, Partition(scene.topic, 0))
        eventually(lambda: bool(owned_partitions(app)[back].pause_reasons), what="it is held")
        scene.arena.produce(scene.redrive, ["waits"], 0)
        scene.arena.produce(scene.redrive, ["flows"], 1)
        scene.arena.produce(scene.topic, ["waits too"], 0)
        scene.arena.produce(scene.topic, ["flows too"], 1)
        eventually(lambda: scene.values() == {"flows", "flows too"}, what="the others flow")
        app.resume(back, Partition(scene.topic, 0))
        eventually(lambda: len(scene.handled) == 4, what="it goes on")
        app.seek(back, 0)
        eventually(lambda: len(scene.handled) == 5, what="it is handled again")
    assert scene.handled[-1][1] == "waits"


@of_totals
def test_an_app_has_started_when_it_has_the_topics_of_its_handlers_and_not_their_side_topics_alone(
    arena: Arena, group: str, protocol: Kafka, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each client hears of its partitions by itself, and a user's first seek went nowhere when the side came first."""
    scene = Scene(arena, group, protocol)
    fetch, subscribe = SplitConsumer.fetch, SplitConsumer._subscribe
    late, turns, looked = list[list[str]](), list[None](), Event()

    def subscribe_late(source: SplitConsumer, member: KafkaConsumer, topics: list[str]) -> None:
        if member is source._main and not looked.is_set():
            late.append(topics)
        else:
            subscribe(source, member, topics)

    def fetch_first(source: SplitConsumer, timeout: float, most: int | None = None) -> Runs:
        """The first client joins when the app has lived with the side topics for some turns; if the app counts as
        started by then, not until the test has looked."""
        turns.extend([None] * (source._side is not None and source._side.joined))
        if late and len(turns) >= 30 and (looked.is_set() or not consumer_of(app).loop.started.is_set()):
            subscribe(source, source._main, late.pop())
        return fetch(source, timeout, most)

    monkeypatch.setattr(SplitConsumer, "_subscribe", subscribe_late)
    monkeypatch.setattr(SplitConsumer, "fetch", fetch_first)
    app = scene.app("one", retries=True)
    with app.running():
        has = scene.has(app)
        looked.set()
        assert has[scene.topic] == 4, "it has what it can be told to seek in"


@of_totals
def test_a_partition_of_either_member_comes_back_when_it_was_fenced(
    arena: Arena, group: str, protocol: Kafka, sqlite_url: str
) -> None:
    """Membership is confirmed by a commit: that of the member who has the partition."""
    scene = Scene(arena, group, protocol, sqlite_url)
    app = scene.app("one")
    both = [Partition(scene.topic, 0), Partition(scene.redrive, 0)]
    with app.running():
        eventually(lambda: sum(scene.has(app).values()) == 8, what="all open")
        scene.arena.produce(scene.topic, ["first"], 0)
        scene.arena.produce(scene.redrive, ["second"], 0)
        eventually(lambda: len(scene.handled) == 2, what="handled")
        store = open_store(sqlite_url)
        assert isinstance(store, FencedStore)
        rivals = granted(store.claim(group, both, "a rival that does not go on", lambda missing: {}))
        scene.arena.produce(scene.topic, ["third"], 0)
        scene.arena.produce(scene.redrive, ["fourth"], 0)
        eventually(lambda: scene.values() >= {"third", "fourth"}, what="claimed again and handled")
        eventually(
            lambda: all(store.load(group, both)[p].epoch > rivals[p].epoch for p in both), what="both are ours again"
        )
    store.close()


@pytest.mark.dense
@pytest.mark.parametrize("waits", [True, False], ids=["for both members", "for one"])
def test_catching_up_waits_for_side_topics_also_when_their_member_joins_late(
    arena: Arena, group: str, waits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene, idle = Scene(arena, group, {}), 0.5
    subscribe, joins = KafkaConsumer.subscribe, SimpleQueue[Callable[[], None]]()

    def late(source: KafkaConsumer, topics: list[str]) -> None:
        if scene.topic in topics:
            subscribe(source, topics)
        else:
            joins.put(lambda: subscribe(source, topics))

    monkeypatch.setattr(KafkaConsumer, "subscribe", late)
    if not waits:
        monkeypatch.setattr(split_source.SplitConsumer, "joined", property(lambda split: split._main.joined))
    arena.produce(scene.topic, ["first"], 0)
    arena.produce(scene.redrive, ["second"], 0)
    app = scene.app("one")

    def join_when_the_other_is_idle() -> None:
        consumers = eventually(lambda: app._supervisor is not None and app._supervisor.consumers, what="it runs")
        assert consumers
        loop = consumers[0].loop
        eventually(lambda: scene.values() and time.monotonic() - loop._last_record > 3 * idle, what="it is idle")
        loop.request(joins.get(timeout=45))

    with ThreadPoolExecutor() as pool:
        joining = pool.submit(join_when_the_other_is_idle)
        app.catch_up(idle=idle)
        joining.result()
    assert scene.values() == ({"first", "second"} if waits else {"first"})

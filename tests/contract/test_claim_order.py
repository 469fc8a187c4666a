"""Claims are ordered by the group's generation, on a real Kafka. Where generations begin again, or are the same for two
processes, the rightful owner is refused at first and goes on once the broker has confirmed it.

That a claim which comes late is refused is shown with frozen processes in `tests/chaos/test_late_claim.py`.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest
from confluent_kafka.admin import AdminClient

from kconsume import App, Partition
from kconsume._config.client_settings import ClientValue
from kconsume._runtime.assignment.claiming import Claiming
from kconsume._runtime.assignment.claims import Answers as OfAClaim
from kconsume._runtime.assignment.claims import Claims
from kconsume._runtime.assignment.partition import PendingClaim
from kconsume.backends import FencedStore, MemoryStore, Position, open_store
from kconsume.backends.base import ClaimTerms, Start
from kconsume.backends.claim import ClaimResults, granted
from kconsume.errors import ConfigurationError, Fenced
from kconsume.testing.services import KafkaService
from tests.fix_arena import PROTOCOLS, QUICK
from tests.fix_kafka import MakeTopic, produce
from tests.waiting import eventually

Kafka = Mapping[str, ClientValue]

STATIC: Kafka = {"session.timeout.ms": 10_000, "heartbeat.interval.ms": 500}


class Shop(NamedTuple):
    """One topic of one partition, and a group that handles it with offsets in a store."""

    bootstrap: str
    topic: str
    group: str
    offsets: str

    @contextmanager
    def running(self, value: str, kafka: Kafka, instance: str | None = None) -> Iterator[None]:
        """A process of the group, which handles this new record and goes on."""
        seen: list[str] = []
        app = App(self.bootstrap, group=self.group, offsets=self.offsets, kafka=kafka, instance=instance)

        @app.consume(self.topic)
        def note(value: str) -> None:
            seen.append(value)

        produce(self.bootstrap, self.topic, [value], partition=0)
        with app.running():
            eventually(lambda: seen == [value], what=f"{value} is handled")
            yield

    def handles(self, value: str, kafka: Kafka, instance: str | None = None) -> Position:
        """Start, handle this one record, and end; the row that it left."""
        with self.running(value, kafka, instance):
            pass
        return self.row()

    @property
    def partition(self) -> Partition:
        return Partition(self.topic, 0)

    def row(self) -> Position:
        with closing(open_store(self.offsets)) as store:
            return store.load(self.group, [self.partition])[self.partition]

    def claimed_before(self, generation: int) -> None:
        """Somebody had the partition, by another cluster's group of this name."""
        with closing(open_store(self.offsets)) as store:
            assert isinstance(store, FencedStore)
            granted(store.claim(self.group, [self.partition], "before", _at_0, ClaimTerms(generation)))


def _at_0(missing: Sequence[Partition]) -> dict[Partition, Position]:
    return dict.fromkeys(missing, Position(0))


@pytest.fixture
def shop(kafka: KafkaService, topic: MakeTopic, group: str, postgres_url: str) -> Shop:
    return Shop(kafka.bootstrap, topic(1), group, postgres_url)


@pytest.fixture(autouse=True)
def _at_info(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="kconsume")


def refusals(caplog: pytest.LogCaptureFixture) -> int:
    return sum(record.getMessage().startswith("claim refused ") for record in caplog.records)


def fencings(caplog: pytest.LogCaptureFixture) -> int:
    return sum(record.getMessage().startswith("partition fenced ") for record in caplog.records)


def quick(protocol: Kafka) -> Kafka:
    return protocol if "group.protocol" in protocol else {**QUICK, **protocol}


def test_a_row_keeps_the_generation_of_its_owner_and_each_new_member_has_a_later_one(
    shop: Shop, protocol: Kafka, caplog: pytest.LogCaptureFixture
) -> None:
    generations = [shop.handles(value, quick(protocol)).generation or 0 for value in ("a", "b")]
    assert generations == sorted(set(generations))
    assert generations[0] > 0
    assert (refusals(caplog), fencings(caplog)) == (0, 0)


def test_a_static_member_that_starts_again_has_the_same_generation_and_goes_on(
    shop: Shop, protocol: Kafka, caplog: pytest.LogCaptureFixture
) -> None:
    kafka = protocol if "group.protocol" in protocol else {**STATIC, **protocol}
    before, after = (shop.handles(value, kafka, instance="pod-1") for value in ("a", "b"))
    assert after.generation == before.generation
    assert after.owner != before.owner
    assert (refusals(caplog), fencings(caplog)) == (1, 0)


def test_a_group_that_was_deleted_goes_on(
    shop: Shop, protocol: Kafka, kafka_admin: AdminClient, caplog: pytest.LogCaptureFixture
) -> None:
    for value in ("a", "b"):
        before = shop.handles(value, quick(protocol))
    (deleted,) = kafka_admin.delete_consumer_groups([shop.group]).values()
    deleted.result(20)
    after = shop.handles("c", quick(protocol))
    assert (after.generation or 0) < (before.generation or 0)
    assert (refusals(caplog), fencings(caplog)) == (1, 0)


@pytest.mark.dense
def test_a_group_that_changes_its_protocol_goes_on(shop: Shop, caplog: pytest.LogCaptureFixture) -> None:
    for value, protocol in (("a", "cooperative"), ("b", "consumer"), ("c", "eager"), ("d", "consumer")):
        shop.handles(value, quick(PROTOCOLS[protocol]))
    assert shop.row().next_offset == 4
    assert fencings(caplog) == 0


@pytest.mark.parametrize("kind", ["postgres", "redis", "sqlite"])
def test_rows_of_another_cluster_with_later_generations_are_taken_over(
    kafka: KafkaService,
    topic: MakeTopic,
    group: str,
    request: pytest.FixtureRequest,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    kind: str,
) -> None:
    offsets = f"sqlite:///{tmp_path / 'shop.db'}" if kind == "sqlite" else request.getfixturevalue(f"{kind}_url")
    shop = Shop(kafka.bootstrap, topic(1), group, offsets)
    shop.claimed_before(1_000_000)
    after = shop.handles("a", QUICK)
    assert 0 < (after.generation or 0) < 1_000_000
    assert (refusals(caplog), fencings(caplog)) == (1, 0)
    shop.handles("b", QUICK)
    assert refusals(caplog) == 1, "its generations count from here"


def test_one_partition_that_is_refused_leaves_the_others_of_its_claim_alone(
    kafka: KafkaService, topic: MakeTopic, group: str, postgres_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    name, seen = topic(2), list[str]()
    shop = Shop(kafka.bootstrap, name, group, postgres_url)
    shop.claimed_before(1_000_000)
    app = App(kafka.bootstrap, group=group, offsets=postgres_url, kafka=QUICK)

    @app.consume(name)
    def note(value: str) -> None:
        seen.append(value)

    for number in (0, 1):
        produce(kafka.bootstrap, name, [str(number)], partition=number)
    with app.running():
        eventually(lambda: sorted(seen) == ["0", "1"], what="both flow")
    (refused,) = [r.getMessage() for r in caplog.records if r.getMessage().startswith("claim refused ")]
    assert f"partition={name}/0 " in refused
    with closing(open_store(postgres_url)) as store:
        assert store.load(group, [Partition(name, 1)])[Partition(name, 1)].epoch == 1, "claimed once"


class SlowToLook(MemoryStore):
    """Its first question waits; what is asked for after it waits behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.asked, self.answers = threading.Event(), threading.Event()
        self.claims: dict[str, list[Partition]] = {}

    def load(self, group: str, partitions: Iterable[Partition]) -> dict[Partition, Position]:
        if not self.asked.is_set():
            self.asked.set()
            self.answers.wait(60)
        return super().load(group, partitions)

    def claim(
        self, group: str, partitions: Sequence[Partition], owner: str, start: Start, terms: ClaimTerms | None = None
    ) -> ClaimResults:
        self.claims.setdefault(owner, []).extend(partitions)
        return super().claim(group, partitions, owner, start, terms)


def a_claim_that_waits_leaves_out_what_went(
    kafka: KafkaService, topic: MakeTopic, group: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The claim of both partitions waits for the store; meanwhile another member is given one of them, and works."""
    name, store, seen = topic(2), SlowToLook(), dict[str, list[str]](slow=[], swift=[])

    def member(who: str) -> App:
        app = App(kafka.bootstrap, group=group, offsets=store, kafka=QUICK, startup=0)

        @app.consume(name)
        def note(value: str) -> None:
            seen[who].append(value)

        return app

    slow, swift = member("slow"), member("swift")
    with slow.running():
        try:
            assert store.asked.wait(60)
            eventually(lambda: len(assigned(slow)) == 2, what="the first is given both")
            with swift.running():
                eventually(lambda: (len(assigned(slow)), len(assigned(swift))) == (1, 1), what="each has one")
                ((_, number),) = assigned(swift)
                produce(kafka.bootstrap, name, ["1"], partition=number)
                eventually(lambda: seen["swift"] == ["1"], what="the second works")
                store.answers.set()
                eventually(lambda: len(store.claims) == 2, what="the first claims")
                assert sorted(map(len, store.claims.values())) == [1, 1], "each has claimed its own"
                produce(kafka.bootstrap, name, ["2"], partition=1 - number)
                eventually(lambda: seen["slow"] == ["2"], what="the first has the other")
                produce(kafka.bootstrap, name, ["3"], partition=number)
                eventually(lambda: seen["swift"] == ["1", "3"], what="the second goes on")
        finally:
            store.answers.set()
    assert (refusals(caplog), fencings(caplog)) == (0, 0)


def test_a_claim_that_waits_in_a_slow_store_leaves_out_what_went(
    kafka: KafkaService, topic: MakeTopic, group: str, caplog: pytest.LogCaptureFixture
) -> None:
    a_claim_that_waits_leaves_out_what_went(kafka, topic, group, caplog)


def test_control_with_the_partitions_of_the_moment_when_it_was_queued_it_does_not(
    kafka: KafkaService,
    topic: MakeTopic,
    group: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def ask(claiming: Claiming, claim: PendingClaim) -> OfAClaim:
        return dict(claim.call(sorted(claim.partitions), None))

    monkeypatch.setattr(Claiming, "_ask_store", ask)
    with pytest.raises(AssertionError, match="each has claimed its own"):
        a_claim_that_waits_leaves_out_what_went(kafka, topic, group, caplog)


def assigned(app: App) -> set[Partition]:
    supervisor = app._supervisor
    consumers = supervisor.consumers if supervisor is not None else ()
    return {p for consumer in consumers for p in consumer.loop.snapshot.assigned}


def test_control_if_the_generation_counted_after_the_confirmation_too_they_are_never_taken_over(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries: list[OfAClaim] = []

    def take_over(self: Claims, epochs: Mapping[Partition, int], generation: int) -> OfAClaim:
        tries.append(self.claim(list(epochs), generation))
        return tries[-1]

    monkeypatch.setattr(Claims, "take_over", take_over)
    monkeypatch.setattr("kconsume._runtime.assignment.claiming._BACKOFF_MOST", 0.1)
    shop.claimed_before(1_000_000)
    app = App(shop.bootstrap, group=shop.group, offsets=shop.offsets, kafka=QUICK, startup=0)  # it never has its claim
    seen: list[str] = []

    @app.consume(shop.topic)
    def note(value: str) -> None:
        seen.append(value)

    produce(shop.bootstrap, shop.topic, ["a"], partition=0)
    with app.running():
        eventually(lambda: len(tries) >= 3, what="it has tried three times")
    assert (seen, shop.row().owner) == ([], "before")


def test_a_seek_of_the_owner_is_no_late_claim(shop: Shop, caplog: pytest.LogCaptureFixture) -> None:
    app = App(shop.bootstrap, group=shop.group, offsets=shop.offsets, kafka=QUICK)
    seen: list[str] = []

    @app.consume(shop.topic)
    def note(value: str) -> None:
        seen.append(value)

    produce(shop.bootstrap, shop.topic, ["a", "b"], partition=0)
    with app.running():
        eventually(lambda: seen == ["a", "b"], what="both are handled")
        app.seek(shop.partition, 1)
        eventually(lambda: seen == ["a", "b", "b"], what="the second again")
    assert (refusals(caplog), fencings(caplog)) == (0, 0)


def test_who_is_in_no_group_leaves_the_generation_as_it_is_and_ends_when_it_is_fenced(shop: Shop) -> None:
    shop.claimed_before(7)
    app = App(shop.bootstrap, group=shop.group, offsets=shop.offsets)
    seen: list[str] = []

    @app.consume(shop.topic, partitions=[0])
    def note(value: str) -> None:
        seen.append(value)

    def run() -> None:
        with app.running():
            produce(shop.bootstrap, shop.topic, ["a"], partition=0)
            eventually(lambda: seen == ["a"], what="handled")
            assert shop.row().generation == 7
            shop.claimed_before(8)
            produce(shop.bootstrap, shop.topic, ["b"], partition=0)
            eventually(lambda: False, what="it ends")

    with pytest.raises(Fenced):
        run()


class OfAnEarlierProtocol(MemoryStore):
    def claim(self, group: str, partitions: Sequence[Partition], owner: str, start: Start) -> ClaimResults:  # type: ignore[override]
        return super().claim(group, partitions, owner, start)


def test_a_store_that_knows_no_terms_is_refused_with_what_to_do(kafka: KafkaService, topic: MakeTopic) -> None:
    app = App(kafka.bootstrap, group="shop", offsets=OfAnEarlierProtocol())

    @app.consume(topic(1))
    def note(value: str) -> None: ...

    with pytest.raises(ConfigurationError, match=r"OfAnEarlierProtocol.claim\(\) takes no `terms`.*FencedSuite"):
        app.catch_up(idle=0.5)

"""Where a partition starts and with what right: never guessed, and never in another topic of the same name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import ClassVar, Literal

import pytest

from kconsume._config.options import StartPolicy
from kconsume._kafka.cluster import Cluster, Committed
from kconsume._kafka.commit_metadata import name_of, note_of
from kconsume._runtime.assignment.claims import Claims
from kconsume._runtime.assignment.partition_trouble import PartitionTrouble, positions_in
from kconsume._runtime.assignment.topic_checks import TopicChecks
from kconsume.backends import FencedStore, MemoryStore, OffsetStore, Position, SqliteStore
from kconsume.errors import (
    Fenced,
    StartRequired,
    StoreUnavailable,
    TopicNotFound,
    TopicRecreated,
)
from kconsume.records import Partition

GROUP = "shop"
ORDERS, PAYMENTS = Partition("orders", 0), Partition("payments", 0)


class FakeCluster(Cluster):
    """Answers from values; logs begin at 10 and end at 90."""

    def __init__(self, ids: dict[str, str | None] | None = None) -> None:
        self.ids = ids or {"orders": "A", "payments": "B"}
        self.partitions = 1
        self.asked: list[tuple[str, list[Partition]]] = []
        self.mirrored: dict[Partition, Committed] = {}

    def committed(self, group: str, partitions: Iterable[Partition]) -> dict[Partition, Committed]:
        return {p: self.mirrored[p] for p in partitions if p in self.mirrored}

    def topics(self, wanted: Sequence[str]) -> dict[str, int]:
        return dict.fromkeys(wanted, self.partitions)

    def topic_ids(self, topics: Iterable[str]) -> dict[str, str | None]:
        return {topic: self.ids[topic] for topic in topics}

    def edges(self, partitions: Iterable[Partition], edge: Literal["earliest", "latest"]) -> dict[Partition, int]:
        chosen = list(partitions)
        self.asked.append((edge, chosen))
        return dict.fromkeys(chosen, {"earliest": 10, "latest": 90}[edge])


class Plain:
    """An `OffsetStore` and no more: the rows of a `MemoryStore`, without its claims."""

    guarantee: ClassVar[str] = "at least once"

    def __init__(self, rows: dict[Partition, Position]) -> None:
        self.address = "plain://"
        self.rows = rows

    def load(self, group: str, partitions: Iterable[Partition]) -> dict[Partition, Position]:
        return {p: self.rows[p] for p in partitions if p in self.rows}

    def save(self, group: str, positions: object) -> None: ...
    def reset(self, group: str, offsets: object) -> None: ...
    def delete(self, group: str, partitions: object = None) -> None: ...
    def groups(self) -> list[str]:
        return []

    def close(self) -> None: ...


def claims(store: OffsetStore, cluster: Cluster | None = None, **begin: StartPolicy) -> Claims:
    begins: dict[str, StartPolicy] = {"orders": "earliest", "payments": "latest", **begin}
    return Claims(store, cluster or FakeCluster(), GROUP, "me", begins.__getitem__)


def topic_checks(cluster: Cluster, ours: Claims | None = None) -> TopicChecks:
    return TopicChecks(cluster, GROUP, ours or claims(MemoryStore(), cluster))


class TestStart:
    def test_a_partition_with_no_row_starts_where_its_topic_s_handler_said(self) -> None:
        claimed = claims(MemoryStore()).claim_all([PAYMENTS, ORDERS])
        assert {p: position.next_offset for p, position in claimed.items()} == {ORDERS: 10, PAYMENTS: 90}
        assert {p: position.topic_id for p, position in claimed.items()} == {ORDERS: "A", PAYMENTS: "B"}

    def test_the_start_is_pinned_as_a_number(self) -> None:
        store = MemoryStore()
        claims(store).claim_all([PAYMENTS])
        assert store.load(GROUP, [PAYMENTS])[PAYMENTS].next_offset == 90

    def test_a_stored_offset_is_taken_as_it_is_and_the_log_is_not_asked(self) -> None:
        store, cluster = MemoryStore(), FakeCluster()
        store.reset(GROUP, {ORDERS: 42})
        assert claims(store, cluster).claim_all([ORDERS])[ORDERS].next_offset == 42
        assert cluster.asked == []

    def test_to_choose_nothing_is_to_be_told(self) -> None:
        store = MemoryStore()
        with pytest.raises(StartRequired) as required:
            claims(store, orders="error").claim_all([ORDERS, PAYMENTS])
        assert "orders/0 of group 'shop' has no stored offset in memory://" in str(required.value)
        assert store.load(GROUP, [ORDERS]) == {}

    def test_a_store_without_owners_has_no_epoch(self) -> None:
        store = Plain({ORDERS: Position(42, topic_id="A")})
        claimed = claims(store).claim_all([ORDERS, PAYMENTS])
        assert {p: (position.next_offset, position.epoch) for p, position in claimed.items()} == {
            ORDERS: (42, 0),
            PAYMENTS: (90, 0),
        }


class TestSameTopic:
    @pytest.mark.parametrize("fenced", [True, False])
    def test_an_offset_of_a_topic_that_was_made_again_is_an_error_with_the_choices(self, fenced: bool) -> None:
        store: OffsetStore = MemoryStore() if fenced else Plain({ORDERS: Position(42, topic_id="A")})
        claims(store).claim_all([ORDERS])
        with pytest.raises(TopicRecreated, match=r"of topic id A, but the topic now has id Z.*Choose: "):
            claims(store, FakeCluster({"orders": "Z"})).claim_all([ORDERS])

    def test_a_cluster_that_tells_no_ids_proves_nothing(self) -> None:
        store = MemoryStore()
        claims(store).claim_all([ORDERS])
        assert claims(store, FakeCluster({"orders": None})).claim_all([ORDERS])[ORDERS].topic_id == "A"

    def test_an_id_that_was_unknown_is_learnt(self) -> None:
        store = MemoryStore()
        store.reset(GROUP, {ORDERS: 42})
        assert claims(store).claim_all([ORDERS])[ORDERS].topic_id == "A"

    def test_an_id_that_was_learnt_protects_a_transactional_handler_s_offset_too(self, tmp_path: Path) -> None:
        """Its offset only ever moves by `advance`, so the id must be in the store from the claim on."""
        store = SqliteStore(tmp_path / "shop.db")
        store.reset(GROUP, {ORDERS: 42})  # by a person: the topic's id is not known
        epoch = claims(store).claim_all([ORDERS])[ORDERS].epoch
        with store.transaction(GROUP, ORDERS, epoch) as tx:
            tx.advance(42, 50)
        try:
            with pytest.raises(TopicRecreated):
                claims(store, FakeCluster({"orders": "Z"})).claim_all([ORDERS])
        finally:
            store.close()


class TestOneBadPartitionAmongMany:
    """What is wrong with one partition is its own answer; the others are claimed all the same."""

    def test_one_of_a_topic_that_was_made_again(self) -> None:
        store = MemoryStore()
        claims(store).claim([ORDERS, PAYMENTS])
        answers = claims(store, FakeCluster({"orders": "Z", "payments": "B"})).claim([ORDERS, PAYMENTS])
        bad, good = answers[ORDERS], answers[PAYMENTS]
        assert isinstance(bad, PartitionTrouble)
        assert (bad.code, bad.row and bad.row.next_offset) == ("topic_recreated", 10)
        assert isinstance(good, Position)

    @pytest.mark.parametrize("fenced", [True, False])
    def test_one_without_an_offset_that_must_have_one(self, *, fenced: bool) -> None:
        answers = claims(MemoryStore() if fenced else Plain({}), orders="error").claim([ORDERS, PAYMENTS])
        bad, good = answers[ORDERS], answers[PAYMENTS]
        assert isinstance(bad, PartitionTrouble)
        assert (bad.code, bad.row) == ("start_required", None)
        assert isinstance(good, Position)

    def test_one_of_a_topic_that_is_not_there(self) -> None:
        class Gone(FakeCluster):
            def topic_ids(self, topics: Iterable[str]) -> dict[str, str | None]:
                names = list(topics)
                if "orders" in names:
                    raise TopicNotFound("the cluster does not know the topic")
                return super().topic_ids(names)

        answers = claims(MemoryStore(), Gone()).claim([ORDERS, PAYMENTS])
        bad, good = answers[ORDERS], answers[PAYMENTS]
        assert isinstance(bad, PartitionTrouble)
        assert bad.code == "topic_missing"
        assert isinstance(good, Position)

    def test_one_of_a_topic_that_goes_while_it_is_asked_for(self) -> None:
        class Going(FakeCluster):
            def edges(
                self, partitions: Iterable[Partition], edge: Literal["earliest", "latest"]
            ) -> dict[Partition, int]:
                chosen = list(partitions)
                if any(p.topic == "orders" for p in chosen):
                    raise TopicNotFound("the cluster does not know the topic (any more)")
                return super().edges(chosen, edge)

            def those_there(self, topics: Iterable[str]) -> list[str]:
                return [topic for topic in topics if topic != "orders"]

        answers = claims(MemoryStore(), Going()).claim([ORDERS, PAYMENTS])
        bad, good = answers[ORDERS], answers[PAYMENTS]
        assert isinstance(bad, PartitionTrouble)
        assert bad.code == "topic_missing"
        assert isinstance(good, Position)

    def test_a_reset_is_a_decision_about_the_topic_that_is_there(self) -> None:
        store = MemoryStore()
        claims(store).claim([ORDERS])
        store.reset(GROUP, {ORDERS: 0})
        assert claims(store, FakeCluster({"orders": "Z"})).claim_all([ORDERS])[ORDERS].topic_id == "Z"

    def test_a_reset_row_that_is_taken_over_learns_its_topic_s_id(self) -> None:
        store = MemoryStore()
        ours = claims(store)
        ours.claim([ORDERS])
        store.reset(GROUP, {ORDERS: 0})
        epoch = store.load(GROUP, [ORDERS])[ORDERS].epoch
        assert positions_in(ours.take_over({ORDERS: epoch}, 1))[ORDERS].topic_id == "A"


class TestRestart:
    def test_a_seek_is_a_reset_and_a_new_claim(self) -> None:
        store = MemoryStore()
        before = claims(store).claim_all([ORDERS])[ORDERS]
        after = positions_in(claims(store).seek({ORDERS: 3}))[ORDERS]
        assert (after.next_offset, after.owner) == (3, "me")
        assert after.epoch > before.epoch + 1


class TestReclaim:
    def test_what_is_still_ours_goes_on_under_a_new_epoch(self) -> None:
        store = MemoryStore()
        first = claims(store, orders="earliest").claim_all([ORDERS])[ORDERS]
        again = positions_in(claims(store, orders="earliest").reclaim({ORDERS: first.epoch}))[ORDERS]
        assert again.epoch > first.epoch
        assert again.next_offset == first.next_offset

    def test_what_another_has_claimed_since_is_not(self) -> None:
        store = MemoryStore()
        ours = claims(store, orders="earliest")
        first = ours.claim_all([ORDERS])[ORDERS]
        store.claim(GROUP, [ORDERS], "another", lambda ps: {})
        with pytest.raises(Fenced):
            positions_in(ours.reclaim({ORDERS: first.epoch}))

    def test_a_newer_epoch_of_our_own_whose_answer_was_lost_is_recognised(self) -> None:
        store = MemoryStore()
        ours = claims(store, orders="earliest")
        first = ours.claim_all([ORDERS])[ORDERS]
        positions_in(ours.reclaim({ORDERS: first.epoch}))  # and nobody heard the answer
        assert positions_in(ours.reclaim({ORDERS: first.epoch}))[ORDERS].epoch > first.epoch + 1


class Moving(FakeCluster):
    """Its logs grow."""

    end = 90

    def __init__(self) -> None:
        super().__init__()
        self.at_edges: Callable[[], dict[Partition, Position]] | None = None
        """Done once, when somebody asks where logs end."""
        self.seen: dict[Partition, Position] = {}

    def edges(self, partitions: Iterable[Partition], edge: Literal["earliest", "latest"]) -> dict[Partition, int]:
        if (act := self.at_edges) is not None:
            self.at_edges = None
            self.seen = act()
        return dict.fromkeys(partitions, self.end if edge == "latest" else 10)


class TestAllBeginAtOnce:
    """With start='latest' a group begins at one moment, whoever comes to claim which partition when."""

    EVERY: ClassVar = [Partition("payments", n) for n in range(4)]

    @pytest.fixture(params=["memory", "sqlite"])
    def store(self, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[OffsetStore]:
        with closing(MemoryStore() if request.param == "memory" else SqliteStore(tmp_path / "offsets.db")) as store:
            yield store

    @pytest.fixture
    def cluster(self) -> Moving:
        cluster = Moving()
        cluster.partitions = len(self.EVERY)
        return cluster

    @pytest.mark.parametrize("claimed", [(1, 3), (0, 1), (2,)])
    def test_what_came_after_the_first_claim_is_not_skipped_in_a_partition_that_nobody_claimed(
        self, store: OffsetStore, cluster: Moving, claimed: tuple[int, ...]
    ) -> None:
        claims(store, cluster).claim([self.EVERY[n] for n in claimed], 1)
        cluster.end = 120  # and then that process died
        answers = positions_in(claims(store, cluster).claim(self.EVERY, 2))
        assert {p: position.next_offset for p, position in answers.items()} == dict.fromkeys(self.EVERY, 90)

    def test_the_member_who_has_it_is_not_fenced_by_that(self, store: OffsetStore, cluster: Moving) -> None:
        assert isinstance(store, FencedStore)
        one, two = claims(store, cluster), claims(store, cluster)
        cluster.at_edges = lambda: positions_in(two.claim(self.EVERY[2:], 1))  # while the first looks where logs end
        first = positions_in(one.claim(self.EVERY[:2], 1))
        for held in (first, two_has := cluster.seen):
            assert {store.load(GROUP, [p])[p].epoch for p in held} == {position.epoch for position in held.values()}
        assert two_has.keys() == set(self.EVERY[2:])

    def test_one_whose_row_is_lost_is_not_begun_by_another(self, cluster: Moving, tmp_path: Path) -> None:
        with closing(SqliteStore(tmp_path / "offsets.db")) as store:
            name = name_of(store)
            cluster.mirrored = {self.EVERY[3]: Committed(50, None, note_of("B", name, 7))}
            claims(store, cluster).claim(self.EVERY[:1], 1)
            assert store.load(GROUP, self.EVERY).keys() == set(self.EVERY[:3])

    def test_a_store_that_pins_nothing_is_told_of_what_begins_at_the_end(self, cluster: Moving) -> None:
        store = Plain({self.EVERY[3]: Position(40)})
        made = claims(store, cluster)
        made.claim(self.EVERY[2:], 1)
        assert made.unpinned == {self.EVERY[2]}


class TestPartitionsThatWereAdded:
    """What was written to a new partition before the group noticed it must not be lost, also with start='latest'."""

    @pytest.mark.parametrize("store", [MemoryStore(), Plain({})])
    def test_a_new_group_begins_at_the_end_if_that_was_asked(self, store: OffsetStore) -> None:
        cluster = FakeCluster()
        cluster.partitions = 3
        made = claims(store, cluster)
        claimed = made.claim_all([Partition("payments", n) for n in range(3)])
        assert {position.next_offset for position in claimed.values()} == {90}
        assert made.added == set()

    def test_one_that_was_added_begins_at_its_start(self) -> None:
        store, cluster = MemoryStore(), FakeCluster()
        cluster.partitions = 2
        claims(store, cluster).claim_all([Partition("payments", n) for n in range(2)])
        cluster.partitions = 4
        made = claims(store, cluster)
        new = [Partition("payments", n) for n in (2, 3)]
        assert {position.next_offset for position in made.claim_all(new).values()} == {10}
        assert made.added == set(new)

    def test_one_among_those_that_are_known_is_not_a_new_one(self) -> None:
        """It may never have been committed."""
        store = Plain({Partition("payments", 2): Position(50)})
        cluster = FakeCluster()
        cluster.partitions = 3
        made = claims(store, cluster)
        assert made.claim_all([PAYMENTS])[PAYMENTS].next_offset == 90
        assert made.added == set()

    def test_what_was_added_before_the_first_commit_begins_at_its_start(self) -> None:
        """The store knows nothing of the group yet; we know what there was when we joined."""
        cluster = FakeCluster()
        made = claims(Plain({}), cluster)
        topic_checks(cluster, made).survey(["payments"])
        cluster.partitions = 2
        new = Partition("payments", 1)
        assert made.claim_all([PAYMENTS, new])[new].next_offset == 10
        assert made.added == {new}

    def test_what_others_of_a_new_group_have_claimed_makes_the_rest_no_addition(self) -> None:
        store, cluster = MemoryStore(), FakeCluster()
        cluster.partitions = 4
        one, two = claims(store, cluster), claims(store, cluster)
        for each in (one, two):
            topic_checks(cluster, each).survey(["payments"])
        one.claim_all([Partition("payments", n) for n in (0, 1)])
        rest = two.claim_all([Partition("payments", n) for n in (2, 3)])
        assert {position.next_offset for position in rest.values()} == {90}, "start='latest' was asked for"

    def test_a_store_that_is_away_at_the_start_is_asked_by_the_first_claim(self) -> None:
        class Away(Plain):
            away = True

            def load(self, group: str, partitions: Iterable[Partition]) -> dict[Partition, Position]:
                if self.away:
                    raise StoreUnavailable("away")
                return super().load(group, partitions)

        store, cluster = Away({PAYMENTS: Position(50)}), FakeCluster()
        cluster.partitions = 2
        made = claims(store, cluster)
        topic_checks(cluster, made).survey(["payments"])
        with pytest.raises(StoreUnavailable):
            made.claim_all([Partition("payments", 1)])
        store.away = False
        assert made.claim_all([Partition("payments", 1)])[Partition("payments", 1)].next_offset == 10

    def test_a_topic_that_a_pattern_brings_later_is_read_from_its_start(self) -> None:
        made = claims(Plain({}), FakeCluster(), orders="latest")
        assert made.claim_all([PAYMENTS])[PAYMENTS].next_offset == 90, "it was there when we joined"
        assert made.claim_all([ORDERS])[ORDERS].next_offset == 10, "it was not"

    def test_start_error_still_asks(self) -> None:
        store, cluster = MemoryStore(), FakeCluster()
        claims(store, cluster).claim_all([PAYMENTS])
        cluster.partitions = 2
        with pytest.raises(StartRequired):
            claims(store, cluster, payments="error").claim_all([Partition("payments", 1)])

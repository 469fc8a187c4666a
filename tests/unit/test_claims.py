"""Where a partition starts and with what right: never guessed, and never in another topic of the same name."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import ClassVar, Literal

import pytest

from kconsume.backends import FencedStore, MemoryStore, OffsetStore, Position, SqliteStore
from kconsume.backends.commit_note import name_of, note_of
from kconsume.cluster import Cluster, Committed, Group, GroupMember
from kconsume.errors import (
    BrokerUnavailable,
    ClientFailed,
    ConfigurationError,
    Fenced,
    RowLost,
    StartRequired,
    StoreUnavailable,
    TopicNotFound,
    TopicRecreated,
)
from kconsume.records import Partition
from kconsume.runtime.claims import Begin, Claims
from kconsume.runtime.trouble import Trouble, positions_in

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


def claims(store: OffsetStore, cluster: Cluster | None = None, **begin: Begin) -> Claims:
    begins: dict[str, Begin] = {"orders": "earliest", "payments": "latest", **begin}
    return Claims(store, cluster or FakeCluster(), GROUP, "me", begins.__getitem__)


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
        assert isinstance(bad, Trouble)
        assert (bad.code, bad.row and bad.row.next_offset) == ("topic_recreated", 10)
        assert isinstance(good, Position)

    @pytest.mark.parametrize("fenced", [True, False])
    def test_one_without_an_offset_that_must_have_one(self, *, fenced: bool) -> None:
        answers = claims(MemoryStore() if fenced else Plain({}), orders="error").claim([ORDERS, PAYMENTS])
        bad, good = answers[ORDERS], answers[PAYMENTS]
        assert isinstance(bad, Trouble)
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
        assert isinstance(bad, Trouble)
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
        assert isinstance(bad, Trouble)
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


class TestWhileItRuns:
    def test_a_topic_made_again_is_noticed(self) -> None:
        found = claims(MemoryStore(), FakeCluster({"orders": "Z"})).check_topics({"orders": "A"})
        assert isinstance(found["orders"], TopicRecreated)
        assert "topic 'orders' had id A and now has Z" in str(found["orders"])

    @pytest.mark.parametrize("now", ["A", None])
    def test_the_same_topic_and_one_without_an_id_are_fine(self, now: str | None) -> None:
        assert claims(MemoryStore(), FakeCluster({"orders": now})).check_topics({"orders": "A"}) == {}

    def test_a_cluster_that_is_away_proves_nothing(self) -> None:
        class Away(FakeCluster):
            def topic_ids(self, topics: Iterable[str]) -> dict[str, str | None]:
                raise BrokerUnavailable("no answer")

        assert claims(MemoryStore(), Away()).check_topics({"orders": "A"}) == {}

    def test_a_topic_that_is_gone_is_an_error_if_a_handler_names_it(self) -> None:
        class Gone(FakeCluster):
            def topics(self, wanted: Sequence[str]) -> dict[str, int]:
                if "orders" in wanted:
                    raise TopicNotFound("topic 'orders' is not on the cluster")
                return super().topics(wanted)

            def topic_ids(self, topics: Iterable[str]) -> dict[str, str | None]:
                raise TopicNotFound("the cluster does not know the topic")

        made = claims(MemoryStore(), Gone())
        found = made.check_topics({}, ["orders", "payments"])
        assert list(found) == ["orders"]
        assert isinstance(found["orders"], TopicNotFound)
        assert made.check_topics({"orders-eu": "A"}, ["payments"]) == {}, "which a pattern had matched"


class TestRestart:
    def test_a_seek_is_a_reset_and_a_new_claim(self) -> None:
        store = MemoryStore()
        before = claims(store).claim_all([ORDERS])[ORDERS]
        after = positions_in(claims(store).restart({ORDERS: 3}))[ORDERS]
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
        made.survey(["payments"])
        cluster.partitions = 2
        new = Partition("payments", 1)
        assert made.claim_all([PAYMENTS, new])[new].next_offset == 10
        assert made.added == {new}

    def test_what_others_of_a_new_group_have_claimed_makes_the_rest_no_addition(self) -> None:
        store, cluster = MemoryStore(), FakeCluster()
        cluster.partitions = 4
        one, two = claims(store, cluster), claims(store, cluster)
        for each in (one, two):
            each.survey(["payments"])
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
        made.survey(["payments"])
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


class TestAGroupOfOnesOwn:
    """Partitions that a person chose are claimed only where no member of the group can be put out by that."""

    @pytest.mark.parametrize("group", [None, Group("empty", "", ())])
    def test_a_group_without_members_may_be_used(self, group: Group | None) -> None:
        claims(MemoryStore(), Described(group)).must_be_alone()

    def test_one_with_members_is_refused_by_their_names(self) -> None:
        member = GroupMember("1", None, "kconsume-host-7", ())
        with pytest.raises(ConfigurationError, match=r"'shop' has members \(kconsume-host-7\).*group= of its own"):
            claims(MemoryStore(), Described(Group("stable", "range", (member,)))).must_be_alone()

    def test_a_broker_that_cannot_say_is_believed(self) -> None:
        claims(MemoryStore(), Described(ClientFailed("not supported"))).must_be_alone()


class Described(FakeCluster):
    def __init__(self, group: Group | ClientFailed | None) -> None:
        super().__init__()
        self.described = group

    def group(self, name: str) -> Group | None:
        if isinstance(self.described, ClientFailed):
            raise self.described
        return self.described


class TestAnotherStore:
    """Two deployments of one group, with their offsets in two places."""

    def at(self, tmp_path: Path, offset: int | None = None) -> SqliteStore:
        store = SqliteStore(tmp_path / "shop.db")
        if offset is not None:
            store.reset(GROUP, {ORDERS: offset})
        return store

    def cluster(self, note: str, offset: int = 7) -> FakeCluster:
        cluster = FakeCluster()
        cluster.mirrored = {ORDERS: Committed(offset, None, note)}
        return cluster

    @pytest.mark.parametrize("stored", [None, 6])
    def test_that_is_further_is_refused_before_anything_is_claimed(self, tmp_path: Path, stored: int | None) -> None:
        store, cluster = self.at(tmp_path, stored), self.cluster("kconsume/1 topic=A store=another")
        before = store.load(GROUP, [ORDERS])
        for ask in (claims(store, cluster).claim, lambda _: claims(store, cluster).survey(["orders"])):
            with pytest.raises(ConfigurationError, match=r"another store than sqlite:///.*orders/0 stands at 7 there"):
                ask([ORDERS])
        assert store.load(GROUP, [ORDERS]) == before

    @pytest.mark.parametrize("stored", [7, 8])
    def test_that_is_not_further_was_moved_here(self, tmp_path: Path, stored: int) -> None:
        cluster = self.cluster("kconsume/1 topic=A store=another")
        assert claims(self.at(tmp_path, stored), cluster).claim_all([ORDERS])[ORDERS].next_offset == stored

    def test_our_own_word_after_a_person_went_back_is_no_other_s(self, tmp_path: Path) -> None:
        store = self.at(tmp_path, 3)
        cluster = self.cluster(note_of("A", name_of(store)))
        assert claims(store, cluster).claim_all([ORDERS])[ORDERS].next_offset == 3

    @pytest.mark.parametrize("note", ["", "NA", "kconsume/1 topic=A"])
    def test_offsets_of_kafka_itself_or_of_another_tool_are_no_store(self, tmp_path: Path, note: str) -> None:
        assert claims(self.at(tmp_path), self.cluster(note)).claim_all([ORDERS])[ORDERS].next_offset == 10

    def test_brokers_that_do_not_answer_are_asked_again_by_the_claim(self, tmp_path: Path) -> None:
        class Away(FakeCluster):
            def committed(self, group: str, partitions: Iterable[Partition]) -> dict[Partition, Committed]:
                raise BrokerUnavailable("no broker answers")

        made = claims(self.at(tmp_path), Away())
        made.survey(["orders"])
        with pytest.raises(BrokerUnavailable):
            made.claim_all([ORDERS])


class TestRowsThatAreMissing:
    """A start without a row is told with its reason, unless the store has lost the row."""

    def store(self, tmp_path: Path) -> SqliteStore:
        return SqliteStore(tmp_path / "shop.db")

    def cluster(self, *shown: tuple[Partition, int, str]) -> FakeCluster:
        cluster = FakeCluster()
        cluster.partitions = 2
        cluster.mirrored = {partition: Committed(offset, None, note) for partition, offset, note in shown}
        return cluster

    def test_one_that_is_gone_names_the_choices_and_nothing_is_pinned(self, tmp_path: Path) -> None:
        store = self.store(tmp_path)
        cluster = self.cluster((ORDERS, 7, note_of("A", name_of(store), 5)))
        with pytest.raises(
            RowLost, match=r"it had orders/0 at 7, has no row now.*store\.reset.*7.*store\.delete"
        ) as lost:
            claims(store, cluster, orders="latest").claim_all([ORDERS])
        assert lost.value.partitions == {ORDERS}
        assert store.load(GROUP, [ORDERS]) == {}

    def test_the_others_of_its_topic_are_surveyed_and_claimed_without_it(self, tmp_path: Path) -> None:
        store, other = self.store(tmp_path), Partition("orders", 1)
        cluster = self.cluster((ORDERS, 7, note_of("A", name_of(store), 5)))
        ours = claims(store, cluster)
        ours.survey(["orders"])
        assert ours.claim_all([other])[other].next_offset == 10

    @pytest.mark.parametrize("whole_group", [True, False])
    def test_both_choices_that_it_names_help(self, tmp_path: Path, whole_group: bool) -> None:
        store = self.store(tmp_path)
        cluster = self.cluster((ORDERS, 7, note_of("A", name_of(store), 5)))
        store.delete(GROUP, None if whole_group else [ORDERS])
        assert claims(store, cluster).claim_all([ORDERS])[ORDERS].next_offset == 10
        store.reset(GROUP, {ORDERS: 7})
        assert claims(store, cluster).claim_all([ORDERS])[ORDERS].next_offset == 7

    def test_one_that_is_lost_after_a_delete_was_accepted_is_noticed(self, tmp_path: Path) -> None:
        store = self.store(tmp_path)
        store.delete(GROUP)
        epoch = claims(store, self.cluster()).claim_all([ORDERS])[ORDERS].epoch
        with closing(sqlite3.connect(store.path)) as somebody:
            somebody.execute("delete from kconsume_offsets")
            somebody.commit()
        with pytest.raises(RowLost):
            claims(store, self.cluster((ORDERS, 7, note_of("A", name_of(store), epoch)))).claim_all([ORDERS])

    def test_one_that_goes_while_we_run_is_asked_for_again(self, tmp_path: Path) -> None:
        store, cluster = self.store(tmp_path), self.cluster()
        ours = claims(store, cluster)
        epoch = ours.claim_all([ORDERS])[ORDERS].epoch
        cluster.mirrored[ORDERS] = Committed(20, None, note_of("A", name_of(store), epoch))
        with closing(sqlite3.connect(store.path)) as somebody:
            somebody.execute("delete from kconsume_offsets")
            somebody.commit()
        with pytest.raises(RowLost):
            ours.claim_all([ORDERS])
        store.delete(GROUP)
        assert ours.claim_all([ORDERS])[ORDERS].next_offset == 10

    @pytest.mark.parametrize(("shown", "stood"), [(None, 15), (12, 15), (20, 20)])
    def test_one_that_we_held_is_known_to_have_been_there_whatever_the_group_shows(
        self, tmp_path: Path, shown: int | None, stood: int
    ) -> None:
        """The group shows nothing in the first second, and never where its rights refuse our commits."""
        store, cluster = self.store(tmp_path), self.cluster()
        ours = claims(store, cluster, orders="latest")
        if shown is not None:
            cluster.mirrored[ORDERS] = Committed(shown, None, note_of("A", name_of(store), 1))
        found = ours.claim([ORDERS], 1, {ORDERS: Position(15, 1)})[ORDERS]
        assert isinstance(found, Trouble)
        assert f"it had orders/0 at {stood}, has no row now" in str(found.error)
        assert store.load(GROUP, [ORDERS]) == {}
        assert isinstance(ours.claim([ORDERS], 1)[ORDERS], Trouble), "it is not forgotten by the next claim"
        store.delete(GROUP, [ORDERS])
        assert ours.claim_all([ORDERS])[ORDERS].next_offset == 90, "which a user asked for"

    def test_one_that_another_member_has_had_since_the_survey_is_asked_for_again(self, tmp_path: Path) -> None:
        store, cluster = self.store(tmp_path), self.cluster()
        ours = claims(store, cluster)
        ours.survey(["orders"])
        cluster.mirrored[ORDERS] = Committed(20, None, note_of("A", name_of(store), 3))
        with pytest.raises(RowLost):
            ours.claim_all([ORDERS])

    @pytest.mark.parametrize(
        ("note", "reason", "level"),
        [
            (None, "nothing is committed for it", "INFO"),
            ("", "by a tool or a version that does not say which store", "WARNING"),
            ("ours", "the row was deleted", "INFO"),
        ],
    )
    def test_every_start_without_a_row_is_told(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture, note: str | None, reason: str, level: str
    ) -> None:
        store = self.store(tmp_path)
        store.delete(GROUP)
        said = note_of("A", name_of(store), 5) if note else note
        cluster = self.cluster() if said is None else self.cluster((ORDERS, 7, said))
        with caplog.at_level("INFO", logger="kconsume"):
            claims(store, cluster).claim_all([ORDERS])
        (record,) = [r for r in caplog.records if r.getMessage().startswith("no stored offset")]
        assert reason in record.getMessage()
        assert "orders/0@10" in record.getMessage()
        assert ("(committed 7)" in record.getMessage()) is (note is not None)
        assert record.levelname == level

    def test_a_store_in_memory_says_so(self, caplog: pytest.LogCaptureFixture) -> None:
        with caplog.at_level("INFO", logger="kconsume"):
            claims(MemoryStore()).claim_all([ORDERS])
        assert "memory:// forgets its rows with the process" in caplog.text

    def test_a_store_without_a_name_begins_where_start_says(self) -> None:
        """Third-party stores of before there were names."""
        store = Plain({})
        cluster = self.cluster((ORDERS, 7, note_of("A", name_of(store))))
        assert claims(store, cluster).claim_all([ORDERS])[ORDERS].next_offset == 10

    def test_a_row_behind_what_its_store_has_shown_is_a_warning(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        store = self.store(tmp_path)
        claims(store).claim_all([ORDERS])
        cluster = self.cluster((ORDERS, 70, note_of("A", name_of(store), 5)))
        assert claims(store, cluster).claim_all([ORDERS])[ORDERS].next_offset == 10
        assert "orders/0@10 (committed 70)" in caplog.text
        caplog.clear()
        store.reset(GROUP, {ORDERS: 11})
        behind = self.cluster((ORDERS, 70, note_of("A", name_of(store), 2)))
        assert claims(store, behind).claim_all([ORDERS])[ORDERS].next_offset == 11
        assert "behind" not in caplog.text, "a user has set it"

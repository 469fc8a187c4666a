"""A store that does not have the offsets that the group was last shown is refused, and nothing is skipped."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path

import pytest

from kconsume._kafka.cluster import Committed
from kconsume._kafka.commit_metadata import name_of, note_of
from kconsume._runtime.assignment.partition_trouble import PartitionTrouble
from kconsume.backends import MemoryStore, Position, SqliteStore
from kconsume.errors import (
    BrokerUnavailable,
    ConfigurationError,
    RowLost,
)
from kconsume.records import Partition
from tests.unit.runtime.assignment.test_claims import GROUP, ORDERS, FakeCluster, Plain, claims, topic_checks

pytestmark = pytest.mark.usefixtures("sqlite_stores_are_closed")


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
        for ask in (
            claims(store, cluster).claim,
            lambda _: topic_checks(cluster, claims(store, cluster)).survey(["orders"]),
        ):
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

        made = claims(self.at(tmp_path), cluster := Away())
        topic_checks(cluster, made).survey(["orders"])
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
        topic_checks(cluster, ours).survey(["orders"])
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
        assert isinstance(found, PartitionTrouble)
        assert f"it had orders/0 at {stood}, has no row now" in str(found.error)
        assert store.load(GROUP, [ORDERS]) == {}
        assert isinstance(ours.claim([ORDERS], 1)[ORDERS], PartitionTrouble), "it is not forgotten by the next claim"
        store.delete(GROUP, [ORDERS])
        assert ours.claim_all([ORDERS])[ORDERS].next_offset == 90, "which a user asked for"

    def test_one_that_another_member_has_had_since_the_survey_is_asked_for_again(self, tmp_path: Path) -> None:
        store, cluster = self.store(tmp_path), self.cluster()
        ours = claims(store, cluster)
        topic_checks(cluster, ours).survey(["orders"])
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
        assert "starts_at=orders/0@10" in record.getMessage()
        assert ("committed=orders/0@7" in record.getMessage()) is (note is not None)
        assert record.levelname == level

    def test_a_store_in_memory_says_so(self, caplog: pytest.LogCaptureFixture) -> None:
        with caplog.at_level("INFO", logger="kconsume"):
            claims(MemoryStore()).claim_all([ORDERS])
        assert "memory:// is lost with the process" in caplog.text

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
        assert "stored=orders/0@10 committed=orders/0@70" in caplog.text
        caplog.clear()
        store.reset(GROUP, {ORDERS: 11})
        behind = self.cluster((ORDERS, 70, note_of("A", name_of(store), 2)))
        assert claims(store, behind).claim_all([ORDERS])[ORDERS].next_offset == 11
        assert "behind" not in caplog.text, "a user has set it"

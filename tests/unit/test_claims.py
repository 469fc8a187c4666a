"""Where a partition starts and with what right: never guessed, and never in another topic of the same name."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import ClassVar, Literal

import pytest

from kconsume.backends import MemoryStore, OffsetStore, Position, SqliteStore
from kconsume.cluster import Cluster
from kconsume.errors import BrokerUnavailable, StartRequired, TopicRecreated
from kconsume.records import Partition
from kconsume.runtime.claims import Begin, Claims

GROUP = "shop"
ORDERS, PAYMENTS = Partition("orders", 0), Partition("payments", 0)


class FakeCluster(Cluster):
    """Answers from values; logs begin at 10 and end at 90."""

    def __init__(self, ids: dict[str, str | None] | None = None) -> None:
        self.ids = ids or {"orders": "A", "payments": "B"}
        self.asked: list[tuple[str, list[Partition]]] = []

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
    return Claims(store, cluster or FakeCluster(), GROUP, "me", {"orders": "earliest", "payments": "latest", **begin})


class TestStart:
    def test_a_partition_with_no_row_starts_where_its_topic_s_handler_said(self) -> None:
        claimed = claims(MemoryStore()).claim([PAYMENTS, ORDERS])
        assert {p: position.next_offset for p, position in claimed.items()} == {ORDERS: 10, PAYMENTS: 90}
        assert {p: position.topic_id for p, position in claimed.items()} == {ORDERS: "A", PAYMENTS: "B"}

    def test_the_start_is_pinned_as_a_number(self) -> None:
        store = MemoryStore()
        claims(store).claim([PAYMENTS])
        assert store.load(GROUP, [PAYMENTS])[PAYMENTS].next_offset == 90

    def test_a_stored_offset_is_taken_as_it_is_and_the_log_is_not_asked(self) -> None:
        store, cluster = MemoryStore(), FakeCluster()
        store.reset(GROUP, {ORDERS: 42})
        assert claims(store, cluster).claim([ORDERS])[ORDERS].next_offset == 42
        assert cluster.asked == []

    def test_to_choose_nothing_is_to_be_told(self) -> None:
        store = MemoryStore()
        with pytest.raises(StartRequired) as required:
            claims(store, orders="error").claim([ORDERS, PAYMENTS])
        assert "orders/0 of group 'shop' has no stored offset in memory://" in str(required.value)
        assert store.groups() == []

    def test_a_store_without_owners_has_no_epoch(self) -> None:
        store = Plain({ORDERS: Position(42, topic_id="A")})
        claimed = claims(store).claim([ORDERS, PAYMENTS])
        assert {p: (position.next_offset, position.epoch) for p, position in claimed.items()} == {
            ORDERS: (42, 0),
            PAYMENTS: (90, 0),
        }


class TestSameTopic:
    @pytest.mark.parametrize("fenced", [True, False])
    def test_an_offset_of_a_topic_that_was_made_again_is_an_error_with_the_choices(self, fenced: bool) -> None:
        store: OffsetStore = MemoryStore() if fenced else Plain({ORDERS: Position(42, topic_id="A")})
        claims(store).claim([ORDERS])
        with pytest.raises(TopicRecreated, match=r"of topic id A, but the topic now has id Z.*Choose: "):
            claims(store, FakeCluster({"orders": "Z"})).claim([ORDERS])

    def test_a_cluster_that_tells_no_ids_proves_nothing(self) -> None:
        store = MemoryStore()
        claims(store).claim([ORDERS])
        assert claims(store, FakeCluster({"orders": None})).claim([ORDERS])[ORDERS].topic_id == "A"

    def test_an_id_that_was_unknown_is_learnt(self) -> None:
        store = MemoryStore()
        store.reset(GROUP, {ORDERS: 42})
        assert claims(store).claim([ORDERS])[ORDERS].topic_id == "A"

    def test_an_id_that_was_learnt_protects_a_transactional_handler_s_offset_too(self, tmp_path: Path) -> None:
        """Its offset only ever moves by `advance`, so the id must be in the store from the claim on."""
        store = SqliteStore(tmp_path / "shop.db")
        store.reset(GROUP, {ORDERS: 42})  # by a person: the topic's id is not known
        epoch = claims(store).claim([ORDERS])[ORDERS].epoch
        with store.transaction(GROUP, ORDERS, epoch) as tx:
            tx.advance(42, 50)
        try:
            with pytest.raises(TopicRecreated):
                claims(store, FakeCluster({"orders": "Z"})).claim([ORDERS])
        finally:
            store.close()


class TestWhileItRuns:
    def test_a_topic_made_again_is_noticed(self) -> None:
        with pytest.raises(TopicRecreated, match="topic 'orders' had id A and now has Z"):
            claims(MemoryStore(), FakeCluster({"orders": "Z"})).check_topics({"orders": "A"})

    @pytest.mark.parametrize("now", ["A", None])
    def test_the_same_topic_and_one_without_an_id_are_fine(self, now: str | None) -> None:
        claims(MemoryStore(), FakeCluster({"orders": now})).check_topics({"orders": "A"})

    def test_a_cluster_that_is_away_proves_nothing(self) -> None:
        class Away(FakeCluster):
            def topic_ids(self, topics: Iterable[str]) -> dict[str, str | None]:
                raise BrokerUnavailable("no answer")

        claims(MemoryStore(), Away()).check_topics({"orders": "A"})


class TestRestart:
    def test_a_seek_is_a_reset_and_a_new_claim(self) -> None:
        store = MemoryStore()
        before = claims(store).claim([ORDERS])[ORDERS]
        after = claims(store).restart({ORDERS: 3})[ORDERS]
        assert (after.next_offset, after.owner) == (3, "me")
        assert after.epoch > before.epoch + 1

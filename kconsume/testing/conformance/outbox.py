"""`OutboxSuite`: tests of a store that keeps the records that handlers send until the broker has confirmed them.

The tests make the calls that the relay makes. A row exists from the commit of its transaction until it is reported as
delivered. Only the owner of its partition can read it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any, cast

import pytest

from kconsume._kafka.outgoing import Outgoing
from kconsume.backends.capabilities import OutboxStore, OutboxTx, capabilities_of
from kconsume.backends.outbox.tables import Posted, Targets
from kconsume.errors import StoreUnavailable
from kconsume.records import Partition
from kconsume.testing.conformance.harness import NOT_OURS, Bench, Handling, Owner, once_it_is_back
from kconsume.testing.conformance.transactional import TransactionalSuite

_ALL = 1000


class OutboxSuite(TransactionalSuite):
    """Subclass it as `Test…`, with a fixture `subject` that returns a `Subject` with `write`, `effects` and `own`."""

    # With the transaction

    def test_an_outbox_row_is_visible_only_after_its_transaction_has_committed(self, bench: Bench) -> None:
        first, *_ = bench.partitions
        bench.me.claim(first)
        with bench.me.transaction(first) as handling:
            handling.write(0)
            post(handling, "a", "b")
            handling.advance(0, 1)
            assert values(read(bench.owner("reader"), first, bench.me.held[first].epoch)) == [], "read before COMMIT"
        assert values(read(bench.me, first)) == ["a", "b"]
        assert (bench.effects(), bench.offsets()) == ([0], {first: 1})

    def test_outbox_rows_are_rolled_back_with_their_transaction(self, bench: Bench) -> None:
        """If such rows were sent, they would report something that never happened."""
        first, *_ = bench.partitions
        bench.me.claim(first)
        for advances in (False, True):
            with pytest.raises(LookupError):
                bench.me.run(first, _posting_and_raising(advances))
        assert values(read(bench.me, first)) == []
        commit_rows(bench.me, first, "good")
        assert values(read(bench.me, first)) == ["good"]

    def test_a_fenced_transaction_leaves_no_outbox_rows(self, bench: Bench) -> None:
        first, *_ = bench.partitions
        rival = bench.owner("rival")
        bench.me.claim(first)
        rival.claim(first)
        with pytest.raises(NOT_OURS):
            commit_rows(bench.me, first, "of a zombie")
        assert values(read(rival, first)) == []

    # Rows

    def test_an_outbox_row_keeps_every_field_of_its_record(self, bench: Bench) -> None:
        """A tombstone is not an empty value. A header may occur twice, and its value may be any bytes."""
        first, *_ = bench.partitions
        sent = [
            Outgoing(b"\x00\xff", b"\xff\x00", (("a", b"\x00\xff"), ("a", b""), ("ü ☕", b"2")), "orders.out"),
            Outgoing(None, b"gone", (), "orders.out"),
            Outgoing(b"", None, (), "elsewhere", datetime(2024, 2, 29, 12, 30, 15, 123000, tzinfo=UTC)),
        ]
        bench.me.claim(first)
        with bench.me.transaction(first) as handling:
            _tx(handling).post(sent)
            handling.advance(0, 1)
        assert [row.outgoing for row in read(bench.me, first)] == sent

    def test_outbox_rows_are_read_in_the_order_of_writing_up_to_the_limit(self, bench: Bench) -> None:
        first, *_ = bench.partitions
        bench.me.claim(first)
        for turn in range(4):
            commit_rows(bench.me, first, *(f"{turn}.{n:02}" for n in range(25)))
        rows = read(bench.me, first)
        assert values(rows) == [f"{turn}.{n:02}" for turn in range(4) for n in range(25)]
        numbers = [row.number for row in rows]
        assert numbers == sorted(set(numbers))
        assert read(bench.me, first, most=30) == rows[:30]

    def test_outbox_rows_can_be_read_for_some_topics_or_for_all_other_topics(self, bench: Bench) -> None:
        """If a row to one topic is refused, rows to other topics are still sent."""
        first, second, *_ = bench.partitions
        bench.me.claim(first, second)
        for partition in (first, second):
            with bench.me.transaction(partition) as handling:
                _tx(handling).post(
                    [Outgoing(f"{topic}{n}".encode(), None, (), topic) for n in range(3) for topic in "abc"]
                )
                handling.advance(0, 1)
        epochs, store = {p: bench.me.held[p].epoch for p in (first, second)}, _store(bench.me)
        found = store.posted(bench.group, epochs, 2, {first: Targets(("b",))})
        assert {p: values(rows) for p, rows in found.items()} == {first: ["b0", "b1"], second: ["a0", "b0"]}
        found = store.posted(bench.group, epochs, 4, {first: Targets(("a", "c"), others=True), second: Targets(("x",))})
        assert {p: values(rows) for p, rows in found.items() if rows} == {first: ["b0", "b1", "b2"]}
        store.delivered(bench.group, {first: [row.number for row in found[first]]})
        assert values(read(bench.me, first)) == ["a0", "c0", "a1", "c1", "a2", "c2"], (
            "rows to other topics were deleted"
        )
        insert_unowned(bench, "to orders.out")
        assert values(store.unowned_rows("me", _ALL, Targets(("elsewhere",)))) == []
        assert values(store.unowned_rows("me", _ALL, Targets(("elsewhere",), others=True))) == ["to orders.out"]
        assert values(store.unowned_rows("me", _ALL, Targets(("orders.out",)))) == ["to orders.out"]

    def test_all_rows_above_a_number_are_read(self, bench: Bench) -> None:
        """The relay asks for the rows above those that it has sent and deleted."""
        first, second, *_ = bench.partitions
        bench.me.claim(first, second)
        for partition in (second, first):  # a store may number the rows of all partitions together
            commit_rows(bench.me, partition, "a", "b", "c", "d")
        epochs, store = {p: bench.me.held[p].epoch for p in (first, second)}, _store(bench.me)
        sent = [row.number for row in read(bench.me, first)][:2]
        store.delivered(bench.group, {first: sent})
        above = {first: Targets((), others=True, above=sent[-1])}
        found = store.posted(bench.group, epochs, 3, above)
        assert {p: values(rows) for p, rows in found.items()} == {first: ["c", "d"], second: ["a", "b", "c"]}
        assert values(store.posted(bench.group, epochs, 1, above)[first]) == ["c"]

    def test_only_outbox_rows_of_the_partition_and_group_are_read(self, bench: Bench) -> None:
        first, second, third, *_ = bench.partitions
        other = bench.of_group(f"{bench.group}-other")
        for owner in (bench.me, other.me):
            owner.claim(first, second, third)
            for partition in (first, second):
                commit_rows(owner, partition, f"{owner.bench.group} {partition.number}")
        found = _store(bench.me).posted(bench.group, {p: bench.me.held[p].epoch for p in (first, second, third)}, _ALL)
        assert {p: values(rows) for p, rows in found.items() if rows} == {
            first: [f"{bench.group} 0"],
            second: [f"{bench.group} 1"],
        }
        assert values(read(other.me, first)) == [f"{other.group} 0"]

    def test_reading_or_deleting_no_outbox_rows_does_nothing(self, bench: Bench) -> None:
        first, *_ = bench.partitions
        bench.me.claim(first)
        commit_rows(bench.me, first, "a")
        assert _store(bench.me).posted(bench.group, {}, _ALL) == {}
        _store(bench.me).delivered(bench.group, {})
        _store(bench.me).delivered(bench.group, {first: []})
        assert values(read(bench.me, first)) == ["a"]

    # Owners

    def test_a_stale_epoch_reads_no_outbox_rows_and_the_next_owner_reads_them(self, bench: Bench) -> None:
        """Otherwise a zombie would send its rows between the rows of the new owner."""
        first, second, *_ = bench.partitions
        rival = bench.owner("rival")
        bench.me.claim(first, second)
        commit_rows(bench.me, first, "a")
        commit_rows(bench.me, second, "b")
        rival.claim(first)
        found = _store(bench.me).posted(bench.group, {p: bench.me.held[p].epoch for p in (first, second)}, _ALL)
        assert {p: values(rows) for p, rows in found.items() if rows} == {second: ["b"]}
        assert values(read(rival, first)) == ["a"]
        assert values(read(rival, first, rival.held[first].epoch + 1)) == [], (
            "rows were read under an epoch that was never given out"
        )

    def test_after_a_reclaim_outbox_rows_are_read_under_the_new_epoch(self, bench: Bench) -> None:
        first, *_ = bench.partitions
        old = bench.me.claim(first)[first].epoch
        commit_rows(bench.me, first, "a")
        bench.me.reclaim(first)
        assert (values(read(bench.me, first, old)), values(read(bench.me, first))) == ([], ["a"])

    # Delivered rows

    def test_only_delivered_outbox_rows_are_deleted(self, bench: Bench) -> None:
        first, second, *_ = bench.partitions
        bench.me.claim(first, second)
        commit_rows(bench.me, first, "a", "b", "c", "d")
        commit_rows(bench.me, second, "other")
        numbers = [row.number for row in read(bench.me, first)]
        for _ in range(2):  # the second time the rows are deleted already, which is no error
            _store(bench.me).delivered(bench.group, {first: [numbers[0], numbers[2]]})
            assert values(read(bench.me, first)) == ["b", "d"]
        assert values(read(bench.me, second)) == ["other"]

    def test_delivered_outbox_rows_of_several_partitions_are_deleted_together(self, bench: Bench) -> None:
        first, second, *_ = bench.partitions
        bench.me.claim(first, second)
        for partition in (first, second):
            commit_rows(bench.me, partition, "a", "b")
        gone = {p: [read(bench.me, p)[0].number] for p in (first, second)}
        _store(bench.me).delivered(bench.group, gone)
        assert [values(read(bench.me, p)) for p in (first, second)] == [["b"], ["b"]]

    def test_an_outbox_row_that_a_zombie_delivered_is_deleted_too(self, bench: Bench) -> None:
        """The broker has confirmed the row, so it is deleted under any owner of the partition."""
        first, *_ = bench.partitions
        rival = bench.owner("rival")
        bench.me.claim(first)
        commit_rows(bench.me, first, "a", "b")
        rows = read(bench.me, first)
        rival.claim(first)
        _store(bench.me).delivered(bench.group, {first: [rows[0].number]})
        assert values(read(rival, first)) == ["b"]

    def test_the_number_of_an_outbox_row_is_never_used_again(self, bench: Bench) -> None:
        """A zombie that wakes after days deletes, by number, the rows that it had sent. It must not delete later
        rows."""
        first, *_ = bench.partitions
        bench.me.claim(first)
        commit_rows(bench.me, first, "a", "b")
        rows = read(bench.me, first)
        _store(bench.me).delivered(bench.group, {first: [row.number for row in rows]})
        bench.store.close()
        commit_rows(bench.me, first, "c", "d")
        _store(bench.me).delivered(bench.group, {first: [row.number for row in rows]})
        assert values(read(bench.me, first)) == ["c", "d"]

    # Rows of the user's own transactions, which belong to no partition

    def test_an_outbox_row_of_a_user_transaction_exists_only_if_it_commits(self, bench: Bench) -> None:
        insert_unowned(bench, "committed")
        with pytest.raises(LookupError):
            insert_unowned(bench, "undone", error=LookupError())
        insert_unowned(bench, "later")
        assert values(_store(bench.me).unowned_rows("me", _ALL)) == ["committed", "later"]
        assert values(_store(bench.me).unowned_rows("me", 1)) == ["committed"]

    def test_outbox_rows_without_a_partition_have_one_sender_at_a_time(self, bench: Bench) -> None:
        rival = _store(bench.owner("rival"))
        assert _store(bench.me).unowned_rows("me", _ALL) == []
        insert_unowned(bench, "a")
        for _ in range(2):
            assert values(_store(bench.me).unowned_rows("me", _ALL)) == ["a"]
            assert rival.unowned_rows("rival", _ALL) == [], "a second sender got the row"

    def test_an_outbox_row_without_a_partition_is_deleted_when_delivered(self, bench: Bench) -> None:
        insert_unowned(bench, "a")
        insert_unowned(bench, "b")
        store = _store(bench.me)
        number = store.unowned_rows("me", _ALL)[0].number
        store.delivered("", {Partition("", 0): [number]})
        assert values(store.unowned_rows("me", _ALL)) == ["b"]

    def test_outbox_rows_with_and_without_a_partition_are_read_separately(self, bench: Bench) -> None:
        first, *_ = bench.partitions
        bench.me.claim(first)
        commit_rows(bench.me, first, "a handler's")
        insert_unowned(bench, "a user's")
        assert values(_store(bench.me).unowned_rows("me", _ALL)) == ["a user's"]
        assert values(read(bench.me, first)) == ["a handler's"]

    # Handled origins

    def test_an_origin_is_recorded_once_by_each_group(self, bench: Bench) -> None:
        first, second, *_ = bench.partitions
        bench.me.claim(first, second)
        assert record_origins(bench.me, first, "a#0", "b#0", "a#0") == {"a#0", "b#0"}
        _store(bench.me).forget_origins()  # deletes expired origins only
        assert record_origins(bench.me, first, "a#0", "it's \\ new") == {"it's \\ new"}
        assert record_origins(bench.me, second, "b#0", "c#0") == {"c#0"}, "b#0 was recorded again in another partition"
        other = bench.of_group(f"{bench.group}-other")
        other.me.claim(first)
        assert record_origins(other.me, first, "a#0") == {"a#0"}

    def test_recorded_origins_are_rolled_back_with_their_transaction(self, bench: Bench) -> None:
        """Otherwise the record of a failed transaction would count as handled."""
        first, *_ = bench.partitions
        bench.me.claim(first)

        def take_and_raise(handling: Handling) -> None:
            assert _tx(handling).record_origins(["a#0"]) == {"a#0"}
            raise LookupError

        with pytest.raises(LookupError):
            bench.me.run(first, take_and_raise)
        assert record_origins(bench.me, first, "a#0") == {"a#0"}

    # An unavailable place

    def test_an_outage_raises_store_unavailable_and_loses_no_outbox_row(self, bench: Bench) -> None:
        """The relay tries again after `StoreUnavailable`. The relay would treat any other error as its own fault."""
        away = bench.subject.away
        if away is None:
            pytest.skip("the Subject has no away=")
        first, *_ = bench.partitions
        bench.me.claim(first)
        commit_rows(bench.me, first, "a")
        store, row = _store(bench.me), read(bench.me, first)[0]
        with away():
            for ask in (
                lambda: read(bench.me, first),
                lambda: store.delivered(bench.group, {first: [row.number]}),
                lambda: store.unowned_rows("me", _ALL),
                store.forget_origins,
            ):
                with pytest.raises(StoreUnavailable):
                    ask()
        assert values(once_it_is_back(lambda: read(bench.me, first))) == ["a"]


def _store(owner: Owner) -> OutboxStore:
    outbox = capabilities_of(owner.store).outbox
    assert outbox is not None, f"{type(owner.store).__name__} declares no outbox"
    return outbox


def _tx(handling: Handling) -> OutboxTx:
    assert isinstance(handling.tx, OutboxTx), (
        f"{type(handling.tx).__name__} is no OutboxTx: it needs post, record_origins"
    )
    return handling.tx


def outgoing(value: str) -> Outgoing:
    return Outgoing(value.encode(), None, (), "orders.out")


def post(handling: Handling, *values: str) -> None:
    _tx(handling).post([outgoing(value) for value in values])


def commit_rows(owner: Owner, partition: Partition, *values: str) -> None:
    """Post rows in a transaction that moves the offset by one."""
    at = owner.store.load(owner.bench.group, [partition])[partition].next_offset

    def handle(handling: Handling) -> None:
        post(handling, *values)
        handling.advance(at, at + 1)

    owner.run(partition, handle)


def record_origins(owner: Owner, partition: Partition, *origins: str) -> set[str]:
    """Record origins in a transaction that moves the offset by one. Returns the origins that were new."""
    at, new = owner.store.load(owner.bench.group, [partition])[partition].next_offset, set[str]()
    with owner.transaction(partition) as handling:
        new.update(_tx(handling).record_origins(list(origins)))
        handling.advance(at, at + 1)
    return new


def read(owner: Owner, partition: Partition, epoch: int | None = None, most: int = _ALL) -> list[Posted]:
    asked = owner.held[partition].epoch if epoch is None else epoch
    return _store(owner).posted(owner.bench.group, {partition: asked}, most).get(partition, [])


def insert_unowned(bench: Bench, value: str, error: Exception | None = None) -> None:
    """Insert a row in a transaction of the user. If `error` is given, it is raised in the transaction."""
    if bench.subject.own is None:
        pytest.fail("the Subject of a store with an outbox needs own=, a transaction of the user's own")
    statement = _store(bench.me).insert_statement(outgoing(value))
    with bench.subject.own() as execute:
        execute(*statement)
        if error is not None:
            raise error


def values(rows: Sequence[Posted]) -> list[str]:
    return [cast(bytes, row.outgoing.value).decode() for row in rows]


def _posting_and_raising(advances: bool) -> Callable[[Handling], Any]:
    def handle(handling: Handling) -> None:
        post(handling, "undone")
        if advances:
            handling.advance(0, 1)
        raise LookupError

    return handle

"""The ledger of a Spark stream on a real PostgreSQL, without Spark: ranges move once, plans are kept, one runs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import psycopg
import pytest

from kconsume.backends import PostgresStore
from kconsume.backends.base import Position, Positions
from kconsume.backends.claim import granted
from kconsume.errors import Fenced, StreamTaken, TransactionMisused
from kconsume.records import Partition
from kconsume.spark import request_stop
from kconsume.spark._batch.ledger import statements
from kconsume.spark._batch.ledger.postgres import PostgresLedger
from kconsume.spark._batch.ranges import OffsetRange, Plan
from tests.waiting import eventually

A, B = Partition("orders", 0), Partition("orders", 1)
Make = Callable[..., PostgresLedger]


@pytest.fixture
def store(postgres_url: str, database: psycopg.Connection) -> Iterator[PostgresStore]:
    database.execute("create table seen (value text)")
    store = PostgresStore(postgres_url)
    yield store
    store.close()


@pytest.fixture
def ledger(store: PostgresStore) -> Iterator[Make]:
    """Ledgers, as of so many processes."""
    made: list[PostgresLedger] = []

    def make(owner: str = "one", name: str = "load", group: str = "shop") -> PostgresLedger:
        made.append(PostgresLedger(store, group, name, owner))
        return made[-1]

    yield make
    for each in made:
        each.unregister()


def claim(store: PostgresStore, *partitions: Partition, owner: str = "one") -> dict[Partition, Position]:
    return granted(
        store.claim("shop", partitions, owner, lambda missing: {p: Position(0, topic_id="id") for p in missing})
    )


def apply(
    ledger: PostgresLedger,
    positions: Positions,
    *ranges: OffsetRange,
    value: str = "x",
    held: Callable[[], object] = bool,
) -> None:
    with ledger.transaction(positions) as tx:
        tx.connection.execute("insert into seen values (%s)", (value,))  # type: ignore[attr-defined]
        held()
        tx.finish(ranges, positions)


def seen(database: psycopg.Connection) -> list[str]:
    return [value for (value,) in database.execute("select value from seen order by 1")]


def offsets(store: PostgresStore) -> dict[Partition, int]:
    return {p: position.next_offset for p, position in store.load("shop", [A, B]).items()}


def test_the_handlers_writes_and_all_ranges_commit_together(
    store: PostgresStore, ledger: Make, database: psycopg.Connection
) -> None:
    one = ledger()
    one.register(["orders"])
    positions = claim(store, A, B)
    apply(one, positions, OffsetRange(A, 0, 7), OffsetRange(B, 0, 5))
    assert (seen(database), offsets(store)) == (["x"], {A: 7, B: 5})


def test_a_range_that_is_not_where_it_should_be_undoes_all_of_the_batch(
    store: PostgresStore, ledger: Make, database: psycopg.Connection
) -> None:
    one = ledger()
    one.register(["orders"])
    positions = claim(store, A, B)
    apply(one, positions, OffsetRange(A, 0, 7))
    with pytest.raises(Fenced, match=r"orders/0 .* epoch 1 at offset 0, the store has epoch 1 at offset 7"):
        apply(one, positions, OffsetRange(B, 0, 5), OffsetRange(A, 0, 7), value="again")
    assert (seen(database), offsets(store)) == (["x"], {A: 7, B: 0})


def test_a_batch_of_an_earlier_epoch_writes_nothing(
    store: PostgresStore, ledger: Make, database: psycopg.Connection
) -> None:
    """An embedded app, or another stream, has claimed one of the partitions."""
    one = ledger()
    one.register(["orders"])
    positions = claim(store, A, B)
    claim(store, B, owner="an embedded app")
    with pytest.raises(Fenced, match=r"orders/1 .* its claim has epoch 1, the store has epoch 2"):
        apply(one, positions, OffsetRange(A, 0, 7), OffsetRange(B, 0, 5))
    assert (seen(database), offsets(store)) == ([], {A: 0, B: 0})


def test_a_batch_that_is_under_way_when_its_partition_is_claimed_is_ended(
    store: PostgresStore, ledger: Make, database: psycopg.Connection
) -> None:
    """The claim finds its transaction by the locks of the partitions, as it finds an embedded owner's."""
    one = ledger()
    one.register(["orders"])
    positions = claim(store, A, B)
    with pytest.raises(Exception, match=r"broke the connection|no longer owned by this process"):
        apply(one, positions, OffsetRange(A, 0, 7), held=lambda: claim(store, A, owner="another"))
    assert (seen(database), offsets(store)) == ([], {A: 0, B: 0})


def test_of_two_transactions_of_one_range_one_commits(
    store: PostgresStore, ledger: Make, database: psycopg.Connection
) -> None:
    """Twins: both are past the check when the first commits."""
    one = ledger()
    one.register(["orders"])
    positions = claim(store, A)
    both, outcomes = threading.Barrier(2), list[str]()

    def twin(name: str) -> None:
        try:
            apply(one, positions, OffsetRange(A, 0, 7), value=name, held=lambda: both.wait(20))
            outcomes.append("applied")
        except Fenced:
            outcomes.append("fenced")

    twins = [threading.Thread(target=twin, args=(name,)) for name in "ab"]
    for each in twins:
        each.start()
    for each in twins:
        each.join(30)
    assert sorted(outcomes) == ["applied", "fenced"]
    assert len(seen(database)) == 1


def test_a_piece_is_undone_by_itself(store: PostgresStore, ledger: Make, database: psycopg.Connection) -> None:
    one = ledger()
    one.register(["orders"])
    positions = claim(store, A)
    with one.transaction(positions) as tx:
        for value in ("good", "bad", "also good"):
            try:
                with tx.savepoint():
                    tx.connection.execute("insert into seen values (%s)", (value,))  # type: ignore[attr-defined]
                    if value == "bad":
                        tx.connection.execute("select 1/0")  # type: ignore[attr-defined]
            except psycopg.errors.DivisionByZero:
                continue
        tx.finish([OffsetRange(A, 0, 3)], positions)
    assert (seen(database), offsets(store)) == (["also good", "good"], {A: 3})


def test_a_handler_that_divides_by_zero_is_not_taken_for_a_fence(store: PostgresStore, ledger: Make) -> None:
    one = ledger()
    one.register(["orders"])
    positions = claim(store, A)
    with pytest.raises(psycopg.errors.DivisionByZero), one.transaction(positions) as tx:
        tx.connection.execute("select 1/0")  # type: ignore[attr-defined]


def test_a_handler_cannot_commit_by_itself(store: PostgresStore, ledger: Make, database: psycopg.Connection) -> None:
    one = ledger()
    one.register(["orders"])
    positions = claim(store, A)
    with one.transaction(positions) as tx:
        with pytest.raises(TransactionMisused, match=r"must not call commit\(\)"):
            tx.connection.commit()  # type: ignore[attr-defined]
        with pytest.raises(TransactionMisused, match=r"must not call commit\(\)"):
            tx.finish([OffsetRange(A, 0, 7)], positions)  # nor swallow the refusal
        tx.connection.refused = None  # type: ignore[attr-defined]
    assert (seen(database), offsets(store)) == ([], {A: 0})


# Plans


def test_a_plan_is_kept_until_it_is_done(store: PostgresStore, ledger: Make) -> None:
    one = ledger()
    one.register(["orders"])
    positions = claim(store, A)
    plan = Plan((OffsetRange(A, 0, 7),))
    assert one.pending_plan() is None
    one.begin_plan(plan)
    assert ledger("two").pending_plan() == plan
    apply(one, positions, *plan.ranges)
    assert one.pending_plan() is None


def test_the_same_plan_has_the_same_number_and_another_the_next(ledger: Make) -> None:
    one = ledger()
    one.register(["orders"])
    first, second = Plan((OffsetRange(A, 0, 7),)), Plan((OffsetRange(A, 7, 9),))
    numbers = [one.begin_plan(first), one.begin_plan(first), one.begin_plan(second)]
    assert numbers[0] == numbers[1] < numbers[2]
    one.unregister()
    again = ledger("two")
    again.register(["orders"])
    later = [again.begin_plan(second), again.begin_plan(first)]
    assert numbers[2] == later[0] < later[1]


@pytest.mark.parametrize(
    "forget",
    ["delete from kconsume_streams", "update kconsume_streams set number = 0, plan = null"],
    ids=["the row is gone", "the database is an earlier state of itself"],
)
def test_numbers_grow_though_the_last_one_is_forgotten(ledger: Make, database: psycopg.Connection, forget: str) -> None:
    """A table that skips numbers it has seen would skip the next batches in silence."""
    one = ledger()
    one.register(["orders"])
    before = one.begin_plan(Plan((OffsetRange(A, 0, 7),)))
    one.unregister()
    database.execute(forget)
    two, renamed = ledger("two"), ledger("three", name="load_orders")
    two.register(["orders"])
    assert two.begin_plan(Plan((OffsetRange(A, 0, 3),))) > before
    two.unregister()
    renamed.register(["orders"])
    assert renamed.begin_plan(Plan((OffsetRange(A, 3, 5),))) > before


def test_a_plan_whose_parts_have_numbers_is_begun_again_with_a_number_above_them(ledger: Make) -> None:
    one = ledger()
    one.register(["orders"])
    plan = Plan((OffsetRange(A, 0, 7),))
    first = one.begin_plan(plan)
    numbers = [one.reserve_numbers(10), one.begin_plan(plan), one.reserve_numbers(10)]
    assert numbers == [first + 1, first + 11, first + 12]


def test_a_plan_of_a_query_that_was_taken_over_is_refused(ledger: Make) -> None:
    one, two = ledger("one"), ledger("two")
    one.register(["orders"])
    one.unregister()
    two.register(["orders"])
    with pytest.raises(Fenced, match="another query named 'load' now"):
        one.begin_plan(Plan((OffsetRange(A, 0, 7),)))


# One query


def test_a_second_query_of_the_group_on_the_topic_is_refused_by_name(ledger: Make) -> None:
    ledger("host:1:one").register(["orders"])
    with pytest.raises(StreamTaken, match="'shop' has a Spark query on topic 'orders' already, in host:1:one"):
        ledger("host:2:two", name="other").register(["orders"])


def test_queries_of_other_groups_and_topics_go_side_by_side(ledger: Make) -> None:
    ledger("one").register(["orders"])
    ledger("two", name="other").register(["payments"])
    ledger("three", group="billing").register(["orders"])


def test_a_query_that_has_left_does_not_keep_the_next_out(ledger: Make) -> None:
    one = ledger("one")
    one.register(["orders"])
    one.unregister()
    ledger("two").register(["orders"])


def test_a_query_that_is_frozen_does_not_keep_the_next_out(
    ledger: Make, database: psycopg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its connection is there, and its lock; it has not been heard of for long."""
    one = ledger("one")
    one.register(["orders"])
    database.execute("update kconsume_streams set beat_at = now() - interval '1 hour'")
    with pytest.raises(StreamTaken, match="only just started"):
        ledger("two").register(["orders"])  # so young a transaction is not ended
    at_once = statements.TERMINATE_LOCK_HOLDER.replace("15 seconds", "0 seconds")
    monkeypatch.setattr(statements, "TERMINATE_LOCK_HOLDER", at_once)
    ledger("three").register(["orders"])
    with pytest.raises(Fenced, match="another query named 'load' now"):
        one.begin_plan(Plan(()))


def test_a_query_hears_that_it_is_to_stop(store: PostgresStore, ledger: Make) -> None:
    one = ledger()
    one.register(["orders"])
    assert one.heartbeat() is False
    assert request_stop(store, "shop") == ["load"]
    assert one.heartbeat() is True
    one.unregister()
    again = ledger("two")
    again.register(["orders"])
    assert again.heartbeat() is False  # it was said to the other one


def test_a_query_takes_its_lock_again_after_the_server_has_ended_its_connection(
    ledger: Make, database: psycopg.Connection
) -> None:
    one = ledger()
    one.register(["orders"])
    ended = database.execute(
        "select pg_terminate_backend(pid) from pg_stat_activity where state = 'idle in transaction' "
        "and datname = current_database()"
    ).fetchall()
    assert ended == [(True,)]
    eventually(lambda: one.heartbeat() is False, what="a beat on a new connection")
    with pytest.raises(StreamTaken):
        ledger("two", name="other").register(["orders"])

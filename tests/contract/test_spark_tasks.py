"""A task of a Spark stream, without Spark, on a real PostgreSQL: twins, deaths after the COMMIT, zombies, bad rows."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import psycopg
import pyarrow as pa
import pytest

from kconsume import Batch, BatchError, DeadLetter, Record, Retry
from kconsume.backends import PostgresStore
from kconsume.backends.base import Position
from kconsume.failures.policy import OnError, Policy, Retries
from kconsume.records import Partition
from kconsume.spark._batch.handler_call import Handler, read_call
from kconsume.spark._batch.ranges import OffsetRange
from kconsume.spark._batch.stream_batch import StreamBatch
from kconsume.spark._batch.task import RangeStatus, Task

ORDERS = Partition("orders", 1)
RANGE = OffsetRange(ORDERS, 100, 110)
Make = Callable[..., Task]


def rows(first: int = 100, end: int = 110, topic: str = "orders", partition: int = 1, step: int = 1) -> pa.RecordBatch:
    offsets = list(range(first, end, step))
    return pa.RecordBatch.from_pydict(
        {
            "value": pa.array([str(offset).encode() for offset in offsets], pa.binary()),
            "topic": pa.array([topic] * len(offsets), pa.string()),
            "partition": pa.array([partition] * len(offsets), pa.int32()),
            "offset": pa.array(offsets, pa.int64()),
        }
    )


def insert(tx: psycopg.Connection, batch: pa.RecordBatch | pa.Table) -> None:
    with tx.cursor() as cursor:
        values = batch["value"].to_pylist()
        cursor.executemany("insert into seen values (%s)", [(bytes(v or b"").decode(),) for v in values])


def load(batches: Iterator[pa.RecordBatch], tx: psycopg.Connection) -> None:
    for batch in batches:
        insert(tx, batch)


def status(task: Task, *batches: pa.RecordBatch) -> RangeStatus | None:
    said = [row for answer in task(iter(batches)) for row in answer.to_pylist()]
    return RangeStatus(**said[0]) if said else None


@pytest.fixture
def store(postgres_url: str, database: psycopg.Connection) -> Iterator[PostgresStore]:
    database.execute("create table seen (value text)")
    store = PostgresStore(postgres_url)
    store.claim("shop", [ORDERS], "driver", lambda missing: {p: Position(100, topic_id="id") for p in missing})
    yield store
    store.close()


@pytest.fixture
def make(store: PostgresStore) -> Iterator[Make]:
    from kconsume.spark._batch import task as tasks

    def make(handler: Handler = load, on_error: OnError = "stop", retry: Retries | None = None, epoch: int = 1) -> Task:
        return Task(
            address=store.database.address,
            group="shop",
            call=read_call(handler, (psycopg.Connection,), store.address),
            policy=Policy(on_error, retry),
            ranges={ORDERS: RANGE},
            epochs={ORDERS: epoch},
            scopes={"orders": "shop:id"},
            most_bytes=1_000_000,
            batch_id=3,
        )

    yield make
    for opened in tasks._stores.values():
        opened.close()
    tasks._stores.clear()


def seen(database: psycopg.Connection) -> list[str]:
    return [value for (value,) in database.execute("select value from seen order by 1")]


def at(store: PostgresStore) -> int:
    return store.load("shop", [ORDERS])[ORDERS].next_offset


WHOLE = [str(offset) for offset in range(100, 110)]


def test_rows_and_range_commit_together(make: Make, store: PostgresStore, database: psycopg.Connection) -> None:
    assert status(make(), rows(100, 104), rows(104, 110)) == RangeStatus("orders", 1, "applied", 10, 0, "")
    assert (seen(database), at(store)) == (WHOLE, 110)


def test_a_range_whose_tail_has_no_records_moves_to_its_planned_end(make: Make, store: PostgresStore) -> None:
    status(make(), rows(100, 103))
    assert at(store) == 110


def test_a_batch_in_an_executor_has_no_number_because_its_ranges_run_side_by_side(make: Make) -> None:
    numbers: list[int | None] = []

    def handler(batches: Iterator[pa.RecordBatch], batch: StreamBatch) -> None:
        numbers.append(batch.number)

    status(make(handler), rows())
    assert numbers == [None]


def test_a_task_that_died_after_its_commit_and_is_run_again_skips(
    make: Make, store: PostgresStore, database: psycopg.Connection
) -> None:
    for outcome in ("applied", "skipped", "skipped"):
        answer = status(make(), rows())
        assert answer is not None
        assert answer.outcome == outcome
    assert (seen(database), at(store)) == (WHOLE, 110)


def test_of_twins_one_applies_and_the_other_skips(make: Make, database: psycopg.Connection) -> None:
    both = threading.Barrier(2)

    def slow(batches: Iterator[pa.RecordBatch], tx: psycopg.Connection) -> None:
        load(batches, tx)
        both.wait(20)  # neither has committed

    outcomes: list[str] = []

    def run() -> None:
        answer = status(make(slow), rows())
        assert answer is not None
        outcomes.append(answer.outcome)

    twins = [threading.Thread(target=run) for _ in range(2)]
    for twin in twins:
        twin.start()
    for twin in twins:
        twin.join(40)
    assert sorted(outcomes) == ["applied", "skipped"]
    assert seen(database) == WHOLE


def test_control_without_the_range_twins_double_their_rows(store: PostgresStore, database: psycopg.Connection) -> None:
    for _ in range(2):
        with psycopg.connect(store.database.address.conninfo) as tx:
            load(iter([rows()]), tx)
    assert len(seen(database)) == 20


def test_a_task_of_an_earlier_epoch_is_fenced(make: Make, store: PostgresStore, database: psycopg.Connection) -> None:
    store.claim("shop", [ORDERS], "an embedded app", lambda missing: {})
    answer = status(make(), rows())
    assert answer is not None
    assert answer.outcome == "fenced"
    assert (seen(database), at(store)) == ([], 100)


@pytest.mark.parametrize("strange", [rows(110, 112), rows(90, 101), rows(partition=2), rows(topic="payments")], ids=str)
def test_rows_of_another_range_are_refused_though_the_handler_swallows_it(
    make: Make, store: PostgresStore, database: psycopg.Connection, strange: pa.RecordBatch
) -> None:
    def swallowing(batches: Iterator[pa.RecordBatch], tx: psycopg.Connection) -> None:
        try:
            load(batches, tx)
        except Exception:  # noqa: BLE001
            return

    answer = status(make(swallowing), rows(100, 102), strange)
    assert answer is not None
    assert answer.outcome == "misused"
    assert (seen(database), at(store)) == ([], 100)


def test_rows_that_break_off_do_not_pass_the_range_though_the_handler_swallows_it(
    make: Make, store: PostgresStore, database: psycopg.Connection
) -> None:
    """As when the source fails in the JVM: the worker's input ends in the middle."""

    def breaking() -> Iterator[pa.RecordBatch]:
        yield rows(100, 105)
        raise EOFError

    def swallowing(batches: Iterator[pa.RecordBatch], tx: psycopg.Connection) -> None:
        try:
            load(batches, tx)
        except Exception:  # noqa: BLE001
            return

    (answer,) = make(swallowing)(breaking())
    assert answer.to_pylist()[0]["outcome"] == "failed"
    assert (seen(database), at(store)) == ([], 100)


def test_a_task_without_rows_says_nothing(make: Make, store: PostgresStore) -> None:
    assert status(make()) is None
    assert status(make(), rows(100, 100)) is None
    assert at(store) == 100  # its range is the driver's to finish


def test_what_a_handler_leaves_unread_is_passed_with_the_range(make: Make, store: PostgresStore) -> None:
    def first_only(batches: Iterator[pa.RecordBatch], tx: psycopg.Connection) -> None:
        insert(tx, next(batches))

    answer = status(make(first_only), rows(100, 104), rows(104, 110))
    assert answer is not None
    assert (answer.outcome, answer.rows, at(store)) == ("applied", 10, 110)


def test_a_handler_that_fails_is_a_status_with_its_words(make: Make, store: PostgresStore) -> None:
    def failing(table: pa.Table, tx: psycopg.Connection) -> None:
        insert(tx, table)
        raise ValueError("no such sku")

    answer = status(make(failing), rows())
    assert answer is not None
    assert answer.outcome == "failed"
    assert answer.detail.startswith("builtins.ValueError: no such sku\nTraceback")
    assert at(store) == 100


def test_bad_records_are_found_and_kept_as_letters(
    make: Make, store: PostgresStore, database: psycopg.Connection
) -> None:
    calls: list[int] = []

    def strict(table: pa.Table, tx: psycopg.Connection, batch: Batch) -> None:
        calls.append(batch.attempt)
        insert(tx, table)
        if bad := {103, 108} & set(table["offset"].to_pylist()):
            raise ValueError(f"cannot load {min(bad)}")

    answer = status(make(strict, DeadLetter(table="failed"), Retry(2, wait=0)), rows())
    assert answer is not None
    assert answer.outcome == "applied"
    assert (seen(database), at(store)) == ([v for v in WHOLE if v not in ("103", "108")], 110)
    letters = database.execute("select record_offset, origin, attempts, message, value from failed order by 1")
    assert letters.fetchall() == [
        (103, "shop:id:1:103", 2, "cannot load 103", b"103"),
        (108, "shop:id:1:108", 2, "cannot load 108", b"108"),
    ]


def test_records_that_a_handler_names_are_not_looked_for(
    make: Make, store: PostgresStore, database: psycopg.Connection
) -> None:
    sizes: list[int] = []

    def naming(table: pa.Table, tx: psycopg.Connection) -> None:
        sizes.append(table.num_rows)
        insert(tx, table)
        if table.num_rows == 10:
            raise BatchError({4: ValueError("no")})

    status(make(naming, DeadLetter(table="failed")), rows())
    assert sizes == [10, 9]
    assert "104" not in seen(database)
    assert at(store) == 110


def test_a_handler_can_have_its_rows_as_records(make: Make, database: psycopg.Connection) -> None:
    def one_by_one(records: Iterator[Record], tx: psycopg.Connection) -> None:
        for record in records:
            tx.execute("insert into seen values (%s)", (record.id,))

    status(make(one_by_one), rows(100, 102))
    assert seen(database) == ["shop:id:1:100", "shop:id:1:101"]

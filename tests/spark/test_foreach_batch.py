"""`foreach_batch` around a person's own query, on a real Spark, Kafka and PostgreSQL: each range is applied once."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pyarrow as pa
import pytest
from confluent_kafka import Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewPartitions  # type: ignore[attr-defined]
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession

from kconsume import Batch, DeadLetter, Partition, Retry
from kconsume._kafka.cluster import Cluster
from kconsume.errors import Fenced, HandlerFailed, KconsumeError, OffsetGap, OffsetOutOfRange, TopicRecreated
from kconsume.spark import StreamBatch, for_each_partition, foreach_batch, request_stop, starting_offsets
from tests.fix_kafka import create_topic, delete_topics, produce
from tests.spark.conftest import OpenShop
from tests.spark.shop import Shop, load, load_rows, load_strictly, load_table_strictly, texts, values_of, write
from tests.waiting import eventually

pytestmark = [pytest.mark.xdist_group("spark"), pytest.mark.timeout(600)]

FORMS = pytest.mark.parametrize("handler", [load, load_rows], ids=["driver", "executors"])


class Crash(Exception):
    """The process ends here, for all that Spark can tell."""


def run(shop: Shop, spark: SparkSession, handler: Any, group: str, checkpoint: str = "own", **options: Any) -> None:
    made = {name: options.pop(name) for name in ("retry", "on_error") if name in options}
    batches = foreach_batch(handler, store=shop.url, group=group, **made)
    batches.wait(shop.query(spark, batches, checkpoint, **options))


@FORMS
def test_what_a_crash_has_left_done_is_not_done_again_whatever_the_checkpoint(
    shop: Shop, spark: SparkSession, group: str, handler: Any, kafka_admin: AdminClient
) -> None:
    shop.fill(400)
    batches = foreach_batch(handler, store=shop.url, group=group)

    def crashing(df: DataFrame, batch_id: int) -> None:
        batches(df, batch_id)
        if batch_id == 1:
            raise Crash("after the store's commit, before Spark's")

    query = shop.query(spark, crashing, maxOffsetsPerTrigger="600")
    with pytest.raises(StreamingQueryException, match="Crash"):
        query.awaitTermination()
    batches.close()
    assert len(shop.seen()) == 1200 == len(set(shop.seen()))
    shop.fill(100, "more")
    run(shop, spark, handler, group)  # the same folder: batch 1 comes again
    assert shop.is_exact()
    shop.fill(50, "most")
    run(shop, spark, handler, group, "new", maxOffsetsPerTrigger="1000")  # another: all comes again, in other ranges
    assert shop.is_exact()
    assert shop.offsets(group) == {0: 550, 1: 550, 2: 550}
    mirrored = Cluster(shop.bootstrap).committed(group, [Partition(shop.topic, n) for n in range(3)])
    assert {p.number: committed.offset for p, committed in mirrored.items()} == {0: 550, 1: 550, 2: 550}


def test_control_without_it_the_same_crash_doubles_rows(shop: Shop, spark: SparkSession) -> None:
    shop.fill(100)

    def bare(df: DataFrame, batch_id: int) -> None:
        with shop.look() as tx:
            write(tx, values_of(df))
        if len(shop.seen()) == 300:
            raise Crash

    with pytest.raises(StreamingQueryException):
        shop.query(spark, bare).awaitTermination()
    shop.query(spark, bare).awaitTermination()
    assert len(shop.seen()) == 600


def test_a_query_that_would_skip_records_is_refused_and_can_begin_where_the_store_stands(
    shop: Shop, spark: SparkSession, group: str
) -> None:
    shop.fill(100)
    run(shop, spark, load, group)
    shop.fill(20, "missed")
    latest = {"startingOffsets": f'{{"{shop.topic}":{{"0":120,"1":120,"2":120}}}}'}
    shop.fill(20, "later")
    with pytest.raises(OffsetGap, match=r"@120\.\.140, and group .* stands at 100 in the store: 20 offsets would be"):
        run(shop, spark, load, group, "skipping", **latest)
    begin = starting_offsets(shop.url, group, [shop.topic], brokers=shop.bootstrap)
    run(shop, spark, load, group, "right", startingOffsets=begin)
    assert shop.is_exact()


# Interrupts


def stopped_in_the_handler(
    shop: Shop, spark: SparkSession, wrapped: Callable[[Any], Any], handle: Callable[[DataFrame, Any], None]
) -> None:
    """Stop the query, as a person does, while its handler is in a job of Spark's, and it swallows what that raises."""
    inside = threading.Event()

    def swallowing(df: DataFrame, tx: Any = None) -> None:
        inside.set()
        try:
            df.sparkSession._jvm.java.lang.Thread.sleep(60_000)  # type: ignore[union-attr]
            handle(df, tx)
        except Exception:  # noqa: BLE001  (as such handlers do)
            return

    query = shop.query(spark, wrapped(swallowing))
    assert inside.wait(60)
    query.stop()
    assert query.exception() is None


def test_an_interrupt_that_a_handler_swallows_loses_nothing(shop: Shop, spark: SparkSession, group: str) -> None:
    shop.fill(100)

    def wrapped(handler: Callable[[DataFrame, Any], None]) -> Any:
        def catching(df: DataFrame, tx: psycopg.Connection) -> None:
            handler(df, tx)

        return foreach_batch(catching, store=shop.url, group=group)

    stopped_in_the_handler(shop, spark, wrapped, lambda df, tx: write(tx, values_of(df)))
    assert shop.offsets(group) == {0: 0, 1: 0, 2: 0}
    run(shop, spark, load, group)
    assert shop.is_exact()


def test_control_without_it_a_swallowed_interrupt_loses_the_batch(shop: Shop, spark: SparkSession) -> None:
    shop.fill(100)

    def bare(df: DataFrame, batch_id: int) -> None:
        with shop.look() as tx:
            write(tx, values_of(df))

    stopped_in_the_handler(shop, spark, lambda handler: lambda df, n: handler(df), lambda df, tx: bare(df, 0))
    shop.query(spark, bare).awaitTermination()
    assert shop.seen() == []


# What Kafka does


def test_records_that_are_gone_are_an_error_though_the_handler_swallows_sparks(
    shop: Shop, spark: SparkSession, group: str, kafka_admin: AdminClient
) -> None:
    shop.fill(100)
    run(shop, spark, load, group)
    shop.fill(100, "more")
    (done,) = kafka_admin.delete_records([TopicPartition(shop.topic, 1, 150)]).values()
    done.result(timeout=20)

    def swallowing(df: DataFrame, tx: psycopg.Connection) -> None:
        try:
            write(tx, values_of(df))
        except Exception:  # noqa: BLE001
            return

    with pytest.raises(OffsetOutOfRange, match=r"/1@100\.\.200 was to be read, and the log begins at 150"):
        run(shop, spark, swallowing, group)
    assert shop.offsets(group) == {0: 100, 1: 100, 2: 100}
    with pytest.raises(OffsetOutOfRange, match="records were deleted before they were handled"):
        run(shop, spark, load, group)  # what Spark says reaches us
    assert len(shop.seen()) == 300


@pytest.mark.parametrize(
    ("size", "error", "words"),
    [
        (40, OffsetOutOfRange, r"Spark says: .*Some data may have been lost.*(.|\n)*or the topic was made again"),
        (300, TopicRecreated, "it was deleted and made again"),  # of which Spark says nothing at all
    ],
    ids=["smaller", "larger"],
)
def test_a_topic_that_was_made_again_is_refused(
    shop: Shop, spark: SparkSession, group: str, kafka_admin: AdminClient, size: int, error: type[Exception], words: str
) -> None:
    shop.fill(100)
    run(shop, spark, load, group)
    delete_topics(kafka_admin, [shop.topic])
    eventually(lambda: shop.topic not in kafka_admin.list_topics(timeout=20).topics, what="the topic to be gone")
    create_topic(kafka_admin, shop.topic, 3)
    before = shop.seen()
    shop.fill(size, "new")
    with pytest.raises(error, match=words):
        run(shop, spark, load, group)
    assert shop.seen() == before
    assert shop.offsets(group) == {0: 100, 1: 100, 2: 100}


def test_partitions_that_are_added_are_read_from_their_beginning(
    shop: Shop, spark: SparkSession, group: str, kafka_admin: AdminClient
) -> None:
    shop.fill(50)
    run(shop, spark, load, group)
    (grown,) = kafka_admin.create_partitions([NewPartitions(shop.topic, 5)]).values()
    grown.result(timeout=20)
    shop.partitions = 5
    eventually(lambda: len(kafka_admin.list_topics(timeout=20).topics[shop.topic].partitions) == 5, what="5 partitions")
    shop.fill(50, "more", fresh=True)
    run(shop, spark, load_rows, group)
    assert shop.is_exact()
    assert shop.offsets(group) == {0: 100, 1: 100, 2: 100, 3: 50, 4: 50}


@FORMS
def test_aborted_transactions_at_the_tail_and_empty_ranges_are_passed(
    shop: Shop, spark: SparkSession, group: str, handler: Any
) -> None:
    """Partition 0 ends with records that were aborted, 1 has nothing else, 2 has none at all."""
    shop.fill(30, partitions=[0])
    producer = Producer({"bootstrap.servers": shop.bootstrap, "transactional.id": group, "log_level": 0})
    producer.init_transactions(30)
    producer.begin_transaction()
    for n in range(40):
        producer.produce(shop.topic, f"aborted:{n}", partition=n % 2)
    producer.flush(30)
    producer.abort_transaction(30)
    run(shop, spark, handler, group, **{"kafka.isolation.level": "read_committed"})
    assert shop.is_exact()
    assert shop.offsets(group) == {0: 51, 1: 21, 2: 0}  # 30 and 20 aborted, 20 aborted; and a marker each
    shop.fill(5, "more")
    run(shop, spark, handler, group, **{"kafka.isolation.level": "read_committed"})
    assert shop.is_exact()


# Failures


@pytest.mark.parametrize("handler", [load_strictly, load_table_strictly], ids=["driver", "executors"])
def test_a_bad_record_becomes_a_dead_letter_and_the_rest_of_the_range_is_applied(
    shop: Shop, spark: SparkSession, group: str, handler: Any
) -> None:
    shop.fill(200)
    produce(shop.bootstrap, shop.topic, ["bad:1"], keys=["k"], partition=1)
    shop.fill(50, "more")
    produce(shop.bootstrap, shop.topic, ["bad:2"], partition=2)
    run(shop, spark, handler, group, on_error=DeadLetter(table="failed"), retry=Retry(2, wait=0))
    assert shop.is_exact()
    assert shop.offsets(group) == {0: 250, 1: 251, 2: 251}
    with shop.look() as look:
        letters = look.execute(
            "select partition, record_offset, key, value, attempts, exception, message from failed order by 1"
        ).fetchall()
    assert letters == [
        (1, 200, b"k", b"bad:1", 2, "builtins.ValueError", "cannot load bad:1"),
        (2, 250, None, b"bad:2", 2, "builtins.ValueError", "cannot load bad:2"),
    ]


def test_records_that_a_handler_rejects_leave_through_the_outbox(
    shop: Shop, spark: SparkSession, group: str, topic: Any
) -> None:
    dead = topic(1)
    shop.fill(20)
    produce(shop.bootstrap, shop.topic, ["bad:1", "bad:2"], partition=0)

    def rejecting(df: DataFrame, tx: psycopg.Connection, batch: StreamBatch) -> None:
        bad = df.where("cast(value as string) like 'bad%'")
        batch.reject(bad, "not an order")
        write(tx, values_of(df.where("cast(value as string) not like 'bad%'")))

    run(shop, spark, rejecting, group, on_error=DeadLetter(dead))
    assert shop.is_exact()
    eventually(lambda: Cluster(shop.bootstrap).edges([Partition(dead, 0)], "latest") == {Partition(dead, 0): 2},
               what="two dead letters")  # fmt: skip
    with shop.look() as look:
        assert look.execute("select count(*) from kconsume_outbox").fetchone() == (0,)


def test_a_query_that_is_started_again_with_the_same_foreach_batch_goes_on(
    shop: Shop, spark: SparkSession, group: str
) -> None:
    """After a failure, after its end, and after a stop of which nobody told it."""
    calls: list[str] = []

    def failing_once(df: DataFrame, tx: psycopg.Connection) -> None:
        load(df, tx)
        calls.append(str(shop.offsets(group)))
        if len(calls) == 1:
            raise ConnectionError("the first call")

    batches = foreach_batch(failing_once, store=shop.url, group=group)
    shop.fill(20)
    with pytest.raises(HandlerFailed, match="the first call"):
        batches.wait(shop.query(spark, batches))
    batches.wait(shop.query(spark, batches))
    assert shop.is_exact()
    shop.fill(20, "more")
    shop.query(spark, batches).awaitTermination()
    shop.fill(20, "most")
    batches.wait(shop.query(spark, batches, "new"))
    assert shop.is_exact()
    assert len(calls) == 4
    assert shop.offsets(group) == {0: 60, 1: 60, 2: 60}


def test_a_foreach_batch_of_two_queries_at_once_is_refused_and_the_first_goes_on(
    shop: Shop, spark: SparkSession, group: str
) -> None:
    shop.fill(20)
    batches = foreach_batch(load, store=shop.url, group=group)
    first = shop.query(spark, batches, trigger={"processingTime": "0 seconds"})
    eventually(shop.is_exact, within=120, what="the first query to consume")
    second = shop.query(spark, batches, "second")
    with pytest.raises(StreamingQueryException, match="call foreach_batch for each query"):
        second.awaitTermination()
    shop.fill(20, "more")
    eventually(shop.is_exact, within=120, what="the first query to go on")
    assert first.isActive
    assert batches.drain()


def test_one_function_in_one_group_reads_two_topics_in_two_queries(
    open_shop: OpenShop, spark: SparkSession, group: str
) -> None:
    shops = [open_shop(), open_shop()]  # in one database

    def consumed() -> bool:
        return shops[0].seen() == sorted(shops[0].written + shops[1].written)

    running = [foreach_batch(load, store=shop.url, group=group) for shop in shops]
    for shop, each in zip(shops, running, strict=True):
        shop.fill(20)
        shop.query(spark, each, shop.topic, trigger={"processingTime": "0 seconds"})
        eventually(consumed, within=120, what="the query to consume")
    # Each speaks again after the other has begun, and has heard of nobody else.
    said = beats_of(shops[0])
    eventually(lambda: not said.intersection(beats_of(shops[0])), within=60, what="signs of life of both")
    assert {owner for owner, _ in beats_of(shops[0])} == {each.owner for each in running}
    assert [each.failure for each in running] == [None, None]
    for shop in shops:
        shop.fill(20, "more")
    eventually(consumed, within=120, what="both queries to go on")
    names = ["load", f"load {shops[1].topic}"]
    assert request_stop(shops[0].url, group, "load") == names
    eventually(lambda: all(each.closed.is_set() for each in running), within=120, what="both to drain")
    shops[1].fill(20, "last")
    again = foreach_batch(load, store=shops[1].url, group=group)
    again.wait(shops[1].query(spark, again, shops[1].topic))
    assert consumed()
    with shops[0].look() as look:  # each has its own row again, and their numbers are one series
        rows = look.execute("select name, topics, number from kconsume_streams order by name").fetchall()
    assert [(name, topics) for name, topics, _ in rows] == [(n, [s.topic]) for n, s in zip(names, shops, strict=True)]
    assert min(number for *_, number in rows) >= 2


def beats_of(shop: Shop) -> set[tuple[object, ...]]:
    with shop.look() as look:
        return set(look.execute("select owner, beat_at from kconsume_streams"))


def test_a_handler_that_fails_for_good_ends_the_query_with_its_own_error(
    shop: Shop, spark: SparkSession, group: str
) -> None:
    shop.fill(20)
    produce(shop.bootstrap, shop.topic, ["bad:1"], partition=0)
    with pytest.raises(HandlerFailed, match=r"load_strictly failed on .*/0@0\.\.21.*cannot load bad:1"):
        run(shop, spark, load_strictly, group)
    with pytest.raises(HandlerFailed, match=r"load_table_strictly failed on .*/0@0\.\.21(.|\n)*cannot load bad:1"):
        run(shop, spark, load_table_strictly, f"{group}-rows")
    assert shop.offsets(group) == {0: 0, 1: 0, 2: 0}
    assert all(not value.startswith("bad") for value in shop.seen())


def ask_too_much(df: DataFrame, batch: Batch, tx: psycopg.Connection) -> None:
    assert batch.first


@for_each_partition
def ask_too_much_of_rows(rows: Iterator[pa.RecordBatch], batch: Batch, tx: psycopg.Connection) -> None:
    assert batch.keys


@pytest.mark.parametrize("handler", [ask_too_much, ask_too_much_of_rows], ids=["driver", "executors"])
def test_a_handler_that_asks_for_what_its_batch_does_not_know_makes_no_dead_letters(
    shop: Shop, spark: SparkSession, group: str, handler: Any
) -> None:
    shop.fill(5)
    with pytest.raises(KconsumeError, match="its records are in the DataFrame"):
        run(shop, spark, handler, group, on_error=DeadLetter(table="failed"), retry=Retry(3, wait=0))
    assert shop.offsets(group) == {0: 0, 1: 0, 2: 0}


def test_an_attempt_that_fails_is_undone_and_made_again(shop: Shop, spark: SparkSession, group: str) -> None:
    shop.fill(20)
    attempts: list[tuple[int, str]] = []

    def third_time_lucky(df: DataFrame, tx: psycopg.Connection, batch: Batch) -> None:
        load(df, tx)
        attempts.append((batch.attempt, batch.id))
        if batch.attempt < 3:
            raise ConnectionError

    run(shop, spark, third_time_lucky, group, retry=Retry(5, wait=0))
    assert [attempt for attempt, _ in attempts] == [1, 2, 3]
    assert len({id for _, id in attempts}) == 1
    assert shop.is_exact()


def test_a_partition_that_an_embedded_app_claims_meanwhile_ends_the_query(
    shop: Shop, spark: SparkSession, group: str
) -> None:
    from kconsume.backends import PostgresStore

    shop.fill(20)

    def claimed(df: DataFrame, tx: psycopg.Connection) -> None:
        other = PostgresStore(shop.url)
        other.claim(group, [Partition(shop.topic, 1)], "an app", lambda missing: {})
        other.close()
        load(df, tx)

    with pytest.raises((Fenced, HandlerFailed)):
        run(shop, spark, claimed, group)
    assert shop.seen() == []
    run(shop, spark, load, group)
    assert shop.is_exact()


# Frames that do not show their ranges


def test_rows_of_one_partition_in_several_tasks_are_refused_before_one_is_handled(
    shop: Shop, spark: SparkSession, group: str
) -> None:
    shop.fill(20)
    for number, mixed in enumerate([shop.source(spark).repartition(3), shop.source(spark).coalesce(1)]):
        with pytest.raises(Exception, match="for_each_partition needs one task for each range"):
            run(shop, spark, load_rows, group, f"mixed{number}", frame=mixed)
    assert shop.seen() == []
    run(shop, spark, load_rows, group, frame=shop.source(spark).where("value is not null").drop("headers"))
    assert shop.is_exact()


def test_a_handler_that_swallows_the_end_of_its_rows_does_not_pass_the_range(
    shop: Shop, spark: SparkSession, group: str
) -> None:
    """The source fails while the rows are read: the task fails, and not only the loop in it."""
    shop.fill(20)
    failing = shop.source(spark).selectExpr(
        "key", "topic", "partition", "offset", "if(offset = 15, raise_error('gone'), value) value"
    )

    @for_each_partition
    def swallowing(rows: Iterator[pa.RecordBatch], tx: psycopg.Connection) -> None:
        with contextlib.suppress(BaseException):
            write(tx, texts(batch for batch in rows))

    with pytest.raises(HandlerFailed):
        run(shop, spark, swallowing, group, frame=failing)
    assert shop.seen() == []
    assert shop.offsets(group) == {0: 0, 1: 0, 2: 0}

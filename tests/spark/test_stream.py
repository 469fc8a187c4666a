"""`stream(app, spark)`: the same app under Spark and embedded, drained, asked to stop, and refused where it must be."""

from __future__ import annotations

import re
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest
from confluent_kafka import Producer
from pyspark.errors import AnalysisException, IllegalArgumentException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.readwriter import DataStreamWriter

from kconsume import App, Batch, Batching, Partition
from kconsume.backends import PostgresStore
from kconsume.errors import CheckpointMismatch, ConfigurationError, HandlerFailed, InvalidHandler, StreamTaken
from kconsume.spark import ForeachBatch, StreamBatch, for_each_partition, foreach_batch, request_stop, stream
from kconsume.spark._stream import foreach_batch as foreach
from kconsume.spark._stream import progress
from tests.chaos.form import form, printed_seed
from tests.fix_kafka import produce
from tests.spark.conftest import OpenShop
from tests.spark.shop import AvailableNow, Shop, load, load_rows, load_table, tell_batch, values_of
from tests.waiting import eventually

pytestmark = [pytest.mark.xdist_group("spark"), pytest.mark.timeout(600)]

STOPS = form(short=4, long=20)


def app_of(shop: Shop, group: str, handler: Any = load_table) -> App:
    app = App(shop.bootstrap, group=group, offsets=shop.url)
    app.consume(shop.topic)(handler)
    return app


def folder(shop: Shop) -> str:
    return str(shop.folder / "checkpoint")


def run(shop: Shop, spark: SparkSession, app: App, **options: Any) -> None:
    with stream(app, spark, trigger=AvailableNow, checkpoint=folder(shop), **options) as running:
        assert running.wait(200)


def test_one_app_goes_from_engine_to_engine_and_nothing_is_lost_or_done_twice(
    shop: Shop, spark: SparkSession, group: str
) -> None:
    shop.fill(100)
    app_of(shop, group).catch_up()  # embedded
    shop.fill(100, "b")
    run(shop, spark, app_of(shop, group), max_records=150)  # in executors
    assert shop.is_exact()
    shop.fill(50, "c")
    app_of(shop, group).catch_up()
    shop.fill(50, "d")
    run(shop, spark, app_of(shop, group, load))  # in the driver; the checkpoint is behind the store
    assert shop.is_exact()
    assert shop.offsets(group) == {0: 300, 1: 300, 2: 300}
    assert sorted(each.name for each in Path(folder(shop)).glob("gen-*")) == ["gen-0001", "gen-0002"]
    shutil.rmtree(folder(shop))
    shop.fill(10, "e")
    run(shop, spark, app_of(shop, group, load))
    assert shop.is_exact()


def test_a_handler_of_tables_gets_the_same_table_and_batch_embedded_and_in_executors(
    open_shop: OpenShop, spark: SparkSession, group: str
) -> None:
    shop = open_shop(1)
    producer, now = Producer({"bootstrap.servers": shop.bootstrap}), round(time.time() * 1000)
    for number in range(20):
        headers: Any = [("trace", b"1"), ("trace", None), ("grün", b"\xff")] if number % 3 else None
        key, value = (None, b"v") if number % 2 else (b"k%d" % number, None if number % 4 else b"")
        producer.produce(shop.topic, value, key, headers=headers, timestamp=now + number)
    producer.flush(30)
    app = App(shop.bootstrap, group=group, offsets=shop.url)
    app.consume(shop.topic, batch=Batching(20, 60))(tell_batch)
    app.catch_up()
    embedded = shop.seen()
    with shop.look() as look:
        look.execute("delete from seen")
    store = PostgresStore(shop.url)
    store.reset(group, {Partition(shop.topic, 0): 0})
    store.close()
    session = spark.newSession()
    session.conf.set("spark.sql.session.timeZone", "America/New_York")
    session.conf.set("spark.sql.execution.arrow.maxRecordsPerBatch", "7")
    run(shop, session, app_of(shop, group, tell_batch))
    assert shop.seen() == embedded
    assert len(embedded) == 15 + 20


def test_a_plan_that_was_begun_is_carried_out_as_it_was_though_the_checkpoint_is_gone(
    shop: Shop, spark: SparkSession, group: str
) -> None:
    """What is done outside of the transaction has the same id, so that it can be known there."""
    shop.fill(100)
    outside: list[tuple[str, int | None]] = []
    broken = True

    def load_and_tell(df: DataFrame, tx: psycopg.Connection, batch: Batch) -> None:
        load(df, tx)
        assert isinstance(batch, StreamBatch)
        outside.append((batch.id, batch.number))
        if broken:
            raise ConnectionError("after the effect outside")

    with pytest.raises(HandlerFailed):
        run(shop, spark, app_of(shop, group, load_and_tell), max_records=150)
    assert shop.seen() == []
    shutil.rmtree(folder(shop))
    shop.fill(100, "more")
    broken = False
    run(shop, spark, app_of(shop, group, load_and_tell), max_records=400)
    assert shop.is_exact()
    first, again, *others = outside
    assert first == again
    assert {number for _, number in others}.isdisjoint({first[1]})


# Ends


@contextmanager
def feeding(shop: Shop) -> Iterator[None]:
    """Records come all the while."""
    over = threading.Event()

    def feed() -> None:
        number = 0
        while not over.wait(0.02):
            number += 1
            values = [f"fed:{number}:{n}" for n in range(20)]
            produce(shop.bootstrap, shop.topic, values, partition=number % shop.partitions)
            shop.written += values

    thread = threading.Thread(target=feed)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def uncommitted(shop: Shop, handled: int | None) -> list[int]:
    """The last batch that was handled, if Spark has not committed it."""
    (generation,) = Path(folder(shop)).glob("gen-*")
    committed = {each.name for each in (generation / "commits").glob("[0-9]*")}
    return [] if handled is None or str(handled) in committed else [handled]


def test_a_drained_stream_leaves_no_batch_handled_and_not_committed(
    shop: Shop, spark: SparkSession, group: str
) -> None:
    chance = printed_seed()
    left: list[int] = []
    with feeding(shop):
        for _ in range(STOPS):
            before = sum(shop.offsets(group).values())
            running = stream(app_of(shop, group, load), spark, checkpoint=folder(shop))
            moved = lambda since=before: sum(shop.offsets(group).values()) > since  # noqa: E731
            eventually(moved, within=120, what="a batch of this stream")
            threading.Event().wait(chance.uniform(0, 0.5))  # any moment will do
            assert running.drain(120)
            left += uncommitted(shop, running._queries[0].batches.gate.last_handled)
    assert left == []
    run(shop, spark, app_of(shop, group, load))
    assert shop.is_exact()


def test_control_a_plain_stop_leaves_a_batch_that_was_handled(shop: Shop, spark: SparkSession, group: str) -> None:
    """And the store knows that it was: it is not done again."""
    shop.fill(20)
    inside, go_on = threading.Event(), threading.Event()

    def slow(df: DataFrame, tx: psycopg.Connection) -> None:
        load(df, tx)
        inside.set()
        go_on.wait(60)

    running = stream(app_of(shop, group, slow), spark, checkpoint=folder(shop))
    assert inside.wait(120)
    stopping = threading.Thread(target=running.stop)
    stopping.start()
    eventually(lambda: not running.queries[0].isActive, within=60, what="the query to be told to stop")
    go_on.set()
    stopping.join(60)
    assert uncommitted(shop, 0) == [0]
    run(shop, spark, app_of(shop, group, load))
    assert shop.is_exact()


def test_a_second_query_of_the_group_is_refused_and_the_first_hears_a_request_to_stop(
    shop: Shop, spark: SparkSession, group: str
) -> None:
    shop.fill(20)
    running = stream(app_of(shop, group, load), spark, checkpoint=folder(shop))
    with pytest.raises(StreamTaken, match=f"group '{group}' has a Spark query on topic '{shop.topic}' already"):
        stream(app_of(shop, group, load), spark)
    eventually(lambda: sum(shop.offsets(group).values()) == 60, within=120, what="all of them")
    assert request_stop(shop.url, group) == [shop.topic]
    assert running.wait(100)
    assert shop.is_exact()


def test_the_lag_is_how_far_each_partition_is_behind_its_end(shop: Shop, spark: SparkSession, group: str) -> None:
    may = threading.Event()
    may.set()

    def load_when_let(df: DataFrame, tx: psycopg.Connection) -> None:
        may.wait(60)
        load(df, tx)

    def lag() -> dict[int, int]:
        return {partition.number: behind for partition, behind in running.lag().items()}

    shop.fill(20)
    with stream(app_of(shop, group, load_when_let), spark, checkpoint=folder(shop)) as running:
        eventually(lambda: lag() == {0: 0, 1: 0, 2: 0}, within=120, what="all of them")
        may.clear()
        shop.fill(7, "b", [0])
        shop.fill(3, "c", [1])
        assert lag() == {0: 7, 1: 3, 2: 0}, "a batch that runs is not passed"
        may.set()
        eventually(lambda: lag() == {0: 0, 1: 0, 2: 0}, within=120, what="the rest of them")
        assert {partition.topic for partition in running.lag()} == {shop.topic}
    shop.fill(2, "d", [2])
    assert lag() == {0: 0, 1: 0, 2: 2}, "also when it has ended"


# Bad input, before a record is read


def test_what_a_stream_cannot_be_is_refused_before_a_record_is_read(
    shop: Shop, spark: SparkSession, group: str
) -> None:
    app = app_of(shop, group)
    refused: list[tuple[dict[str, Any], str]] = [
        ({"trigger": {"continuous": "1 second"}}, "a continuous or real-time trigger has no batches"),
        ({"options": {"minPartitions": "8"}}, "minPartitions='8' splits ranges"),
        ({"options": {"maxRecordsPerPartition": "8"}}, "maxRecordsPerPartition='8' splits ranges"),
        ({"options": {"asyncProgressTrackingEnabled": "true"}}, "what a batch covers is not known"),
        ({"options": {"startingOffsets": "latest"}}, "the query begins at the stored offsets"),
        ({"options": {"failOnDataLoss": "false"}}, "deleted records must end the query with an error"),
    ]
    for options, words in refused:
        with pytest.raises(ConfigurationError, match=words):
            stream(app, spark, **options)
    with pytest.raises(ConfigurationError, match="has no handler"):
        stream(App(shop.bootstrap, group=group, offsets=shop.url), spark)
    other = App(shop.bootstrap, group=group, offsets=shop.url)

    @other.consume(shop.topic)
    def one_by_one(value: bytes) -> None: ...

    with pytest.raises(InvalidHandler, match="one_by_one takes bytes, which a Spark stream cannot pass to a handler"):
        stream(other, spark)
    assert shop.offsets(group) == {}


def test_a_checkpoint_of_another_query_is_refused_before_a_record_is_read(
    shop: Shop, spark: SparkSession, group: str
) -> None:
    Path(folder(shop), "offsets").mkdir(parents=True)
    with pytest.raises(CheckpointMismatch, match="the checkpoint of a query that is not kconsume's"):
        stream(app_of(shop, group), spark, checkpoint=folder(shop))
    shutil.rmtree(folder(shop))
    run(shop, spark, app_of(shop, group))
    with pytest.raises(CheckpointMismatch, match=f"its group is '{group}', and here it is 'other'"):
        stream(app_of(shop, "other"), spark, checkpoint=folder(shop))


def test_a_group_with_members_is_refused(
    shop: Shop, spark: SparkSession, group: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kconsume.spark._stream import handler_query

    monkeypatch.setattr(handler_query, "_MEMBERS_LEAVE", 0.0)
    shop.fill(5)
    with app_of(shop, group).running():
        eventually(lambda: len(shop.seen()) == 15, within=60, what="the embedded app to consume")
        with pytest.raises(ConfigurationError, match=r"has members .*: stop the embedded app first"):
            stream(app_of(shop, group), spark)
    assert shop.is_exact()


def test_a_group_that_keeps_its_offsets_elsewhere_is_refused_and_one_that_is_new_is_not(
    shop: Shop, spark: SparkSession, group: str
) -> None:
    """Of a group that the cluster does not know, its offsets there are not asked for: this one it knows."""
    seen: list[str] = []

    def look(df: DataFrame) -> None:
        seen.extend(values_of(df))

    def elsewhere(group: str) -> App:
        app = App(shop.bootstrap, group=group, offsets=f"sqlite:///{shop.folder}/offsets.db")
        app.consume(shop.topic)(look)
        return app

    shop.fill(10)
    run(shop, spark, app_of(shop, group, load))
    with pytest.raises(ConfigurationError, match=f"group '{group}' keeps its offsets in another store than sqlite"):
        stream(elsewhere(group), spark)
    own = foreach_batch(look, store=f"sqlite:///{shop.folder}/offsets.db", group=group)
    with pytest.raises(ConfigurationError, match=f"group '{group}' keeps its offsets in another store than sqlite"):
        own.wait(shop.query(spark, own, "elsewhere"))
    assert seen == []
    assert stream(elsewhere(f"{group}-new"), spark, trigger=AvailableNow).wait(200)
    assert sorted(seen) == sorted(shop.written)


def test_a_handler_that_cannot_be_pickled_is_refused_when_it_is_given(shop: Shop, group: str) -> None:
    lock = threading.Lock()

    @for_each_partition
    def locked(rows: Any = None) -> None:
        with lock:
            return

    locked.__annotations__.clear()
    with pytest.raises(InvalidHandler, match=r"locked is called in executors and cannot be pickled .*_thread.lock"):
        foreach_batch(locked, store=shop.url, group=group)
    with pytest.raises(ConfigurationError, match=r"is for_each_partition, .* keep the offsets in PostgreSQL"):
        foreach_batch(for_each_partition(lambda rows: None), store="memory://", group=group)


def test_a_query_of_ones_own_that_hides_its_ranges_is_refused_before_a_record_is_read(
    shop: Shop, spark: SparkSession, group: str
) -> None:
    shop.fill(20)
    splitting: dict[str, Any] = {"minPartitions": "6", "maxRecordsPerPartition": "6"}
    for option, value in splitting.items():
        batches = foreach_batch(load_rows, store=shop.url, group=group)
        with pytest.raises(ConfigurationError, match=f"{option}='6' splits ranges"):
            batches.wait(shop.query(spark, batches, option, **{option: value}))
    batches = foreach_batch(load, store=shop.url, group=group)
    with pytest.raises(IllegalArgumentException, match="does not support async progress tracking"):  # Spark's own
        own_writer(shop, spark, batches, "async").option("asyncProgressTrackingEnabled", "true").start()
    with pytest.raises(AnalysisException, match="'foreachBatch' is not supported with continuous trigger"):
        own_writer(shop, spark, batches, "continuous").trigger(continuous="1 second").start()
    assert shop.seen() == []
    assert shop.offsets(group) == {}


def own_writer(shop: Shop, spark: SparkSession, batches: ForeachBatch, checkpoint: str) -> DataStreamWriter:
    writer = shop.source(spark).writeStream.foreachBatch(batches)
    return writer.option("checkpointLocation", str(shop.folder / checkpoint))


# What a person sees


def test_each_batch_is_told_of_in_the_log_and_on_the_spark_ui_and_the_lag_as_it_goes(
    shop: Shop, spark: SparkSession, group: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(foreach, "_HEARTBEAT_EVERY", 0.05)
    monkeypatch.setattr(progress, "LOG_EVERY", 0.0)
    caplog.set_level("INFO", "kconsume.spark")
    shop.fill(20)
    ranges = ",".join(f"{shop.topic}/{n}@0..20" for n in range(3))
    with stream(app_of(shop, group, load), spark, checkpoint=folder(shop)):
        eventually(lambda: "stream progress group=" in caplog.text, within=120, what="a word of progress")
    assert re.search(
        rf"batch done group={group} handler=load batch=0 offsets=60 per_second=\d+ ranges={ranges}", caplog.text
    )
    assert re.search(rf"progress group={group} handler=load batches=1 per_second=\d+ lag=0 worst=0", caplog.text)
    jobs = spark.sparkContext._jsc.sc().statusStore().jobsList(None)
    described = {jobs.apply(n).description().toString() for n in range(jobs.size())}
    assert f"Some({group} load {ranges})" in described

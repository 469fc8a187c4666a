"""Handlers of DataFrames and `SparkSink`, on a real Spark and a real Kafka: what is written is read back."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import msgspec
import psycopg
import pyarrow as pa
import pyarrow.parquet
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

from kconsume import App, Batch, Batching, DeadLetter
from kconsume._handlers.arrow import table_of
from kconsume.records import Partition
from kconsume.spark import SparkSink
from kconsume.spark._sink.dataframes import to_dataframe
from kconsume.testing import feed
from kconsume.testing.services import KafkaService
from tests.fix_kafka import MakeTopic, produce
from tests.unit.fakes import FakeMessage

pytestmark = pytest.mark.timeout(400)  # the first of them waits for Spark to start, on cores that others use too

BATCH = Batching(records=300, wait=0.3)
Transform = Callable[[DataFrame], DataFrame]


class Click(msgspec.Struct):
    id: int
    word: str


def clicks(partition: int, count: int) -> list[str]:
    return [json.dumps({"id": partition * 10_000 + n, "word": f"w{n % 7}"}) for n in range(count)]


@pytest.fixture
def filled(kafka: KafkaService, topic: MakeTopic) -> str:
    """A topic with 1,000 clicks in each of two partitions."""
    name = topic(2)
    for partition in range(2):
        produce(kafka.bootstrap, name, clicks(partition, 1000), partition=partition)
    return name


IDS = [partition * 10_000 + n for partition in range(2) for n in range(1000)]


def app_of(kafka: KafkaService, group: str, offsets: str = "memory://") -> App:
    return App(kafka.bootstrap, group=group, offsets=offsets)


class TestTheDataFrame:
    def test_has_the_columns_of_the_records_and_the_offset_passes_after_it(
        self, spark: SparkSession, kafka: KafkaService, filled: str, group: str
    ) -> None:
        app, seen, names = app_of(kafka, group, "kafka://"), list[Any](), set[str]()
        guard = threading.Lock()

        @app.consume(filled, batch=BATCH)
        def load(df: DataFrame, batch: Batch) -> None:
            rows = df.select("topic", "partition", "offset", f.length("value").alias("size")).collect()
            with guard:
                names.add(df.schema.simpleString())
                seen.extend((row.topic, row.partition, row.offset) for row in rows)
            assert [row.offset for row in rows] == batch.offsets

        report = app.catch_up()
        assert names == {
            "struct<key:binary,value:binary,topic:string,partition:int,offset:bigint,timestamp:timestamp,"
            "headers:array<struct<key:string,value:binary>>>"
        }
        assert sorted(seen) == [(filled, partition, n) for partition in range(2) for n in range(1000)]
        assert report.committed == {Partition(filled, 0): 1000, Partition(filled, 1): 1000}

    def test_has_the_columns_of_a_model_and_a_record_that_is_none_becomes_a_dead_letter(
        self, spark: SparkSession, kafka: KafkaService, topic: MakeTopic, group: str
    ) -> None:
        name, dead = topic(1), topic(1)
        produce(kafka.bootstrap, name, [*clicks(0, 5), "{}", *clicks(1, 5)])
        app, seen = app_of(kafka, group), list[Any]()

        @app.consume(name, batch=BATCH, on_error=DeadLetter(dead))
        def load(df: Annotated[DataFrame, Click]) -> None:
            seen.extend(row.asDict() for row in df.collect())

        @app.consume(dead)
        def bad(value: bytes) -> None:
            assert value == b"{}"
            seen.append(value)

        app.catch_up()
        assert [row["id"] for row in seen if isinstance(row, dict)] == [*range(5), *range(10_000, 10_005)]
        assert seen.count(b"{}") == 1

    def test_a_record_on_which_the_handlers_job_fails_is_found_and_the_others_are_applied(
        self, spark: SparkSession
    ) -> None:
        app, seen = App("embedded://", group="clicks", offsets="memory://"), list[int]()

        @app.consume("clicks", batch=BATCH, on_error=DeadLetter("clicks.dlq"))
        def load(df: Annotated[DataFrame, Click]) -> None:
            checked = df.withColumn("n", f.when(f.col("id") == 3, f.raise_error(f.lit("no"))).otherwise(f.col("id")))
            seen.extend(row.n for row in checked.collect())

        fed = feed(app, "clicks", [{"id": n, "word": "w"} for n in range(6)])
        assert sorted(seen) == [0, 1, 2, 4, 5]
        assert len(fed.dead_letters) == 1

    def test_is_made_in_the_session_that_the_app_declares(self, spark: SparkSession) -> None:
        app, seen = App("embedded://", group="clicks", offsets="memory://"), list[object]()
        mine = spark.newSession()

        @app.resource
        def session() -> Iterator[SparkSession]:
            yield mine

        @app.consume("clicks")
        def load(df: DataFrame, spark: SparkSession) -> None:
            seen.extend([df.sparkSession, spark])

        feed(app, "clicks", [b"a"])
        assert seen == [mine, mine]

    def test_leaves_the_session_as_it_was(self, spark: SparkSession) -> None:
        keys = [f"spark.sql.execution.arrow.{name}" for name in ("localRelationThreshold", "maxRecordsPerBatch")]
        spark.conf.set(keys[1], "1234")
        before = [spark.conf.get(key, None) for key in keys]
        frame = to_dataframe(spark, pa.table({"n": range(1000)}))
        assert [spark.conf.get(key, None) for key in keys] == before
        assert frame.rdd.getNumPartitions() == 2
        assert frame.agg(f.sum("n")).first() == (499_500,)
        spark.conf.unset(keys[1])

    def test_heavy_records_without_headers_are_cut_into_parts(self, spark: SparkSession) -> None:
        table = table_of([FakeMessage(b"y" * 500, offset=n) for n in range(20)])
        frame = to_dataframe(spark, table, part_bytes=2000)
        assert frame.rdd.getNumPartitions() > 4
        assert [row.offset for row in frame.select("offset").collect()] == list(range(20))

    def test_no_rows_is_a_frame_too(self, spark: SparkSession) -> None:
        assert to_dataframe(spark, pa.table({"n": pa.array([], pa.int64())})).count() == 0


def written(app: App, topic: str, sink: SparkSink, batch: Batching = BATCH) -> None:
    app.consume(topic, batch=batch)(sink)
    app.catch_up()


class TestFiles:
    @pytest.mark.parametrize("form", ["parquet", "orc"])
    def test_what_is_consumed_again_in_batches_of_another_size_is_written_once(
        self, form: str, spark: SparkSession, kafka: KafkaService, filled: str, group: str, tmp_path: Path
    ) -> None:
        """Offsets that are forgotten are the worst that a kill between write and commit can do."""
        for size in (300, 170):
            sink = SparkSink(path=tmp_path / "clicks", format=form, rows=Click)
            written(app_of(kafka, group), filled, sink, Batching(size, 0.3))
        read = spark.read.format(form).load(str(tmp_path / "clicks"))
        assert read.schema.simpleString() == "struct<id:bigint,word:string>"
        assert sorted(row.id for row in read.select("id").collect()) == IDS
        names = sorted(path.name for path in (tmp_path / "clicks").glob("offsets-*"))
        assert len(names) >= 8
        assert all(name.startswith(f"offsets-{filled}-") and name.endswith(f".{form}") for name in names)

    def test_options_reach_the_files(
        self, spark: SparkSession, kafka: KafkaService, filled: str, group: str, tmp_path: Path
    ) -> None:
        options = {"compression": "gzip", "parquet.enable.dictionary": "false"}
        written(app_of(kafka, group), filled, SparkSink(path=tmp_path / "clicks", rows=Click, options=options))
        file = next((tmp_path / "clicks").glob("offsets-*.parquet"))
        words = pyarrow.parquet.read_metadata(file).row_group(0).column(1)
        assert (words.path_in_schema, words.compression, words.has_dictionary_page) == ("word", "GZIP", False)

    def test_records_as_they_are_and_a_transform(
        self, spark: SparkSession, kafka: KafkaService, filled: str, group: str, tmp_path: Path
    ) -> None:
        def doubled(frame: DataFrame) -> DataFrame:
            return frame.select("partition", (f.col("offset") * 2).alias("twice"))

        for size in (600, 350):  # the second reads again what the first has written, cut elsewhere
            sink = SparkSink(path=tmp_path / "clicks", transform=doubled)
            app = app_of(kafka, group)
            app.consume(filled, batch=Batching(size, 0.3))(sink)
            app.catch_up()
            produce(kafka.bootstrap, filled, clicks(2, 100), partition=0)
        rows = spark.read.parquet(str(tmp_path / "clicks")).collect()
        assert Counter((row.partition, row.twice) for row in rows) == Counter(
            (partition, 2 * n) for partition, count in ((0, 1100), (1, 1000)) for n in range(count)
        )

    def test_two_sinks_of_one_topic_write_all_of_their_rows_into_one_folder(
        self, spark: SparkSession, kafka: KafkaService, filled: str, group: str, tmp_path: Path
    ) -> None:
        def keep(rest: int) -> Transform:
            return lambda frame: frame.where(f"id % 2 = {rest}")

        app = app_of(kafka, group)
        for rest in (0, 1):
            sink = SparkSink(path=tmp_path / "clicks", rows=Click, transform=keep(rest), name=f"rest_{rest}")
            app.consume(filled, batch=BATCH, group=f"{group}-{rest}")(sink)
        app.catch_up()
        rows = spark.read.parquet(str(tmp_path / "clicks")).select("id").collect()
        assert sorted(row.id for row in rows) == IDS


class TestPostgres:
    @pytest.fixture
    def table(self, database: psycopg.Connection) -> str:
        database.execute("create table clicks (id bigint, word text)")
        return "clicks"

    def ids(self, database: psycopg.Connection) -> list[int]:
        return [row[0] for row in database.execute("select id from clicks order by id")]

    def test_with_a_range_of_its_own_nothing_is_written_twice_whatever_becomes_of_the_offsets(
        self, kafka: KafkaService, filled: str, group: str, postgres_url: str, database: psycopg.Connection, table: str
    ) -> None:
        for size in (300, 170):
            sink = SparkSink(table=table, url=postgres_url, rows=Click)
            written(app_of(kafka, group), filled, sink, Batching(size, 0.3))
        assert self.ids(database) == IDS

    def test_two_sinks_of_one_topic_write_all_of_their_rows_into_one_table(
        self, kafka: KafkaService, filled: str, group: str, postgres_url: str, database: psycopg.Connection, table: str
    ) -> None:
        app = app_of(kafka, group)
        for reader in ("one", "two"):
            sink = SparkSink(table=table, url=postgres_url, rows=Click, name=f"copy_{reader}")
            app.consume(filled, batch=BATCH, group=f"{group}-{reader}")(sink)
        app.catch_up()
        assert self.ids(database) == sorted(IDS * 2)

    def test_control_without_the_range_it_is_written_twice(
        self, kafka: KafkaService, filled: str, group: str, postgres_url: str, database: psycopg.Connection, table: str
    ) -> None:
        for size in (300, 170):
            sink = SparkSink(table=table, url=postgres_url, rows=Click)
            written(app_of(kafka, group), filled, sink, Batching(size, 0.3))
            database.execute("delete from kconsume_sink_ranges")
        assert self.ids(database) == sorted(IDS * 2)

    def test_in_the_transaction_of_the_offset_store_with_a_transform(
        self, spark: SparkSession, kafka: KafkaService, filled: str, group: str, postgres_url: str,
        database: psycopg.Connection, table: str,
    ) -> None:  # fmt: skip
        def odd(frame: DataFrame) -> DataFrame:
            return frame.where("id % 2 = 1")

        sink = SparkSink(table=table, format="jdbc", rows=Click, transform=odd)
        written(app_of(kafka, group, postgres_url), filled, sink)
        assert self.ids(database) == [n for n in IDS if n % 2]

    def test_rows_that_the_table_refuses_are_found_and_the_others_are_there(
        self, kafka: KafkaService, topic: MakeTopic, group: str, postgres_url: str, database: psycopg.Connection,
        table: str,
    ) -> None:  # fmt: skip
        database.execute("alter table clicks add check (id <> 3)")
        name, dead = topic(1), topic(1)
        produce(kafka.bootstrap, name, clicks(0, 8))
        app = app_of(kafka, group)
        sink = SparkSink(table=table, url=postgres_url, rows=Click)
        app.consume(name, batch=BATCH, on_error=DeadLetter(dead))(sink)
        assert app.catch_up().skipped == 1
        assert self.ids(database) == [0, 1, 2, 4, 5, 6, 7]

    def test_records_as_they_are_with_their_headers_as_json(
        self, kafka: KafkaService, filled: str, group: str, postgres_url: str, database: psycopg.Connection
    ) -> None:
        database.execute(
            'create table raw (key bytea, value bytea, topic text, partition int, "offset" bigint, '
            '"timestamp" timestamptz, headers jsonb)'
        )
        written(app_of(kafka, group), filled, SparkSink(table="raw", url=postgres_url))
        rows = database.execute('select partition, "offset" from raw where "timestamp" is not null').fetchall()
        assert sorted(rows) == [(partition, n) for partition in range(2) for n in range(1000)]

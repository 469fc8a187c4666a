"""Handlers of streams: what their signatures get, and what is refused before anything runs."""

from __future__ import annotations

import pickle
import re
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pyarrow as pa
import pytest
from pyspark.sql import DataFrame

from kconsume import App, Batch, DeadLetter, Record, Retry, RetryTopics
from kconsume.errors import ConfigurationError, InvalidHandler, MissingExtra
from kconsume.records import Partition
from kconsume.spark import StreamBatch, for_each_partition, foreach_batch, stream
from kconsume.spark._batch.dead_letters import TableMessages
from kconsume.spark._batch.handler_call import read_call
from kconsume.spark._batch.ranges import OffsetRange
from kconsume.spark._batch.stream_batch import RangeBatch
from kconsume.spark._stream.kafka_options import source_options
from tests.ids import short

EXTRAS = tomllib.loads(Path(__file__).parents[3].joinpath("pyproject.toml").read_text())["project"][
    "optional-dependencies"
]
OFFERED = (psycopg.Connection,)
BATCH = StreamBatch("shop", (OffsetRange(Partition("orders", 0), 3, 9),), batch_id=4)


def plain(df: DataFrame) -> None: ...
def bare(df, batch_id): ...  # type: ignore[no-untyped-def]
def with_tx(df: DataFrame, tx: psycopg.Connection) -> None: ...
def with_all(df: DataFrame, batch: Batch, number: int, tx: psycopg.Connection, size: float = 1.0) -> None: ...
def of_tables(table: pa.Table) -> None: ...
def of_batches(rows: Iterator[pa.RecordBatch], tx: psycopg.Connection) -> None: ...
def of_records(records: Iterator[Record]) -> None: ...


@pytest.mark.parametrize(
    ("handler", "form", "others"),
    [
        (plain, "frame", ()),
        (bare, "frame", (("batch_id", "batch_id"),)),
        (with_tx, "frame", (("tx", "tx"),)),
        (with_all, "frame", (("batch", "batch"), ("number", "batch_id"), ("tx", "tx"))),
        (of_tables, "table", ()),
        (of_batches, "batches", (("tx", "tx"),)),
        (of_records, "records", ()),
        (for_each_partition(lambda rows: None), "batches", ()),
    ],
    ids=short,
)
def test_the_annotations_say_what_a_handler_gets(handler: Any, form: str, others: tuple[Any, ...]) -> None:
    call = read_call(handler, OFFERED, "postgresql://shop")
    assert (call.form, call.others) == (form, others)
    assert call.in_executors == (form != "frame")


def test_a_call_hands_over_what_was_asked_for() -> None:
    got: list[object] = []

    def handler(df: DataFrame, batch: StreamBatch, batch_id: int) -> None:
        got.extend([df, batch, batch_id])

    read_call(handler, OFFERED, "postgresql://shop")("the frame", None, BATCH)
    assert got == ["the frame", BATCH, 4]


async def awaited(df: DataFrame) -> None: ...
def of_bytes(value: bytes) -> None: ...
def greedy(*frames: DataFrame) -> None: ...
def nothing() -> None: ...
def stranger(df: DataFrame, client: dict[str, int]) -> None: ...
def generating(df: DataFrame) -> Iterator[int]:
    yield 1


@pytest.mark.parametrize(
    ("handler", "words"),
    [
        (awaited, "is async"),
        (of_bytes, "takes value: bytes, which a Spark stream cannot pass to a handler"),
        (greedy, "name each thing it should get"),
        (nothing, "no parameter for the frame"),
        (
            stranger,
            r"asks for client: dict\[str, int\], which nobody provides in a stream with offsets in postgresql://shop",
        ),
        (generating, "is a generator"),
        (for_each_partition(lambda rows, tx, more: None), "asks for more, which nobody provides"),
    ],
    ids=short,
)
def test_what_cannot_be_given_is_refused(handler: Callable[..., object], words: str) -> None:
    with pytest.raises(InvalidHandler, match=words):
        read_call(handler, OFFERED, "postgresql://shop")


def test_a_frame_in_executors_is_refused() -> None:
    def frame(df: DataFrame) -> None: ...

    with pytest.raises(InvalidHandler, match="there are no DataFrames"):
        read_call(for_each_partition(frame), OFFERED, "postgresql://shop")


def test_a_batch_knows_its_ranges_and_not_its_records() -> None:
    assert BATCH.id == "shop:orders/0@3..9"
    assert bool(BATCH)
    asked: list[Callable[[StreamBatch], object]] = [
        len, list, lambda each: each[0], lambda each: each.topic, lambda each: each.partition, lambda each: each.first,
        lambda each: each.last, lambda each: each.keys, lambda each: each.timestamps,
    ]  # fmt: skip
    for ask in asked:
        with pytest.raises(ConfigurationError, match=r"its records are in the DataFrame\. Use batch\.ranges"):
            ask(BATCH)
    with pytest.raises(ConfigurationError, match=r"batch.reject\(\) needs a place for dead letters"):
        BATCH.reject(pa.table({}), "why")


def test_a_batch_in_an_executor_knows_its_records_beside_a_table_and_its_bounds_beside_an_iterator() -> None:
    ranges = (OffsetRange(Partition("orders", 2), 3, 9),)
    table = pa.table({"topic": ["orders"] * 2, "partition": [2, 2], "offset": [4, 7], "key": [b"a", None]})
    known = RangeBatch("shop", ranges, messages=TableMessages(table), scope="shop:id")
    assert (known.topic, known.partition, known.first, known.last, known.keys) == ("orders", 2, 4, 7, [b"a", None])
    assert known.id == "shop:id:2:4-7"
    assert [record.offset for record in known] == [4, 7]
    assert (known[-1].id, known[:1].offsets) == ("shop:id:2:7", [4])
    bounded = RangeBatch("shop", ranges, scope="shop:id")
    assert (bounded.topic, bounded.partition, bounded.first, bounded.last) == ("orders", 2, 3, 8)
    assert bounded.id == "shop:orders/2@3..9"
    with pytest.raises(ConfigurationError, match="its records are in the DataFrame"):
        len(bounded)


def test_what_a_store_cannot_do_from_spark_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="RetryTopics, which are read by an embedded app"):
        foreach_batch(plain, store="memory://", group="shop", retry=RetryTopics(delays=(5,)))
    with pytest.raises(ConfigurationError, match="on_error='hold', which holds a single partition"):
        foreach_batch(plain, store="memory://", group="shop", on_error="hold")
    with pytest.raises(ConfigurationError, match=r"has a DeadLetter, .* keep the offsets in PostgreSQL"):
        foreach_batch(plain, store="memory://", group="shop", on_error=DeadLetter("dead"), retry=Retry(2))
    with pytest.raises(InvalidHandler, match="asks for tx: Connection, which nobody provides"):
        foreach_batch(with_tx, store="memory://", group="shop")


def test_the_extra_brings_what_a_handler_in_executors_needs() -> None:
    """`mapInArrow` needs pandas, though nothing here does, and PySpark's own metadata asks for neither."""
    names = {re.split("[^a-z]", line)[0] for line in EXTRAS["spark"]}
    assert names == {"pyspark", "pyarrow", "pandas"}


@pytest.mark.parametrize(("module", "said"), [("pandas", r"Pandas >= 2\.2"), ("pyarrow", "PyArrow >= 18")])
def test_a_handler_in_executors_without_pandas_or_pyarrow_is_refused_with_the_extra(
    module: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    read_call(of_records, (), "memory://")
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingExtra, match=rf"of_records is called in executors.*{said}.*'kconsume\[spark\]'"):
        foreach_batch(of_records, store="postgresql://nowhere/shop", group="shop")
    foreach_batch(plain, store="postgresql://nowhere/shop", group="shop")


def test_spark_connect_is_told_why_not() -> None:
    """It pickles the handler, to send it to the server."""
    with pytest.raises(ConfigurationError, match="Run the driver in classic mode"):
        pickle.dumps(foreach_batch(plain, store="memory://", group="shop"))


def test_a_stream_on_spark_connect_is_told_why_not() -> None:
    session = type("SparkSession", (), {"__module__": "pyspark.sql.connect.session"})()
    with pytest.raises(ConfigurationError, match=r"not work with Spark Connect: .* Run the driver in classic mode"):
        stream(App("a:1", group="shop"), session)


def test_offsets_in_kafka_need_the_brokers_that_only_the_query_knows() -> None:
    with pytest.raises(ConfigurationError, match=r"write foreach_batch\(…, brokers='host:port'\)"):
        foreach_batch(plain, store="kafka://", group="shop")
    foreach_batch(plain, store="kafka://", group="shop", brokers="a:1")


# The source


def test_a_source_reads_more_at_once_than_sparks_defaults() -> None:
    options = source_options("a:1", {"fetch.queue.backoff.ms": 5}, {"kafka.max.poll.records": "7"})
    assert options["kafka.bootstrap.servers"] == "a:1"
    assert options["kafka.max.partition.fetch.bytes"] == "8388608"
    assert options["kafka.max.poll.records"] == "7"
    assert not any("backoff" in name for name in options)


def test_a_login_is_put_into_javas_words() -> None:
    kafka = {
        "security.protocol": "SASL_SSL", "sasl.mechanisms": "SCRAM-SHA-512", "sasl.username": "shop",
        "sasl.password": 'a"b\\', "ssl.ca.location": "/ca.pem",
    }  # fmt: skip
    options = source_options("a:1", kafka, {})
    assert options["kafka.security.protocol"] == "SASL_SSL"
    assert options["kafka.sasl.mechanism"] == "SCRAM-SHA-512"
    assert options["kafka.ssl.truststore.location"] == "/ca.pem"
    assert options["kafka.sasl.jaas.config"] == (
        'org.apache.kafka.common.security.scram.ScramLoginModule required username="shop" password="a\\"b\\\\";'
    )


def test_what_has_no_word_in_java_is_refused_by_name() -> None:
    with pytest.raises(ConfigurationError, match=r"'ssl\.key\.location': …\} says how to connect"):
        source_options("a:1", {"ssl.key.location": "/key.pem"}, {})
    with pytest.raises(ConfigurationError, match=r"sasl\.mechanisms=GSSAPI cannot be configured"):
        source_options("a:1", {"sasl.mechanisms": "GSSAPI", "sasl.username": "a", "sasl.password": "b"}, {})

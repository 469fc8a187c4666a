"""Queries that keep state between batches are refused around `foreach_batch`; those without state go on.

Spark emits a closed window in a batch without new offsets. Such a batch has no range, so the handler is not called for
it, and the window would be lost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import psycopg
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f
from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle

from kconsume.errors import ConfigurationError
from kconsume.spark import foreach_batch
from kconsume.spark._stream import foreach_batch as foreach
from tests.spark.shop import Shop, load, load_rows, write

pytestmark = [pytest.mark.xdist_group("spark"), pytest.mark.timeout(600)]

Shape = Callable[[DataFrame], DataFrame]
WORD = "cast(value as string) word"


def in_time(source: DataFrame) -> DataFrame:
    """The records, ten seconds apart, with a watermark."""
    seconds = "timestamp_seconds(10 * cast(split(cast(value as string), ':')[2] as bigint)) time"
    return source.selectExpr(WORD, seconds, "partition").withWatermark("time", "0 seconds")


def windows(source: DataFrame) -> DataFrame:
    return in_time(source).groupBy(f.window("time", "1 minute")).agg(f.count("*").alias("n"))


def sessions(source: DataFrame) -> DataFrame:
    return in_time(source).groupBy(f.session_window("time", "5 seconds"), "partition").agg(f.count("*").alias("n"))


def joined(source: DataFrame) -> DataFrame:
    left, right = in_time(source), in_time(source).select(f.col("word").alias("other"), f.col("time").alias("later"))
    return left.join(right, f.expr("word = other and later >= time"))


def stated(source: DataFrame) -> DataFrame:
    def none(key: Any, frames: Any, state: Any) -> Iterator[Any]:
        return iter(())

    return in_time(source).groupBy("partition").applyInPandasWithState(none, "n long", "n long", "append", "NoTimeout")


class Counting(StatefulProcessor):
    def init(self, handle: StatefulProcessorHandle) -> None:
        """It keeps nothing."""

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Any:  # noqa: N802, N803  (Spark's names)
        return iter(())

    def close(self) -> None:
        """It has nothing to close."""


def transformed(source: DataFrame) -> DataFrame:
    grouped = in_time(source).groupBy("partition")
    return grouped.transformWithState(Counting(), "n long", "append", "none")


STATEFUL: dict[str, tuple[Shape, str]] = {
    "windows": (windows, "groupBy with an aggregation"),
    "session windows": (sessions, "groupBy with an aggregation"),
    "distinct": (lambda source: source.selectExpr(WORD).distinct(), "distinct or dropDuplicates"),
    "dropDuplicates": (lambda source: in_time(source).dropDuplicates(["word"]), "distinct or dropDuplicates"),
    "dropDuplicatesWithinWatermark": (
        lambda source: in_time(source).dropDuplicatesWithinWatermark(["word"]),
        "dropDuplicatesWithinWatermark",
    ),
    "join of streams": (joined, "a join of two streams"),
    "limit": (lambda source: source.limit(5), "limit"),
    "applyInPandasWithState": (stated, "applyInPandasWithState"),
    "transformWithState": (transformed, "transformWithState"),
}

STATELESS: dict[str, Shape] = {
    "filter": lambda source: source.where("partition >= 0").select("value", "topic", "partition", "offset"),
    "watermark": lambda source: source.withWatermark("timestamp", "1 minute"),
    "join with a table": lambda source: source.join(
        source.sparkSession.range(3).groupBy("id").agg(f.max("id").alias("most")), f.expr("id = partition")
    ),
}


@pytest.fixture
def rocks(spark: SparkSession) -> Iterator[None]:
    """What transformWithState needs."""
    key = "spark.sql.streaming.stateStore.providerClass"
    spark.conf.set(key, "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider")
    yield
    spark.conf.unset(key)


def run(shop: Shop, spark: SparkSession, handler: Any, group: str, frame: DataFrame, checkpoint: str = "own") -> None:
    batches = foreach_batch(handler, store=shop.url, group=group)
    batches.wait(shop.query(spark, batches, checkpoint, frame))


def untouched(shop: Shop, group: str) -> bool:
    """Whether nothing was claimed, begun or passed."""
    with shop.look() as look:
        (made,) = look.execute("select to_regclass('kconsume_streams') is not null").fetchone() or (True,)
        streams = look.execute("select 1 from kconsume_streams").fetchall() if made else []
    return shop.offsets(group) == {} and not streams


@pytest.mark.usefixtures("rocks")
@pytest.mark.parametrize("name", STATEFUL)
def test_a_query_with_state_is_refused_before_a_record_is_read(
    name: str, shop: Shop, spark: SparkSession, group: str
) -> None:
    shop.fill(20)
    shape, words = STATEFUL[name]
    calls: list[int] = []

    def handler(df: DataFrame, batch_id: int) -> None:
        calls.append(batch_id)

    for _ in range(2 if name == "windows" else 1):  # a second start is no way around it
        with pytest.raises(ConfigurationError, match=rf"keeps state from one batch to the next \({words}\)"):
            run(shop, spark, handler, group, shape(shop.source(spark)))
    assert calls == []
    assert untouched(shop, group)


def test_a_query_with_state_is_refused_also_for_a_handler_in_executors(
    shop: Shop, spark: SparkSession, group: str
) -> None:
    shop.fill(20)
    deduplicated = shop.source(spark).withWatermark("timestamp", "1 minute").dropDuplicates(["value"])
    with pytest.raises(ConfigurationError, match="keeps state from one batch to the next"):
        run(shop, spark, load_rows, group, deduplicated)
    assert untouched(shop, group)


@pytest.mark.parametrize("name", STATELESS)
def test_a_query_without_state_goes_on(name: str, shop: Shop, spark: SparkSession, group: str) -> None:
    shop.fill(20)
    for more in range(2):
        run(shop, spark, load, group, STATELESS[name](shop.source(spark)))
        assert shop.is_exact()
        shop.fill(5, f"more{more}")


def load_windows(df: DataFrame, tx: psycopg.Connection) -> None:
    write(tx, [f"{row.window.start} {row.n}" for row in df.collect()])


def test_control_without_the_refusal_windows_are_lost_and_their_offsets_passed(
    shop: Shop, spark: SparkSession, group: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    shop.fill(100)
    emitted: list[str] = []

    def bare(df: DataFrame, batch_id: int) -> None:
        emitted.extend(f"{row.window.start} {row.n}" for row in df.collect())

    shop.query(spark, bare, "bare", windows(shop.source(spark))).awaitTermination()
    assert len(emitted) == 16
    monkeypatch.setattr(foreach, "check_query", lambda *_, **__: None)
    with suppress(Exception):  # Spark's own check of its state store ends the first start
        run(shop, spark, load_windows, group, windows(shop.source(spark)))
    run(shop, spark, load_windows, group, windows(shop.source(spark)))
    assert shop.offsets(group) == {0: 100, 1: 100, 2: 100}
    assert shop.seen() == []

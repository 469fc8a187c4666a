"""The second way, to PostgreSQL: your own streaming query. Spark reads Kafka, and kconsume applies each range once.

The rows, the totals of the pages and the offsets of the micro-batch commit in one transaction. Otherwise a
kill could lead to a total that was raised twice.

    python -m examples.lakehouse.warehouse
"""

from __future__ import annotations

import psycopg
from pyspark.sql import DataFrame
from pyspark.sql import functions as f

from kconsume.spark import foreach_batch, open_session

from .clicks import BROKERS, CHECKPOINT, CLICKS, STAGE, WAREHOUSE

FIELDS = "id bigint, visitor string, page string, at timestamp, milliseconds int"


def keep(df: DataFrame, tx: psycopg.Connection) -> None:
    click = f.from_json(f.col("value").cast("string"), FIELDS, {"mode": "FAILFAST"})
    clicks = df.select(click.alias("click")).select("click.*").persist()  # else each action reads Kafka again
    try:
        _copy(clicks, tx)
        _count(clicks, tx)
    finally:
        clicks.unpersist()


def _copy(clicks: DataFrame, tx: psycopg.Connection) -> None:
    with tx.cursor() as cursor, cursor.copy("copy clicks (id, visitor, page, at, milliseconds) from stdin") as copy:
        for row in clicks.toArrow().to_pylist():
            copy.write_row(list(row.values()))


def _count(clicks: DataFrame, tx: psycopg.Connection) -> None:
    for page, times in clicks.groupBy("page").count().collect():
        tx.execute(
            "insert into pages values (%s, %s)"
            " on conflict (page) do update set clicks = pages.clicks + excluded.clicks",
            (page, times),
        )


def main() -> None:
    batches = foreach_batch(keep, store=WAREHOUSE, group=f"{STAGE}warehouse")
    spark = open_session("warehouse", connector=True)
    source = (
        spark.readStream.format("kafka")
        .option("kafka.bootstrap.servers", BROKERS)
        .option("subscribe", CLICKS)
        .option("startingOffsets", "earliest")
        .option("maxOffsetsPerTrigger", 2_000)
        .load()
    )
    query = source.writeStream.foreachBatch(batches).option("checkpointLocation", CHECKPOINT).start()
    batches.wait(query)  # on SIGTERM, the running batch is finished first
    spark.stop()


if __name__ == "__main__":
    main()

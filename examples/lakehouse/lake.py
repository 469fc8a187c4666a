"""The first way, to parquet: an app with `SparkSink`. kconsume reads Kafka, and Spark writes the files.

A range of offsets becomes one complete file, and each range is in the folder once. The offsets are stored in Kafka, but
the files in the folder decide which ranges were written.

    kconsume run examples.lakehouse.lake:app
"""

from __future__ import annotations

from collections.abc import Iterator

from pyspark.sql import SparkSession

from kconsume import App, Batching
from kconsume.spark import SparkSink, open_session

from .clicks import BROKERS, CLICKS, LAKE, STAGE, Click

app = App(BROKERS, group=f"{STAGE}lake")


@app.resource
def spark() -> Iterator[SparkSession]:
    # Spark's default type for a time in parquet, INT96, has no time zone for readers other than Spark.
    session = open_session("lake", settings={"spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS"})
    yield session
    session.stop()


app.consume(CLICKS, batch=Batching(records=1_000, wait=0.5))(SparkSink(path=LAKE, rows=Click, name="lake"))

if __name__ == "__main__":
    app.run()

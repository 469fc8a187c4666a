"""Way one, into parquet: an app, and the sink that is there. kconsume reads Kafka, Spark writes the files.

A file is made for each range of offsets, whole or not at all, and a range is in the folder once. The offsets stay in
Kafka: where the folder stands decides.

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
    # Spark's default for a time in parquet, INT96, has no time zone for those who read it without Spark.
    session = open_session("lake", settings={"spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS"})
    yield session
    session.stop()


app.consume(CLICKS, batch=Batching(records=1_000, wait=0.5))(SparkSink(path=LAKE, rows=Click, name="lake"))

if __name__ == "__main__":
    app.run()

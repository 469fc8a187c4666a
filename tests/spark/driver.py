"""A driver that is to be killed: `python -m tests.spark.driver`, its orders as JSON on the command line.

It runs the shop's handler as a stream, or in a query of its own, until it is told to stop.
"""

from __future__ import annotations

import dataclasses
import logging
import sys
from pathlib import Path

import msgspec
from pyspark.sql import SparkSession

from kconsume import App
from kconsume.spark import foreach_batch, stream
from kconsume.spark.session import open_session
from tests.fix_spark import spark_settings
from tests.spark.shop import load, load_table


@dataclasses.dataclass
class Orders:
    bootstrap: str
    topic: str
    url: str
    group: str
    form: str
    """`driver` and `executors`: a stream whose handler runs there; `own`: a query of one's own."""
    folder: str
    master: str
    max_records: int

    @property
    def checkpoint(self) -> str:
        return f"{self.folder}/checkpoint"


def main(orders: Orders) -> None:
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(name)s %(message)s")
    logging.getLogger("py4j").setLevel(logging.CRITICAL)
    scratch = Path(orders.folder, "scratch")
    scratch.mkdir(exist_ok=True)
    settings = {
        **spark_settings(scratch),
        "spark.task.maxFailures": "50",
        "spark.deploy.maxExecutorRetries": "-1",
        "spark.shuffle.service.enabled": "false",
    }
    spark = open_session("driver", master=orders.master, settings=settings)
    run_own_query(orders, spark) if orders.form == "own" else run_stream(orders, spark)
    spark.stop()
    print("drained", flush=True)  # noqa: T201


def app_of(orders: Orders) -> App:
    app = App(orders.bootstrap, group=orders.group, offsets=orders.url)
    app.consume(orders.topic)(load if orders.form == "driver" else load_table)
    return app


def run_stream(orders: Orders, spark: SparkSession) -> None:
    stream(app_of(orders), spark, checkpoint=orders.checkpoint, max_records=orders.max_records).wait()


def run_own_query(orders: Orders, spark: SparkSession) -> None:
    """Its checkpoint is where a stream would have its first."""
    source = spark.readStream.format("kafka").option("kafka.bootstrap.servers", orders.bootstrap)
    source = source.option("subscribe", orders.topic).option("startingOffsets", "earliest")
    frame = source.option("maxOffsetsPerTrigger", str(orders.max_records)).load()
    batches = foreach_batch(load, store=orders.url, group=orders.group)
    writer = frame.writeStream.foreachBatch(batches)
    batches.wait(writer.option("checkpointLocation", f"{orders.checkpoint}/gen-0001").start())


if __name__ == "__main__":
    main(msgspec.json.decode(sys.argv[1], type=Orders))

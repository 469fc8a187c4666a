"""A driver with one `SparkSink`, to be killed: `python -m tests.spark.sink_program '{"brokers": …}'`."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec

from kconsume import App, Batching
from kconsume.spark import SparkSink, open_session
from tests.fix_spark import LOCAL, spark_settings


class Click(msgspec.Struct):
    id: int


class Told(msgspec.Struct):
    brokers: str
    topic: str
    group: str
    offsets: str
    records: int
    """In a batch."""
    path: str | None = None
    table: str | None = None
    url: str | None = None


def main(told: Told, scratch: Path) -> None:
    app = App(
        told.brokers,
        group=told.group,
        offsets=told.offsets,
        instance="driver",  # so that its partitions are its own again as soon as it is started again
        kafka={"session.timeout.ms": 10_000},
    )
    if told.path is not None:
        open_session("sink", master=LOCAL, settings={**spark_settings(scratch), "spark.jars": ""})
    sink = SparkSink(path=told.path, table=told.table, url=told.url, rows=Click)
    app.consume(told.topic, batch=Batching(told.records, 0.2))(sink)
    app.catch_up(idle=1.0)


if __name__ == "__main__":
    main(msgspec.json.decode(sys.argv[1], type=Told), Path(sys.argv[2]))

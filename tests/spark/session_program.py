"""A session without the connector's jars, or with some of another kind, and what is said of it: by the check that a
person calls, and by a stream, which must not have claimed anything by then.

`python -m tests.spark.session_program BROKERS TOPIC SCRATCH [JARS]`: a process of its own, for a JVM keeps its jars.
"""

from __future__ import annotations

import sys
from pathlib import Path

from pyspark.sql import DataFrame

from kconsume import App
from kconsume.backends.registry import open_store
from kconsume.errors import ConfigurationError
from kconsume.records import Partition
from kconsume.spark import check_connector, open_session, stream
from tests.fix_spark import spark_settings

GROUP = "checked"


def main(brokers: str, topic: str, scratch: str, jars: str = "") -> None:
    spark = open_session("check", master="local[1]", settings={**spark_settings(Path(scratch)), "spark.jars": jars})
    try:
        check_connector(spark, brokers, topic)
    except ConfigurationError as refusal:
        sys.stdout.write(f"check: {refusal}\n")
    offsets = f"sqlite:///{scratch}/offsets.db"
    app = App(brokers, group=GROUP, offsets=offsets)

    @app.consume(topic)
    def load(df: DataFrame) -> None:
        raise AssertionError("a record was read")

    try:
        stream(app, spark, trigger={"availableNow": True}).wait()
    except ConfigurationError as refusal:
        sys.stdout.write(f"stream: {refusal}\n")
    sys.stdout.write(f"claimed: {len(open_store(offsets).load(GROUP, [Partition(topic, 0)]))}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])

"""A session without the connector's jars, or with one of another kind, and what the start-up check says of it.

`python -m tests.spark.session_program BROKERS TOPIC SCRATCH [JARS]`: a process of its own, for a JVM keeps its jars.
"""

from __future__ import annotations

import sys
from pathlib import Path

from kconsume.errors import ConfigurationError
from kconsume.spark import check_connector, open_session
from tests.fix_spark import spark_settings


def main(brokers: str, topic: str, scratch: str, jars: str = "") -> None:
    spark = open_session("check", master="local[1]", settings={**spark_settings(Path(scratch)), "spark.jars": jars})
    try:
        check_connector(spark, brokers, topic)
    except ConfigurationError as refusal:
        sys.stdout.write(f"refused: {refusal}\n")
    else:
        sys.stdout.write("fits\n")


if __name__ == "__main__":
    main(*sys.argv[1:])

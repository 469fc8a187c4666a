"""The session on a real Spark: what it is opened with, and whether the connector that it has fits."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from kconsume.spark import jars
from kconsume.spark.session import check_connector, missing_jars, open_session
from kconsume.testing.services import KafkaService
from tests.fix_kafka import MakeTopic
from tests.fix_spark import driver_environment

pytestmark = pytest.mark.timeout(400)


def test_a_session_that_is_there_is_taken_as_it_is(spark: SparkSession) -> None:
    assert open_session("another", master="local[7]").sparkContext is spark.sparkContext


def test_the_connector_fits_when_a_stream_opens(spark: SparkSession, kafka: KafkaService, topic: MakeTopic) -> None:
    assert missing_jars(spark) == []
    check_connector(spark, kafka.bootstrap, topic(1))


def test_a_session_without_the_jars_is_refused_with_the_coordinates_that_are_missing(
    kafka: KafkaService, topic: MakeTopic, tmp_path: Path
) -> None:
    connector = next(path for path in jars.connector_jars() if "spark-sql-kafka" in path.name)
    command = [sys.executable, "-m", "tests.spark.session_program", kafka.bootstrap, topic(1), str(tmp_path)]
    done = subprocess.run(
        [*command, str(connector)], env=driver_environment(), capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("refused: Spark has no Kafka source: ")
    missing = [jar.coordinate for jar in jars.CONNECTOR if jar.coordinate in done.stdout.partition("missing")[0]]
    assert missing == [jar.coordinate for jar in jars.CONNECTOR[1:]]
    assert "PySpark 4.2.0" in done.stdout
    assert jars.FETCH in done.stdout

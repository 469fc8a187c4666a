"""The session on a real Spark: what it is opened with, and whether the connector that it has fits."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from kconsume.spark import jars
from kconsume.spark.session import check_connector, missing_jars, open_session
from kconsume.testing.services import KafkaService
from kconsume.testing.services.jars import fetched_jars
from tests.fix_kafka import MakeTopic
from tests.fix_spark import driver_environment

pytestmark = pytest.mark.timeout(400)


def test_a_session_that_is_there_is_taken_as_it_is(spark: SparkSession) -> None:
    assert open_session("another", master="local[7]").sparkContext is spark.sparkContext


def test_the_connector_fits_when_a_stream_opens(spark: SparkSession, kafka: KafkaService, topic: MakeTopic) -> None:
    assert missing_jars(spark) == []
    check_connector(spark, kafka.bootstrap, topic(1))


OLDER = (
    "org.apache.spark:spark-sql-kafka-0-10_2.13:4.0.0@jar",
    "org.apache.spark:spark-token-provider-kafka-0-10_2.13:4.0.0@jar",
    "org.apache.kafka:kafka-clients:3.9.2@jar",
    "org.apache.commons:commons-pool2:2.13.1@jar",
)


def said_with(kafka: KafkaService, topic: str, scratch: Path, given: list[Path]) -> dict[str, str]:
    """By the check, and by `stream`."""
    command = [sys.executable, "-m", "tests.spark.session_program", kafka.bootstrap, topic, str(scratch)]
    done = subprocess.run(
        [*command, ",".join(map(str, given))], env=driver_environment(), capture_output=True, text=True, check=True
    )
    return dict(line.split(": ", 1) for line in done.stdout.splitlines() if ": " in line)


def test_a_session_without_the_jars_is_refused_with_the_coordinates_that_are_missing(
    kafka: KafkaService, topic: MakeTopic, tmp_path: Path
) -> None:
    connector = next(path for path in jars.connector_jars() if "spark-sql-kafka" in path.name)
    said = said_with(kafka, topic(1), tmp_path, [connector])
    assert said["check"] == said["stream"]
    assert said["check"].startswith("Spark has no Kafka source: ")
    missing = [jar.coordinate for jar in jars.CONNECTOR if jar.coordinate in said["check"].partition("missing")[0]]
    assert missing == [jar.coordinate for jar in jars.CONNECTOR[1:]]
    assert "PySpark 4.2.0" in said["check"]
    assert jars.FETCH in said["check"]
    assert said["claimed"] == "0"


def test_the_jars_of_another_spark_are_refused_by_a_stream_that_opens_before_anything_is_claimed(
    kafka: KafkaService, topic: MakeTopic, tmp_path: Path
) -> None:
    """All classes are there, and a batch would pass."""
    said = said_with(kafka, topic(1), tmp_path, sorted(fetched_jars(OLDER, "spark-kafka-4.0.0").iterdir()))
    for where in ("check", "stream"):
        assert said[where].startswith("Spark's Kafka source does not fit PySpark 4.2.0 (")
        assert f"use exactly {jars.all_coordinates()}" in said[where]
    assert said["claimed"] == "0"


# The Python of the executors


def run_without_activating(mode: str, scratch: Path) -> dict[str, str]:
    """With a `python3` on the PATH that has none of the packages, as outside of a virtual environment."""
    (scratch / "bin").mkdir()
    (scratch / "bin" / "python3").symlink_to(sys._base_executable)  # type: ignore[attr-defined]
    environment = driver_environment()
    del environment["PYSPARK_PYTHON"]
    environment["PATH"] = f"{scratch / 'bin'}{os.pathsep}{environment['PATH']}"
    command = [sys.executable, "-m", "tests.spark.python_program", mode, str(scratch)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return dict(line.split(": ", 1) for line in done.stdout.splitlines() if ": " in line)


def test_the_executors_of_a_session_that_kconsume_opens_have_the_drivers_python(tmp_path: Path) -> None:
    """Though the virtual environment is not activated."""
    assert run_without_activating("ours", tmp_path) == {"executors": sys.executable}


def test_a_session_whose_executors_have_another_python_is_refused_with_the_fix(tmp_path: Path) -> None:
    said = run_without_activating("theirs", tmp_path)
    assert list(said) == ["stream", "own"]
    for refusal in said.values():
        assert refusal.startswith("the Python of the executors, 'python3', cannot run a handler (ModuleNotFoundError:")
        assert f"PYSPARK_PYTHON={sys.executable}" in refusal

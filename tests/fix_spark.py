"""Fixtures for tests that need a real Spark: one JVM a test process, small, with the Kafka connector's jars.

A process has one Spark context at a time. Tests that ask for `spark` share `local[2]`; those that ask for
`spark_cluster` share one with two executor processes, and going from one to the other costs seconds: keep them in
files of their own. A driver that is to be killed is a process of its own: `driver_environment` and `spark_settings`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kconsume.spark.jars import spark_jars
from kconsume.spark.java_home import home_of, spark_java
from kconsume.spark.session import open_session

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

LOCAL = "local[2]"
CLUSTER = "local-cluster[2,1,1200]"
# These live for minutes at most, so what they would gain by compiling well they do not live to see.
QUICK = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"


def spark_settings(folder: Path) -> dict[str, str]:
    """What every test's session is opened with; `folder` takes what Spark would leave in the working folder."""
    return {
        "spark.driver.memory": "1g",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.extraJavaOptions": f"-Xss8m -XX:-UsePerfData {QUICK} -Dderby.system.home={folder}",
        "spark.executor.extraJavaOptions": f"-XX:-UsePerfData {QUICK}",
        "spark.executor.memory": "512m",
        "spark.jars": spark_jars(),
        "spark.local.dir": str(folder / "local"),
        "spark.sql.shuffle.partitions": "2",
        "spark.sql.warehouse.dir": str(folder / "warehouse"),
        "spark.ui.enabled": "false",
        "spark.log.level": "ERROR",
    }


def driver_environment() -> dict[str, str]:
    """The environment for a driver that is a process of its own: this Python, a Java that will do, these modules."""
    here = str(Path(__file__).parent.parent)
    return {
        **os.environ,
        "JAVA_HOME": str(home_of(spark_java())),
        "PYSPARK_PYTHON": sys.executable,
        "PYTHONPATH": os.pathsep.join(filter(None, [here, os.environ.get("PYTHONPATH", "")])),
        "SPARK_LOCAL_IP": "127.0.0.1",
    }


class Sparks:
    """The one context of this process, of whichever kind the test at hand asks for."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._master = ""
        self._session: SparkSession | None = None

    def at(self, master: str) -> SparkSession:
        if self._session is None or master != self._master:
            self.stop()
            self._session = open_session("tests", master=master, settings=spark_settings(self._folder))
            self._master = master
        return self._session

    def stop(self) -> None:
        if self._session is not None:
            self._session.stop()
            self._session = None


@pytest.fixture(scope="session")
def sparks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sparks]:
    kept = {name: os.environ.get(name) for name in ("PYSPARK_PYTHON", "SPARK_LOCAL_IP")}
    os.environ.update(PYSPARK_PYTHON=sys.executable, SPARK_LOCAL_IP="127.0.0.1")
    sparks = Sparks(tmp_path_factory.mktemp("spark"))
    yield sparks
    sparks.stop()
    for name, value in kept.items():
        os.environ.pop(name, None) if value is None else os.environ.update({name: value})


@pytest.fixture
def spark(sparks: Sparks) -> SparkSession:
    """`local[2]`: the driver does all."""
    return sparks.at(LOCAL)


@pytest.fixture
def spark_cluster(sparks: Sparks) -> SparkSession:
    """Two executors, each a process of its own."""
    return sparks.at(CLUSTER)

"""The jars of Spark's Kafka connector: their versions, and how to fetch them.

`python -m kconsume.spark.jars` fetches them by name and prints the value of `spark.jars`. Streaming queries need these
jars; the sink does not. Importing this module imports neither Spark nor pyarrow.

Each jar is fetched by its own name, without its dependencies. Maven and `spark.jars.packages` cannot resolve the
dependencies of the connector 4.2, because its token provider was not released in that version.
"""

from __future__ import annotations

import importlib.metadata
import sys
from dataclasses import dataclass
from pathlib import Path

from kconsume.errors import ConfigurationError, MissingExtra, ServiceUnavailable
from kconsume.testing.services.jars import fetched_jars

OLDEST, BEFORE = (4, 2), (4, 4)
"""The versions of PySpark with which kconsume was tested: from the first up to but not including the second."""

FETCH = "python -m kconsume.spark.jars"


@dataclass(frozen=True, slots=True)
class Jar:
    """A jar of the connector."""

    coordinate: str
    class_name: str
    """A class that only this jar has."""


CONNECTOR = (
    Jar("org.apache.spark:spark-sql-kafka-0-10_2.13:4.2.0", "org.apache.spark.sql.kafka010.KafkaSourceProvider"),
    Jar(
        "org.apache.spark:spark-token-provider-kafka-0-10_2.13:4.1.0-preview1",
        "org.apache.spark.kafka010.KafkaTokenUtil",
    ),
    Jar("org.apache.kafka:kafka-clients:3.9.2", "org.apache.kafka.clients.consumer.KafkaConsumer"),
    Jar("org.apache.commons:commons-pool2:2.13.1", "org.apache.commons.pool2.impl.GenericKeyedObjectPool"),
)
"""The tested jars. The connector 4.2.0 works with PySpark 4.2.0, 4.2.1 and 4.3.0."""


def pyspark_version() -> str:
    """The installed version. Raises if PySpark is missing, or if kconsume was not tested with its version."""
    try:
        version = importlib.metadata.version("pyspark")
    except importlib.metadata.PackageNotFoundError as error:
        raise MissingExtra(
            "a handler that takes a DataFrame needs PySpark, which is not installed: pip install 'kconsume[spark]'"
        ) from error
    check_version(version)
    return version


def check_version(version: str) -> None:
    numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdecimal())
    if not OLDEST <= numbers < BEFORE:
        raise ConfigurationError(
            f"PySpark {version} is installed, and kconsume runs with 4.2 and 4.3: pip install 'pyspark>=4.2,<4.4'"
        )


def connector_jars() -> list[Path]:
    """The connector's jars as files, fetched on first use."""
    pyspark_version()
    coordinates = tuple(f"{jar.coordinate}@jar" for jar in CONNECTOR)
    try:
        return sorted(fetched_jars(coordinates, "spark-kafka-4.2.0").iterdir())
    except ServiceUnavailable as error:
        raise ConfigurationError(
            f"{error} You can also download them and list them in spark.jars: {all_coordinates()}"
        ) from error


def spark_jars() -> str:
    """The value of `spark.jars`; fetches the jars on first use."""
    return ",".join(map(str, connector_jars()))


def all_coordinates() -> str:
    return ", ".join(jar.coordinate for jar in CONNECTOR)


if __name__ == "__main__":
    try:
        sys.stdout.write(f"{spark_jars()}\n")
    except ConfigurationError as refusal:
        sys.exit(str(refusal))

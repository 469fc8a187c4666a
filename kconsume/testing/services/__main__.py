"""`python -m kconsume.testing.services [NAME…]`: fetch now what the tests would otherwise fetch on first use.

A download in the middle of a test would count against that test's time limit. Without names every service is
prepared, and one that cannot be had does not keep the others from it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from kconsume.errors import ConfigurationError, ServiceUnavailable
from kconsume.spark.jars import connector_jars
from kconsume.spark.java import spark_java
from kconsume.testing.services.kafka import prepare_kafka
from kconsume.testing.services.pgbouncer import prepare_pgbouncer
from kconsume.testing.services.postgres import prepare_postgres
from kconsume.testing.services.redis import prepare_redis


def prepare_spark() -> None:
    """Spark itself is a package of the tests; what it runs on, and its Kafka source, are not."""
    try:
        spark_java()
        connector_jars()
    except ConfigurationError as refusal:
        raise ServiceUnavailable(str(refusal)) from refusal


SERVICES: dict[str, Callable[[], None]] = {
    "kafka": prepare_kafka,
    "postgres": prepare_postgres,
    "redis": prepare_redis,
    "pgbouncer": prepare_pgbouncer,
    "spark": prepare_spark,
}


def prepare(names: Sequence[str]) -> list[str]:
    """Prepare these services, or all; what is missing, a sentence for each."""
    missing: list[str] = []
    for name in names or SERVICES:
        if name not in SERVICES:
            missing.append(f"There is no service {name!r}; there are {', '.join(SERVICES)}.")
            continue
        try:
            SERVICES[name]()
        except ServiceUnavailable as refusal:
            missing.append(f"{name}: {refusal}")
    return missing


if __name__ == "__main__":
    sys.exit("\n".join(prepare(sys.argv[1:])) or None)

"""`python -m kconsume.testing.services [NAME…]`: fetch in advance what tests would otherwise fetch on first use.

A download during a test would count against the time limit of that test. Without names every service is prepared. One
line is printed before each service, because a download can take minutes. If one service cannot be prepared, the other
services are still prepared.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from kconsume.errors import ConfigurationError, ServiceUnavailable
from kconsume.spark.jars import connector_jars
from kconsume.spark.java_home import spark_java
from kconsume.testing.services.kafka.service import prepare_kafka
from kconsume.testing.services.postgres.pgbouncer import prepare_pgbouncer
from kconsume.testing.services.postgres.service import prepare_postgres
from kconsume.testing.services.redis.service import prepare_redis


def prepare_spark() -> None:
    """Fetch Spark's Kafka source, and find a Java for Spark. Spark itself is a package that the tests depend on."""
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
    """Prepare the named services, or all if no name is given. Return one sentence for each that failed."""
    missing: list[str] = []
    for name in names or SERVICES:
        if name not in SERVICES:
            missing.append(f"There is no service {name!r}; there are {', '.join(SERVICES)}.")
            continue
        sys.stdout.write(f"preparing {name} …\n")
        sys.stdout.flush()
        try:
            SERVICES[name]()
        except ServiceUnavailable as refusal:
            missing.append(f"{name}: {refusal}")
    return missing


if __name__ == "__main__":
    sys.exit("\n".join(prepare(sys.argv[1:])) or None)

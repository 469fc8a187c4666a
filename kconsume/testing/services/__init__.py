"""Real services for tests: each is taken from an address, from Docker, or started as a local process.

One service, one `…_service()`. What cannot be had is a `ServiceUnavailable` that says what is missing and
how to get it; never a skipped test.
"""

from kconsume.testing.services.kafka import KafkaService, LocalKafka, kafka_service
from kconsume.testing.services.pgbouncer import LocalPgBouncer
from kconsume.testing.services.postgres import LocalPostgres, PostgresService, postgres_service
from kconsume.testing.services.redis import LocalRedis, RedisService, redis_service

__all__ = [
    "KafkaService",
    "LocalKafka",
    "LocalPgBouncer",
    "LocalPostgres",
    "LocalRedis",
    "PostgresService",
    "RedisService",
    "kafka_service",
    "postgres_service",
    "redis_service",
]

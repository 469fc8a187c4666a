"""Real Kafka, PostgreSQL and Redis for tests: at a given address, in Docker, or as a local process.

Each service has one function `…_service()`. If a service cannot be started, the function raises `ServiceUnavailable`,
which says what is missing and how to get it. No test is skipped for that reason.
"""

from kconsume.testing.services.kafka.local import LocalKafka
from kconsume.testing.services.kafka.service import KafkaService, kafka_service
from kconsume.testing.services.postgres.local import LocalPostgres
from kconsume.testing.services.postgres.pgbouncer import LocalPgBouncer
from kconsume.testing.services.postgres.service import PostgresService, postgres_service
from kconsume.testing.services.redis.local import LocalRedis
from kconsume.testing.services.redis.service import RedisService, redis_service

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

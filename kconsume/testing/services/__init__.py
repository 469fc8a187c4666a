"""Real services for tests: each is taken from an address, from Docker, or started as a local process.

One service, one `…_service()`. What cannot be had is a `ServiceUnavailable` that says what is missing and
how to get it; never a skipped test.
"""

from kconsume.testing.services.kafka import KafkaService, LocalKafka, kafka_service

__all__ = ["KafkaService", "LocalKafka", "kafka_service"]

"""Apache Kafka for tests."""

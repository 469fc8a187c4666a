"""The Kafka client: consumer, producer, admin, and what they read and write."""

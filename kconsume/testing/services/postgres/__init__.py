"""PostgreSQL, and PgBouncer in front of it, for tests."""

"""Redis for tests."""

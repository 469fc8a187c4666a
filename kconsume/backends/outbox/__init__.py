"""The transactional outbox: its tables, its API for programs, its reader for tools."""

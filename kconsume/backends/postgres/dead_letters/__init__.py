"""A table of dead letters on PostgreSQL: written in the handler's transaction, read and sent back by tools."""

"""`postgresql://`: offsets in PostgreSQL, in the handler's transaction."""

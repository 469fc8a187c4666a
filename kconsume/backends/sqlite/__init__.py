"""`sqlite:///`: offsets in an SQLite file, in the handler's transaction."""

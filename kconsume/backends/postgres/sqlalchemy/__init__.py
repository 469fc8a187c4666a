"""PostgreSQL through the user's SQLAlchemy engine."""

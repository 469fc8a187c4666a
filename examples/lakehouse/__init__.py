"""A stream of clicks that Spark stores twice, in parquet files and in PostgreSQL: each click once, through kills."""

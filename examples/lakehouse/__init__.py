"""A stream of clicks, kept twice by Spark: as parquet files and in PostgreSQL; each click once, through kills."""

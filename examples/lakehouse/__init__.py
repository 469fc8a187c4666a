"""Spark stores clicks in parquet files and in PostgreSQL: each click once in each, although processes are killed."""

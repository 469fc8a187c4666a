"""Spark: the room for the DataFrame hand-off and the foreachBatch adapter. Empty in this version."""

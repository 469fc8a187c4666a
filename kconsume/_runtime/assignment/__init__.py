"""The partitions that this process owns, and the progress of each."""

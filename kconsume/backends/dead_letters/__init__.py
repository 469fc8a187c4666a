"""The table of dead letters, for every SQL store."""

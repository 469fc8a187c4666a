"""`kconsume dlq redrive`: dead letters tried with today's handler and sent back to their group."""

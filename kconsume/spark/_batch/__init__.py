"""One micro-batch: its ranges, the calls of its handler, and the transactions that move its offsets."""

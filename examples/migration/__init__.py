"""A plain consumer loop and the same service on kconsume. Both are killed, and their results are compared."""

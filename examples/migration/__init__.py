"""A plain consumer loop and the same service on kconsume, and what a kill does to each."""

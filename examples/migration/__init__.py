"""A plain consumer loop beside the same service on kconsume, and what a kill does to each."""

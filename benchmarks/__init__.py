"""Measures speed, as ratios to programs without kconsume. `benchmarks/README.md` explains the figures.

This file must import nothing: `cases/start` measures the start of a process that imports it.
"""

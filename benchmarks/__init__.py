"""Speed, as ratios against what a person would write by hand. `benchmarks/README.md` says how to read them.

Nothing is imported here: `cases/start` measures the start of a process that passes through this file.
"""

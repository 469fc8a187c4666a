"""Speed, as ratios against what a user would write by hand. `benchmarks/README.md` explains the figures.

Must not import anything: `cases/start` measures the start of a process that imports this file.
"""

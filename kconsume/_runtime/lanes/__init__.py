"""Order and concurrency: which worker runs which chunk, and when.

Modules: `lane` (one ordered sequence of records), `reports` (what a lane tells the loop), `inline`, `threads` and
`event_loop` (three ways to run lanes), `timer` (wakes suspended lanes), `pacing` and `backpressure` (pure decisions
about sizes), `batching` (collects records into batches). `_runtime/processing` decides what happens to the records of a
chunk.
"""

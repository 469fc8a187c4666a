"""What happens to a chunk of records.

`rules` decides what to run next and what its result means; it yields `steps`. `driver` carries the steps out, on a
thread or on an event loop. It uses one of two attempts: `plain` (offsets stored apart from the handler's writes) or
`transactional` (both in one transaction).

Helpers: `failure_decisions` (what the policy means for failed records), `slice_result` (which records of a slice are
finished), `dedup` (records that were handled before), `timeout` (a limit for one call), `pipelining`, `blocking_tx`
(blocking transactions for an event loop), `dry_run_tx` (the transactions of a dry run).
"""

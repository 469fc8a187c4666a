"""What happens to a record that fails, as values. The runtime carries the decisions out.

`policy` decides; `retry`, `retry_topics` and `dead_letter` are the parts a user chooses. `letter_headers` makes the
record that is written about a failure. `skip_log` logs skipped records.
"""

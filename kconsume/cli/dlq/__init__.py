"""`kconsume dlq`: dead letters, by cause and one by one."""

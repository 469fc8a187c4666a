"""Sends the output and the dead letters of handlers: `publisher` (both kinds), `letter_batch` and `letters_in_flight`
(dead letters for which no handler waits), `outbox_relay` and `partition_outbox` (rows that transactions left in an
outbox).
"""

"""What can be seen of a running consumer, from other threads and by other rooms.

`snapshot` is its state as one value. `events` are what happens, `event_lines` their log lines. `causes` names the one
cause of each partition, and `standstill` watches them. Nothing here changes what the consumer does.
"""

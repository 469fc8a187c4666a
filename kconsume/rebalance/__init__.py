"""Rebalances as people meet them: listeners, assignors, the coordinator on a store.

The protocol with the broker is not here: it is told, from start to end, in `kconsume/runtime/source.py`.
"""

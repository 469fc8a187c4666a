"""Offset stores: where a group's position is kept, and what that promises."""

from kconsume.backends.abc import FencedStore, OffsetStore, Position, TransactionalStore, Tx
from kconsume.backends.kafka import KafkaStore
from kconsume.backends.memory import MemoryStore
from kconsume.backends.registry import open_store
from kconsume.backends.sqlite import SqliteStore

__all__ = [
    "FencedStore",
    "KafkaStore",
    "MemoryStore",
    "OffsetStore",
    "Position",
    "SqliteStore",
    "TransactionalStore",
    "Tx",
    "open_store",
]

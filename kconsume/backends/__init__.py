"""Offset stores. Each store keeps the offsets of consumer groups and has its own delivery guarantee.

The module of a store is imported when its name is first used, so only the drivers that are used must be installed.
"""

from typing import TYPE_CHECKING

from kconsume._lazy import lazily

if TYPE_CHECKING:
    from kconsume.backends.base import FencedStore, OffsetStore, Position, TransactionalStore, Tx
    from kconsume.backends.kafka import KafkaStore
    from kconsume.backends.memory import MemoryStore
    from kconsume.backends.outbox.api import Outbox
    from kconsume.backends.postgres.store import PostgresStore
    from kconsume.backends.redis.store import RedisStore
    from kconsume.backends.registry import open_store
    from kconsume.backends.sqlite.store import SqliteStore

__all__ = [
    "FencedStore",
    "KafkaStore",
    "MemoryStore",
    "OffsetStore",
    "Outbox",
    "Position",
    "PostgresStore",
    "RedisStore",
    "SqliteStore",
    "TransactionalStore",
    "Tx",
    "open_store",
]

_BASE = ("FencedStore", "OffsetStore", "Position", "TransactionalStore", "Tx")
_MODULES = dict.fromkeys(_BASE, "kconsume.backends.base") | {
    "KafkaStore": "kconsume.backends.kafka",
    "MemoryStore": "kconsume.backends.memory",
    "Outbox": "kconsume.backends.outbox.api",
    "PostgresStore": "kconsume.backends.postgres.store",
    "RedisStore": "kconsume.backends.redis.store",
    "SqliteStore": "kconsume.backends.sqlite.store",
    "open_store": "kconsume.backends.registry",
}

__getattr__, __dir__ = lazily(__name__, _MODULES, globals())

"""Offset stores: where a group's position is kept, and what that promises.

A store that needs an extra is imported when it is first named.
"""

from typing import TYPE_CHECKING

from kconsume.backends.abc import FencedStore, OffsetStore, Position, TransactionalStore, Tx
from kconsume.backends.kafka import KafkaStore
from kconsume.backends.memory import MemoryStore
from kconsume.backends.outbox import Outbox
from kconsume.backends.registry import open_store
from kconsume.backends.sqlite import SqliteStore
from kconsume.lazy import lazily

if TYPE_CHECKING:
    from kconsume.backends.postgres import PostgresStore
    from kconsume.backends.redis import RedisStore

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

_HOMES = {"PostgresStore": "postgres", "RedisStore": "redis"}

__getattr__, __dir__ = lazily(__name__, _HOMES, globals())

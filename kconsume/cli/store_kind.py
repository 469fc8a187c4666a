"""Which backend a store belongs to, by the name of its class.

Importing the class itself would need the backend's extra, also for users of another backend.
"""

from __future__ import annotations

from kconsume.backends import OffsetStore


def is_postgres(store: OffsetStore) -> bool:
    """True for `PostgresStore` and its subclasses."""
    return _is_of(store, "kconsume.backends.postgres.store")


def is_redis(store: OffsetStore) -> bool:
    """True for `RedisStore` and its subclasses."""
    return _is_of(store, "kconsume.backends.redis.store")


def _is_of(store: OffsetStore, module: str) -> bool:
    return any(kind.__module__ == module for kind in type(store).__mro__)

"""Opens the store for an address: `open_store("sqlite:///shop.db")`.

A scheme names a store of this package, or an entry point of the group `kconsume.stores`. The name of the entry point is
the scheme. kconsume calls the object of the entry point with the address. A module is imported only when its scheme is
used.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import cast

from kconsume._config.client_settings import ClientValue, masked_address, scheme_in
from kconsume.backends.base import OffsetStore
from kconsume.errors import ConfigurationError, MissingExtra, UnknownStore

ENTRY_POINTS = "kconsume.stores"
SCHEMES = ("kafka", "memory", "postgres", "postgresql", "redis", "rediss", "sqlite")


def open_store(
    address: str, *, brokers: str = "localhost:9092", kafka: Mapping[str, ClientValue] | None = None
) -> OffsetStore:
    """Return the store for an address. Opens no connection.

    Args:
        address: `postgresql://host/database`, `sqlite:///file.db`, `redis://host:6379/0`, `kafka://`, `memory://`, or
            the address of a third-party store.
        brokers: the addresses of the Kafka cluster, for `kafka://`.
        kafka: properties of the Kafka client, for `kafka://`.
    """
    scheme = scheme_of(address)
    if scheme == "kafka":
        if address != "kafka://":
            raise ConfigurationError(
                f"offsets={masked_address(address)!r} names a cluster, but kafka:// keeps the offsets in the cluster "
                f"that is consumed: write offsets='kafka://', and the cluster's address in App('host:port', ...)"
            )
        from kconsume.backends.kafka import KafkaStore

        return KafkaStore(brokers, kafka)
    if scheme == "memory":
        from kconsume.backends.memory import MemoryStore

        return MemoryStore()
    if scheme == "sqlite":
        from kconsume.backends.sqlite.store import SqliteStore

        return SqliteStore.from_url(address)
    if scheme in ("postgresql", "postgres"):
        try:
            from kconsume.backends.postgres.store import PostgresStore
        except ImportError as error:
            raise MissingExtra(
                f"the store {scheme}:// needs psycopg, which cannot be imported ({error}): pip install "
                f"'kconsume[postgres]'"
            ) from error
        return PostgresStore.from_url(address)
    if scheme in ("redis", "rediss"):
        from kconsume.backends.redis.store import RedisStore

        return RedisStore.from_url(address)
    return _third_party(scheme, address)


def scheme_of(address: str) -> str:
    """The part before `://`. Raises `UnknownStore` if there is none."""
    scheme = scheme_in(address)
    if scheme is None:
        raise UnknownStore(f"offsets={masked_address(address)!r} is not an address: write {_offer()}")
    return scheme


def _third_party(scheme: str, address: str) -> OffsetStore:
    for entry in entry_points(group=ENTRY_POINTS, name=scheme):
        return cast(OffsetStore, _load(entry)(address))
    raise UnknownStore(
        f"there is no offset store for {masked_address(address)!r}: write {_offer()}, or install a package that "
        f"offers {scheme!r} under the entry point {ENTRY_POINTS}"
    )


def _load(entry: EntryPoint) -> type:
    try:
        return cast(type, entry.load())
    except ImportError as error:
        extra = f"[{','.join(entry.extras)}]" if entry.extras else ""
        package = entry.dist.name if entry.dist is not None else "its package"
        raise MissingExtra(
            f"the store {entry.name}:// needs {error.name or 'a package'} that is not installed: "
            f"pip install '{package}{extra}'"
        ) from error


def _offer() -> str:
    return "kafka://, postgresql://host/database, sqlite:///file.db, redis://host:6379/0 or memory://"

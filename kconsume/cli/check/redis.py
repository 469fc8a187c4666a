"""Findings about a Redis: what its configuration cannot guarantee, and which rights its user lacks.

The facts come from the server (`RedisStore.facts`); the rights are tried (`RedisStore.try_rights`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from kconsume.backends import OffsetStore
from kconsume.cli.check.findings import Finding
from kconsume.cli.store_kind import is_redis
from kconsume.errors import KconsumeError, StoreUnavailable

if TYPE_CHECKING:
    from kconsume.backends.redis.server_checks import RedisServerFacts
    from kconsume.backends.redis.store import RedisStore


def of_stores(stores: Iterable[OffsetStore], *, offline: bool = False) -> Iterator[Finding]:
    """Findings about the Redis stores. Asks each store once, or none if `offline`."""
    asked = set()
    for store in stores:
        if store.address in asked or offline or not is_redis(store):
            continue
        asked.add(store.address)
        yield from _of_store(store)


def _of_store(store: RedisStore | OffsetStore) -> Iterator[Finding]:
    from kconsume.backends.redis.store import RedisStore

    assert isinstance(store, RedisStore)
    try:
        store.examine()
        facts = store.facts()
        if facts.role in (None, "master"):  # a replica refuses all writes; `of_server` reports it
            store.try_rights()
    except StoreUnavailable as error:
        yield Finding("error", "store-unreachable", store.address, str(error), "start it, or correct offsets=")
    except KconsumeError as error:
        problem, _, fix = str(error).rpartition(": ")
        yield Finding("error", "store-unusable", store.address, problem, fix)
    else:
        yield from of_server(store.address, facts)
    finally:
        store.close()


def of_server(address: str, facts: RedisServerFacts) -> Iterator[Finding]:
    """Findings about what a server with these settings can lose, and when."""
    if facts.role is not None and facts.role != "master":
        yield Finding(
            "error", "redis-replica", address,
            f"{address} is a replica, which refuses writes",
            "name the primary in offsets=",
        )  # fmt: skip
    yield from _of_persistence(address, facts)
    if facts.replicas:
        yield Finding(
            "note", "redis-failover", address,
            f"{address} answers a write before its {facts.replicas} replicas have it: a failover may lose the last "
            f"writes, offsets and effects together, and their records are handled again",
            "nothing to do if effects are in this Redis only; what a handler does elsewhere may be repeated",
        )  # fmt: skip
    if facts.policy is None:
        yield Finding(
            "warning", "redis-eviction-unknown", address,
            f"{address} does not show its maxmemory-policy; an allkeys policy would evict offsets",
            "make sure that maxmemory-policy is noeviction",
        )  # fmt: skip
    elif facts.policy.startswith("allkeys"):
        yield Finding(
            "note", "redis-eviction", address,
            f"{address} has maxmemory-policy {facts.policy}: once maxmemory is set, Redis would evict offsets, so "
            f"kconsume would refuse this server",
            "set maxmemory-policy noeviction before you set maxmemory",
        )  # fmt: skip


def _of_persistence(address: str, facts: RedisServerFacts) -> Iterator[Finding]:
    if facts.appendonly is False:
        yield Finding(
            "warning", "redis-not-persistent", address,
            f"{address} has appendonly off: a restart loses everything since the last snapshot, or all data if there "
            f"is no snapshot, offsets and effects together; the records are handled again, if Kafka still has them",
            "set appendonly yes",
        )  # fmt: skip
    elif facts.appendfsync == "no":
        yield Finding(
            "warning", "redis-fsync", address,
            f"{address} has appendfsync no: a power cut loses what the operating system has not written yet, often "
            f"30 s",
            "set appendfsync everysec, or always",
        )  # fmt: skip
    elif facts.appendonly and facts.appendfsync != "always":
        yield Finding(
            "note", "redis-fsync", address,
            f"{address} writes to disk once a second (appendfsync {facts.appendfsync or 'everysec, as it seems'}): a "
            f"power cut loses up to two seconds, offsets and effects together",
            "appendfsync always loses nothing, and is slower",
        )  # fmt: skip

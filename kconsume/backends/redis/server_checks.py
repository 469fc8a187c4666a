"""Checks that a Redis server can keep offsets, at the first use of every node.

This module reads the settings of a server and decides whether they are safe. `connection` sends the commands. Nothing
is changed on the server.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias, cast

from redis import exceptions
from redis.crc import key_slot

from kconsume._event_log import EventLog
from kconsume.backends.redis.pipeline import KeysOf, Rules, table_of
from kconsume.errors import ConfigurationError

Argument: TypeAlias = str | bytes | int
Reply: TypeAlias = bytes | int | Sequence["Reply"] | None
Ask: TypeAlias = Callable[..., Reply]
"""Sends one command, given by its words; raises the errors of redis-py."""

RIGHTS = (
    "+eval +evalsha +command +info +config|get +select +hget +hmget +hset +hsetnx +hincrby +hdel +exists +del +sadd "
    "+srem +scard +smembers"
)
"""The rights that a Redis user needs on `kconsume:*`, besides the rights for the commands that handlers queue."""

_OLDEST = (6, 0)

_log = EventLog("stores")


@dataclass(frozen=True, slots=True)
class RedisServerFacts:
    """What a server reports about itself; None for a value that it does not report."""

    version: str | None = None
    cluster: bool = False
    role: str | None = None
    replicas: int = 0
    maxmemory: int | None = None
    policy: str | None = None
    appendonly: bool | None = None
    appendfsync: str | None = None


def facts_of(ask: Ask) -> RedisServerFacts:
    """Ask a server for its version and settings. Works also for a server that the store would refuse."""
    info = _info(ask)
    config = _config(ask, "appendfsync") if info.get("aof_enabled") == "1" else {}
    maxmemory, policy = info.get("maxmemory"), info.get("maxmemory_policy")
    if maxmemory is None or policy is None:
        memory = _config(ask, "maxmemory*")
        maxmemory, policy = memory.get("maxmemory"), memory.get("maxmemory-policy")
    return RedisServerFacts(
        version=info.get("redis_version"),
        cluster=info.get("cluster_enabled") == "1",
        role=info.get("role"),
        replicas=int(info.get("connected_slaves", "0")),
        maxmemory=None if maxmemory is None else int(maxmemory),
        policy=policy,
        appendonly=None if "aof_enabled" not in info else info["aof_enabled"] == "1",
        appendfsync=config.get("appendfsync"),
    )


def examined(ask: Ask, address: str, tag: str | None, keys_of: KeysOf) -> Rules:
    """Check the server, and return the rules for the commands that handlers may queue.

    Raises `ConfigurationError` if the server cannot keep offsets.

    Args:
        ask: sends one command to the server.
        address: the store's address, for messages.
        tag: the hash tag in the store's address.
        keys_of: asks the server for the keys of a command.
    """
    facts = facts_of(ask)
    _must_serve(facts, address, tag)
    try:
        table = table_of(cast("Sequence[Sequence[object]]", ask("COMMAND")))
    except exceptions.ResponseError as error:
        if not isinstance(error, exceptions.NoPermissionError) and "unknown command" not in str(error):
            raise
        raise ConfigurationError(
            f"{address} does not show its table of commands ({error}). kconsume needs the table to refuse a wrong "
            f"command before a part of a record is written: grant the right, with ACL SETUSER name +command"
        ) from error
    return Rules(table, keys_of, key_slot(cast(str, tag).encode()) if facts.cluster else None)


def _must_serve(facts: RedisServerFacts, address: str, tag: str | None) -> None:
    version = facts.version
    if version is not None and tuple(int(part) for part in re.findall(r"\d+", version)[:2]) < _OLDEST:
        raise ConfigurationError(f"{address} is Redis {version}: offsets need version 6 or newer")
    if facts.cluster and tag is None:
        raise ConfigurationError(
            f"{address} is a cluster, where only keys with the same hash tag are written together: add a tag to "
            f"the address, as in redis://host:6379/0?tag=shop, and put {{shop}} into the keys that handlers write"
        )
    if facts.policy is None:
        _log.warning(
            "eviction policy unknown",
            store=address,
            hint="the server refuses INFO and CONFIG; set maxmemory-policy noeviction, or offsets may be evicted",
        )
    elif facts.policy.startswith("allkeys") and facts.maxmemory != 0:
        raise ConfigurationError(
            f"{address} may evict offsets when its memory is full (maxmemory-policy {facts.policy}), and "
            f"records would be handled again: set maxmemory-policy noeviction, or a volatile-… policy, which "
            f"evicts no offsets"
        )


def _info(ask: Ask) -> Mapping[str, str]:
    try:
        reply = ask("INFO")
    except exceptions.NoPermissionError:
        return {}
    text = cast(bytes, reply).decode(errors="replace")
    return {name: value for name, colon, value in (line.partition(":") for line in text.splitlines()) if colon}


def _config(ask: Ask, pattern: str) -> Mapping[str, str]:
    """The settings that match the pattern. Empty if CONFIG is not allowed: managed services rename or forbid it."""
    try:
        reply = ask("CONFIG", "GET", pattern)
    except exceptions.ResponseError:
        return {}
    pairs = cast("Mapping[bytes, bytes] | Sequence[bytes]", reply)
    if isinstance(pairs, Mapping):  # RESP3
        return {_text(name): _text(value) for name, value in pairs.items()}
    words = [_text(word) for word in pairs]
    return dict(zip(words[::2], words[1::2], strict=True))


def _text(word: object) -> str:
    return word.decode(errors="replace") if isinstance(word, bytes) else str(word)

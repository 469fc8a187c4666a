"""What a Redis must be like to keep offsets: asked when it is first used, of every node that is used.

Facts and rules out of a server's answers; who carries the questions is `redis_line.py`. Changes nothing on the server.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias, cast

from redis import exceptions
from redis.crc import key_slot

from kconsume.backends.redis_pipeline import KeysOf, Rules, table_of
from kconsume.errors import ConfigurationError

Argument: TypeAlias = str | bytes | int
Reply: TypeAlias = bytes | int | Sequence["Reply"] | None
Ask: TypeAlias = Callable[..., Reply]
"""One command in its words; raises what redis-py raises."""

RIGHTS = (
    "+eval +evalsha +command +info +config|get +select +hget +hmget +hset +hsetnx +hincrby +hdel +exists +del +sadd "
    "+srem +scard +smembers"
)
"""What a user needs on `kconsume:*`, besides what its handlers queue."""

_OLDEST = (6, 0)

_log = logging.getLogger("kconsume.backends")


@dataclass(frozen=True, slots=True)
class Facts:
    """What a server says of itself; None where it does not say."""

    version: str | None = None
    cluster: bool = False
    role: str | None = None
    replicas: int = 0
    maxmemory: int | None = None
    policy: str | None = None
    appendonly: bool | None = None
    appendfsync: str | None = None


def facts_of(ask: Ask) -> Facts:
    """Also of a server that would be refused."""
    info = _info(ask)
    config = _config(ask, "appendfsync") if info.get("aof_enabled") == "1" else {}
    maxmemory, policy = info.get("maxmemory"), info.get("maxmemory_policy")
    if maxmemory is None or policy is None:
        said = _config(ask, "maxmemory*")
        maxmemory, policy = said.get("maxmemory"), said.get("maxmemory-policy")
    return Facts(
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
    """What may be queued for this server; `ConfigurationError` if it cannot keep offsets."""
    facts = facts_of(ask)
    _must_serve(facts, address, tag)
    try:
        table = table_of(cast("Sequence[Sequence[object]]", ask("COMMAND")))
    except exceptions.ResponseError as error:
        if not isinstance(error, exceptions.NoPermissionError) and "unknown command" not in str(error):
            raise
        raise ConfigurationError(
            f"{address} does not show its table of commands ({error}), without which a command that fails half-way is "
            f"found too late: grant it to the user, with ACL SETUSER name +command"
        ) from error
    return Rules(table, keys_of, key_slot(cast(str, tag).encode()) if facts.cluster else None)


def _must_serve(facts: Facts, address: str, tag: str | None) -> None:
    version = facts.version
    if version is not None and tuple(int(part) for part in re.findall(r"\d+", version)[:2]) < _OLDEST:
        raise ConfigurationError(f"{address} is Redis {version}: offsets need version 6 or newer")
    if facts.cluster and tag is None:
        raise ConfigurationError(
            f"{address} is a cluster, where only keys with the same hash tag are written together: name it in "
            f"the address, as in redis://host:6379/0?tag=shop, and put {{shop}} into the keys that handlers write"
        )
    if facts.policy is None:
        _log.warning(
            "%s shows neither INFO nor CONFIG: make sure that its maxmemory-policy is noeviction, or offsets may "
            "be evicted",
            address,
        )
    elif facts.policy.startswith("allkeys") and facts.maxmemory != 0:
        raise ConfigurationError(
            f"{address} evicts any key when its memory is full (maxmemory-policy {facts.policy}), offsets "
            f"too, and their records would be handled again: set maxmemory-policy noeviction (volatile-lru and kin "
            f"spare the offsets as well)"
        )


def _info(ask: Ask) -> Mapping[str, str]:
    try:
        said = ask("INFO")
    except exceptions.NoPermissionError:
        return {}
    text = cast(bytes, said).decode(errors="replace")
    return {name: value for name, colon, value in (line.partition(":") for line in text.splitlines()) if colon}


def _config(ask: Ask, pattern: str) -> Mapping[str, str]:
    """Empty where CONFIG is not for us: managed services have renamed or forbidden it."""
    try:
        said = ask("CONFIG", "GET", pattern)
    except exceptions.ResponseError:
        return {}
    pairs = cast("Mapping[bytes, bytes] | Sequence[bytes]", said)
    if isinstance(pairs, Mapping):  # RESP3
        return {_text(name): _text(value) for name, value in pairs.items()}
    words = [_text(word) for word in pairs]
    return dict(zip(words[::2], words[1::2], strict=True))


def _text(word: object) -> str:
    return word.decode(errors="replace") if isinstance(word, bytes) else str(word)

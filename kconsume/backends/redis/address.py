"""The address of a Redis: parses `redis://user:password@host:port/0?tag=shop`, or takes the user's own client.

This module does not connect. The error for an address that cannot be parsed names the fix and does not quote the
address, because any part of such an address may contain the password.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple
from urllib.parse import SplitResult, parse_qsl, quote, urlencode, urlsplit

from redis import Redis, exceptions
from redis.backoff import NoBackoff
from redis.connection import ConnectionPool, SSLConnection, parse_url
from redis.retry import Retry

from kconsume.errors import ConfigurationError

_PATIENCE = 5.0
"""Seconds to wait for a reply, unless the address or the client says otherwise."""
_LONGEST = 3600.0

_SCHEMES = ("redis", "rediss", "unix")
_KNOWN = (
    "tag", "db", "username", "password", "socket_timeout", "socket_connect_timeout", "socket_keepalive",
    "socket_read_size", "health_check_interval", "max_connections", "client_name", "protocol",
)  # fmt: skip
"""The settings that may follow the question mark; with `rediss://` also redis-py's `ssl_…`. Retries are not allowed: a
script that is sent again after a timeout might already be applied."""
_UNREADABLE = (
    "the address of the Redis store cannot be read: write redis://user:password@host:6379/0, and in user, password and "
    "settings / as %2F, ? as %3F, # as %23, @ as %40 (urllib.parse.quote(password, safe='') does it)"
)


class RedisAddress(NamedTuple):
    """The address of a Redis.

    Attributes:
        pool: the connections.
        address: the address as a user writes it, without a password.
        tag: the hash tag on a cluster, and a name for these offsets; None without a tag.
        pool_at: makes a pool for another node of the cluster; None if the user gave a client.
    """

    pool: ConnectionPool
    address: str
    tag: str | None
    pool_at: Callable[[str, int], ConnectionPool] | None


def address_of_url(url: str, tag: str | None = None) -> RedisAddress:
    """The parsed address.

    Args:
        url: `redis://user:password@host:port/0?tag=shop`, `rediss://` for TLS, `unix://` for a socket.
        tag: replaces the tag in the address.
    """
    parts = _split(url)
    query = _settings(parts)
    rest = urlencode([(name, value) for name, value in query.items() if name != "tag"])
    try:
        options = parse_url(f"{url.partition('?')[0]}?{rest}")  # type: ignore[no-untyped-call]
    except ValueError:
        raise _not_taken(query) from None
    settings = {
        "socket_timeout": _PATIENCE,
        "socket_connect_timeout": _PATIENCE,
        "retry": Retry(NoBackoff(), 0),
        **({} if "path" in options else {"socket_keepalive": True}),
        **options,
    }
    _check_reach(settings)

    def pool_at(host: str | None = None, port: int | None = None) -> ConnectionPool:
        return ConnectionPool(**(settings if host is None else {**settings, "host": host, "port": port}))

    try:
        pool = pool_at()
        pool.make_connection()  # does not connect
    except (TypeError, ValueError, exceptions.RedisError):
        raise _not_taken(query) from None
    chosen = _checked_tag(tag if tag is not None else query.get("tag"))
    return RedisAddress(pool, _address(pool, chosen), chosen, pool_at)


def address_of_client(client: Redis, tag: str | None = None) -> RedisAddress:
    """The address of the user's own client. Raises `ConfigurationError` if the client has no deadline for replies."""
    if not isinstance(client, Redis):
        raise ConfigurationError(
            f"RedisStore(client=...) takes a redis.Redis, and this is a {type(client).__module__}."
            f"{type(client).__qualname__}: give a redis.Redis, also for handlers that are async; for a cluster give an "
            f"address with ?tag="
        )
    pool = client.connection_pool
    if pool.connection_kwargs.get("socket_timeout") is None:
        raise ConfigurationError(
            "the client has no deadline for replies, so a partition could wait for ever: set socket_timeout, as in "
            "redis.Redis(..., socket_timeout=5)"
        )
    _check_reach(pool.connection_kwargs)
    chosen = _checked_tag(tag)
    return RedisAddress(pool, _address(pool, chosen), chosen, None)


def _split(url: object) -> SplitResult:
    if not isinstance(url, str):
        raise ConfigurationError(
            f"RedisStore takes an address as text, and this is a {type(url).__name__}: write 'redis://localhost:6379/0'"
        )
    scheme, _, rest = url.partition("://")
    if scheme not in _SCHEMES:
        raise ConfigurationError("the address of the Redis store must begin with redis://, rediss:// or unix://")
    authority = re.split("[/?#]", rest, maxsplit=1)[0]
    if any(mark in rest[len(authority) :] for mark in "@#"):  # the parsed host part ended inside the password
        raise ConfigurationError(_UNREADABLE)
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        raise ConfigurationError(_UNREADABLE) from None
    if scheme == "unix":
        if not parts.path.strip("/"):
            raise ConfigurationError("unix:// names no socket: write the whole path, as in unix:///run/redis.sock?db=0")
        return parts
    if port == 0:
        raise ConfigurationError("the address of the Redis store has port 0: write its port, as in redis://host:6379/0")
    if not re.fullmatch(r"/?[0-9]*", parts.path):
        raise ConfigurationError(
            f"{parts.path!r} in the address of the Redis store is not a database number: write redis://host:6379/0, "
            f"and a name for these offsets as ?tag=shop"
        )
    return parts


def _settings(parts: SplitResult) -> dict[str, str]:
    """The settings after the question mark. Each setting must occur once and have a value."""
    pairs = parse_qsl(parts.query, keep_blank_values=True)
    query = dict(pairs)
    for name, value in pairs:
        if name not in _KNOWN and not (name.startswith("ssl_") and parts.scheme == "rediss"):
            raise ConfigurationError(
                f"{name!r} in the address of the Redis store is not a setting: choose from {', '.join(_KNOWN)} (and "
                f"ssl_… with rediss://), or make a redis.Redis of your own and give RedisStore(client=...)"
            )
        if not value:
            raise ConfigurationError(f"{name}= in the address of the Redis store has no value: give one, or remove it")
    if len(query) < len(pairs):
        raise ConfigurationError(
            f"the address of the Redis store has one of {', '.join(sorted(query))} twice: remove one of the two"
        )
    if "db" in query and parts.scheme != "unix" and parts.path.strip("/"):
        raise ConfigurationError("the address of the Redis store names its database twice: remove ?db=")
    return query


def _not_taken(query: Mapping[str, str]) -> ConfigurationError:
    return ConfigurationError(
        f"redis-py does not accept the settings {', '.join(sorted(query))} in the address of the Redis store: "
        f"correct their values, as in socket_timeout=5&protocol=3"
    )


def _check_reach(settings: Mapping[str, Any]) -> None:
    """Refuse timeouts, database numbers and host names that would otherwise fail only at the first connection."""
    for name in ("socket_timeout", "socket_connect_timeout"):
        seconds = settings.get(name)
        if seconds is not None and not (math.isfinite(seconds) and 0 < seconds <= _LONGEST):
            raise ConfigurationError(f"{name}={seconds:g} is not a timeout: give seconds, above 0 and up to 3600")
    database = settings.get("db") or 0
    if database < 0:
        raise ConfigurationError(f"there is no database {database} in a Redis: write a number from 0 on")
    host = settings.get("host")
    try:
        (host or "").encode("idna")
    except UnicodeError:
        raise ConfigurationError(
            f"{host!r} is not a host name: correct it in the address of the Redis store, redis://host:6379/0"
        ) from None


def _checked_tag(tag: object) -> str | None:
    if tag is None:
        return None
    if not isinstance(tag, str) or not tag or "{" in tag or "}" in tag:
        raise ConfigurationError(
            f"tag={tag!r} cannot be a hash tag: write the name that is between the braces of your keys, as in tag=shop"
        )
    return tag


def _address(pool: ConnectionPool, tag: str | None) -> str:
    settings = pool.connection_kwargs
    user = f"{quote(settings['username'])}@" if settings.get("username") else ""
    query = "" if tag is None else f"?tag={quote(tag)}"
    if "path" in settings:
        return f"unix://{user}{settings['path']}{query}"
    if hasattr(pool, "service_name"):
        return f"sentinel://{user}{pool.service_name}/{settings.get('db') or 0}{query}"
    scheme = "rediss" if issubclass(pool.connection_class, SSLConnection) else "redis"
    where = f"{settings.get('host', 'localhost')}:{settings.get('port', 6379)}"
    return f"{scheme}://{user}{where}/{settings.get('db') or 0}{query}"

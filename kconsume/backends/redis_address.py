"""Where a Redis is: reads `redis://user:password@host:port/0?tag=shop`, or a person's own client.

Values only: nothing here connects. An address that cannot be read is refused with the fix, and not in its own words:
as long as nobody knows where its parts end, any of them may be the password.
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
"""How long an answer is waited for, in seconds, unless the address or the client says otherwise."""
_LONGEST = 3600.0

_SCHEMES = ("redis", "rediss", "unix")
_KNOWN = (
    "tag", "db", "username", "password", "socket_timeout", "socket_connect_timeout", "socket_keepalive",
    "socket_read_size", "health_check_interval", "max_connections", "client_name", "protocol",
)  # fmt: skip
"""What may follow the question mark, and with `rediss://` also redis-py's `ssl_…`. Not its retries: a script that is
sent again after a timeout would find itself applied."""
_UNREADABLE = (
    "the address of the Redis store cannot be read: write redis://user:password@host:6379/0, and in user, password and "
    "settings / as %2F, ? as %3F, # as %23, @ as %40 (urllib.parse.quote(password, safe='') does it)"
)


class Place(NamedTuple):
    """Where a Redis is: how to reach it, and how a person writes that, with no password in it."""

    pool: ConnectionPool
    address: str
    tag: str | None
    elsewhere: Callable[[str, int], ConnectionPool] | None
    """The same on another node of the cluster; None for a client that is the person's own."""


def place_of_url(url: str, tag: str | None = None) -> Place:
    """Where `redis://user:password@host:port/0?tag=shop` is."""
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

    def reach(host: str | None = None, port: int | None = None) -> ConnectionPool:
        return ConnectionPool(**(settings if host is None else {**settings, "host": host, "port": port}))

    try:
        pool = reach()
        pool.make_connection()  # it does not connect
    except (TypeError, ValueError, exceptions.RedisError):
        raise _not_taken(query) from None
    chosen = _checked_tag(tag if tag is not None else query.get("tag"))
    return Place(pool, _address(pool, chosen), chosen, reach)


def place_of_client(client: Redis, tag: str | None = None) -> Place:
    """Where a person's own client is connected to."""
    if not isinstance(client, Redis):
        raise ConfigurationError(
            f"RedisStore(client=...) takes a redis.Redis, and this is a {type(client).__module__}."
            f"{type(client).__qualname__}: give a redis.Redis, also for handlers that are async; for a cluster give an "
            f"address with ?tag="
        )
    pool = client.connection_pool
    if pool.connection_kwargs.get("socket_timeout") is None:
        raise ConfigurationError(
            "the client waits for an answer without end, and a partition would with it: make it with a deadline, as in "
            "redis.Redis(..., socket_timeout=5)"
        )
    _check_reach(pool.connection_kwargs)
    chosen = _checked_tag(tag)
    return Place(pool, _address(pool, chosen), chosen, None)


def _split(url: object) -> SplitResult:
    if not isinstance(url, str):
        raise ConfigurationError(
            f"RedisStore takes an address as text, and this is a {type(url).__name__}: write 'redis://localhost:6379/0'"
        )
    scheme, _, rest = url.partition("://")
    if scheme not in _SCHEMES:
        raise ConfigurationError("the address of the Redis store must begin with redis://, rediss:// or unix://")
    authority = re.split("[/?#]", rest, maxsplit=1)[0]
    if any(mark in rest[len(authority) :] for mark in "@#"):  # the place ended inside the password
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
            f"{parts.path!r} in the address of the Redis store is no number of a database: write redis://host:6379/0, "
            f"and a name of your own for the offsets as ?tag=shop"
        )
    return parts


def _settings(parts: SplitResult) -> dict[str, str]:
    """What follows the question mark, each once and with a value."""
    pairs = parse_qsl(parts.query, keep_blank_values=True)
    query = dict(pairs)
    for name, value in pairs:
        if name not in _KNOWN and not (name.startswith("ssl_") and parts.scheme == "rediss"):
            raise ConfigurationError(
                f"{name!r} in the address of the Redis store is no setting: choose from {', '.join(_KNOWN)} (and "
                f"ssl_… with rediss://), or make a redis.Redis of your own and give RedisStore(client=...)"
            )
        if not value:
            raise ConfigurationError(f"{name}= in the address of the Redis store has no value: give one, or remove it")
    if len(query) < len(pairs):
        raise ConfigurationError(
            f"the address of the Redis store says one of {', '.join(sorted(query))} twice: remove one of the two"
        )
    if "db" in query and parts.scheme != "unix" and parts.path.strip("/"):
        raise ConfigurationError("the address of the Redis store names its database twice: remove ?db=")
    return query


def _not_taken(query: Mapping[str, str]) -> ConfigurationError:
    return ConfigurationError(
        f"redis-py does not take the settings {', '.join(sorted(query))} as they stand in the address of the Redis "
        f"store: correct their values, as in socket_timeout=5&protocol=3"
    )


def _check_reach(settings: Mapping[str, Any]) -> None:
    """What would fail only when it connects, and then in the words of a socket."""
    for name in ("socket_timeout", "socket_connect_timeout"):
        seconds = settings.get(name)
        if seconds is not None and not (math.isfinite(seconds) and 0 < seconds <= _LONGEST):
            raise ConfigurationError(f"{name}={seconds:g} is no time to wait: give seconds, above 0 and up to 3600")
    database = settings.get("db") or 0
    if database < 0:
        raise ConfigurationError(f"there is no database {database} in a Redis: write a number from 0 on")
    host = settings.get("host")
    try:
        (host or "").encode("idna")
    except UnicodeError:
        raise ConfigurationError(
            f"{host!r} is no name of a host: correct it in the address of the Redis store, redis://host:6379/0"
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
    said = pool.connection_kwargs
    user = f"{quote(said['username'])}@" if said.get("username") else ""
    query = "" if tag is None else f"?tag={quote(tag)}"
    if "path" in said:
        return f"unix://{user}{said['path']}{query}"
    if hasattr(pool, "service_name"):
        return f"sentinel://{user}{pool.service_name}/{said.get('db') or 0}{query}"
    scheme = "rediss" if issubclass(pool.connection_class, SSLConnection) else "redis"
    where = f"{said.get('host', 'localhost')}:{said.get('port', 6379)}"
    return f"{scheme}://{user}{where}/{said.get('db') or 0}{query}"

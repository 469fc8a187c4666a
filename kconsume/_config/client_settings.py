"""The properties of the Kafka client: defaults with their reasons, refused properties, and secrets.

This file must not open a connection.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Mapping
from typing import NamedTuple

from kconsume._config.group_protocol import OF_CLASSIC, GroupProtocol, protocol_of
from kconsume._config.group_protocol import ClientValue as ClientValue
from kconsume.errors import ConfigurationError


class Default(NamedTuple):
    """A client property that kconsume sets itself."""

    name: str
    value: ClientValue
    librdkafka: ClientValue
    why: str


RECEIVE_LIMIT, HIGHEST_LIMIT = "receive.message.max.bytes", 2147483647
"""The client of a consumer always has the highest limit. When a response is above the limit, the client closes the
connection to the broker again and again, and names no partition (measured). `_kafka/fetched.py` applies a lower limit
of the user to each record.
"""

SESSION, HEARTBEAT = "session.timeout.ms", "heartbeat.interval.ms"

DEFAULTS = (
    Default(
        "partition.assignment.strategy", "cooperative-sticky", "range,roundrobin",
        "partitions that do not move do not stop in a rebalance",
    ),
    Default("isolation.level", "read_committed", "read_committed", "aborted records are never handled"),
    Default("check.crcs", True, False, "a damaged batch is an error; unchecked, damaged bytes would reach the handler"),
    Default("allow.auto.create.topics", False, False, "a misspelt topic is an error, not a new topic"),
    Default(
        "fetch.queue.backoff.ms", 5, 1000,
        "at 1000 a fast consumer waits up to a second with nothing to do, and is five times slower",
    ),
    Default("fetch.wait.max.ms", 100, 500, "a newly assigned partition without new records is fetched again sooner"),
    Default("queued.min.messages", 20000, 100000, "enough for a fast handler; a larger queue only costs memory"),
    Default("queued.max.messages.kbytes", 16384, 65536, "bounds the client's memory at any lag"),
    Default(
        RECEIVE_LIMIT, HIGHEST_LIMIT, 100000000,
        "a larger record would stop every partition of its broker; the brokers' own limits bound the size of records",
    ),
    Default("socket.keepalive.enable", True, False, "a connection that a firewall has dropped is noticed"),
    Default("socket.nagle.disable", True, True, "small requests are sent at once"),
    Default(SESSION, 45000, 45000, "how long a dead process keeps its partitions"),
    Default(HEARTBEAT, 3000, 3000, "a rebalance is noticed within this time; at most a third of session.timeout.ms"),
    Default(
        "topic.metadata.refresh.interval.ms", 30000, 300000,
        "how soon new partitions and new topics of a pattern are noticed",
    ),
    Default("max.poll.interval.ms", 300000, 300000, "polling never waits for handlers, so this is never reached"),
)  # fmt: skip

FORBIDDEN = {
    "enable.auto.commit": "an offset is stored after the handler has returned, never by a timer",
    "enable.auto.offset.store": "an offset is stored after the handler has returned, not when the record is fetched",
    "auto.offset.reset": "set start='earliest', 'latest' or 'error' in @app.consume; a stored offset is never skipped",
    "group.id": "set App(group=...)",
    "group.instance.id": "set App(instance=...)",
    "bootstrap.servers": "set App('host:port,...')",
    "metadata.broker.list": "set App('host:port,...')",
    "enable.partition.eof": "kconsume uses it to detect the end of a partition",
    "rebalance_cb": "kconsume handles rebalances; use @app.on_assigned and @app.on_revoked",
    "on_commit": "kconsume sends the commits and reads their results",
}

_SECRET = re.compile(r"password|passphrase|secret|\.pem$|token|oauthbearer\.config|jaas", re.IGNORECASE)
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_HARMLESS = re.compile(r"(sqlite:)?[\w./\\ -]*")  # for example a file name: without : and =, it has no password
_USERINFO = re.compile(r"(?<=//)(.*)@")  # up to the last @, because a password may contain : / @
_PARAMETER = re.compile(r"([^&=]*)=([^&]*)")
MASK = "********"


# The embedded broker ends a rebalance only when the session timeout has nearly passed, so the timeout is short.
# The embedded broker writes transaction markers without a checksum.
EMBEDDED: Mapping[str, ClientValue] = {SESSION: 2000, HEARTBEAT: 250, "check.crcs": False}


def client_settings(
    brokers: str,
    group: str,
    overrides: Mapping[str, ClientValue],
    *,
    instance: str | None = None,
    embedded: bool = False,
) -> dict[str, ClientValue]:
    """Return all properties of the consumer: defaults, then the user's, then those that the guarantees need.

    Args:
        brokers: the address of the brokers.
        group: the consumer group.
        overrides: the user's properties.
        instance: the name of a static member.
        embedded: whether the broker is an embedded one.
    """
    settings: dict[str, ClientValue] = {default.name: default.value for default in DEFAULTS}
    settings.update(EMBEDDED if embedded else {})
    if protocol_of(overrides) is GroupProtocol.CONSUMER:
        settings = {name: value for name, value in settings.items() if name not in OF_CLASSIC}
    settings["client.id"] = f"kconsume-{socket.gethostname()}-{os.getpid()}"
    settings.update(overrides)
    if HEARTBEAT in settings and HEARTBEAT not in overrides:
        settings[HEARTBEAT] = _heartbeat(settings[HEARTBEAT], settings.get(SESSION))
    settings.update({} if instance is None else {"group.instance.id": instance})
    settings.update(
        {
            "bootstrap.servers": brokers,
            "group.id": group,
            "enable.auto.commit": False,
            "enable.auto.offset.store": False,
            "auto.offset.reset": "error",
            "enable.partition.eof": True,
        }
    )
    return settings


def _heartbeat(usual: ClientValue, session: ClientValue | None) -> ClientValue:
    """Return the heartbeat interval: the default, or a third of a short session timeout.

    With fewer than three heartbeats in a session, one late heartbeat costs the member its partitions.
    """
    try:
        return max(1, min(int(usual), int(session or 0) // 3))
    except ValueError:
        return usual  # the client refuses a value that is not a number, and names the property


def record_limit(settings: Mapping[str, ClientValue]) -> int | None:
    """Return the size in bytes above which a record holds its partition, if the user has set one."""
    limit = settings.get(RECEIVE_LIMIT, HIGHEST_LIMIT)
    try:
        size = int(limit)
    except ValueError:
        raise ConfigurationError(f"kafka={{{RECEIVE_LIMIT!r}: {limit!r}}} must be a number of bytes") from None
    return size if size < HIGHEST_LIMIT else None


SIDE: Mapping[str, int] = {"queued.max.messages.kbytes": 1024, "queued.min.messages": 1000}
"""Prefetch limits of the second client, which reads retry and re-drive topics. These topics are mostly empty."""


def side_settings(settings: Mapping[str, ClientValue]) -> dict[str, ClientValue]:
    """Return all properties of the second client, which reads side topics (`_kafka/two_member_consumer.py`).

    Only the prefetch limits, the client id and the static member name differ from the first client.
    """
    side = {name: min(int(settings[name]), most) for name, most in SIDE.items()}
    side_name = {"client.id": side_client(str(settings["client.id"]))}
    if (instance := settings.get("group.instance.id")) is not None:
        side_name["group.instance.id"] = side_instance(str(instance))
    return {**settings, **side, **side_name}


def side_client(client: str) -> str:
    """Return the client id of the second client."""
    return f"{client}-side"


def side_instance(instance: str) -> str:
    """Return the static member name of the second client."""
    return f"{instance}.side"


def connection_settings(brokers: str, overrides: Mapping[str, ClientValue]) -> dict[str, ClientValue]:
    """Return the properties of a client that is no consumer. The client ignores properties that only consumers have."""
    return {**overrides, "bootstrap.servers": brokers, "log_level": 0}


def check_overrides(overrides: Mapping[str, ClientValue]) -> None:
    """Raise ConfigurationError if a property would break a guarantee. The error names the property."""
    for name in overrides:
        if name in FORBIDDEN:
            raise ConfigurationError(f"kafka={{{name!r}: ...}} is refused: {FORBIDDEN[name]}")


def check_instance(instance: object) -> str:
    """Return the name of a static member (KIP-345), or raise if it cannot be one."""
    if not isinstance(instance, str) or not instance.strip() or instance != instance.strip():
        raise ConfigurationError(
            f"instance={instance!r} cannot name a static member: give each process a name that it keeps over a restart "
            f"and that no other process has, such as that of its pod: App(instance='shop-0')"
        )
    return instance


def check_group(group: object) -> str:
    """Return the name of the group, or raise if the client would change it.

    The client cuts white space off the front of every value. With an empty group name it aborts the process.
    """
    if not isinstance(group, str) or not group.strip():
        raise ConfigurationError("App needs a group: App(..., group='inventory'); its members share the work")
    if group[0].isspace():
        raise ConfigurationError(
            f"group {group!r} begins with white space, which the Kafka client cuts off, so it would use another group: "
            f"remove the white space"
        )
    return group


def masked(settings: Mapping[str, ClientValue]) -> dict[str, ClientValue]:
    """Return the settings with secrets masked, for a log or a page."""
    return {name: MASK if _SECRET.search(name) else value for name, value in settings.items()}


def scheme_in(address: str) -> str | None:
    """Return the scheme of an address; None for a text that is no address."""
    match = _SCHEME.match(address)
    return match.group(1) if match else None


def masked_address(address: str) -> str:
    """Return an address with its passwords masked: `postgresql://shop:********@host/db?password=********`.

    If the text is not an address, the place of a password is unknown. Then the whole text is masked, unless its
    characters rule out a password.
    """
    if scheme_in(address) is None:
        return address if _HARMLESS.fullmatch(address) else MASK

    def mask_userinfo(match: re.Match[str]) -> str:
        user, colon, _ = match.group(1).partition(":")
        return f"{user}:{MASK}@" if colon else match.group(0)

    def mask_parameter(match: re.Match[str]) -> str:
        name = match.group(1)
        return f"{name}={MASK}" if _SECRET.search(name) else match.group(0)

    place, mark, query = address.partition("?")
    if "@" in query:  # the ? is part of a password
        place, mark, query = address, "", ""
    return _USERINFO.sub(mask_userinfo, place) + mark + _PARAMETER.sub(mask_parameter, query)

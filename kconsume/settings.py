"""What the Kafka client is told: our defaults with their reasons, what is refused, what is secret.

Values only; nothing here opens a connection.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Mapping
from typing import NamedTuple

from kconsume.errors import ConfigurationError
from kconsume.protocols import OF_CLASSIC, GroupProtocol, protocol_of
from kconsume.protocols import ClientValue as ClientValue


class Default(NamedTuple):
    """A client property that kconsume sets itself."""

    name: str
    value: ClientValue
    librdkafka: ClientValue
    why: str


RECEIVE_LIMIT, HIGHEST_LIMIT = "receive.message.max.bytes", 2147483647
"""The client of a consumer always has the highest. Above its limit it closes the connection to the broker, again and
again, and names no partition (measured). A lower limit of the user is kept record by record (`runtime/arrivals.py`).
"""

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
        "at 1000 a fast consumer waits up to a second with nothing to do, a factor of five",
    ),
    Default("fetch.wait.max.ms", 100, 500, "a quiet partition is asked again sooner after it was assigned"),
    Default("queued.min.messages", 20000, 100000, "enough for a fast handler; more only costs memory"),
    Default("queued.max.messages.kbytes", 16384, 65536, "bounds what the client holds, whatever the lag"),
    Default(
        RECEIVE_LIMIT, HIGHEST_LIMIT, 100000000,
        "a record above it would stop every partition of its broker; the broker's own limits bound what comes",
    ),
    Default("socket.keepalive.enable", True, False, "a dead connection is noticed behind a firewall"),
    Default("socket.nagle.disable", True, True, "small requests leave at once"),
    Default("session.timeout.ms", 45000, 45000, "how long a dead process keeps its partitions"),
    Default("heartbeat.interval.ms", 3000, 3000, "a rebalance is noticed within this time"),
    Default(
        "topic.metadata.refresh.interval.ms", 30000, 300000, "new partitions, and topics that match a pattern, are seen"
    ),
    Default("max.poll.interval.ms", 300000, 300000, "polling never waits for handlers, so this is never reached"),
)  # fmt: skip

FORBIDDEN = {
    "enable.auto.commit": "offsets pass when the handler has returned, never by a timer",
    "enable.auto.offset.store": "offsets pass when the handler has returned, never when they were fetched",
    "auto.offset.reset": "say start='earliest', 'latest' or 'error' to @app.consume; a stored offset is never jumped",
    "group.id": "say App(group=...)",
    "group.instance.id": "say App(instance=...)",
    "bootstrap.servers": "say App('host:port,...')",
    "metadata.broker.list": "say App('host:port,...')",
    "enable.partition.eof": "kconsume uses it to know when it has caught up",
    "rebalance_cb": "kconsume owns the rebalance",
    "on_commit": "kconsume owns the commit",
}

_SECRET = re.compile(r"password|passphrase|secret|\.pem$|token|oauthbearer\.config|jaas", re.IGNORECASE)
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_HARMLESS = re.compile(r"(sqlite:)?[\w./\\ -]*")  # such as a file's name; a password stands behind a : or a =
_USERINFO = re.compile(r"(?<=//)(.*)@")  # to the last @: a password may hold any of : / @
_PARAMETER = re.compile(r"([^&=]*)=([^&]*)")
MASK = "********"


# The embedded broker ends a rebalance only when the session timeout is nearly over, so it is kept short there. It
# writes the markers of transactions without a checksum.
EMBEDDED: Mapping[str, ClientValue] = {"session.timeout.ms": 2000, "heartbeat.interval.ms": 250, "check.crcs": False}


def client_settings(
    brokers: str,
    group: str,
    overrides: Mapping[str, ClientValue],
    *,
    instance: str | None = None,
    embedded: bool = False,
) -> dict[str, ClientValue]:
    """All properties of the consumer. Ours first, the person's over them, then what the promises need."""
    settings: dict[str, ClientValue] = {default.name: default.value for default in DEFAULTS}
    settings.update(EMBEDDED if embedded else {})
    if protocol_of(overrides) is GroupProtocol.CONSUMER:
        settings = {name: value for name, value in settings.items() if name not in OF_CLASSIC}
    settings["client.id"] = f"kconsume-{socket.gethostname()}-{os.getpid()}"
    settings.update(overrides)
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


def record_limit(settings: Mapping[str, ClientValue]) -> int | None:
    """The size in bytes above which a record holds its partition, if the user has set one."""
    limit = settings.get(RECEIVE_LIMIT, HIGHEST_LIMIT)
    try:
        size = int(limit)
    except ValueError:
        raise ConfigurationError(f"kafka={{{RECEIVE_LIMIT!r}: {limit!r}}} is no number of bytes") from None
    return size if size < HIGHEST_LIMIT else None


SIDE: Mapping[str, int] = {"queued.max.messages.kbytes": 1024, "queued.min.messages": 1000}
"""Side topics are empty most of the time, so their client prefetches little: its memory is on top of the other's."""


def side_settings(settings: Mapping[str, ClientValue]) -> dict[str, ClientValue]:
    """All properties of the consumer's second client, which reads its side topics (`runtime/split_source.py`): those of
    the first one with names of its own."""
    side = {name: min(int(settings[name]), most) for name, most in SIDE.items()}
    side_name = {"client.id": side_client(str(settings["client.id"]))}
    if (instance := settings.get("group.instance.id")) is not None:
        side_name["group.instance.id"] = side_instance(str(instance))
    return {**settings, **side, **side_name}


def side_client(client: str) -> str:
    return f"{client}-side"


def side_instance(instance: str) -> str:
    return f"{instance}.side"


def connection_settings(brokers: str, overrides: Mapping[str, ClientValue]) -> dict[str, ClientValue]:
    """For a client that is not the consumer: the person's properties; it passes over those that only consumers know."""
    return {**overrides, "bootstrap.servers": brokers, "log_level": 0}


def check_overrides(overrides: Mapping[str, ClientValue]) -> None:
    """Refuse by name what would break a promise."""
    for name in overrides:
        if name in FORBIDDEN:
            raise ConfigurationError(f"kafka={{{name!r}: ...}} is refused: {FORBIDDEN[name]}")


def check_instance(instance: object) -> str:
    """The name of a static member (KIP-345), as the client takes it."""
    if not isinstance(instance, str) or not instance.strip() or instance != instance.strip():
        raise ConfigurationError(
            f"instance={instance!r} is no name for a static member: give each process one that it keeps when it is "
            f"restarted and that no other has, such as a pod's: App(instance='shop-0')"
        )
    return instance


def check_group(group: object) -> str:
    """The group's name; refused if the client would not take it as it stands.

    It cuts white space off the front of every value, and a consumer of which no name is left aborts the process.
    """
    if not isinstance(group, str) or not group.strip():
        raise ConfigurationError("App needs a group: App(..., group='inventory'); members share its work")
    if group[0].isspace():
        raise ConfigurationError(
            f"group {group!r} begins with white space, which the Kafka client cuts off, so that it would use another "
            f"group than the one that is named: remove it"
        )
    return group


def masked(settings: Mapping[str, ClientValue]) -> dict[str, ClientValue]:
    """The same settings with secrets covered, fit for a log or a page."""
    return {name: MASK if _SECRET.search(name) else value for name, value in settings.items()}


def scheme_in(address: str) -> str | None:
    """The scheme of an address, None of a text that is not one."""
    match = _SCHEME.match(address)
    return match.group(1) if match else None


def masked_address(address: str) -> str:
    """An address with its passwords covered: `postgresql://shop:********@host/db?password=********`.

    Of a text that is not an address nobody knows where its password stands, so all of it is covered, unless there
    is no place for one.
    """
    if scheme_in(address) is None:
        return address if _HARMLESS.fullmatch(address) else MASK

    def cover_userinfo(match: re.Match[str]) -> str:
        user, colon, _ = match.group(1).partition(":")
        return f"{user}:{MASK}@" if colon else match.group(0)

    def cover_parameter(match: re.Match[str]) -> str:
        name = match.group(1)
        return f"{name}={MASK}" if _SECRET.search(name) else match.group(0)

    place, mark, query = address.partition("?")
    if "@" in query:  # then the mark belongs to a password
        place, mark, query = address, "", ""
    return _USERINFO.sub(cover_userinfo, place) + mark + _PARAMETER.sub(cover_parameter, query)

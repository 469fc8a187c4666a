"""Join errors of a classic group that the Kafka client retries for ever.

The client asks to join again every second or two, and reports each refusal as a message without a topic (measured on
Kafka 4.1: error codes 23, 26 and 81). A refusal that may end, because members are leaving, must last some seconds
before it counts as final. Under KIP-848 the same refusals end the client at once (`_kafka/fetched.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple, TypeAlias

from confluent_kafka import KafkaError

from kconsume._config.group_protocol import COOPERATIVE_STICKY, STRATEGY, ClientValue
from kconsume._kafka.cluster import Group
from kconsume.errors import GroupRefused

Settings = Mapping[str, ClientValue]

ClientError: TypeAlias = KafkaError
"""An error of the Kafka client, for packages that do not import the client."""


class JoinRefusal(NamedTuple):
    """How a refusal is treated, by its code."""

    patience: float
    """Seconds that the refusal must last before it counts as final."""
    sentence: Callable[[str, Settings, Group | None], str]


def _other_assignor(name: str, settings: Settings, group: Group | None) -> str:
    ours = settings.get(STRATEGY, COOPERATIVE_STICKY)
    theirs = group.assignor if group is not None and group.assignor else None
    members = "" if group is None else f" ({', '.join(sorted({m.client for m in group.members})[:3])})"
    ways = f"stop the other members first, or consume under a new group{_as_theirs(theirs)}"
    return (
        f"group {name!r} does not accept this member, because its assignor is {ours!r} and the present members"
        f"{members} use {'another' if theirs is None else repr(theirs)}: {ways}"
    )


def _as_theirs(theirs: str | None) -> str:
    if theirs is None:
        return ""
    return f"; or join them for now with App(kafka={{{STRATEGY!r}: {theirs!r}}}), until the last of them has gone"


def _full(name: str, _: Settings, group: Group | None) -> str:
    there = "" if group is None or not group.members else f" of {len(group.members)} members"
    return (
        f"group {name!r}{there} accepts no more members: run fewer of them, or raise group.max.size on the brokers "
        f"(under group.protocol='consumer' group.consumer.max.size)"
    )


def _session(name: str, settings: Settings, _: Group | None) -> str:
    return (
        f"the brokers refuse session.timeout.ms={settings.get('session.timeout.ms')} for group {name!r}: set it in "
        f"kafka={{...}} within group.min.session.timeout.ms and group.max.session.timeout.ms of the brokers (6000 and "
        f"1800000 by default), or change these two settings of the brokers"
    )


REFUSALS: Mapping[int, JoinRefusal] = {
    KafkaError.INCONSISTENT_GROUP_PROTOCOL: JoinRefusal(12.0, _other_assignor),
    KafkaError.GROUP_MAX_SIZE_REACHED: JoinRefusal(12.0, _full),
    KafkaError.INVALID_SESSION_TIMEOUT: JoinRefusal(0.0, _session),
}


class RefusedMember:
    """How long the group has refused this member without a break. The caller gives the time."""

    def __init__(self) -> None:
        self._since: float | None = None
        self._joins = 0

    def lasts(self, code: int, joins: int, now: float) -> bool:
        """Return whether this refusal has lasted long enough to count as final.

        Args:
            code: the error code.
            joins: the number of assignments so far; a new assignment starts the time again.
            now: seconds of a monotonic clock.
        """
        refusal = REFUSALS.get(code)
        if refusal is None:
            return False
        if self._since is None or joins != self._joins:
            self._since, self._joins = now, joins
        return now - self._since >= refusal.patience


def why(error: KafkaError, name: str, settings: Settings, group: Group | None) -> GroupRefused:
    """Return the error for a refusal.

    Args:
        error: the refusal.
        name: the name of the group.
        settings: the properties of the client.
        group: the group as the coordinator describes it; None if unknown.
    """
    return GroupRefused(f"{REFUSALS[error.code()].sentence(name, settings, group)} ({error.str()})")

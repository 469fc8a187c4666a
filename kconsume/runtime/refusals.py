"""Why a classic group does not take us as a member, where the Kafka client goes on asking for ever.

The client asks to join again every second or two, and each refusal comes as a message of no topic (measured on Kafka
4.1: error codes 23, 26 and 81). A refusal that may pass, because members are leaving just now, is waited out for a
while. Under KIP-848 the same refusals end the client at once (`arrivals.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from confluent_kafka import KafkaError

from kconsume.cluster import Group
from kconsume.errors import GroupRefused
from kconsume.protocols import COOPERATIVE_STICKY, STRATEGY, ClientValue

Settings = Mapping[str, ClientValue]


class Refusal(NamedTuple):
    """What is known of a refusal by its code."""

    patience: float
    """Seconds that it may last before it counts."""
    sentence: Callable[[str, Settings, Group | None], str]


def _other_assignor(name: str, settings: Settings, group: Group | None) -> str:
    ours = settings.get(STRATEGY, COOPERATIVE_STICKY)
    theirs = group.assignor if group is not None and group.assignor else None
    members = "" if group is None else f" ({', '.join(sorted({m.client for m in group.members})[:3])})"
    ways = f"stop the other members first, or consume under a new group{_as_theirs(theirs)}"
    return (
        f"group {name!r} does not take this member, because its assignor is {ours!r} and the members that are there"
        f"{members} use {'another' if theirs is None else repr(theirs)}: {ways}"
    )


def _as_theirs(theirs: str | None) -> str:
    if theirs is None:
        return ""
    return f"; or join them for now with App(kafka={{{STRATEGY!r}: {theirs!r}}}), until the last of them has gone"


def _full(name: str, _: Settings, group: Group | None) -> str:
    there = "" if group is None or not group.members else f" of {len(group.members)} members"
    return (
        f"group {name!r}{there} takes no more members: run fewer of them, or raise group.max.size on the brokers "
        f"(under group.protocol='consumer' group.consumer.max.size)"
    )


def _session(name: str, settings: Settings, _: Group | None) -> str:
    return (
        f"the brokers refuse session.timeout.ms={settings.get('session.timeout.ms')} for group {name!r}: set it in "
        f"kafka={{...}} within group.min.session.timeout.ms and group.max.session.timeout.ms of the brokers (6000 and "
        f"1800000 by default), or change those"
    )


REFUSALS: Mapping[int, Refusal] = {
    KafkaError.INCONSISTENT_GROUP_PROTOCOL: Refusal(12.0, _other_assignor),
    KafkaError.GROUP_MAX_SIZE_REACHED: Refusal(12.0, _full),
    KafkaError.INVALID_SESSION_TIMEOUT: Refusal(0.0, _session),
}


class TurnedAway:
    """How long the group has refused us without a break. Pure: the caller knows the time."""

    def __init__(self) -> None:
        self._since: float | None = None
        self._joins = 0

    def lasts(self, code: int, joins: int, now: float) -> bool:
        """Whether this refusal counts now. `joins`: how many assignments there were; a new one ends the count."""
        refusal = REFUSALS.get(code)
        if refusal is None:
            return False
        if self._since is None or joins != self._joins:
            self._since, self._joins = now, joins
        return now - self._since >= refusal.patience


def why(error: KafkaError, name: str, settings: Settings, group: Group | None) -> GroupRefused:
    """The sentence for a refusal. `group`: as the coordinator describes it, if it does."""
    return GroupRefused(f"{REFUSALS[error.code()].sentence(name, settings, group)} ({error.str()})")

"""The three group protocols, and the client properties that each of them refuses.

    eager          range, roundrobin       each member gives up all partitions in each rebalance
    cooperative    cooperative-sticky      a member gives up only partitions that move (KIP-429); the default
    consumer       group.protocol          the broker moves partitions one by one (KIP-848)

Values only. `_kafka/consumer.py` describes what happens in a rebalance.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping

from kconsume.errors import ConfigurationError

ClientValue = str | int | float | bool

STRATEGY = "partition.assignment.strategy"
PROTOCOL = "group.protocol"
REMOTE_ASSIGNOR = "group.remote.assignor"

OF_CLASSIC = ("session.timeout.ms", "heartbeat.interval.ms", STRATEGY, "group.protocol.type")
"""Properties that the client refuses under KIP-848, where the broker decides them."""
_BROKERS_OWN = {
    "session.timeout.ms": "group.consumer.session.timeout.ms",
    "heartbeat.interval.ms": "group.consumer.heartbeat.interval.ms",
}
_EAGER = ("range", "roundrobin")
COOPERATIVE_STICKY = "cooperative-sticky"


class GroupProtocol(enum.Enum):
    """How the members of a group share its partitions."""

    EAGER = "eager"
    COOPERATIVE = "cooperative"
    CONSUMER = "consumer"

    def __str__(self) -> str:
        return self.value


def protocol_of(settings: Mapping[str, ClientValue]) -> GroupProtocol:
    """Return the protocol that these client properties choose."""
    if settings.get(PROTOCOL, "classic") == "consumer":
        return GroupProtocol.CONSUMER
    strategy = settings.get(STRATEGY, COOPERATIVE_STICKY)
    return GroupProtocol.COOPERATIVE if strategy == COOPERATIVE_STICKY else GroupProtocol.EAGER


def balances_the_total(settings: Mapping[str, ClientValue]) -> bool:
    """Return whether the group's assignor balances the total number of partitions of a member.

    The other assignors spread each topic separately. A KIP-848 broker uses `uniform` unless another one is requested.
    """
    if protocol_of(settings) is GroupProtocol.CONSUMER:
        return settings.get(REMOTE_ASSIGNOR) != "range"
    return protocol_of(settings) is GroupProtocol.COOPERATIVE


def check_protocol(overrides: Mapping[str, ClientValue]) -> None:
    """Raise if there are properties that the client or its group would refuse later, with a less clear message."""
    protocol = overrides.get(PROTOCOL, "classic")
    if protocol not in ("classic", "consumer"):
        raise ConfigurationError(
            f"{PROTOCOL}={protocol!r} is unknown: choose 'classic' (the default) or 'consumer' (KIP-848)"
        )
    if protocol == "consumer":
        _check_consumer(overrides)
    else:
        _check_classic(overrides)


def _check_consumer(overrides: Mapping[str, ClientValue]) -> None:
    for name in OF_CLASSIC:
        if name in overrides:
            broker = f": set {_BROKERS_OWN[name]} on the brokers" if name in _BROKERS_OWN else ""
            instead = f": leave it out, or set {REMOTE_ASSIGNOR}='uniform' or 'range'" if name == STRATEGY else broker
            raise ConfigurationError(
                f"kafka={{{name!r}: ...}} is refused with {PROTOCOL}='consumer', where the broker decides it"
                f"{instead or ': leave it out'}"
            )


def _check_classic(overrides: Mapping[str, ClientValue]) -> None:
    if REMOTE_ASSIGNOR in overrides:
        raise ConfigurationError(
            f"kafka={{{REMOTE_ASSIGNOR!r}: ...}} has no effect in a classic group: set {PROTOCOL}='consumer' too, "
            f"or choose by {STRATEGY}"
        )
    given = overrides.get(STRATEGY, COOPERATIVE_STICKY)
    names = [name.strip() for name in str(given).split(",")]
    for name in names:
        if name not in (*_EAGER, COOPERATIVE_STICKY):
            hint = "; the client has no eager sticky assignor" if name == "sticky" else ""
            raise ConfigurationError(
                f"{STRATEGY}={given!r} names {name!r}, which the Kafka client does not have: choose "
                f"'{COOPERATIVE_STICKY}' (the default), 'range' or 'roundrobin'{hint}"
            )
    if COOPERATIVE_STICKY in names and len(names) > 1:
        raise ConfigurationError(
            f"{STRATEGY}={given!r} mixes cooperative and eager assignors, which cannot share one group: choose one "
            f"kind, the same for all members"
        )

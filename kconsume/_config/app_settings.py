"""The settings of an app as one value, checked when it is made. Opens nothing and reads no environment variable."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass

from kconsume._config.client_settings import (
    DEFAULTS,
    EMBEDDED,
    ClientValue,
    check_group,
    check_instance,
    check_overrides,
)
from kconsume._config.group_protocol import check_protocol
from kconsume.backends.base import OffsetStore
from kconsume.errors import ConfigurationError

_AFTER_THE_SESSION = 15.0
"""Seconds that the default of `startup=` adds to the session timeout, for joining and claiming."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AppSettings:
    """The arguments of `App(...)`, with the `KCONSUME_*` variables applied.

    Args:
        brokers: `host:port,...`, or `embedded://`.
        group: the consumer group of handlers without their own `group=`.
        offsets: the offset store of handlers without their own `offsets=`: an address or a store.
        kafka: librdkafka properties of the user.
        instance: the name of a static member (`group.instance.id`).
        startup: seconds that `App.running` waits for the first partitions; None for the default.
        shutdown: seconds from the request to stop until the process has ended.
        memory: bytes of records that may be in flight.
    """

    brokers: str
    group: str
    offsets: str | OffsetStore
    kafka: dict[str, ClientValue]
    instance: str | None
    startup: float | None
    shutdown: float
    memory: int

    def __post_init__(self) -> None:
        if not self.brokers or not isinstance(self.brokers, str):
            raise ConfigurationError(
                f"App needs an address, and brokers={self.brokers!r} is no address: write App('localhost:9092', ...) "
                f"or App('embedded://', ...)"
            )
        for name, value in (("shutdown", self.shutdown), ("memory", self.memory)):
            if value <= 0:
                unit = "seconds" if name == "shutdown" else "bytes"
                raise ConfigurationError(f"{name}={value!r} must be above zero: give it in {unit}, or leave it out")
        if self.startup is not None and not 0 <= self.startup < math.inf:
            raise ConfigurationError(
                f"startup={self.startup!r} must be a number of seconds, 0 or more: give the time that running() may "
                f"wait for its first partitions, or 0 to enter the block at once"
            )
        check_group(self.group)
        if self.instance is not None:
            check_instance(self.instance)
        check_overrides(self.kafka)
        check_protocol(self.kafka)

    def replaced(self, values: Mapping[str, object]) -> AppSettings:
        """Return a copy with other values, by field name. The copy is checked again."""
        return dataclasses.replace(self, **values)  # type: ignore[arg-type]

    @property
    def embedded(self) -> bool:
        """Whether the broker is an embedded one, which this process or this machine runs."""
        return self.brokers.startswith("embedded://")

    @property
    def startup_seconds(self) -> float:
        """`startup`, or its default: the session timeout and 15 s more.

        A group gives the partitions of a killed member to others only after that member's session has ended.
        """
        if self.startup is not None:
            return self.startup
        default = EMBEDDED if self.embedded else {each.name: each.value for each in DEFAULTS}
        session = self.kafka.get("session.timeout.ms", default["session.timeout.ms"])
        return float(session) / 1000 + _AFTER_THE_SESSION

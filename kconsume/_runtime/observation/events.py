"""What happens in a running consumer, as values, for those who watch it: the log, the history of rebalances, metrics.

An event is published per report, claim or rebalance, never per record. Without a subscriber, publishing costs one
look into a dictionary. Events are published on the owner thread, so a subscriber must not wait.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from kconsume._event_log import EventLog
from kconsume._runtime.observation.causes import Cause
from kconsume.rebalance.events import Rebalance
from kconsume.records import Partition

_log = EventLog("loop")

E = TypeVar("E")


class RecordsFinished(NamedTuple):
    """Records were handled, or skipped as a policy says. Their offsets may pass."""

    partition: Partition
    handled: int
    skipped: int


class OffsetsStored(NamedTuple):
    """Offsets are stored now."""

    offsets: Mapping[Partition, int]
    seconds: float
    """From sending until the answer was taken."""


class PartitionsAssigned(NamedTuple):
    """The claim of these partitions succeeded, and their records are handled from these offsets on."""

    offsets: Mapping[Partition, int]


class PartitionsLost(NamedTuple):
    """The broker has given these partitions to other members."""

    partitions: Sequence[Partition]


class RebalanceEnded(NamedTuple):
    """A rebalance is complete, for this member."""

    rebalance: Rebalance


class ClaimFailed(NamedTuple):
    """The store or the broker did not answer a claim."""

    partitions: Sequence[Partition]
    again_in: float
    cause: BaseException


class PartitionStopped(NamedTuple):
    """The store failed while records were handled, and the partition is claimed again."""

    partition: Partition
    again_in: float
    cause: BaseException


class PartitionFenced(NamedTuple):
    """Another owner has the partition in the store."""

    partition: Partition
    cause: BaseException
    is_refused_claim: bool
    """Whether our claim was refused, because another member has claimed it under a later generation."""


class PartitionHeld(NamedTuple):
    """Something is wrong with this partition, and it is not read until that is over."""

    partition: Partition
    code: str
    cause: BaseException
    hint: str = ""
    seconds: float | None = None
    """For how long it is held already; None if it is held from now on."""


class PartitionTriedAgain(NamedTuple):
    """A held partition is claimed again."""

    partition: Partition
    code: str
    reason: str


class PartitionReleased(NamedTuple):
    """A partition is no longer held."""

    partition: Partition
    code: str


class PartitionStandsStill(NamedTuple):
    """A partition has neither moved nor reached its end for some time."""

    partition: Partition
    cause: Cause
    seconds: float


class BrokerTrouble(NamedTuple):
    """The client reported errors of its connections or its group."""

    times: int
    last: str


Event = (
    RecordsFinished
    | OffsetsStored
    | PartitionsAssigned
    | PartitionsLost
    | RebalanceEnded
    | ClaimFailed
    | PartitionStopped
    | PartitionFenced
    | PartitionHeld
    | PartitionTriedAgain
    | PartitionReleased
    | PartitionStandsStill
    | BrokerTrouble
)


class Events:
    """The subscribers of one consumer.

    Fields: `_subscribers` is written by `subscribe`, before the consumer starts, and read by the owner thread.
    """

    def __init__(self) -> None:
        self._subscribers: dict[type, list[Callable[[Any], None]]] = {}

    def subscribe(self, kind: type[E], subscriber: Callable[[E], None]) -> None:
        """Call `subscriber` with each event of this kind, in the order of subscription."""
        self._subscribers.setdefault(kind, []).append(subscriber)

    def publish(self, event: Event) -> None:
        """Pass an event to its subscribers. One that raises is logged; it harms neither the others nor the consumer."""
        for subscriber in self._subscribers.get(type(event), ()):
            try:
                subscriber(event)
            except Exception as error:  # noqa: BLE001  (logged; the runtime does not depend on who watches it)
                _log.error("subscriber failed", exc_info=error, watched=type(event).__name__)

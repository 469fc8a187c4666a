"""Names the cause of every partition, and publishes those that stand still.

A partition that neither moves nor is at its end is published with its cause after 20 s, and again every five minutes
while the cause stays the same. Held partitions are left to `HeldWatch`, which publishes them at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from kconsume._kafka.two_member_consumer import AnyConsumer
from kconsume._runtime.assignment.assignment import Assignment
from kconsume._runtime.assignment.partition import OwnedPartition
from kconsume._runtime.dispatch import Dispatcher
from kconsume._runtime.observation.causes import MOVING, Cause, Facts, cause_of
from kconsume._runtime.observation.events import Events, PartitionStandsStill
from kconsume.records import Partition

LOG_AFTER = 20.0
"""Seconds for which a cause must last until it is published: well within 30 s, also if the loop is late."""
LOG_AGAIN_EVERY = 300.0
_QUIET = frozenset((MOVING, "caught_up", "paused"))
"""Causes that need no attention."""


class _Standing(NamedTuple):
    """Since when a partition has its cause, and when the cause is published next."""

    code: str
    since: float
    log_at: float


class StandstillWatch:
    """The causes of the partitions of one consumer. Used by the owner thread alone."""

    def __init__(self, assignment: Assignment, dispatcher: Dispatcher, consumer: AnyConsumer, events: Events) -> None:
        self._assignment = assignment
        self._dispatcher = dispatcher
        self._consumer = consumer
        self._events = events
        self._standing: dict[Partition, _Standing] = {}

    def look(self, now: float, broker_error: str) -> dict[Partition, Cause]:
        """The cause of each partition now.

        Args:
            now: the time on the clock of `OwnedPartition.moved_at`.
            broker_error: the last error of the connections, if nothing was fetched since.
        """
        assignment, ends = self._assignment, self._consumer.ends
        blocked = assignment.blocked_outboxes
        causes = {
            p: cause_of(o, self._facts(o, broker_error, blocked.get(p, ""), is_at_end=p in ends), now)
            for p, o in assignment.partitions.items()
        }
        self._publish_standing(causes, now)
        return causes

    def _facts(self, owned: OwnedPartition, broker_error: str, outbox_error: str, *, is_at_end: bool) -> Facts:
        assignment = self._assignment
        return Facts(
            is_claimed=assignment.claiming.has_pending(owned),
            can_be_confirmed=assignment.can_be_confirmed(owned),
            store_error=assignment.store_error,
            is_rebalancing=assignment.is_rebalancing,
            outbox_error=outbox_error,
            outbox_is_full=assignment.outbox_is_full(owned.partition),
            waits_for_batch=self._dispatcher.waits_for_batch(owned),
            broker_error=broker_error,
            coordinator_is_lost=assignment.commits.coordinator_is_lost,
            is_at_end=is_at_end,
        )

    def _publish_standing(self, causes: Mapping[Partition, Cause], now: float) -> None:
        before, self._standing = self._standing, {}
        held = self._assignment.partitions.troubles
        for partition, cause in causes.items():
            if cause.code in _QUIET or partition in held:
                continue
            standing = before.get(partition)
            if standing is None or standing.code != cause.code:
                standing = _Standing(cause.code, now, now + LOG_AFTER)
            elif now >= standing.log_at:
                standing = standing._replace(log_at=now + LOG_AGAIN_EVERY)
                self._events.publish(PartitionStandsStill(partition, cause, now - standing.since))
            self._standing[partition] = standing

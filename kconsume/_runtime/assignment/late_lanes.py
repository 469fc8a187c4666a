"""Lanes that were stopped while their handler may still run: their partition was taken away, or gets another lane.

Such a lane gets as much time as a whole shutdown. Then its handler is abandoned, and the next owner handles the record
again. If this process becomes the next owner, a new lane may run beside the abandoned handler only where the fence of
the store keeps the writes of the handler out. Elsewhere the process ends.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from kconsume._event_log import EventLog
from kconsume._runtime.assignment.partition import OwnedPartition
from kconsume._runtime.deadlines import Deadline
from kconsume._runtime.lanes.lane import Lane
from kconsume.errors import TooManyFailures
from kconsume.records import Partition

_log = EventLog("rebalance")


class LateLanes:
    """All methods are called on the owner thread."""

    def __init__(self, patience: float, may_be_left: Callable[[Lane], bool], abandoned: list[Partition]) -> None:
        """patience: seconds until a handler is abandoned.

        Args:
            may_be_left: whether the next lane of a partition may open beside an abandoned handler.
            abandoned: the partitions of abandoned handlers are appended to it.
        """
        self._patience = patience
        self._may_be_left = may_be_left
        self._abandoned = abandoned
        self._previous: dict[Partition, Lane] = {}
        """The last lane of each partition that left. The lane may still be busy when the partition is assigned
        again."""
        self._waiting: list[tuple[Lane, Deadline]] = []
        self._hung: list[Lane] = []
        """Abandoned lanes whose partition must not get another lane."""

    def __bool__(self) -> bool:
        return bool(self._waiting or self._hung)

    def close(self, owned: OwnedPartition, reason: str) -> None:
        """Stop the lane of a partition that stays ours. The next lane waits until this lane has ended. It waits for a
        handler that hangs only where the fence does not protect the store."""
        lane = owned.lane
        if lane is not None:
            lane.request_stop(reason)
            _set_aside(owned)
            if self._may_be_left(lane):
                self._expect_end(lane)

    def keep(self, owned: OwnedPartition) -> None:
        """Remember the last lane of a partition that leaves."""
        _set_aside(owned)
        if owned.previous_lane is not None:
            self._previous[owned.partition] = owned.previous_lane
            self._expect_end(owned.previous_lane)

    def take_previous(self, partition: Partition) -> Lane | None:
        """The last lane of a partition that returns, if there was one."""
        return self._previous.pop(partition, None)

    def _expect_end(self, lane: Lane) -> None:
        """Expect the handler of this lane to end, if it runs. A lane that is already expected keeps its deadline."""
        known = [*self._hung, *(waiting for waiting, _ in self._waiting)]
        if lane.occupied and not any(each is lane for each in known):
            self._waiting.append((lane, Deadline(self._patience)))

    def step(self, partitions: Mapping[Partition, OwnedPartition]) -> None:
        """Abandon handlers that are past their deadline. Raises `TooManyFailures` if one of our partitions would have
        to wait for an abandoned handler for ever."""
        self._waiting = [(lane, deadline) for lane, deadline in self._waiting if lane.busy]
        for lane, _ in [late for late in self._waiting if late[1].passed]:
            self._abandoned.append(lane.partition)
            lane.lanes.abandon(lane)
            _log.error(
                "handler abandoned",
                partition=lane.partition,
                seconds=self._patience,
                effect="the next owner handles the record",
            )
            self._leave_behind(lane)
        self._waiting = [late for late in self._waiting if not late[1].passed]
        self._end_for_hung_handlers(partitions)

    def _leave_behind(self, lane: Lane) -> None:
        """Abandon a handler that does not return. Its partition may be assigned to this process again and must not wait
        for ever."""
        if self._may_be_left(lane):
            lane.abandoned = True
        else:
            self._hung.append(lane)

    def _end_for_hung_handlers(self, partitions: Mapping[Partition, OwnedPartition]) -> None:
        self._hung = [lane for lane in self._hung if lane.busy]
        for lane in self._hung:
            owned = partitions.get(lane.partition)
            if owned is not None and owned.previous_lane is lane:
                raise TooManyFailures(
                    f"a handler call of {lane.partition} has not returned, and this process was assigned the "
                    f"partition again: its next record must not be handled at the same time, so the process ends. "
                    f"Give the handler a timeout="
                )


def _set_aside(owned: OwnedPartition) -> None:
    if owned.lane is not None:
        owned.lane.lanes.lane_closed()
        owned.lane, owned.previous_lane = None, owned.lane

"""Lanes whose partition was taken away while their handler still runs.

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
            may_be_left: whether the next lane of a partition may open beside an abandoned handler. It is also asked by
                `Assignment`.
            abandoned: the partitions of abandoned handlers are appended to it.
        """
        self._patience = patience
        self.may_be_left = may_be_left
        self._abandoned = abandoned
        self._waiting: list[tuple[Lane, Deadline]] = []
        self._hung: list[Lane] = []
        """Abandoned lanes whose partition must not get another lane."""

    def __bool__(self) -> bool:
        return bool(self._waiting or self._hung)

    def expect_end(self, lane: Lane) -> None:
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
        if self.may_be_left(lane):
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

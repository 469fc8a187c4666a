"""The fixes of faults that were found outside, taken out one by one: the state machine must find each of them again."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kconsume._runtime.assignment.assignment import Assignment
from kconsume._runtime.assignment.committer import StoreCommitter
from kconsume._runtime.assignment.late_lanes import LateLanes
from kconsume._runtime.assignment.owned_partitions import OwnedPartitions
from kconsume._runtime.assignment.partition import OwnedPartition
from kconsume._runtime.deadlines import Deadline
from kconsume._runtime.lanes.lane import Lane
from kconsume.backends import claim as claiming
from kconsume.records import Partition


def a_row_has_two_writers(patch: pytest.MonkeyPatch) -> None:
    """Faults 1 and 2. The periodic save also saves lanes whose transactions move the row."""

    def unsaved(self: OwnedPartition) -> bool:
        return self.lane is not None and self.progress.watermark != self.stored

    patch.setattr(OwnedPartition, "unsaved", property(unsaved))


def stale_answers_count(patch: pytest.MonkeyPatch) -> None:
    """Fault 3. Whatever is answered is taken for an answer to what was asked last."""

    def current(self: OwnedPartitions, partition: Partition, token: object) -> OwnedPartition | None:
        return self.get(partition)

    patch.setattr(OwnedPartitions, "current", current)


def a_hung_handler_is_waited_for(patch: pytest.MonkeyPatch) -> None:
    """Fault 5. The next lane of a partition never opens beside a handler that does not return."""

    def leave_behind(self: LateLanes, lane: Lane) -> None:
        """The lane stays as it is."""

    patch.setattr(LateLanes, "_leave_behind", leave_behind)


def only_stored_offsets_confirm(patch: pytest.MonkeyPatch) -> None:
    """Fault 6. A partition that was refused in its first claim has no stored offset to commit, so it never is
    confirmed."""

    def to_mirror(self: OwnedPartition) -> int | None:
        return self.stored if self.stored != self.mirrored else None

    patch.setattr(OwnedPartition, "offset_to_mirror", property(to_mirror))


def claims_are_not_ordered(patch: pytest.MonkeyPatch) -> None:
    """Fault 9. A claim that comes late takes the row from whoever has it by then."""
    patch.setattr(claiming, "accepts", lambda *_: True)


def the_last_save_does_not_wait(patch: pytest.MonkeyPatch) -> None:
    """A save at a revoke is sent beside the one under way, from the offset before it."""

    def settle(self: StoreCommitter, deadline: Deadline) -> None:
        self._answer = None

    patch.setattr(StoreCommitter, "settle", settle)


def a_closed_lane_is_forgotten(patch: pytest.MonkeyPatch) -> None:
    """A partition leaves before its claim is made, comes back, and its next lane knows nothing of the busy one."""

    def forget(self: Assignment, owned_partitions: list[OwnedPartition]) -> None:
        for owned in owned_partitions:
            if owned.lane is not None:
                self._late_lanes._previous[owned.partition] = owned.lane
            del self.partitions[owned.partition]

    patch.setattr(Assignment, "_forget", forget)


def what_was_abandoned_is_awaited(patch: pytest.MonkeyPatch) -> None:
    """A partition comes back long after its handler was given up, and waits for it."""
    patch.setattr(LateLanes, "_end_for_hung_handlers", lambda *_: None)


def a_claim_may_be_resumed(patch: pytest.MonkeyPatch) -> None:
    """A partition that waits for its claim counts as paused for no reason: a user's resume has the client read it."""
    made = OwnedPartition.__init__

    def without_reason(self: OwnedPartition, partition: Partition, previous_lane: Lane | None = None) -> None:
        made(self, partition, previous_lane)
        self.pause_reasons = set()

    patch.setattr(OwnedPartition, "__init__", without_reason)


Fault = Callable[[pytest.MonkeyPatch], None]

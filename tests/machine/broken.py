"""The fixes of faults that were found outside, taken out one by one: the state machine must find each of them again."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kconsume.backends import claiming
from kconsume.records import Partition
from kconsume.runtime import loop
from kconsume.runtime.budget import Deadline
from kconsume.runtime.commits import StoreLedger
from kconsume.runtime.holding import Holding
from kconsume.runtime.lanes import Lane
from kconsume.runtime.tenancy import Tenancy


def a_row_has_two_writers(patch: pytest.MonkeyPatch) -> None:
    """Faults 1 and 2. The periodic save also saves lanes whose transactions move the row."""

    def unsaved(self: Holding) -> bool:
        return self.lane is not None and self.tracker.watermark != self.stored

    patch.setattr(Holding, "unsaved", property(unsaved))


def stale_answers_count(patch: pytest.MonkeyPatch) -> None:
    """Fault 3. Whatever is answered is taken for an answer to what was asked last."""

    def current(self: Tenancy, partition: Partition, token: object) -> Holding | None:
        return self.holdings.get(partition)

    patch.setattr(Tenancy, "current", current)


def a_hung_handler_is_waited_for(patch: pytest.MonkeyPatch) -> None:
    """Fault 5. The next lane of a partition never opens beside a handler that does not return."""

    def leave_behind(self: Tenancy, lane: Lane) -> None:
        """The lane stays as it is."""

    patch.setattr(Tenancy, "_leave_behind", leave_behind)


def only_stored_offsets_confirm(patch: pytest.MonkeyPatch) -> None:
    """Fault 6. A partition that was refused in its first claim has no stored offset to commit, so it never is
    confirmed."""

    def to_mirror(holding: Holding) -> int | None:
        return holding.stored if holding.stored != holding.mirrored else None

    patch.setattr(loop, "_to_mirror", to_mirror)


def claims_are_not_ordered(patch: pytest.MonkeyPatch) -> None:
    """Fault 9. A claim that comes late takes the row from whoever has it by then."""
    patch.setattr(claiming, "accepts", lambda *_: True)


def the_last_save_does_not_wait(patch: pytest.MonkeyPatch) -> None:
    """A save at a revoke is sent beside the one under way, from the offset before it."""

    def settle(self: StoreLedger, deadline: Deadline) -> None:
        self._answer = None

    patch.setattr(StoreLedger, "settle", settle)


def a_closed_lane_is_forgotten(patch: pytest.MonkeyPatch) -> None:
    """A partition leaves before its claim is made, comes back, and its next lane knows nothing of the busy one."""

    def forget(self: Tenancy, holdings: list[Holding]) -> None:
        for holding in holdings:
            if holding.lane is not None:
                self._resting[holding.partition] = holding.lane
            del self.holdings[holding.partition]

    patch.setattr(Tenancy, "_forget", forget)


def what_was_abandoned_is_awaited(patch: pytest.MonkeyPatch) -> None:
    """A partition comes back long after its handler was given up, and waits for it."""
    patch.setattr(Tenancy, "_end_for_hung_handlers", lambda self: None)


def a_claim_may_be_resumed(patch: pytest.MonkeyPatch) -> None:
    """A partition that waits for its claim counts as paused for no reason: a user's resume has the client read it."""
    made = Holding.__init__

    def without_reason(self: Holding, partition: Partition, closed: Lane | None = None) -> None:
        made(self, partition, closed)
        self.held = set()

    patch.setattr(Holding, "__init__", without_reason)


Fault = Callable[[pytest.MonkeyPatch], None]

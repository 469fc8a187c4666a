"""What the lanes report, and what it means for their partitions.

A report of a lane that is no longer in charge of its partition changes nothing. All methods are called on the owner
thread, also inside the client's callbacks.
"""

from __future__ import annotations

from queue import Empty

from kconsume._runtime.assignment.claiming import Claiming
from kconsume._runtime.assignment.holds import Holds
from kconsume._runtime.assignment.owned_partitions import OwnedPartitions
from kconsume._runtime.assignment.partition import OwnedPartition
from kconsume._runtime.lanes.backpressure import Backpressure
from kconsume._runtime.lanes.lane import Chunk, Lane
from kconsume._runtime.lanes.reports import (
    Crashed,
    Failure,
    LaneReport,
    LaneReports,
    LettersFailed,
    MovedToLogEnd,
    Progress,
    StoreRefused,
    Unblocked,
)
from kconsume._runtime.observation.events import Events, RecordsFinished
from kconsume.errors import HandlerFailed


class Completion:
    """Takes the reports of the lanes of one consumer."""

    def __init__(
        self,
        partitions: OwnedPartitions,
        claiming: Claiming,
        holds: Holds,
        reports: LaneReports,
        events: Events,
    ) -> None:
        self.handled = 0
        """How many records were handled."""
        self.skipped = 0
        """How many records were passed without being handled, because a policy says so."""
        self.failure: HandlerFailed | None = None
        """The first record that failed for good and must end the consumer."""
        self._partitions = partitions
        self._claiming = claiming
        self._holds = holds
        self._reports = reports
        self._events = events
        self._with_letters: list[Lane] = []
        """Lanes that must send dead letters again."""

    def take_all(self) -> None:
        """Take every report that has come."""
        while not self._reports.empty():
            self._take(self._reports.get())

    def wait(self, seconds: float) -> None:
        """Take the next report. Waits at most this long for it."""
        try:
            report = self._reports.get(timeout=seconds)
        except Empty:
            return
        self._take(report)

    def step(self) -> None:
        """Let lanes send their dead letters again. Not inside a callback: a lane may work on the owner thread."""
        lanes, self._with_letters = self._with_letters, []
        for lane in lanes:
            lane.lanes.submit(lane, Chunk([], 0, -1))

    def _take(self, report: LaneReport) -> None:
        owned = self._partitions.current(report.lane.partition, report.lane)
        if owned is None:
            return
        if isinstance(report, Progress):
            self._advance(owned, report)
        elif isinstance(report, Unblocked):
            report.lane.count_finished(report.records)
        elif isinstance(report, MovedToLogEnd):
            owned.progress.ended(report.offset)
            owned.note_stored(report.offset)
        elif isinstance(report, StoreRefused):
            self._claiming.store_refused(owned, report.error, holds=report.holds_partition)
        elif isinstance(report, LettersFailed):
            self._with_letters.append(report.lane)
        elif isinstance(report, Crashed):
            raise report.error
        else:
            self._fail(owned, report)

    def _fail(self, owned: OwnedPartition, failure: Failure) -> None:
        place = f"{failure.lane.partition}@{failure.message.offset()}"
        error = HandlerFailed(failure.handler, place, failure.error)
        if failure.holds_partition:
            self._holds.put_on_hold(owned, error, drains=False)
        else:
            self.failure = self.failure or error

    def _advance(self, owned: OwnedPartition, progress: Progress) -> None:
        lane, count = progress.lane, progress.handled + progress.skipped
        owned.progress.finished(progress.first, progress.upto)
        owned.leader_epoch = progress.leader_epoch
        owned.claim_tries = 0
        owned.handled += count
        if owned.trouble is not None:
            self._holds.note_progress(owned)
        if progress.stored:
            owned.note_stored(progress.upto)
        elif progress.upto - (owned.stored or 0) > Backpressure.MOST_RECORDS:
            self._partitions.commit_is_due = True  # a crash repeats at most one window
        if not progress.waited_for_letters:
            lane.count_finished(count)
        self.handled += progress.handled
        self.skipped += progress.skipped
        self._events.publish(RecordsFinished(owned.partition, progress.handled, progress.skipped))

"""Dead letters of a lane that are on their way to a broker, and the reports that wait for them (P1).

The rules of a chunk hand letters over and continue with the next records. Later reports of the chunk wait in a queue
behind the letters. A report leaves the queue, in order, as soon as all earlier letters are confirmed. The thread that
gets the confirmation sends the report, so that no thread waits. If a letter could not be written, no later report is
sent. The loop wakes the lane, and the rules of the lane send the letter again (`_runtime/output/letter_batch.py`).

The queue is bounded: a lane with too many letters in flight runs nothing more until some are confirmed. This module
only counts and queues; it does no I/O.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial

from kconsume._runtime.lanes.backpressure import Backpressure
from kconsume._runtime.lanes.lane import Lane
from kconsume._runtime.lanes.reports import LettersFailed, Progress, SendReport, Unblocked
from kconsume.failures.letter_headers import LetterDraft
from kconsume.records import Message

_ADDED = 1_000
"""Approximate bytes of a letter in addition to its record."""


class LetterGroup:
    """Letters that were handed over together, and the records that they are about."""

    __slots__ = ("bytes", "confirmed", "drafts", "error", "messages")

    def __init__(self, messages: Sequence[Message], drafts: Sequence[LetterDraft]) -> None:
        self.messages = messages
        self.drafts = drafts
        self.bytes = sum(map(len, messages)) + _ADDED * len(drafts)
        self.confirmed = False
        self.error: BaseException | None = None
        """Why the letters could not be written, until they are sent again."""


class LettersInFlight:
    """The letters of one lane.

    `report_in_order`, `track` and `track_again` are called by the worker that runs the lane; deliveries end on any
    thread. All fields are written under `_lock`. `is_empty` and `blocks_lane` read without the lock and accept an old
    value.
    """

    MOST_LETTERS = 2_000
    MOST_BYTES = 4 * 2**20
    MOST_RECORDS = 2 * Backpressure.MOST_RECORDS
    """Most records that wait behind letters. A crash repeats these records. With a quarter of this number, a lane with
    a fast handler stopped some ten times in a million records to wait for its letters (measured)."""

    def __init__(self, lane: Lane, report: SendReport) -> None:
        self._lane = lane
        self._report = report
        self._lock = threading.Lock()
        self._queue: deque[LetterGroup | Progress] = deque()
        """Letters and the reports behind them. The queue is empty or begins with a group that is not confirmed."""
        self._letters = self._bytes = self._records = self._failures = 0

    @property
    def is_empty(self) -> bool:
        """True if all letters that were handed over are confirmed."""
        return not self._queue

    @property
    def may_report(self) -> bool:
        """True if the end of a delivery may send a report, without any work of the lane."""
        with self._lock:
            head = self._queue[0] if self._queue else None
            return isinstance(head, LetterGroup) and head.error is None

    @property
    def blocks_lane(self) -> bool:
        """True if the lane must run nothing more for now: a letter could not be written, or too many are in flight."""
        return bool(
            self._failures
            or self._letters >= self.MOST_LETTERS
            or self._bytes >= self.MOST_BYTES
            or self._records >= self.MOST_RECORDS
        )

    @property
    def failed(self) -> list[LetterGroup]:
        """The groups that could not be written, in order."""
        with self._lock:
            return [each for each in self._queue if isinstance(each, LetterGroup) and each.error is not None]

    def report_in_order(self, progress: Progress) -> None:
        """Report `progress` once all letters that were handed over before are confirmed."""
        with self._lock:
            self._report_or_queue(progress)

    def track(self, group: LetterGroup, delivery: Future[None], behind: Progress) -> None:
        """Track letters that were handed over.

        Args:
            group: the letters.
            delivery: ends when the letters are confirmed, or with an error.
            behind: the report about the records of the letters and the later records.
        """
        with self._lock:
            self._queue.append(group)
            self._letters += len(group.drafts)
            self._bytes += group.bytes
            self._report_or_queue(behind)
        delivery.add_done_callback(partial(self._ended, group))

    def track_again(self, group: LetterGroup, delivery: Future[None]) -> None:
        """Track letters that could not be written and were handed over again."""
        with self._lock:
            group.error = None
            self._failures -= 1
        delivery.add_done_callback(partial(self._ended, group))

    def _report_or_queue(self, progress: Progress) -> None:
        if not self._queue:
            self._report(progress)
            return
        lane, first, upto, handled, skipped, epoch = progress[:6]
        self._records += handled + skipped
        self._report(Unblocked(lane, handled + skipped))
        # The report has no records, because there are many and only the letters are limited here.
        self._queue.append(
            Progress(lane, first, upto, handled, skipped, epoch, progress.stored, waited_for_letters=True)
        )

    def _ended(self, group: LetterGroup, delivery: Future[None]) -> None:
        """Called at the end of a delivery, on the thread that serves deliveries, so it must neither wait nor send."""
        error = delivery.exception()
        with self._lock:
            if error is None:
                group.confirmed = True
                self._letters -= len(group.drafts)
                self._bytes -= group.bytes
                group.messages = group.drafts = ()  # the group may stay in the queue behind another for a while
                self._report_ready()
            else:
                group.error = error
                self._failures += 1
        if error is not None:
            self._report(LettersFailed(self._lane))

    def _report_ready(self) -> None:
        """Report everything before the first unconfirmed letter. Called under the lock, which keeps reports in
        order."""
        queue = self._queue
        while queue:
            head = queue[0]
            if isinstance(head, Progress):
                self._records -= head.handled + head.skipped
                self._report(head)
            elif not head.confirmed:
                return
            queue.popleft()
